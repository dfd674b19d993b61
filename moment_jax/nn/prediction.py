"""Predictions of a `mj.Bayesian`: in batches, and beside sampled networks.

In batches the model's graph and the network's options are static.
"""

import time
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from moment_jax.nn.inputs import arguments, check_inputs, check_key, with_batch
from moment_jax.nn.modules import as_nnx
from moment_jax.nn.static import Static
from moment_jax.progress import compiling
from moment_jax.propagation.law import check_mean, refuse_deviation, rounding
from moment_jax.propagation.propagator import is_random_input
from moment_jax.xla import inlined


class Check(NamedTuple):
    """One pass beside sampled networks, averaged over all entries of the output."""

    sd_ratio: float  # sd of the pass over the sampled one, mean
    sd_error: float  # the same, mean |ratio - 1|
    mean_error: float  # |mean of the pass - sampled mean|, in sampled sds
    noise: float  # of a sampled sd, relative: `sd_error` cannot be told from it below
    seconds: float  # of the pass, compiled
    seconds_sampled: float  # of all sampled networks, compiled


def predicted(
    model: nnx.Module, inputs: Any, options: dict[str, Any], batch_size: int, axes: int
) -> Any:
    """`model.likelihood(model(*inputs, **options))`, batch by batch where there are batch axes.

    The last batch is filled up with its first example.
    """
    if not isinstance(batch_size, int | np.integer) or batch_size < 1:
        raise ValueError(f"`predict` needs an integer batch_size >= 1. Got {batch_size}.")
    graph, state = nnx.split(model)
    known = Static(options)
    size = jax.tree.leaves(inputs)[0].shape[0] if axes and inputs else 0
    if size <= batch_size:
        return _told(_predicted, model, graph, state, inputs, known=known)
    parts = []
    for first in range(0, size, batch_size):
        rows = np.arange(first, first + batch_size)
        rows = np.where(rows < size, rows, first)
        batch = jax.tree.map(lambda x, rows=rows: jnp.asarray(x)[rows], inputs)
        parts.append(_told(_predicted, model, graph, state, batch, known=known))
    return _joined(parts, size)


@partial(inlined, static_argnums=1)
def _joined(parts: list[Any], size: int) -> Any:
    return jax.tree.map(lambda *each: jnp.concatenate(each)[:size], *parts)


def compiled_pass(model: Any, inputs: Any, options: dict[str, Any]) -> Any:
    """`model(*inputs, **options)` as one program; in compiled or differentiated code as it stands."""
    graph, state = nnx.split(model)
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((state, inputs, options))):
        return model._moments(inputs, options)
    return _told(_pass, model, graph, state, inputs, known=Static(options))


def _told(fn: Any, model: Any, *args: Any, known: Static) -> Any:
    with compiling(f"the pass of {model.name} ({model.structure.__name__})"):
        return fn(*args, known=known)


def beside_sampled(
    model: Any, caller: str, x: Any, key: Array | None, samples: int, options: Any
) -> list[Any]:
    """One pass, and mean and sd of sampled networks, each with its seconds, compiled."""
    inputs, key = arguments(x), jax.random.key(0) if key is None else key
    if any(map(is_random_input, inputs)):
        came = "Got the moments of a random one. Give its mean"
        raise ValueError(f"`{caller}` draws networks, and needs certain inputs. {came}.")
    check_inputs(inputs, model.batch_axes, model.structure)
    check_key(caller, key)
    if samples < 2:
        raise ValueError(f"`{caller}` needs samples >= 2. Got {samples}.")
    check_law(model, inputs, options)
    keys = jax.random.split(key, samples)
    own, known, found = (*nnx.split(model), inputs), Static(options), []
    for run in (partial(_pass, *own), partial(_drawn, *own, keys)):
        jax.block_until_ready(run(known=known))  # compiles
        start = time.perf_counter()
        result = jax.block_until_ready(run(known=known))
        found.append((result, time.perf_counter() - start))
    return found


def check_law(model: Any, inputs: Any, options: dict[str, Any]) -> None:
    """Raise if the pass without noise, the same program with other numbers, is not the network."""
    if model.linearised or any(map(is_random_input, inputs)):
        return
    known, (graph, state) = Static(options), nnx.split(model.scaled(0.0))
    found = _told(_pass, model, graph, state, inputs, known=known).mean
    plain = partial(_at_means, graph, known=known)
    unit = rounding(jax.make_jaxpr(plain)(state, inputs))
    what = check_mean(found, plain(state, inputs), unit)
    if what is not None:
        refuse_deviation(what, unit, *pass_of_one(model.scaled(0.0), inputs, options))


def pass_of_one(model: Any, inputs: Any, options: dict[str, Any]) -> Any:
    """The pass of the first example: function, beliefs, inputs, structure and landmarks."""

    def fn(values: Any, *inputs: Any) -> Any:
        return model._network(values)(*inputs, **options)

    axes = model.batch_axes
    first = jax.tree.map(lambda x: x[(0,) * axes], inputs)
    given = tuple(with_batch(x, axes) for x in first)
    return fn, model.beliefs, given, model.structure, model.landmarks


def spread_factors(sd: Array, sampled: Array) -> Array:
    """Factors (C,) from sds (..., C) of a pass and sampled networks; their mean where none is known."""
    known = (sd > 0) & (sampled > 0)
    if not jnp.any(known):
        raise ValueError("`corrected` needs an output that varies. Got variances of zero.")
    ratio = jnp.where(known, sampled / jnp.where(known, sd, 1), jnp.nan)
    each = jnp.nanmean(ratio, axis=tuple(range(sd.ndim - 1)))
    return jnp.where(jnp.isnan(each), jnp.nanmean(each), each)


@jax.custom_jvp
def as_corrected(beliefs: Any) -> Any:
    """Beliefs that have no derivative, for the spread was found at their values."""
    return beliefs


@as_corrected.defjvp
def _refused(*_: Any) -> Any:
    raise ValueError(
        "A corrected model has factors that hold for its present beliefs. Got a derivative by them. "
        "Train the model that `corrected` was called on, or model.replace(), and correct it afterwards."
    )


@partial(jax.jit, static_argnums=0, static_argnames="known")
def _predicted(graph: Any, state: Any, inputs: Any, *, known: Static) -> Any:
    model: Any = nnx.merge(graph, state)
    return model.likelihood(model(*inputs, **known.value))


@partial(jax.jit, static_argnums=0, static_argnames="known")
def _pass(graph: Any, state: Any, inputs: Any, *, known: Static) -> Any:
    model: Any = nnx.merge(graph, state)
    return model(*inputs, **known.value)


@partial(jax.jit, static_argnums=0, static_argnames="known")
def _at_means(graph: Any, state: Any, inputs: Any, *, known: Static) -> Any:
    model: Any = nnx.merge(graph, state)
    return as_nnx(model.at_means(), model.output)(*inputs, **known.value)


@partial(jax.jit, static_argnums=0, static_argnames="known")
def _drawn(graph: Any, state: Any, inputs: Any, keys: Array, *, known: Static) -> Any:
    """Mean and sd of the sampled networks' outputs."""
    model: Any = nnx.merge(graph, state)

    def of_network(key: Array) -> Array:
        output: Array = as_nnx(model.sample(key), model.output)(*inputs, **known.value)
        return output

    outputs = jax.lax.map(of_network, keys, batch_size=min(len(keys), 10))
    return outputs.mean(axis=0), outputs.std(axis=0, ddof=1)
