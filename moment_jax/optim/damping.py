"""Damping of the curvature and the bound of a step: fixed, scheduled or adaptive."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array

Schedule = Callable[[Array], Any]

SLACK = 3.0  # a `TrustRegion` falls no faster than 1 / steps, up to this factor


class Adaptive:
    """A rule for a number that adapts from step to step, within limits."""

    initial: float
    smallest: float
    largest: float
    rate: float = 0.0

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not 0 < self.smallest <= self.initial <= self.largest:
            raise ValueError(
                f"`{name}` needs 0 < smallest <= initial <= largest. Got {self.smallest}, "
                f"{self.initial} and {self.largest}."
            )
        check_range(name, "a rate", self.rate, least=0)

    def scaled(self, value: Array, factor: Array) -> Array:
        """`value` times a factor, within the limits."""
        return jnp.clip(value * factor, self.smallest, self.largest)


@dataclasses.dataclass(frozen=True)
class LevenbergMarquardt(Adaptive):
    """Damping by the reduction ratio: actual over predicted change of the loss.

    Pass the change to `update(..., change=change)`: the loss after the previous step minus the loss
    before it, on the same batch. Without a finite change, damping stays as it is.

    Args:
      initial: first value.
      factor: multiplies or divides the damping; above 1.
      lower: the damping grows below this ratio.
      upper: the damping shrinks above this ratio.
      smallest: lower limit.
      largest: upper limit.

    Raises:
      ValueError: if the numbers are out of order.
    """

    initial: float = 1e-2
    factor: float = 1.5
    lower: float = 0.25
    upper: float = 0.75
    smallest: float = 1e-8
    largest: float = 1e4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.factor <= 1 or not self.lower < self.upper:
            raise ValueError(
                "`LevenbergMarquardt` needs factor > 1 and lower < upper. Got "
                f"{self.factor}, {self.lower} and {self.upper}."
            )

    def adapted(self, damping: Array, change: Array, predicted: Array) -> Array:
        """The next damping, from the actual and the predicted change of the loss by the last step."""
        ratio = change / jnp.where(predicted < 0, predicted, -1)
        worse = jnp.where(ratio < self.lower, self.factor, 1.0)
        factor = jnp.where(ratio > self.upper, 1 / self.factor, worse).astype(damping.dtype)
        return self.scaled(damping, jnp.where(jnp.isfinite(ratio) & (predicted < 0), factor, 1))


@dataclasses.dataclass(frozen=True)
class AdaptiveDamping(Adaptive):
    """Damping that descends the next batch's loss.

    Let x = (F + damping)^-1 grad of the new batch, and s the last step with |s|^2 = s^T (F + damping) s
    held fixed. The derivative of the new loss with respect to the damping is then proportional to
    <x, s> - <s, s> <grad, s> / (2 |s|^2): two inner products, no evaluation of the loss. The damping
    settles among the curvatures of the directions in which the loss still falls, in whatever units.

    Args:
      initial: first value; an error of a factor of ten is corrected within some dozens of steps.
      rate: upper limit of a change of log damping; typical changes are a hundredth of it.
      smallest: the damping stays above it.
      largest: and below it.

    Raises:
      ValueError: if the numbers are out of order.
    """

    initial: float = 3e-4
    rate: float = 5.0
    smallest: float = 1e-8
    largest: float = 1e4

    def adapted(self, damping: Array, slope: Array, taken_back: Array) -> Array:
        """The next damping, from the scaled slope of the loss; fourfold after a step taken back."""
        return self.scaled(damping, jnp.where(taken_back, 4, jnp.exp(-self.rate * slope)))


@dataclasses.dataclass(frozen=True)
class TrustRegion(Adaptive):
    """A bound of the step's KL divergence that grows while steps are too short, and else shrinks.

    After a step s the new gradient shows how the loss changes along it: c = <grad, s> over the norms of
    both in F + damping. It is -1 if the step was far too short, 0 if it ended at a minimum, 1 if it was
    far too long. With d = c - aim the bound is multiplied by exp(-rate d), or by exp(-2 rate d) where
    d > 0.

    The gradient is of another batch, so noise that the step followed does not count in its favour. It
    counts against it: n batches drawn without replacement are anticorrelated by 1 / (n - 1), so near
    convergence gradients point back along the last steps however short these are. The bound therefore
    falls no faster than 1 / (number of steps), up to a factor of three; such step lengths have an
    infinite sum.

    Args:
      initial: first value, nats per example; small, since an average of few batches is poor curvature.
      rate: see above.
      smallest: the bound stays above it.
      largest: and below it.
      aim: target of c, slightly past the minimum, which suits later losses better.

    Raises:
      ValueError: if the numbers are out of order.
    """

    initial: float = 1e-4
    rate: float = 0.5
    smallest: float = 1e-9
    largest: float = 1.0
    aim: float = 0.02

    def adapted(
        self, bound: Array, least: Array, slope: Array, taken_back: Array, step: Array
    ) -> tuple[Array, Array]:
        """The bound, a quarter of it after a step taken back, and the least that slopes may make it."""
        past = slope - self.aim
        followed = jnp.exp(-jnp.where(past > 0, 2, 1) * self.rate * past)
        least = jnp.where(taken_back, 0.25, 1) * least * step / (step + 1)
        moved = jnp.maximum(self.scaled(bound, jnp.where(taken_back, 0.25, followed)), least)
        return moved, jnp.maximum(least, moved / SLACK)


Number = float | Array
Damping = Number | Schedule | LevenbergMarquardt | AdaptiveDamping
Bound = Number | Schedule | TrustRegion | None


def current(setting: Damping | Bound, count: Array, adapted: Array | None = None) -> Array:
    """A setting at a step; no bound is float32's largest, what adapts is `adapted`, None at first."""
    value: Any = setting
    if isinstance(setting, Adaptive):
        value = setting.initial if adapted is None else adapted
    elif setting is None:
        value = jnp.finfo(jnp.float32).max
    elif callable(setting):
        value = setting(count)
    return jnp.asarray(value, jnp.float32)


def check_range(
    name: str, what: str, value: Any, *, least: float, below: float | None = None
) -> None:
    """Raise unless a Python number lies in its range; arrays and schedules are not checked."""
    if not isinstance(value, int | float) or (value >= least and (below is None or value < below)):
        return
    wanted = f">= {least}" if below is None else f">= {least} and < {below}"
    raise ValueError(f"`{name}` needs {what} {wanted}. Got {value}.")


DEFAULT_DAMPING, DEFAULT_BOUND = AdaptiveDamping(), TrustRegion()
