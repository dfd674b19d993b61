"""Elementwise nonlinearities of a random sequence."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from moment_jax import expectations
from moment_jax.covariance import Covariance
from moment_jax.layers.checks import check_moments, takes
from moment_jax.xla import materialized_inputs

Array = jax.Array
S = TypeVar("S", bound=Covariance)


@materialized_inputs
def relu(mean: Array, cov: S) -> tuple[Array, S]:
    """Moments of max(x, 0): means and variances in closed form.

    Between different entries the first two terms of the Hermite expansion are kept, by Price's theorem
    E[relu'] E[relu'] Cov + ..., in the place of the derivation's first-order Taylor at the mean.

    Assumes that x is Gaussian.

    Args:
      mean: E[x], (T, D).
      cov: covariance of x, a structure of shape (T, D).

    Returns:
      Mean (T, D) and covariance of relu(x), in the structure of `cov`.

    Raises:
      ValueError: if shapes do not fit.

    Source: Transformer derivation, section 4.6; rectified-Gaussian moments.
    """
    check_moments("relu", mean, cov)
    moments = expectations.rectified(mean, cov.variance())
    return moments.mean, cov.elementwise(moments)


@materialized_inputs
def gelu(mean: Array, cov: S) -> tuple[Array, S]:
    """Moments of x Phi(x), the exact GELU; arguments, results and assumptions as in `relu`."""
    check_moments("gelu", mean, cov)
    moments = expectations.gelu(mean, cov.variance())
    return moments.mean, cov.elementwise(moments)


@materialized_inputs
def activation(mean: Array, cov: S, fn: Callable[[Array], Array]) -> tuple[Array, S]:
    """Moments of `fn(x)` for any smooth scalar function, by Gauss-Hermite quadrature.

    Args:
      mean: E[x], (T, D).
      cov: covariance of x, a structure of shape (T, D).
      fn: a smooth JAX function of a scalar, such as `jnp.tanh` (static: it must be hashable). For ReLU
        and GELU use `relu` and `gelu`, which are exact.

    Returns:
      Mean (T, D) and covariance of fn(x), in the structure of `cov`.

    Raises:
      ValueError: if shapes do not fit. TypeError: if `fn` is no function of a scalar.
    """
    check_moments("activation", mean, cov)
    if not takes(fn, 1):
        raise TypeError(
            f"`activation(mean, cov, fn)` needs a function of a scalar. Got {fn!r}. Use jnp.tanh for "
            "example; mj.relu(mean, cov) and mj.gelu(mean, cov) transform moments by themselves."
        )
    moments = expectations.elementwise(fn, mean, cov.variance())
    return moments.mean, cov.elementwise(moments)


def moments_of(
    transform: Callable[..., Any],
) -> Callable[[Array, Array], expectations.ElementwiseMoments] | None:
    """What `relu`, `gelu` or `functools.partial(activation, fn=fn)` is made of; None for others.

    Returns:
      The function (mean, variance) -> moments, the expected gain among them.
    """
    if transform is relu:
        return expectations.rectified
    if transform is gelu:
        return expectations.gelu
    if isinstance(transform, functools.partial) and transform.func is activation:
        fn = transform.keywords.get("fn")
        if callable(fn) and not transform.args and takes(fn, 1):
            return functools.partial(expectations.elementwise, fn)
    return None
