"""`freeze_features`: average feature correlations once, and use them in every prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from moment_jax.covariance import FrozenSeparable
from moment_jax.covariance.statistics import averaged, with_feature_statistics

M = TypeVar("M", bound=nnx.Module)
Found = dict[int, Any]  # statistics of the modules, by their identity
NAME = "feature_statistics"  # a module's attribute that holds them

_recording: ContextVar[Found | None] = ContextVar("recording", default=None)


class FeatureStatistics(nnx.Variable[Any]):
    """What `FrozenSeparable` reads in a module: no parameter, saved with the other state."""


def freeze_features(module: M, batches: Iterable[Any]) -> M:
    """The same module in `FrozenSeparable`, feature correlations averaged over these inputs.

    To be called once, after training, with some hundred training inputs: correlations averaged while the
    weights still moved would belong to none of them. Parameters are the same variables as the module's;
    train them further, and the statistics are old: call it anew.

    Args:
      module: a module of `mj.nn`, or of your own with such modules in it, each called once in a pass.
      batches: inputs of the module, or tuples of them where it takes several. All of one shape, or the
        pass is compiled for each.

    Raises:
      ValueError: if there is no batch, no module of `mj.nn` was called, or one was called twice.
    """
    # Here, for `base` imports this file.
    from moment_jax.nn.base import with_structure

    frozen = with_structure(module, FrozenSeparable)
    graph, state = nnx.split(frozen)

    @jax.jit
    def statistics(state: Any, inputs: tuple[Any, ...]) -> list[Any]:
        copy: Any = nnx.merge(graph, state)
        with _records() as found:
            copy(*inputs)
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
    """`run(layer)`, which maps the layer over `num_axes` leading axes, with the module's statistics."""
    if module.settings.structure is not FrozenSeparable:
        return run(layer)
    found = _recording.get()
    if found is None:
        stored = getattr(module, NAME, None)
        if stored is None:
            raise ValueError(
                f"`FrozenSeparable` needs feature statistics, and this {type(module).__name__} has "
                "none. Make the module by `mj.nn.freeze_features(module, batches)`."
            )
        return run(lambda *args: with_feature_statistics(layer)(stored.get_value(), *args)[0])
    if id(module) in found:
        raise ValueError(
            f"`freeze_features` needs every module called once in a pass. Got {type(module).__name__} "
            "a second time. Predict with `Separable`."
        )
    result, written = run(partial(with_feature_statistics(layer), None))
    axes = tuple(range(num_axes))
    found[id(module)] = jax.tree.map(lambda leaf: jnp.mean(leaf, axis=axes), written)
    return result


@contextmanager
def _records() -> Iterator[Found]:
    found: Found = {}
    token = _recording.set(found)
    try:
        yield found
    finally:
        _recording.reset(token)
