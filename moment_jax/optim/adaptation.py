"""Wrappers that let the last step decide: on the damping, on the bound of a step, and on going back."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from optax import GradientTransformation, GradientTransformationExtraArgs

Number = float | Array
Schedule = Callable[[Array], Any]

DAMPINGS = 1e-8, 1e4  # between which it adapts
BOUNDS = 1e-9, 1.0  # likewise
SLACK = 3.0  # the bound of a trust region falls no faster than 1 / steps, up to this factor
SETTLING = 25  # steps after which its rate falls
DEVIATIONS = 6.0  # a step is taken back if the loss is this many deviations above its average
SHARE = 0.1  # of the newest loss in that average, and of the newest slope in a trust region's
MOMENTA = optax.EmaState | optax.TraceState


class LastStep(NamedTuple):
    """What a new gradient g, its direction x and the curvature F + gamma I say of the last step s."""

    slope: Array  # <g, s>
    along: Array  # <x, s>
    length: Array  # <s, s>
    ratio: Array  # s^T F s / <s, s>, of the last step whose product with F was computed
    size: Array  # s^T (F + gamma) s
    quadratic: Array  # x^T (F + gamma) x

    def slope_in_damping(self, damping: Array) -> Array:
        """The derivative of the new loss in log damping at fixed |s|, scaled as `scaled` does."""
        along = self.length * self.slope / (2 * jnp.where(self.size > 0, self.size, 1))
        return self.scaled(damping * (along - self.along))

    def scaled(self, slope: Array) -> Array:
        """The slope over the norms of s and x in F + gamma I, within [-1, 1]."""
        norms = jnp.sqrt(self.size) * jnp.sqrt(self.quadratic)
        ratio = jnp.clip(slope / jnp.where(norms > 0, norms, 1), -1, 1)
        return jnp.where((norms > 0) & jnp.isfinite(ratio), ratio, 0)


class AdaptDampingState(NamedTuple):
    """State of `adapt_damping`."""

    inner_state: Any
    damping: Array  # of the next step


def adapt_damping(
    inner: GradientTransformationExtraArgs, initial: float = 3e-4, rate: float = 5.0
) -> GradientTransformationExtraArgs:
    """Damping that descends the next batch's loss, for a direction or a `trust_region` of it.

    Let x = (F + damping)^-1 grad of the new batch, and s the last step with |s|^2 = s^T (F + damping) s
    held fixed. The derivative of the new loss with respect to the damping is then proportional to
    <x, s> - <s, s> <grad, s> / (2 |s|^2). The damping settles among the curvatures of the directions in
    which the loss still falls. After a step taken back it is fourfold. A wrong `initial` is corrected
    within some dozens of steps; `rate` limits a change of log damping.

    ValueError if a number is negative; from update, without an `undo_bad_steps` around the chain.
    """
    check_range("adapt_damping", initial=initial, rate=rate)

    def init(params: optax.Params) -> AdaptDampingState:
        return AdaptDampingState(inner.init(params), jnp.float32(initial))

    def update(updates: Any, state: AdaptDampingState, params: Any = None, **extra: Any) -> Any:
        back = _taken_back("adapt_damping", extra)
        extra["damping"] = state.damping
        updates, inner_state = inner.update(updates, state.inner_state, params, **extra)
        slope = optax.tree.get(inner_state, "last").slope_in_damping(state.damping)
        if isinstance(inner_state, TrustRegionState):
            # At its least bound, slopes are noise, and more damping would only shorten the steps.
            slope = jnp.where(inner_state.bound > inner_state.least, slope, 0)
        factor = jnp.where(back, 4, jnp.exp(-rate * slope))
        return updates, AdaptDampingState(inner_state, jnp.clip(state.damping * factor, *DAMPINGS))

    return GradientTransformationExtraArgs(init, update)


class TrustRegionState(NamedTuple):
    """State of `trust_region`."""

    inner_state: Any
    steps: Array  # so far
    bound: Array  # on 1/2 x^T (F + damping) x of the last direction
    least: Array  # slopes do not take the bound below this
    clip: Array  # factor by which the bound scaled the last direction
    square: Array  # running average of the squared slope


def trust_region(
    inner: GradientTransformationExtraArgs, bound: Number | Schedule | None = None, *,
    initial: float = 1e-4, rate: float = 0.3, aim: float = 0.2,
) -> GradientTransformationExtraArgs:  # fmt: skip
    """A bound of the step's KL divergence that grows while steps are too short, and else shrinks.

    The direction x of `inner` is scaled so that 1/2 x^T (F + damping) x <= bound, nats per example: a
    number, a schedule, or None for a bound that adapts from `initial` on (small, since an average of few
    batches is poor curvature). After a step s, c = <grad, s> over the norms of both in F + damping is -1
    if it was far too short, 0 if it ended at a minimum, 1 if it was far too long. Noise makes |c| small,
    so that it counts in units of its running root mean square, r: with d = c / r - aim the bound is
    multiplied by exp(-rate d), or by exp(-2 rate d) where d > 0, with a rate that falls as
    1 / sqrt(1 + steps / 25). By noise alone, c / r ~ N(0, 1), it shrinks. A step taken back quarters it.

    n batches drawn without replacement are anticorrelated by 1 / (n - 1), so near convergence gradients
    point back along the last steps however short these are. The bound therefore falls no faster than
    1 / (number of steps), up to a factor of three. Errors are those of `adapt_damping`.
    """
    check_range("trust_region", bound=bound, initial=initial, rate=rate)

    def init(params: optax.Params) -> TrustRegionState:
        first = current(initial if bound is None else bound, jnp.int32(0))
        least, clip, square = jnp.float32(0), jnp.float32(1), jnp.float32(0)
        return TrustRegionState(inner.init(params), jnp.int32(0), first, least, clip, square)

    def update(updates: Any, state: TrustRegionState, params: Any = None, **extra: Any) -> Any:
        updates, inner_state = inner.update(updates, state.inner_state, params, **extra)
        last, square = optax.tree.get(inner_state, "last"), state.square
        if bound is None:
            back, slope = _taken_back("trust_region", extra), last.scaled(last.slope)
            # Of the slopes that there are: the first gradient has no step before it.
            share = jnp.maximum(SHARE, 1 / jnp.maximum(state.steps, 1)) * (state.steps > 0)
            square += share * (slope**2 - square)
            slope /= jnp.sqrt(jnp.where(square > 0, square, 1))
            # A bound that was not active cannot have been too small.
            past = jnp.where(state.clip < 1, slope, jnp.maximum(slope, aim)) - aim
            past /= jnp.sqrt(1 + state.steps / SETTLING)
            followed = jnp.exp(-jnp.where(past > 0, 2, 1) * rate * past)
            least = jnp.where(back, 0.25, 1) * state.least * state.steps / (state.steps + 1)
            most = jnp.clip(state.bound * jnp.where(back, 0.25, followed), *BOUNDS)
            most = jnp.maximum(most, least)
            least = jnp.maximum(least, most / SLACK)
        else:
            most, least = current(bound, state.steps), state.least
        size = last.quadratic / 2
        clip = jnp.where(size > most, jnp.sqrt(most / jnp.where(size > 0, size, 1)), 1)
        updates = jax.tree.map(lambda x: clip.astype(x.dtype) * x, updates)
        return updates, TrustRegionState(inner_state, state.steps + 1, most, least, clip, square)

    return GradientTransformationExtraArgs(init, update)


class UndoState(NamedTuple):
    """State of `undo_bad_steps`."""

    inner_state: Any
    previous: optax.Params  # before the last step
    taken_back: Array  # number of steps undone
    may_undo: Array  # whether the last step may be: not if it undid one
    number: Array  # of losses so far
    average: Array
    deviation: Array  # their average distance from `average`; of the first, a quarter of itself


def undo_bad_steps(inner: GradientTransformation) -> GradientTransformationExtraArgs:
    """Take a step back if the loss after it is not finite or far above its average.

    `update(grads, state, params, value=value)` is given the loss at `params`; without it none is. A step
    back also drops the momentum of `optax.ema` and `optax.trace`. The inner transformation is given
    `taken_back`, with a gradient of zero, and at every step `last_step`, the change of the parameters.
    """
    inner = optax.with_extra_args_support(inner)

    def init(params: optax.Params) -> UndoState:
        # Every array is a new one, because an array can be donated only once.
        losses = jnp.int32(0), jnp.float32(0), jnp.float32(0)
        start, previous = inner.init(params), jax.tree.map(jnp.copy, params)
        return UndoState(start, previous, jnp.int32(0), jnp.zeros((), bool), *losses)

    def update(
        updates: Any, state: UndoState, params: Any = None, *, value: Any = None, **extra: Any
    ) -> Any:
        if params is None:
            raise ValueError(
                "`undo_bad_steps` needs update(grads, state, params, factors=factors). Got no params."
            )
        loss = jnp.asarray(jnp.nan if value is None else value, jnp.float32)
        first = state.number == 0
        far = (loss > state.average + DEVIATIONS * state.deviation) | ~jnp.isfinite(loss)
        back = far & ~first & state.may_undo & (value is not None)
        last_step = jax.tree.map(lambda new, old: new - old, params, state.previous)
        grads = jax.tree.map(lambda grad: jnp.where(back, 0, grad), updates)
        extra |= {"last_step": last_step, "taken_back": back}
        steps, inner_state = inner.update(grads, state.inner_state, params, **extra)

        def without_momentum(part: Any) -> Any:
            if not isinstance(part, MOMENTA):
                return part
            return jax.tree.map(lambda x: jnp.where(back, jnp.zeros_like(x), x), part)

        inner_state = jax.tree.map(
            without_momentum, inner_state, is_leaf=lambda part: isinstance(part, MOMENTA)
        )
        steps = jax.tree.map(lambda x, s: jnp.where(back, -s.astype(x.dtype), x), steps, last_step)
        takes = ~back & jnp.isfinite(loss)
        share = jnp.where(first, 1, SHARE) * takes
        change = jnp.where(takes, loss - state.average, 0)
        distance = jnp.abs(change) / jnp.where(first, 4, 1)
        average = state.average + share * change
        deviation = state.deviation + share * (distance - state.deviation)
        losses = state.number + takes, average, deviation
        return steps, UndoState(inner_state, params, state.taken_back + back, ~back, *losses)

    return GradientTransformationExtraArgs(init, update)


def _taken_back(name: str, extra: dict[str, Any]) -> Array:
    """Whether the last step was taken back; raises unless an `undo_bad_steps` tells."""
    if extra.get("last_step") is None:
        raise ValueError(
            f"`{name}` adapts to the last step, and got none. Put mj.optim.undo_bad_steps(...) around "
            "the whole chain, as mj.optim.kfac does."
        )
    return jnp.asarray(extra["taken_back"])


def current(setting: Number | Schedule | None, count: Array) -> Array:
    """A number or a schedule at a step."""
    value: Any = setting(count) if callable(setting) else setting
    return jnp.asarray(value, jnp.float32)


def check_range(
    name: str, least: float = 0, below: float | None = None, whole: bool = False, **settings: Any
) -> None:
    """Raise unless known numbers lie in a range, those of schedules at their first two steps."""
    for what, known in settings.items():
        if callable(known):
            with jax.ensure_compile_time_eval():
                known = jnp.stack([current(known, jnp.int32(step)) for step in range(2)])
        if known is None or isinstance(known, jax.core.Tracer):
            continue
        inside = (np.asarray(known) >= least) & (below is None or np.asarray(known) < below)
        if not np.all(inside & (not whole or known == np.round(known))):
            also = f" and < {below}" if below is not None else ", whole" if whole else ""
            raise ValueError(f"`{name}` needs {what} >= {least}{also}. Got {known}.")
