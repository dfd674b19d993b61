"""The chain that an optimiser is made of, with bad steps left out or taken back, and counted."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from moment_jax.optim.damping import Bound, Number, Schedule, TrustRegion, check_range, current

Array = jax.Array

DEVIATIONS = 6.0  # of the losses from their average: a step is taken back where they are past this
SHARE = 0.1  # of the newest loss in that average


class SafeguardedState(NamedTuple):
    """State of `cg_fac` and `kfac`."""

    chain: Any  # (SecondOrderState, momentum, weight decay, learning rate)
    skipped: Array  # steps left out because a gradient was not finite, or no curvature was there
    taken_back: Array  # steps undone because the loss after them was far above what it had been
    last_taken_back: Array  # whether that was at the last update
    losses: Array  # how many have been seen
    average: Array  # of the losses
    deviation: Array  # average distance of the losses from it


def safeguarded(
    name: str,
    direction: optax.GradientTransformationExtraArgs,
    learning_rate: Number | Schedule,
    momentum: Number,
    weight_decay: Number,
) -> optax.GradientTransformationExtraArgs:
    """Optax's momentum, weight decay and learning rate after a `scale_by_...`, and its bad steps undone.

    Args:
      name: for errors.
      direction: `scale_by_kfac` or `scale_by_cg_fac`.
      learning_rate: a number or a schedule.
      momentum: of the running average of the directions; 0 for none.
      weight_decay: decoupled, as in AdamW, times the learning rate.
    """
    check_range(name, "momentum", momentum, least=0, below=1)
    check_range(name, "weight_decay", weight_decay, least=0)
    chain = optax.chain(
        direction,
        optax.ema(momentum),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(learning_rate),
    )

    def init(params: optax.Params) -> SafeguardedState:
        def zero(dtype: Any) -> Array:  # a new one each time: an array may be donated once
            return jnp.zeros((), dtype)

        return SafeguardedState(
            chain.init(params),
            skipped=zero(jnp.int32),
            taken_back=zero(jnp.int32),
            last_taken_back=zero(bool),
            losses=zero(jnp.int32),
            average=zero(jnp.float32),
            deviation=zero(jnp.float32),
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
        known = value is not None and previous is not None
        back = _is_bad(state, loss) if known else jnp.zeros((), bool)
        grads = jax.tree.map(lambda g: jnp.where(back, 0, g), updates)
        steps, inner = chain.update(grads, state.chain, params, taken_back=back, **extra)
        moves = inner[0].skipped == state.chain[0].skipped
        # What led to a bad step goes on in no momentum; without a gradient nothing moves.
        average = jax.tree.map(
            lambda new, old: jnp.where(back, 0, jnp.where(moves, new, old)).astype(new.dtype),
            inner[1],
            state.chain[1],
        )
        steps = jax.tree.map(lambda step: jnp.where(moves & ~back, step, 0), steps)
        if previous is not None:
            steps = jax.tree.map(
                lambda step, old, now: jnp.where(back, (old - now).astype(step.dtype), step),
                steps,
                previous,
                params,
            )
        new = SafeguardedState(
            (inner[0], average, *inner[2:]),
            inner[0].skipped,
            state.taken_back + back,
            back,
            *_followed(state, loss, ~back & jnp.isfinite(loss)),
        )
        return steps, new

    return optax.GradientTransformationExtraArgs(init, update)


def per_rate(name: str, kl_bound: Bound, learning_rate: Number | Schedule) -> Bound:
    """The bound of a direction whose multiple by the learning rate is within `kl_bound`."""
    check_range(name, "a learning rate", learning_rate, least=0)
    check_range(name, "kl_bound", kl_bound, least=0)
    if kl_bound is None or isinstance(kl_bound, TrustRegion):
        return kl_bound

    def bound(count: Array) -> Array:
        rate = current(learning_rate, count)
        return current(kl_bound, count) / jnp.where(rate == 0, 1, rate) ** 2

    return bound if callable(kl_bound) or callable(learning_rate) else bound(jnp.int32(0))


def _is_bad(state: SafeguardedState, loss: Array) -> Array:
    """Whether the last step is to be undone; never two in a row, for there is one to go back to."""
    past = loss > state.average + DEVIATIONS * state.deviation
    return (state.losses > 0) & (past | ~jnp.isfinite(loss)) & ~state.last_taken_back


def _followed(state: SafeguardedState, loss: Array, takes: Array) -> tuple[Array, Array, Array]:
    """Count, average and deviation with one more loss; a quarter of the first is the first deviation."""
    first = state.losses == 0
    share = jnp.where(first, 1, SHARE)
    distance = jnp.where(first, jnp.abs(loss) / 4, jnp.abs(loss - state.average))
    average = state.average + share * (loss - state.average)
    deviation = state.deviation + share * (distance - state.deviation)
    old, new = (
        (state.losses, state.average, state.deviation),
        (state.losses + 1, average, deviation),
    )
    count, average, deviation = (jnp.where(takes, b, a) for a, b in zip(old, new, strict=True))
    return count, average, deviation


def curvature_due(state: Any) -> Array:
    """Whether an optimiser wants new curvature at its next update: `when` of `value_grad_and_factors`.

    Args:
      state: of an optimiser with `kfac` or `cg_fac` somewhere in it; `nnx.Optimizer.opt_state` too.

    Raises:
      ValueError: if there is none.
    """
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    due = [leaf for path, leaf in leaves if any(getattr(k, "name", None) == "due" for k in path)]
    if not due:
        raise ValueError(
            "`curvature_due` needs the state of an optimiser with kfac or cg_fac in it. Got "
            f"{type(state).__name__}."
        )
    return jnp.any(jnp.stack(due))
