"""What the next gradient says about the last step."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.optim.factors import Factors, quadratic_form
from moment_jax.optim.groups import Matrices


class Moved(NamedTuple):
    """The last step s, judged by the new gradient and curvature."""

    step: Matrices
    slope: Array  # <grad, s>
    length: Array  # <s, s>
    size: Array  # s^T (F + damping) s
    ratio: Array  # s^T F s / <s, s>
    predicted: Array  # change of the loss by the quadratic model at the step's start

    @classmethod
    def by(
        cls,
        step: Matrices,
        grads: Matrices,
        curvature: Factors,
        damping: Array,
        quadratic: Array,
        ratio: Array,
        exact: Array,
    ) -> Moved:
        """Judge the last step.

        Where not `exact`, s^T F s is taken as `ratio` <s, s>, with the ratio of an earlier step: the
        product with F costs as much as a new direction, and the ratio changes slowly.
        """
        length = inner(step, step)

        def measured() -> Array:
            return sum_of(quadratic_form(curvature[key], each) for key, each in step.items())

        curved = jax.lax.cond(exact, measured, lambda: ratio * length)
        ratio = jnp.where(length > 0, curved / jnp.where(length > 0, length, 1), ratio)
        size = curved + damping * length
        # s is a negative multiple of the old x, so the old slope is minus the product of the norms.
        predicted = curved / 2 - jnp.sqrt(size * quadratic)
        return cls(step, inner(grads, step), length, size, ratio, predicted)

    def slope_along(self, quadratic: Array) -> Array:
        """<grad, s> over the norms of both, within [-1, 1]; `quadratic` is x^T (F + damping) x."""
        return self._scaled(self.slope, quadratic)

    def slope_in_damping(self, x: Matrices, quadratic: Array, damping: Array) -> Array:
        """The derivative of the new loss in log damping at fixed |s|, scaled likewise."""
        along = self.length * self.slope / (2 * jnp.where(self.size > 0, self.size, 1))
        return self._scaled(damping * (along - inner(x, self.step)), quadratic)

    def _scaled(self, slope: Array, quadratic: Array) -> Array:
        norms = jnp.sqrt(self.size) * jnp.sqrt(quadratic)
        ratio = jnp.clip(slope / jnp.where(norms > 0, norms, 1), -1, 1)
        return jnp.where((norms > 0) & jnp.isfinite(ratio), ratio, 0)


def inner(left: Matrices, right: Matrices) -> Array:
    """The inner product, summed over all groups."""
    return sum_of(jnp.sum(left[key] * right[key]) for key in left)


def sum_of(scalars: Any) -> Array:
    """The sum of scalars in float32, the state's precision."""
    return jnp.sum(jnp.stack([jnp.asarray(scalar, jnp.float32) for scalar in scalars]))
