"""One update with accumulated gradients, and what in it is finite."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array

from experiments.command_line import PartError
from experiments.loop.job import Batch, Job, Report
from experiments.loop.state import Blueprint, leaf_name
from experiments.training import TrainState

Update = Callable[[TrainState, Batch], tuple[TrainState, tuple[Report, Array]]]


def check_finite(step: int, flags: Array, params: Any) -> None:
    """Raise an error that names the arrays of an update that are not finite; `flags` come from it."""
    paths = [leaf_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    names = [
        "the loss",
        *(f"the gradient of {p}" for p in paths),
        *(f"the updated {p}" for p in paths),
    ]
    bad = [names[i] for i in np.flatnonzero(~np.asarray(flags))]
    if bad:
        more = f", and {len(bad) - 3} more," if len(bad) > 3 else ""
        raise PartError(
            f"update {step}: {', '.join(bad[:3])}{more} not finite; nothing of this update is saved. "
            "Lower the learning rate, or clip the gradients"
        )


def compiled_update(job: Job, blueprint: Blueprint) -> Update:
    """The jitted update; donates the state and keeps its layout.

    Its outcome has whether each of loss, gradients and new parameters is finite, in one vector.
    """

    def loss_of(params: Any, batch: Batch, key: Array, step: Array) -> tuple[Array, Report]:
        with jax.default_matmul_precision("float32"):
            return job.loss(nnx.merge(blueprint.graph, params), batch, key, step)

    def update(state: TrainState, batch: Batch) -> tuple[TrainState, tuple[Report, Array]]:
        key, noise = jax.random.split(state.key)

        def part(index: Array, examples: Batch) -> Any:
            own = jax.random.fold_in(noise, index)
            compute = jax.value_and_grad(loss_of, has_aux=True)
            return compute(state.params, examples, own, state.step)

        (loss, report), grads = _averaged(part, batch, job.accumulate)
        changes, optimizer = job.optimizer.update(grads, state.optimizer, state.params)
        params = optax.apply_updates(state.params, changes)
        new = TrainState(params, optimizer, state.step + 1, key)
        finite = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves((loss, grads, params))]
        return new, ({"loss": loss, **report}, jnp.stack(finite))

    return jax.jit(update, donate_argnums=0, out_shardings=(blueprint.shardings, None))


def _averaged(part: Callable[[Array, Batch], Any], batch: Batch, count: int) -> Any:
    """The mean over the parts, in the memory of one gradient."""
    first = jnp.int32(0), jax.tree.map(lambda x: x[0], batch)
    if count == 1:
        return part(*first)
    shapes = jax.eval_shape(part, *first)
    start = jax.tree.map(
        lambda s: jnp.zeros(s.shape, jnp.promote_types(s.dtype, "float32")), shapes
    )

    def add(total: Any, given: tuple[Array, Batch]) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, part(*given)), None

    total, _ = jax.lax.scan(add, start, (jnp.arange(count), batch))
    return jax.tree.map(lambda t, s: (t / count).astype(s.dtype), total, shapes)
