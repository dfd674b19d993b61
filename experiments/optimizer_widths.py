"""Memory and time of one update against the width of the Transformer."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.optimizer_runs import Method, Settings, make_update
from experiments.optimizer_tasks import transformer


class Cost(NamedTuple):
    """One update of one method at one width."""

    width: int
    method: str
    megabytes: float  # arguments, results in their place (donated), and what is held between
    seconds_with_curvature: float  # with new curvature and new inverses
    seconds_between: float  # with those there are


def cost_of_update(width: int, name: str, method: Method, settings: Settings) -> Cost:
    """Compile the update of the Transformer of this width, and time both kinds of it once."""
    task = transformer(width)
    _, tx, update = make_update(task, method, task.num_steps, settings)
    params: Any = nnx.split(task.create(0))[1]
    state = tx.init(nnx.as_pure(params))
    key = jax.random.key(0)
    first, between = jnp.int32(0), jnp.int32(task.curvature_every + 1)
    compiled = jax.jit(update, donate_argnums=(0, 1)).lower(params, state, key, first).compile()
    memory = compiled.memory_analysis()
    assert memory is not None  # every backend here has the analysis
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    held -= memory.alias_size_in_bytes
    params, state = compiled(params, state, key, first)  # the first call of a program is slower
    seconds = []
    for step in (jnp.int32(2 * task.curvature_every), between):
        jax.block_until_ready((params, state))
        began = time.perf_counter()
        params, state = compiled(params, state, key, step)
        jax.block_until_ready((params, state))
        seconds.append(time.perf_counter() - began)
    return Cost(width, name, held / 1e6, *seconds)
