"""Moments of the exact GELU, x Phi(x), of a Gaussian x ~ N(m, v), in closed form."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import erf

from moment_jax.expectations.moments import ElementwiseMoments, evaluated


def gelu(mean: jax.Array, variance: jax.Array) -> ElementwiseMoments:
    """Moments of the exact GELU, f(x) = x Phi(x), for x ~ N(mean, variance), elementwise.

    With r = 1 / sqrt(1 + v), t = m r and e_j = E[phi^(j)(x)], E[f] = m Phi(t) + v e_0, E[f'] = Phi(t) -
    e_1 and E[f^(k)] = e_(k-2) - e_k. The variance is the first three terms of Parseval's sum,
    sum_k v^k E[f^(k)]^2 / k!, which never exceeds it.

    Error budget: the sd is never too large, and too small by at most 1e-4, 0.004, 0.012 and 0.021 sd of
    x for v up to 0.1, 0.5, 1 and any. So far below zero (m < -2), where next to nothing of x passes,
    much of a small sd can be missing. Structures lose 2 to 6 %. All else is exact, and everything is
    smooth, at v = 0 too.

    Args:
      mean: means m, any shape.
      variance: variances v >= 0, same shape. Negative values (rounding) count as 0.

    Returns:
      Mean, variance, gain and second, each of the shape of mean.

    Raises:
      ValueError: if the shapes differ.
      TypeError: if the arrays are not real floating-point ones.

    Source: Transformer derivation, section 4.6, with another activation.
    """
    return evaluated("gelu", _gelu, mean, variance)


def _gelu(mean: jax.Array, variance: jax.Array) -> ElementwiseMoments:
    v = jnp.where(variance < 0, 0, variance)  # the full derivative at 0, unlike a maximum
    r = jax.lax.rsqrt(1 + v)
    t = mean * r
    tail = 0.5 + 0.5 * erf(0.5**0.5 * t)
    e0 = (0.5 / np.pi) ** 0.5 * r * jnp.exp(-0.5 * t * t)
    e1 = -r * t * e0
    e2 = -r * (t * e1 + r * e0)
    e3 = -r * (t * e2 + 2 * r * e1)
    f1, f2, f3 = tail - e1, e0 - e2, e1 - e3
    spread = v * (f1**2 + 0.5 * v * (f2**2 + v / 3 * f3**2))
    return ElementwiseMoments(mean * tail + v * e0, spread, f1, 0.5**0.5 * v * f2)
