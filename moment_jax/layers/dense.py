"""Dense layers, products of random matrices (Prop. 1 and 2), activations."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from moment_jax import expectations
from moment_jax.covariance import Covariance
from moment_jax.layers import params as checks
from moment_jax.layers.params import DenseParams, S, with_bias
from moment_jax.posterior import Point
from moment_jax.xla import materialized_inputs

Activation = str | Callable[[Array], Array]
"""A name or a function of a scalar, see `expectations.of`."""


@materialized_inputs
def dense(mean: Array, cov: S, params: DenseParams) -> tuple[Array, S]:
    """Moments of `x @ kernel + bias` for a random sequence, a random kernel and a random bias.

    Exact for `Full`; other structures keep the projection of the exact covariance. All tokens share the
    noise of kernel and bias.

    Assumes that x, the kernel and the bias are mutually independent.

    Args:
      mean: E[x], (T, D).
      cov: covariance of x, a structure of shape (T, D).
      params: beliefs about the kernel (D, O) and the bias (O,), or None for no bias.

    Returns:
      Mean (T, O) and covariance of the output, in the structure of `cov`.

    Raises:
      ValueError: if shapes do not fit.
      TypeError: if `cov` or a parameter has the wrong type.

    Source: Transformer derivation, Prop. 1, Prop. 2 (its trace transposed) and section 4.2.

    >>> import jax.numpy as jnp, moment_jax as mj
    >>> kernel = mj.posterior.Factorized(jnp.eye(2), jnp.full((2, 2), 0.5))
    >>> mean, cov = mj.dense(jnp.ones((1, 2)), mj.Diagonal.zeros((1, 2)), mj.DenseParams(kernel))
    >>> print(mean, cov.variance())
    [[1. 1.]] [[1. 1.]]
    """
    checks.check_moments("dense", mean, cov)
    kernel, bias = params.kernel, params.bias
    checks.check_belief("dense", "kernel", mean.shape[1], kernel)
    checks.check_belief("dense", "bias", kernel.shape[1], bias)
    out_cov = cov.map_features(kernel.mean)
    if not isinstance(kernel, Point):
        out_cov = out_cov.add(cov.weight_noise(mean, kernel))
    return params.mean_output(mean), with_bias(out_cov, bias)


@materialized_inputs
def matmul(mean_a: Array, cov_a: S, mean_b: Array, cov_b: Covariance) -> tuple[Array, S]:
    """Moments of `a @ b` for independent random matrices.

    Exact for `Full`, including all cross-covariances of rows and columns. Other structures keep the
    projection of the exact covariance, for operands that have the given structures.

    Assumes that a and b are independent.

    Args:
      mean_a: E[a], (T, P).
      cov_a: covariance of a, a structure of shape (T, P).
      mean_b: E[b], (P, Q).
      cov_b: covariance of b, a structure of shape (P, Q); it may differ from `cov_a`'s.

    Returns:
      Mean (T, Q) and covariance of the product, in the structure of `cov_a`. Errors as of `dense`.

    Source: Transformer derivation, Prop. 1 and 2, with tr(A^T B) instead of tr(A B).
    """
    checks.check_moments("matmul", mean_a, cov_a)
    checks.check_moments("matmul", mean_b, cov_b)
    if mean_a.shape[1] != mean_b.shape[0]:
        raise ValueError(
            "`matmul(mean_a, cov_a, mean_b, cov_b)` needs as many columns in a as rows in b. Got "
            f"{tuple(mean_a.shape)} and {tuple(mean_b.shape)}. Use shapes (T, P) and (P, Q)."
        )
    mapped = cov_a.map_features(mean_b)
    return mean_a @ mean_b, mapped.add(cov_a.weight_noise(mean_a, _RandomMatrix(cov_b)))


@dataclasses.dataclass(frozen=True)
class _RandomMatrix:
    """A random (P, Q) matrix with a structured covariance, as a random kernel."""

    cov: Covariance
    uncorrelated: ClassVar[bool] = False

    def noise_variance(self, mean: Array, variance: Array) -> Array:
        return variance @ self.cov.variance() + self.cov.map_tokens(mean).variance()

    def noise_block(self, moment: Array) -> Array:
        return jnp.einsum("...pr,poru->...ou", moment, self.cov.to_dense())

    def input_metric(self) -> Array:
        return self.cov.token_gram()


@materialized_inputs
def relu(mean: Array, cov: S) -> tuple[Array, S]:
    """Moments of max(x, 0): exact means and variances in closed form.

    Covariances keep the first two terms of the Hermite expansion, by Price's theorem E[relu'] E[relu']
    Cov + ..., instead of the derivation's first-order Taylor at the mean.

    Assumes that x is Gaussian. Arguments, results and errors are those of `dense`.

    Source: Transformer derivation, section 4.6; rectified-Gaussian moments.
    """
    return _elementwise("relu", mean, cov, "relu")


@materialized_inputs
def gelu(mean: Array, cov: S) -> tuple[Array, S]:
    """Moments of x Phi(x), the exact GELU; arguments, results and assumptions as in `relu`."""
    return _elementwise("gelu", mean, cov, "gelu")


@materialized_inputs
def activation(mean: Array, cov: S, fn: Activation) -> tuple[Array, S]:
    """Moments of `fn(x)` for a scalar function: in closed form if it has one, or by quadrature.

    `fn` is "relu", "gelu", or a static JAX function of a scalar, such as `jnp.tanh`, read as in
    `expectations.of`, which says what it raises for others. The rest is as in `relu`.
    """
    return _elementwise("activation", mean, cov, fn)


def _elementwise(name: str, mean: Array, cov: S, fn: Activation) -> tuple[Array, S]:
    checks.check_moments(name, mean, cov)
    found = expectations.of(fn)(mean, cov.variance())
    return found.mean, cov.elementwise(found)
