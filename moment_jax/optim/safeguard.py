"""The chain of a whole optimiser, which skips or takes back bad steps and counts them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from moment_jax.optim.damping import Bound, Number, Schedule, TrustRegion, check_range, current

DEVIATIONS = 6.0  # a step is taken back if the loss is this many deviations above its average
SHARE = 0.1  # of the newest loss in that average


class SafeguardedState(NamedTuple):
    """State of `cg_fac` and `kfac`."""

    chain: Any  # (SecondOrderState, momentum, weight decay, learning rate)
    skipped: Array  # steps skipped for a gradient that was not finite, or for want of curvature
    taken_back: Array  # steps undone because the loss after them was far above its average
    last_taken_back: Array  # whether the last update undid a step
    losses: Array  # number of losses so far
    average: Array  # of the losses
    deviation: Array  # average distance of the losses from `average`


def safeguarded(
    name: str,
    direction: optax.GradientTransformationExtraArgs,
    learning_rate: Number | Schedule,
    momentum: Number,
    weight_decay: Number,
) -> optax.GradientTransformationExtraArgs:
    """A direction, then Optax's momentum, weight decay and learning rate; undoes bad steps."""
    check_range(name, "momentum", momentum, least=0, below=1)
    check_range(name, "weight_decay", weight_decay, least=0)
    chain = optax.chain(
        direction,
        optax.ema(momentum),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(learning_rate),
    )

    def init(params: optax.Params) -> SafeguardedState:
        # Every array is a new one, because an array can be donated only once.
        return SafeguardedState(
            chain.init(params),
            skipped=jnp.int32(0),
            taken_back=jnp.int32(0),
            last_taken_back=jnp.zeros((), bool),
            losses=jnp.int32(0),
            average=jnp.float32(0),
            deviation=jnp.float32(0),
        )

    def update(
        updates: optax.Updates,
        state: SafeguardedState,
        params: optax.Params | None = None,
        *,
        value: Array | float | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, SafeguardedState]:
        loss = jnp.asarray(jnp.nan if value is None else value, jnp.float32)
        previous = state.chain[0].previous
        back = jnp.zeros((), bool)
        if value is not None and previous is not None:
            far = (loss > state.average + DEVIATIONS * state.deviation) | ~jnp.isfinite(loss)
            # Never two in a row, since only one step is stored.
            back = (state.losses > 0) & far & ~state.last_taken_back
        grads = jax.tree.map(lambda g: jnp.where(back, 0, g), updates)
        steps, inner = chain.update(grads, state.chain, params, taken_back=back, **extra)
        moves = inner[0].step > state.chain[0].step

        def kept(new: Array, old: Array) -> Array:
            """No momentum of what led to a bad step; a skipped step leaves it as it is."""
            return jnp.where(back, 0, jnp.where(moves, new, old)).astype(new.dtype)

        def taken(step: Array, old: Array, now: Array) -> Array:
            return jnp.where(back, (old - now).astype(step.dtype), jnp.where(moves, step, 0))

        average = jax.tree.map(kept, inner[1], state.chain[1])
        undo = (steps, steps) if previous is None else (previous, params)
        return jax.tree.map(taken, steps, *undo), SafeguardedState(
            (inner[0], average, *inner[2:]),
            state.skipped + ~moves,
            state.taken_back + back,
            back,
            *_followed(state, loss, ~back & jnp.isfinite(loss)),
        )

    return optax.GradientTransformationExtraArgs(init, update)


def per_rate(name: str, kl_bound: Bound, learning_rate: Number | Schedule) -> Bound:
    """The bound of a direction that is within `kl_bound` after scaling by the learning rate."""
    check_range(name, "a learning rate", learning_rate, least=0)
    check_range(name, "kl_bound", kl_bound, least=0)
    if kl_bound is None or isinstance(kl_bound, TrustRegion):
        return kl_bound

    def bound(count: Array) -> Array:
        rate = current(learning_rate, count)
        return current(kl_bound, count) / jnp.where(rate == 0, 1, rate) ** 2

    return bound if callable(kl_bound) or callable(learning_rate) else bound(jnp.int32(0))


def _followed(state: SafeguardedState, loss: Array, takes: Array) -> tuple[Array, Array, Array]:
    """Count, average and deviation with one more loss; the first deviation is a quarter of the loss."""
    first = state.losses == 0
    share = jnp.where(first, 1, SHARE)
    distance = jnp.where(first, jnp.abs(loss) / 4, jnp.abs(loss - state.average))
    average = state.average + share * (loss - state.average)
    deviation = state.deviation + share * (distance - state.deviation)
    average = jnp.where(takes, average, state.average)
    return state.losses + takes, average, jnp.where(takes, deviation, state.deviation)


def curvature_due(state: Any) -> Array:
    """Whether an optimiser wants new curvature at its next update; `when` of `value_grad_and_factors`.

    The state is `nnx.Optimizer.opt_state`, or of any optimiser with `kfac` or `cg_fac` in it; without
    one it raises a ValueError.
    """
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    due = [leaf for path, leaf in leaves if any(getattr(k, "name", None) == "due" for k in path)]
    if not due:
        raise ValueError(
            "`curvature_due` needs the state of an optimiser with kfac or cg_fac in it. Got "
            f"{type(state).__name__}."
        )
    return jnp.any(jnp.stack(due))
