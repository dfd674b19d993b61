"""Moments of the exact GELU, x Phi(x), of a Gaussian x ~ N(m, v), in closed form."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import erfc

from moment_jax.expectations.moments import ElementwiseMoments, evaluated

# Standardised means are clipped here: the density is zero in float64 too, and powers cannot overflow.
_FAR = 40.0
# Below this variance the closed form cancels, and a Hermite series replaces it.
_SMALL = 1.0 / 16.0


def gelu(mean: jax.Array, variance: jax.Array) -> ElementwiseMoments:
    """Moments of the exact GELU, f(x) = x Phi(x), for x ~ N(mean, variance), elementwise.

    With t = m / sqrt(1 + v): E[f] = m Phi(t) + v phi(t) / sqrt(1 + v). The means of all derivatives
    follow from f'' = phi - phi''. The variance needs E[Phi(x)^2] = Phi(t) - 2 T(t, 1/sqrt(1 + 2v)) with
    Owen's function T, computed here as a Gauss-Legendre integral of a smooth positive function; the
    rest is elementary (Stein's identity). Where v < 1/16 the closed form cancels and Var = sum_k v^k
    E[f^(k)]^2 / k! replaces it. For m > 0 the identity f(x) = x + f(-x) avoids cancellation of large
    terms.

    Error budget: in float32 the relative error of the standard deviation is at most 1e-3, or its
    absolute error 1e-5 sqrt(v) where it is below a hundredth of the sd of x (4e-4, against adaptive
    quadrature for |m| <= 6 and v <= 100). Covariance structures lose at least five times as much. In
    float64, the reference, the relative error is 1e-11. Derivatives follow Price's theorem (dE[g]/dm =
    E[g'], dE[g]/dv = E[g''] / 2), at v = 0 too.

    Args:
      mean: means m, any shape.
      variance: variances v >= 0, same shape. Negative values (rounding) count as 0.

    Returns:
      Mean, variance, gain and second, each of the shape of mean.

    Raises:
      ValueError: if the shapes differ.
      TypeError: if the arrays are not real floating-point ones.

    Source: Transformer derivation, section 4.6, with another activation; Owen (1956).
    """
    return evaluated("gelu", _gelu, mean, variance)


@jax.custom_jvp
def _gelu(mean: jax.Array, variance: jax.Array) -> ElementwiseMoments:
    variance = jnp.maximum(variance, 0.0)
    f, products = _integrals(mean, variance)
    return ElementwiseMoments(f[0], products.value_value, f[1], 0.5**0.5 * variance * f[2])


@_gelu.defjvp
def _gelu_jvp(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[ElementwiseMoments, ElementwiseMoments]:
    d_mean, d_variance = tangents
    variance = jnp.maximum(primals[1], 0.0)
    f, products = _integrals(primals[0], variance)
    out = ElementwiseMoments(f[0], products.value_value, f[1], 0.5**0.5 * variance * f[2])
    by_variance = products.slope_square + products.value_curvature
    second_by_variance = f[2] + 0.5 * variance * f[4]
    return out, ElementwiseMoments(
        mean=f[1] * d_mean + 0.5 * f[2] * d_variance,
        variance=2.0 * products.value_slope * d_mean + by_variance * d_variance,
        gain=f[2] * d_mean + 0.5 * f[3] * d_variance,
        second=0.5**0.5 * (variance * f[3] * d_mean + second_by_variance * d_variance),
    )


class _Products(NamedTuple):
    """Second moments from which the variance and its derivatives are computed."""

    value_value: jax.Array  # Var[f]
    value_slope: jax.Array  # Cov[f, f']
    slope_square: jax.Array  # E[f'^2]
    value_curvature: jax.Array  # Cov[f, f'']


def _integrals(mean: jax.Array, variance: jax.Array) -> tuple[list[jax.Array], _Products]:
    """E[f^(k)] for k = 0 .. 4, and the second moments."""
    double = jnp.finfo(mean.dtype).eps < 1e-10
    terms, nodes = (12, 12) if double else (4, 4)
    # Compute at t = -|m| / sqrt(1 + v), where all terms decay and nothing large cancels, then reflect.
    root = jax.lax.rsqrt(1.0 + variance)
    t = jnp.maximum(-jnp.abs(mean) * root, -_FAR)
    tail = 0.5 * erfc(-(0.5**0.5) * t)
    f = _derivative_means(t, variance, root, tail, terms + 2)
    small = variance < _SMALL
    series = _hermite_series(f, jnp.minimum(variance, _SMALL), terms)
    closed = _closed_form(t, variance, root, tail, f, nodes)
    value_value, value_slope, slope_square, value_curvature = (
        jnp.where(small, a, b) for a, b in zip(series, closed, strict=True)
    )
    # f(x) = x + f(-x): Cov[x, g(-x)] = -v E[g'(-x)].
    up = mean > 0.0
    products = _Products(
        jnp.where(up, variance * (1.0 - 2.0 * f[1]) + value_value, value_value),
        jnp.where(up, variance * f[2] - value_slope, value_slope),
        jnp.where(up, 1.0 - 2.0 * f[1] + slope_square, slope_square),
        jnp.where(up, value_curvature - variance * f[3], value_curvature),
    )
    value, slope = jnp.where(up, mean + f[0], f[0]), jnp.where(up, 1.0 - f[1], f[1])
    return [value, slope, f[2], jnp.where(up, -f[3], f[3]), f[4]], products


def _derivative_means(
    t: jax.Array, variance: jax.Array, root: jax.Array, tail: jax.Array, highest: int
) -> list[jax.Array]:
    """E[f^(k)(x)] for k = 0 .. highest, given root = 1 / sqrt(1 + v) and tail = Phi(t).

    With e_j = E[phi^(j)(x)], a Hermite polynomial times a Gaussian: f' = Phi - phi' and
    f^(k) = phi^(k-2) - phi^(k) for k >= 2.
    """
    e = [root * _density(t)]
    e.append(-root * t * e[0])
    for j in range(1, highest):
        e.append(-root * (t * e[j] + j * root * e[j - 1]))
    first = [t * ((1.0 + variance) * root) * tail + variance * e[0], tail - e[1]]
    return first + [e[k - 2] - e[k] for k in range(2, highest + 1)]


def _hermite_series(f: list[jax.Array], variance: jax.Array, terms: int) -> _Products:
    """Cov[f^(i), f^(j)] = sum_{k >= 1} v^k E[f^(i+k)] E[f^(j+k)] / k!, by Horner's scheme."""
    vv = vs = ss = vc = jnp.zeros_like(variance)
    for k in range(terms, 0, -1):
        factor = variance / k
        vv = factor * (f[k] * f[k] + vv)
        vs = factor * (f[k] * f[k + 1] + vs)
        ss = factor * (f[k + 1] * f[k + 1] + ss)
        vc = factor * (f[k] * f[k + 2] + vc)
    return _Products(vv, vs, f[1] * f[1] + ss, vc)


def _closed_form(
    t: jax.Array,
    variance: jax.Array,
    root: jax.Array,
    tail: jax.Array,
    f: list[jax.Array],
    nodes: int,
) -> _Products:
    """The same from E[Phi^2], E[Phi phi] and E[phi^2], for t <= 0, by Stein's identity."""
    v, shrink = variance, root * root
    mean = t * ((1.0 + v) * root)
    a = jax.lax.rsqrt(1.0 + 2.0 * v)
    square, tail_inner = _bivariate(t, v, a, tail, nodes)  # E[Phi^2], Phi(a t)
    cross = _density(t) * root * tail_inner  # E[Phi phi]
    peak = a * _density(t) * _density(t * a)  # E[phi^2]
    peak_1, peak_2 = mean * a * a * peak, (v + (mean * a) ** 2) * a * a * peak  # E[x^n phi^2]
    cross_1 = shrink * (mean * cross + v * peak)  # E[x^n Phi phi]
    cross_2 = shrink * (mean * cross_1 + v * cross + v * peak_1)
    cross_3 = shrink * (mean * cross_2 + 2.0 * v * cross_1 + v * peak_2)
    value_square = (t * t + v * shrink) * square * (1.0 + v) + 2.0 * v * (mean * cross + cross_1)
    variance_of_f = value_square - f[0] * f[0]
    bound = v * (f[1] * f[1] + 0.5 * v * f[2] * f[2])  # Parseval's bound, despite rounding
    return _Products(
        jnp.maximum(variance_of_f, bound),
        mean * square + 2.0 * v * cross + cross_2 - f[0] * f[1],
        square + 2.0 * cross_1 + peak_2,
        2.0 * cross_1 - cross_3 - f[0] * f[2],
    )


def _bivariate(
    t: jax.Array, variance: jax.Array, a: jax.Array, tail: jax.Array, nodes: int
) -> tuple[jax.Array, jax.Array]:
    """E[Phi(x)^2] = Phi(t)^2 + 2 (T(t, 1) - T(t, a)) and Phi(a t), a = 1 / sqrt(1 + 2v), t <= 0.

    Both are integrals over (a, 1), of phi(t) phi(t u) / (1 + u^2) and of |t| phi(t u). The integrands
    are positive and smooth, so one set of nodes serves both and no digits cancel.
    """
    width = 2.0 * variance * a * a / (1.0 + a)  # 1 - a
    points, weights = np.polynomial.legendre.leggauss(nodes)
    square = inner = jnp.zeros_like(t)
    for point, weight in zip(0.5 + 0.5 * points, 0.5 * weights, strict=True):
        u = a + width * float(point)
        term = float(weight) * _density(t * u)
        square = square + term / (1.0 + u * u)
        inner = inner + term
    return tail * tail + 2.0 * width * _density(t) * square, tail - t * width * inner


def _density(t: jax.Array) -> jax.Array:
    """The standard normal density."""
    return (0.5 / np.pi) ** 0.5 * jnp.exp(-0.5 * t * t)
