"""Damping of the curvature and the bound of a step: fixed, scheduled, or led by the last step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from moment_jax.optim.factors import Factors, quadratic_form
from moment_jax.optim.layer_blocks import Matrices

Schedule = Callable[[Array], Any]
Number = float | Array

SLACK = 3.0  # a `TrustRegion` falls no faster than 1 / steps, up to this factor


@dataclasses.dataclass(frozen=True)
class Adaptive:
    """A number that adapts from step to step, within limits."""

    initial: float
    rate: float
    smallest: float
    largest: float

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not 0 < self.smallest <= self.initial <= self.largest:
            raise ValueError(
                f"`{name}` needs 0 < smallest <= initial <= largest. Got {self.smallest}, "
                f"{self.initial} and {self.largest}."
            )
        check_range(name, "a rate", self.rate, least=0)


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
        factor = jnp.where(taken_back, 4, jnp.exp(-self.rate * slope))
        return jnp.clip(damping * factor, self.smallest, self.largest)


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
        moved = bound * jnp.where(taken_back, 0.25, followed)
        moved = jnp.maximum(jnp.clip(moved, self.smallest, self.largest), least)
        return moved, jnp.maximum(least, moved / SLACK)


Damping = Number | Schedule | AdaptiveDamping
Bound = Number | Schedule | TrustRegion | None


class LastStep(NamedTuple):
    """The last step s, judged by the new gradient and curvature."""

    step: Matrices
    slope: Array  # <grad, s>
    length: Array  # <s, s>
    size: Array  # s^T (F + damping) s
    ratio: Array  # s^T F s / <s, s>

    @classmethod
    def judged(
        cls,
        step: Matrices,
        grads: Matrices,
        curvature: Factors,
        damping: Array,
        ratio: Array,
        fresh: Array,
    ) -> LastStep:
        """Judge the last step; s^T F s is `ratio` <s, s> of an earlier step unless curvature is `fresh`.

        For the product with F costs as much as a new direction, and the ratio changes slowly.
        """
        length = inner(step, step)

        def measured() -> Array:
            return sum_of(quadratic_form(curvature[key], each) for key, each in step.items())

        curved = jax.lax.cond(fresh, measured, lambda: ratio * length)
        ratio = jnp.where(length > 0, curved / jnp.where(length > 0, length, 1), ratio)
        return cls(step, inner(grads, step), length, curved + damping * length, ratio)

    def slope_in_damping(self, x: Matrices, quadratic: Array, damping: Array) -> Array:
        """The derivative of the new loss in log damping at fixed |s|, scaled likewise."""
        along = self.length * self.slope / (2 * jnp.where(self.size > 0, self.size, 1))
        return self.scaled(damping * (along - inner(x, self.step)), quadratic)

    def scaled(self, slope: Array, quadratic: Array) -> Array:
        """The slope over the norms of s and x, within [-1, 1]; `quadratic` is x^T (F + damping) x."""
        norms = jnp.sqrt(self.size) * jnp.sqrt(quadratic)
        ratio = jnp.clip(slope / jnp.where(norms > 0, norms, 1), -1, 1)
        return jnp.where((norms > 0) & jnp.isfinite(ratio), ratio, 0)


def inner(left: Matrices, right: Matrices) -> Array:
    """The inner product, summed over all groups."""
    return sum_of(jnp.sum(left[key] * right[key]) for key in left)


def sum_of(scalars: Any) -> Array:
    """The sum of scalars in float32, the state's precision."""
    return jnp.sum(jnp.stack([jnp.asarray(scalar, jnp.float32) for scalar in scalars]))


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
    name: str,
    what: str,
    value: Any,
    *,
    least: float,
    below: float | None = None,
    whole: bool = False,
) -> None:
    """Raise unless a known number lies in its range; schedules and traced values are not checked."""
    if value is None or callable(value) or isinstance(value, Adaptive | jax.core.Tracer):
        return
    known = np.asarray(value)
    inside = (known >= least) & (below is None or known < below)
    if not np.all(inside & (not whole or known == np.round(known))):
        wanted = f">= {least}" if below is None else f">= {least} and < {below}"
        raise ValueError(
            f"`{name}` needs {what} {wanted}{', whole' if whole else ''}. Got {value}."
        )


DEFAULT_DAMPING, DEFAULT_BOUND = AdaptiveDamping(), TrustRegion()
