"""Moments of any smooth scalar function of a Gaussian, by Gauss and Hermite's quadrature."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moment_jax.expectations.moments import ElementwiseMoments, checked

ScalarFunction = Callable[[jax.Array], jax.Array]
# Functions of a point x and of constants (pivots), with any pytree of scalars as their value.
_Integrand = Callable[[jax.Array, Any], Any]


def elementwise(
    fn: ScalarFunction, mean: jax.Array, variance: jax.Array, *, num_nodes: int = 16
) -> ElementwiseMoments:
    """Moments of fn(x) for x ~ N(mean, variance), elementwise, by quadrature.

    Exact (to rounding) for polynomials of degree below num_nodes. Otherwise the error is that of
    Gauss and Hermite's rule: it falls fast where fn varies little over one node spacing, about
    sqrt(10 v / num_nodes). With 16 nodes the sd of tanh and silu is right to 3e-4 for v <= 1 and
    3e-2 for v <= 9. For relu and GELU use `rectified` and `gelu`, which are exact.

    The variance is gain^2 v + second^2 + E[what the first two Hermite terms leave of fn, squared]:
    never below the first two terms, and without cancellation when sqrt(v) is small beside m.
    Derivatives follow Price's theorem (dE[g]/dm = E[g'], dE[g]/dv = E[g''] / 2), to any order, and so
    are finite and right at v = 0.

    Args:
        fn: a smooth function of a scalar, traceable by JAX and four times differentiable.
        mean: means m, any shape.
        variance: variances v >= 0, the same shape. Negative values (rounding) count as 0.
        num_nodes: how many points fn is evaluated at for each element, at least 3.

    Returns:
        Mean, variance, gain and second, each of the shape of mean.

    Raises:
        ValueError: the shapes differ, num_nodes < 3, or fn does not return a scalar of x's dtype.
        TypeError: the arrays are not real floating-point ones.

    Source: replaces the Taylor step of Transformer derivation, section 4.6; Price (1958).

    Example:
        >>> moments = elementwise(jnp.square, jnp.array([1.0]), jnp.array([0.5]))
        >>> print(moments.mean.round(4), moments.variance.round(4))
        [1.5] [2.5]
    """
    mean, variance = checked("elementwise", mean, variance)
    if num_nodes < 3:
        raise ValueError(f"`elementwise` needs num_nodes >= 3. Got {num_nodes}.")
    out = jax.eval_shape(fn, jax.ShapeDtypeStruct((), mean.dtype))
    if getattr(out, "shape", None) != () or out.dtype != mean.dtype:
        raise ValueError(
            f"`elementwise(fn, mean, variance)` needs fn to map a {mean.dtype} scalar to one. "
            f"Got {out}. Give the function of one element; it is mapped over the array."
        )
    return _moments(fn, num_nodes, mean, variance)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _moments(
    fn: ScalarFunction, num_nodes: int, mean: jax.Array, variance: jax.Array
) -> ElementwiseMoments:
    def leading(x: jax.Array, pivots: None) -> tuple[jax.Array, ...]:
        return tuple(d(x) for d in _derivatives(fn, 2))

    value, gain, curvature = _expectation(leading, num_nodes, mean, variance, None)
    variance = jnp.maximum(variance, 0.0)
    second = 0.5**0.5 * variance * curvature
    first = jnp.sqrt(variance) * gain

    def rest_squared(z: jax.Array, x: jax.Array) -> jax.Array:
        hermite = first * z + second * (0.5**0.5 * (z * z - 1.0))
        return (_over_array(fn, x.ndim)(x) - value - hermite) ** 2

    rest = _weighted_sum(rest_squared, num_nodes, mean, variance)
    return ElementwiseMoments(value, first * first + second * second + rest, gain, second)


@_moments.defjvp
def _moments_jvp(
    fn: ScalarFunction,
    num_nodes: int,
    primals: tuple[jax.Array, jax.Array],
    tangents: tuple[jax.Array, jax.Array],
) -> tuple[ElementwiseMoments, ElementwiseMoments]:
    mean, variance = primals
    d_mean, d_variance = tangents
    out = _moments(fn, num_nodes, mean, variance)
    # Covariances do not depend on the pivots; near the values at m they spare us cancellation.
    at_mean = tuple(_over_array(d, mean.ndim)(mean) for d in _derivatives(fn, 2))
    pivots = jax.lax.stop_gradient(at_mean)

    def integrand(x: jax.Array, pivots: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        f0, f1, f2, f3, f4 = (d(x) for d in _derivatives(fn, 4))
        c0, c1, c2 = f0 - pivots[0], f1 - pivots[1], f2 - pivots[2]
        return c0, c1, c2, f3, f4, c0 * c1, f1 * f1, c0 * c2

    c0, c1, c2, f3, f4, value_slope, slope_square, value_curvature = _expectation(
        integrand, num_nodes, mean, variance, pivots
    )
    by_mean = 2.0 * (value_slope - c0 * c1)  # 2 Cov[f, f']
    by_variance = slope_square + value_curvature - c0 * c2  # E[f'^2] + Cov[f, f'']
    curvature = c2 + pivots[2]
    second_by_variance = curvature + 0.5 * variance * f4
    return out, ElementwiseMoments(
        mean=out.gain * d_mean + 0.5 * curvature * d_variance,
        variance=by_mean * d_mean + by_variance * d_variance,
        gain=curvature * d_mean + 0.5 * f3 * d_variance,
        second=0.5**0.5 * (variance * f3 * d_mean + second_by_variance * d_variance),
    )


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _expectation(
    integrand: _Integrand, num_nodes: int, mean: jax.Array, variance: jax.Array, pivots: Any
) -> Any:
    """E[integrand(x, pivots)]: a pytree of arrays of the shape of mean. Pivots count as constants."""

    def values(z: jax.Array, x: jax.Array) -> Any:
        return _over_array(integrand, x.ndim)(x, pivots)

    return _weighted_sum(values, num_nodes, mean, variance)


@_expectation.defjvp
def _expectation_jvp(
    integrand: _Integrand, num_nodes: int, primals: tuple, tangents: tuple
) -> tuple[Any, Any]:
    """Price's theorem: dE[g]/dm = E[g'] and dE[g]/dv = E[g''] / 2."""

    def with_derivatives(x: jax.Array, pivots: Any) -> tuple[Any, Any, Any]:
        g, dg, ddg = (d(x) for d in _derivatives(lambda y: integrand(y, pivots), 2))
        return g, dg, ddg

    out, by_mean, by_variance = _expectation(with_derivatives, num_nodes, *primals)
    d_mean, d_variance = tangents[0], tangents[1]
    tangent = jax.tree.map(
        lambda a, b: a * d_mean + 0.5 * b * d_variance, by_mean, by_variance
    )
    return out, tangent


def _weighted_sum(
    values: Callable[[jax.Array, jax.Array], Any],
    num_nodes: int,
    mean: jax.Array,
    variance: jax.Array,
) -> Any:
    """Sum of weight * values(z, m + s z) over the nodes z, one node at a time to spare memory."""
    scale = jnp.sqrt(jnp.maximum(variance, 0.0))
    points, weights = np.polynomial.hermite_e.hermegauss(num_nodes)
    weights = weights / weights.sum()

    def add(total: Any, node: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
        z, weight = node
        terms = values(z, mean + scale * z)
        return jax.tree.map(lambda a, b: a + weight * b, total, terms), None

    start = jax.tree.map(jnp.zeros_like, jax.eval_shape(values, jax.ShapeDtypeStruct((), mean.dtype), mean))
    rule = jnp.asarray(points, mean.dtype), jnp.asarray(weights, mean.dtype)
    total, _ = jax.lax.scan(add, start, rule)
    return total


def _derivatives(fn: Callable[[jax.Array], Any], highest: int) -> list[Callable[[jax.Array], Any]]:
    """[fn, fn', .., fn^(highest)], each a function of a scalar."""

    def derivative(g: Callable[[jax.Array], Any]) -> Callable[[jax.Array], Any]:
        return lambda x: jax.jvp(g, (x,), (jnp.ones_like(x),))[1]

    out = [fn]
    for _ in range(highest):
        out.append(derivative(out[-1]))
    return out


def _over_array(fn: Callable, ndim: int) -> Callable:
    """Map a function of scalars over arrays with ndim axes, so that it cannot mix elements."""
    for _ in range(ndim):
        fn = jax.vmap(fn)
    return fn
