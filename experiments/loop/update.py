"""One update with accumulated gradients, and a guard against numbers that are not finite."""

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


class Guard:
    """Stops the run where an array is not finite, and names it."""

    def __init__(self, params: Any) -> None:
        paths = [leaf_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
        self.names = [
            "the loss",
            *(f"the gradient of {path}" for path in paths),
            *(f"the updated {path}" for path in paths),
        ]

    def check(self, step: int, flags: Array) -> None:
        """Raise an error that names the arrays that are not finite; `flags` from `all_finite`."""
        bad = [self.names[i] for i in np.flatnonzero(~np.asarray(flags))]
        if not bad:
            return
        more = f", and {len(bad) - 3} more," if len(bad) > 3 else ""
        raise PartError(
            f"update {step}: {', '.join(bad[:3])}{more} not finite; nothing of this update is saved. "
            "Lower the learning rate, or clip the gradients"
        )


def all_finite(*trees: Any) -> Array:
    """Whether each leaf is finite, as one vector."""
    return jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(trees)])


def compiled_update(job: Job, blueprint: Blueprint) -> Update:
    """The jitted update; donates the state and keeps its layout."""

    def loss_of(params: Any, batch: Batch, key: Array, step: Array) -> tuple[Array, Report]:
        with jax.default_matmul_precision("float32"):
            return job.loss(nnx.merge(blueprint.graph, params), batch, key, step)

    compute = jax.value_and_grad(loss_of, has_aux=True)

    def update(state: TrainState, batch: Batch) -> tuple[TrainState, tuple[Report, Array]]:
        key, noise = jax.random.split(state.key)

        def part(_: None, given: tuple[Array, Batch]) -> tuple[None, Any]:
            index, examples = given
            return None, compute(
                state.params, examples, jax.random.fold_in(noise, index), state.step
            )

        if job.accumulate == 1:
            _, results = part(None, (jnp.int32(0), jax.tree.map(lambda x: x[0], batch)))
        else:
            results = _averaged(part, batch, job.accumulate)
        (loss, report), grads = results
        changes, optimizer = job.optimizer.update(grads, state.optimizer, state.params)
        params = optax.apply_updates(state.params, changes)
        new = TrainState(params, optimizer, state.step + 1, key)
        return new, ({"loss": loss, **report}, all_finite(loss, grads, params))

    return jax.jit(update, donate_argnums=0, out_shardings=(blueprint.shardings, None))


def _averaged(part: Any, batch: Batch, count: int) -> Any:
    """The mean over the parts, in the memory of one gradient."""
    first = (jnp.int32(0), jax.tree.map(lambda x: x[0], batch))
    shapes = jax.eval_shape(lambda given: part(None, given)[1], first)
    start = jax.tree.map(
        lambda s: jnp.zeros(s.shape, jnp.promote_types(s.dtype, "float32")), shapes
    )

    def add(total: Any, given: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, part(None, given)[1]), None

    total, _ = jax.lax.scan(add, start, (jnp.arange(count), batch))
    return jax.tree.map(lambda t, s: (t / count).astype(s.dtype), total, shapes)
