"""Dense layers, products of random matrices (Prop. 1 and 2), activations."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from moment_jax import expectations
from moment_jax.covariance import Covariance
from moment_jax.covariance.fields import need
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
    noise of kernel and bias. Assumes that x, the kernel and the bias are mutually independent.

    Args:
      mean: E[x], (T, D).
      cov: covariance of x, a structure of shape (T, D).
      params: beliefs about the kernel (D, O) and the bias (O,), or None for no bias.

    Returns:
      Mean (T, O) and covariance of the output, in the structure of `cov`; ValueError or TypeError if an
      argument does not fit. Source: Transformer derivation, Prop. 1, 2 (its trace transposed) and 4.2.

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
    """Moments of `a @ b`, (T, Q), for independent random matrices a (T, P) and b (P, Q).

    Exact for `Full`, including all cross-covariances of rows and columns. Other structures keep the
    projection of the exact covariance, for operands that have the given structures, which may differ;
    the result has that of `cov_a`. Errors are those of `dense`.

    Source: Transformer derivation, Prop. 1 and 2, with tr(A^T B) instead of tr(A B).
    """
    checks.check_moments("matmul", mean_a, cov_a)
    checks.check_moments("matmul", mean_b, cov_b)
    rule, came = "as many columns in a as rows in b", f"{mean_a.shape} and {mean_b.shape}"
    right = mean_a.shape[1] == mean_b.shape[0]
    need("matmul", right, rule, came, "Use shapes (T, P) and (P, Q).")
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
def activation(mean: Array, cov: S, fn: Activation) -> tuple[Array, S]:
    """Moments of `fn(x)` for a scalar function of Gaussian x: in closed form, or by quadrature.

    `fn` is "relu", "gelu", or a static JAX function of a scalar, such as `jnp.tanh`, read as in
    `expectations.of`, which says what it raises for others. Means and variances are exact in closed
    form. Covariances keep the first two terms of the Hermite expansion, by Price's theorem
    E[f'] E[f'] Cov + ..., instead of the first-order Taylor at the mean of the derivation, section 4.6.
    Arguments, results and errors are those of `dense`.
    """
    checks.check_moments("activation", mean, cov)
    found = expectations.of(fn)(mean, cov.variance())
    return found.mean, cov.elementwise(found)
