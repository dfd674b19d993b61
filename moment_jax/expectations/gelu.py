"""Moments of the exact GELU, x Phi(x), of a Gaussian x ~ N(m, v), in closed form."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import erf

from moment_jax.expectations.moments import ElementwiseMoments, evaluated
from moment_jax.xla import materialized


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


@jax.custom_jvp
def _gelu(mean: jax.Array, variance: jax.Array) -> ElementwiseMoments:
    v = _positive(variance, variance)
    f = _derivatives(mean, v, 3)
    spread = v * (f[1] ** 2 + 0.5 * v * (f[2] ** 2 + v / 3 * f[3] ** 2))
    return ElementwiseMoments(f[0], spread, f[1], 0.5**0.5 * v * f[2])


@_gelu.defjvp
def _gelu_jvp(
    primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]
) -> tuple[ElementwiseMoments, ElementwiseMoments]:
    """By Price's theorem dE[f^(k)] is E[f^(k+1)] dm + E[f^(k+2)] dv / 2: a gradient stores little."""
    mean, variance = primals
    change, v = tangents[0], _positive(variance, variance)
    half = 0.5 * _positive(variance, tangents[1])
    _, f1, f2, f3, f4, f5 = _derivatives(mean, v, 5)
    by_mean = 2 * v * (f1 * f2 + 0.5 * v * (f2 * f3 + v / 3 * f3 * f4))
    by_half = 2 * (f1**2 + v * (f1 * f3 + f2**2 + 0.5 * v * (f2 * f4 + f3**2 + v / 3 * f3 * f5)))
    by_mean, by_half = materialized((by_mean, by_half))
    return _gelu(mean, variance), ElementwiseMoments(
        f1 * change + f2 * half,
        by_mean * change + by_half * half,
        f2 * change + f3 * half,
        0.5**0.5 * (v * f3 * change + (2 * f2 + v * f4) * half),
    )


def _positive(variance: jax.Array, array: jax.Array) -> jax.Array:
    """The array, and 0 below a variance of 0; at 0 the full derivative, unlike a maximum."""
    return jnp.where(variance < 0, 0, array)


def _derivatives(mean: jax.Array, v: jax.Array, count: int) -> list[jax.Array]:
    """E[f] and the expectations of its first `count` derivatives."""
    r = jax.lax.rsqrt(1 + v)
    t = mean * r
    tail = 0.5 + 0.5 * erf(0.5**0.5 * t)
    e = [(0.5 / np.pi) ** 0.5 * r * jnp.exp(-0.5 * t * t)]
    e.append(-r * t * e[0])
    for k in range(1, count):
        e.append(-r * (t * e[k] + k * r * e[k - 1]))
    return [mean * tail + v * e[0], tail - e[1], *(e[k - 2] - e[k] for k in range(2, count + 1))]
