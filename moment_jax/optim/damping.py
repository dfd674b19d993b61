"""How much of the identity is added to the curvature, and how far a step may go: fixed or adapted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array
Schedule = Callable[[Array], Any]

SLACK = 3.0  # how far below its largest values, falling as 1 / steps, a `TrustRegion` may be


@dataclasses.dataclass(frozen=True)
class LevenbergMarquardt:
    """Damping that grows where the quadratic model promised too much, and else shrinks.

    The reduction ratio is the change of the loss over the change that the model predicted for the step
    before. Give the change to `update(..., change=change)`: the loss after the previous step less that
    before it, on the same batch. Where it is not given, or not finite, damping stays.

    Args:
      initial: where it starts.
      factor: what it is divided or multiplied by, above 1.
      lower: below this ratio it grows.
      upper: above this ratio it shrinks.
      smallest: never below this.
      largest: never above this.

    Raises:
      ValueError: if the numbers are not in order.
    """

    initial: float = 1e-2
    factor: float = 1.5
    lower: float = 0.25
    upper: float = 0.75
    smallest: float = 1e-8
    largest: float = 1e4

    def __post_init__(self) -> None:
        check_order("LevenbergMarquardt", self)
        if self.factor <= 1 or not self.lower < self.upper:
            raise ValueError(
                "`LevenbergMarquardt` needs factor > 1 and lower < upper. Got "
                f"{self.factor}, {self.lower} and {self.upper}."
            )

    def adapted(self, damping: Array, change: Array, predicted: Array) -> Array:
        """The damping for the next step.

        Args:
          damping: that of the step before.
          change: of the loss by that step, negative where it fell.
          predicted: the same by the quadratic model.
        """
        ratio = change / jnp.where(predicted < 0, predicted, -1)
        known = jnp.isfinite(ratio) & (predicted < 0)
        worse = jnp.where(ratio < self.lower, self.factor, 1.0)
        scale = jnp.where(ratio > self.upper, 1 / self.factor, worse).astype(damping.dtype)
        scale = jnp.where(known, scale, 1)
        return jnp.clip(damping * scale, self.smallest, self.largest)


@dataclasses.dataclass(frozen=True)
class Followed:
    """A number that follows a slope of the loss, at a rate, within limits."""

    initial: float
    rate: float
    smallest: float
    largest: float

    def __post_init__(self) -> None:
        check_order(type(self).__name__, self)
        check_range(type(self).__name__, "a rate", self.rate, least=0)

    def moved(self, value: Array, exponent: Array, taken_back: Array, instead: float) -> Array:
        """`value` times e^exponent, or times `instead` where the last step has been undone."""
        factor = jnp.where(taken_back, instead, jnp.exp(exponent))
        return jnp.clip(value * factor, self.smallest, self.largest)


@dataclasses.dataclass(frozen=True)
class AdaptiveDamping(Followed):
    """Damping that follows the derivative of the next batch's loss with respect to it.

    With x = (F + damping)^-1 grad of the new batch, s the last step and |s|^2 = s^T (F + damping) s held
    fixed, that derivative is, up to its size, <x, s> - <s, s> <grad, s> / (2 |s|^2): two inner products,
    and no evaluation of the loss. Damping so comes to lie among the curvatures of the directions in
    which the loss still falls, whatever the loss is measured in.

    Args:
      initial: where it starts; a factor of ten up or down is made good in some dozens of steps.
      rate: log damping moves by at most this, and mostly by a hundredth of it.
      smallest: never below this.
      largest: never above this.

    Raises:
      ValueError: if the numbers are not in order.
    """

    initial: float = 3e-4
    rate: float = 5.0
    smallest: float = 1e-8
    largest: float = 1e4

    def adapted(self, damping: Array, slope: Array, taken_back: Array) -> Array:
        """The damping for the next step: fourfold where the last one has been taken back.

        Args:
          damping: that of this step.
          slope: of the loss in log damping, a number between -1 and 1 that is scaled as above.
          taken_back: whether the last step has been undone.
        """
        return self.moved(damping, -self.rate * slope, taken_back, 4)


@dataclasses.dataclass(frozen=True)
class TrustRegion(Followed):
    """A bound of the step's KL divergence that grows while the steps end on a slope, and else shrinks.

    After a step s the new gradient says how the loss still falls along it: c = <grad, s> over the
    norms of both in F + damping, from -1 (the step could have been far longer) by 0 (it has ended at a
    minimum) to 1 (far too long). With d = c - aim, the bound is multiplied by exp(-rate d), or by
    exp(-2 rate d) where d > 0. The gradient is that of another batch, so the noise that a step has
    followed does not speak for it. It speaks against it: of n batches drawn without replacement every
    two are anticorrelated by 1 / (n - 1), so that near the end each gradient points back along the last
    steps however short they are. Hence the bound falls no faster than 1 / (number of steps), give or
    take a factor of three: lengths of steps whose sum has no end.

    Args:
      initial: where it starts, nats per example. Small: averages of few batches are bad curvature.
      rate: see above.
      smallest: never below this.
      largest: never above this.
      aim: a little past the minimum: the best step for the next loss is too short for those to come.

    Raises:
      ValueError: if the numbers are not in order.
    """

    initial: float = 1e-4
    rate: float = 0.5
    smallest: float = 1e-9
    largest: float = 1.0
    aim: float = 0.02

    def adapted(
        self, bound: Array, least: Array, slope: Array, taken_back: Array, step: Array
    ) -> tuple[Array, Array]:
        """The bound for this step, a quarter where the last one has been taken back, and its least."""
        past = slope - self.aim
        moved = self.moved(bound, -jnp.where(past > 0, 2, 1) * self.rate * past, taken_back, 0.25)
        least = jnp.where(taken_back, 0.25, 1) * least * step / (step + 1)
        moved = jnp.maximum(moved, least)
        return moved, jnp.maximum(least, moved / SLACK)


def check_order(name: str, rule: Any) -> None:
    """Raise unless 0 < smallest <= initial <= largest."""
    if not 0 < rule.smallest <= rule.initial <= rule.largest:
        raise ValueError(
            f"`{name}` needs 0 < smallest <= initial <= largest. Got {rule.smallest}, {rule.initial} "
            f"and {rule.largest}."
        )


Number = float | Array
Damping = Number | Schedule | LevenbergMarquardt | AdaptiveDamping
Bound = Number | Schedule | TrustRegion | None


def initial_value(setting: Damping | Bound) -> Array:
    """Where a damping or a bound in the state starts; no bound is the largest number."""
    if setting is None:
        return jnp.asarray(jnp.finfo(jnp.float32).max, jnp.float32)
    if isinstance(setting, LevenbergMarquardt | AdaptiveDamping | TrustRegion):
        return jnp.asarray(setting.initial, jnp.float32)
    return current(setting, jnp.int32(0))


def current(value: Number | Schedule, count: Array) -> Array:
    """The value of a number or a schedule at a step."""
    if callable(value):
        value = value(count)
    return jnp.asarray(value, jnp.float32)


def check_range(
    name: str, what: str, value: Any, *, least: float | None = None, below: float | None = None
) -> None:
    """Raise unless a Python number lies in its range; arrays and schedules are not looked into."""
    if not isinstance(value, int | float):
        return
    wanted = f">= {least}" if below is None else f">= {least} and < {below}"
    too_small = least is not None and not value >= least
    if too_small or (below is not None and not value < below):
        raise ValueError(f"`{name}` needs {what} {wanted}. Got {value}.")


DEFAULT_DAMPING, DEFAULT_BOUND = AdaptiveDamping(), TrustRegion()
