"""Predictions of a `mj.Bayesian`: in batches, and beside sampled networks.

In batches the model's graph and the network's options are static.
"""

import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from moment_jax.nn.plain import arguments, as_nnx
from moment_jax.progress import advance, compiling, running
from moment_jax.propagation.propagator import is_random_input
from moment_jax.xla import inlined


def predicted(
    model: nnx.Module, inputs: Any, options: dict[str, Any], batch_size: int, axes: int
) -> Any:
    """`model.likelihood(model(*inputs, **options))`, batch by batch where there are batch axes.

    The last batch is filled up with its first example.
    """
    if not isinstance(batch_size, int | np.integer) or batch_size < 1:
        raise ValueError(f"`predict` needs an integer batch_size >= 1. Got {batch_size}.")
    graph, state = nnx.split(model)
    known = _Static(options)
    size = jax.tree.leaves(inputs)[0].shape[0] if axes and inputs else 0
    if size <= batch_size:
        with compiling(_pass_of(model)):
            return _predicted(graph, state, inputs, known=known)
    parts = []
    for first in range(0, size, batch_size):
        rows = np.arange(first, first + batch_size)
        rows = np.where(rows < size, rows, first)
        batch = jax.tree.map(lambda x, rows=rows: jnp.asarray(x)[rows], inputs)
        with compiling(_pass_of(model)):
            parts.append(_predicted(graph, state, batch, known=known))
    return _joined(parts, size)


@partial(inlined, static_argnums=1)
def _joined(parts: list[Any], size: int) -> Any:
    return jax.tree.map(lambda *each: jnp.concatenate(each)[:size], *parts)


def compiled_pass(model: Any, inputs: Any, options: dict[str, Any]) -> Any:
    """`model(*inputs, **options)` as one program; in compiled or differentiated code as it stands."""
    graph, state = nnx.split(model)
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((state, inputs, options))):
        return model._moments(inputs, options)
    with compiling(_pass_of(model)):
        return _pass(graph, state, inputs, known=_Static(options))


def _pass_of(model: Any) -> str:
    return f"the pass of {model.name} ({model.structure.__name__})"


def beside_sampled(
    model: Any,
    caller: str,
    x: Any,
    key: Array | None,
    samples: int,
    progress: bool | None,
    options: Any,
) -> list[Any]:
    """One pass, and mean and sd of sampled networks, each with its seconds, compiled."""
    inputs = arguments(x)
    if any(map(is_random_input, inputs)):
        raise ValueError(
            f"`{caller}` draws networks, and needs certain inputs. Got the moments of a random one. "
            "Give its mean, or sample the input and call model(x) for each."
        )
    if samples < 2:
        raise ValueError(f"`{caller}` needs samples >= 2. Got {samples}.")
    keys = jax.random.split(jax.random.key(0) if key is None else key, samples)
    own, known, found = (*nnx.split(model), inputs), _Static(options), []
    passes = {
        _pass_of(model): partial(_pass, *own),
        "sampled networks": partial(_drawn, *own, keys),
    }
    with running(2 * len(passes), progress):
        for what, run in passes.items():
            with compiling(what):
                jax.block_until_ready(run(known=known))
            advance()
            start = time.perf_counter()
            result = jax.block_until_ready(run(known=known))
            found.append((result, time.perf_counter() - start))
            advance()
    return found


def spread_factors(sd: Array, sampled: Array) -> Array:
    """Factors (C,) from sds (..., C) of a pass and sampled networks; their mean where none is known."""
    known = (sd > 0) & (sampled > 0)
    if not jnp.any(known):
        raise ValueError("`corrected` needs an output that varies. Got variances of zero.")
    ratio = jnp.where(known, sampled / jnp.where(known, sd, 1), jnp.nan)
    each = jnp.nanmean(ratio, axis=tuple(range(sd.ndim - 1)))
    return jnp.where(jnp.isnan(each), jnp.nanmean(each), each)


class _Static:
    """Keyword arguments as a static argument: arrays count by their values, and stay known."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        leaves, tree = jax.tree.flatten(options)
        arrays = jax.Array | np.ndarray
        known = [
            (np.asarray(x).tobytes(), x.shape, str(x.dtype)) if isinstance(x, arrays) else x
            for x in leaves
        ]
        self.key = tree, *known

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Static) and self.key == other.key


@partial(jax.jit, static_argnums=0, static_argnames="known")
def _predicted(graph: Any, state: Any, inputs: Any, *, known: _Static) -> Any:
    model: Any = nnx.merge(graph, state)
    return model.likelihood(model(*inputs, **known.options))


@partial(jax.jit, static_argnums=0, static_argnames="known")
def _pass(graph: Any, state: Any, inputs: Any, *, known: _Static) -> Any:
    model: Any = nnx.merge(graph, state)
    return model(*inputs, **known.options)


@partial(jax.jit, static_argnums=0, static_argnames="known")
def _drawn(graph: Any, state: Any, inputs: Any, keys: Array, *, known: _Static) -> Any:
    """Mean and sd of the sampled networks' outputs."""
    model: Any = nnx.merge(graph, state)

    def of_network(key: Array) -> Array:
        output: Array = as_nnx(model.sample(key))(*inputs, **known.options)
        return output

    outputs = jax.lax.map(of_network, keys, batch_size=min(len(keys), 10))
    return outputs.mean(axis=0), outputs.std(axis=0, ddof=1)
