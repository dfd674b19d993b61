"""`freeze_features`: average feature correlations once, for all later predictions."""

from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from moment_jax.covariance import FrozenSeparable
from moment_jax.covariance.statistics import averaged, with_feature_statistics
from moment_jax.nn.settings import with_structure

M = TypeVar("M", bound=nnx.Module)
Found = dict[int, Any]  # statistics by the `id` of their module
NAME = "feature_statistics"  # the module's attribute that holds them

_recording: ContextVar[Found | None] = ContextVar("recording", default=None)


class FeatureStatistics(nnx.Variable[Any]):
    """The statistics that `FrozenSeparable` reads: state of a module, and no parameters."""


def freeze_features(module: M, batches: Iterable[Any]) -> M:
    """The same module in `FrozenSeparable`, with feature correlations averaged over these inputs.

    Call it once, after training, with some hundred training inputs. Parameters are shared with the
    module; after further training the statistics are out of date, so call it again.

    Args:
      module: a module of `mj.nn`, or your own with such modules in it, each called once per pass.
      batches: inputs of the module, or tuples of them where it takes several. Equal shapes avoid
        recompilation.

    Raises:
      ValueError: if there is no batch, or no module of `mj.nn` was called, or one was called twice.
    """
    frozen = with_structure(module, FrozenSeparable)
    graph, state = nnx.split(frozen)

    @jax.jit
    def statistics(state: Any, inputs: tuple[Any, ...]) -> list[Any]:
        copy: Any = nnx.merge(graph, state)
        found: Found = {}
        token = _recording.set(found)
        try:
            copy(*inputs)
        finally:
            _recording.reset(token)
        return [found.get(id(part)) for _, part in nnx.iter_modules(copy)]

    every = [statistics(state, b if isinstance(b, tuple) else (b,)) for b in batches]
    if not jax.tree.leaves(every):
        raise ValueError(
            "`freeze_features` needs inputs, and a module of `mj.nn` that is called with them. Got "
            f"{len(every)} batches and {type(module).__name__}."
        )
    parts: Iterator[tuple[Any, Any]] = nnx.iter_modules(frozen)
    for (_, part), values in zip(list(parts), averaged(every), strict=True):
        if values is not None:
            setattr(part, NAME, FeatureStatistics(values))
    return frozen


def over_statistics(
    module: Any, layer: Callable[..., Any], run: Callable[[Callable[..., Any]], Any], num_axes: int
) -> Any:
    """`run(layer)` with the module's statistics; `run` maps the layer over `num_axes` leading axes."""
    if module.settings.structure is not FrozenSeparable:
        return run(layer)
    found = _recording.get()
    if found is None:
        stored = getattr(module, NAME, None)
        if stored is None:
            raise ValueError(
                f"`FrozenSeparable` needs feature statistics. Got a {type(module).__name__} without "
                "any. Use `mj.nn.freeze_features(module, batches)`."
            )
        return run(lambda *args: with_feature_statistics(layer)(stored.get_value(), *args)[0])
    if id(module) in found:
        raise ValueError(
            f"`freeze_features` needs every module called once per pass. Got {type(module).__name__} "
            "a second time. Predict in `Separable` instead."
        )
    result, written = run(partial(with_feature_statistics(layer), None))
    axes = tuple(range(num_axes))
    found[id(module)] = jax.tree.map(lambda leaf: jnp.mean(leaf, axis=axes), written)
    return result
