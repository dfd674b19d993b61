"""Sampled moments of a network with random weights, with their standard errors.

The sums are of powers, up to the fourth, about the mean of the first batch and not of the draws
themselves. So nothing cancels when the mean is large against the deviation, and constant draws have no
variance.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.covariance.fields import need
from moment_jax.covariance.numerics import safe_sqrt
from moment_jax.posterior import sample_params
from moment_jax.xla import diagonal_of


class MonteCarloMoments(NamedTuple):
    """Moments of sampled outputs and their standard errors, in the shape of the output."""

    mean: Array
    variance: Array
    standard_deviation: Array
    mean_error: Array
    variance_error: Array
    sd_error: Array
    covariance: Array | None = None  # of the n entries, (n, n) in C order; None if not requested
    covariance_error: Array | None = None  # likewise


def monte_carlo(
    fn: Callable[[Any], Array], params: Any, key: Array, num_samples: int, *,
    batch_size: int = 128, covariance: bool = False,
) -> MonteCarloMoments:  # fmt: skip
    """Moments of `fn(draw of params)` by sampling, with standard errors.

    Mean and variance are unbiased, in the dtype of the output (the default floating-point type if that
    is boolean or integer). Draw i has the key `fold_in(key, i)`, so up to rounding the estimate does not
    depend on the batch size. Standard errors assume only finite fourth moments: those of variance and
    standard deviation use the sampled fourth central moment. Source: Transformer derivation, Eq. 1, 7.

    Args:
      fn: a function of one draw of the parameters (arrays in place of beliefs) that returns one array
        of any shape, or TypeError; it is vmapped.
      params: any pytree with `Posterior` leaves.
      key: a JAX random key.
      num_samples: number of draws, at least 2, or ValueError (static).
      batch_size: draws evaluated, and in memory, at a time (static).
      covariance: also estimate the (n, n) covariance of all n entries of the output.

    >>> import moment_jax as mj
    >>> belief = mj.posterior.Factorized(jnp.ones(2), jnp.array([0.0, 4.0]))
    >>> truth = mj.monte_carlo(lambda draw: draw, belief, jax.random.key(0), 1000)
    >>> print(truth.mean[0], truth.standard_deviation[0])  # the first entry is certain
    1.0 0.0
    """
    num_samples, batch_size = operator.index(num_samples), operator.index(batch_size)
    right, came = num_samples >= 2 and batch_size >= 1, f"{num_samples} and {batch_size}"
    need("monte_carlo", right, "num_samples >= 2, for a variance, and batch_size >= 1", came)
    output = jax.eval_shape(lambda k: fn(sample_params(params, k)), key)
    right, came = hasattr(output, "shape"), type(output).__name__
    mend = "Pick one output, as in lambda params: fn(params)[0]."
    need("monte_carlo", right, "an fn that returns one array", came, mend, TypeError)
    dtype = jnp.result_type(output.dtype, 0.0)
    # Batches of equal size; surplus draws of the last one are not counted.
    num_batches = -(-num_samples // batch_size)
    batch_size = -(-num_samples // num_batches)

    def add_batch(carry: tuple[Array, _Sums], batch: Array) -> tuple[Any, None]:
        centre, sums = carry
        indices = batch * batch_size + jnp.arange(batch_size)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, indices)
        draws = jax.vmap(lambda k: fn(sample_params(params, k)))(keys).astype(dtype)
        draws, kept = draws.reshape(batch_size, -1), (indices < num_samples)[:, None]
        # Relative to the first draw, so that the mean of constant draws is exact.
        near = draws[0] + jnp.mean(draws - draws[:1], axis=0)
        centre = jax.lax.stop_gradient(jnp.where(batch == 0, near, centre))
        x = jnp.where(kept, draws - centre[None], 0)
        return (centre, jax.tree.map(jnp.add, sums, _Sums.of(x, covariance))), None

    none = jnp.zeros((1, output.size), dtype)
    start = none[0], _Sums.of(none, covariance)
    (centre, sums), _ = jax.lax.scan(add_batch, start, jnp.arange(num_batches))
    found = sums.covariance_and_error(num_samples)
    own = map(diagonal_of, found) if covariance else found
    variance, error = (x.reshape(output.shape) for x in own)
    deviation, certain = safe_sqrt(variance), variance == 0
    return MonteCarloMoments(
        mean=(centre + sums.first / num_samples).reshape(output.shape),
        variance=variance,
        standard_deviation=deviation,
        mean_error=deviation / num_samples**0.5,
        variance_error=error,
        sd_error=jnp.where(certain, 0, error / jnp.where(certain, 1, 2 * deviation)),
        covariance=found[0] if covariance else None,
        covariance_error=found[1] if covariance else None,
    )


class _Sums(NamedTuple):
    """Sums over draws x (n, D) less a centre: of each entry alone, (D,), or of all pairs, (D, D)."""

    first: Array  # sum x_i, (D,)
    product: Array  # sum x_i x_j
    mixed: Array  # sum x_i^2 x_j
    squares: Array  # sum x_i^2 x_j^2

    @classmethod
    def of(cls, x: Array, joint: bool) -> _Sums:
        """The sums over these draws."""

        def total(x: Array, y: Array) -> Array:
            return x.T @ y if joint else jnp.sum(x * y, axis=0)

        return cls(jnp.sum(x, axis=0), total(x, x), total(x**2, x), total(x**2, x**2))

    def covariance_and_error(self, n: int) -> tuple[Array, Array]:
        """Unbiased covariance, and its standard error whatever the distribution.

        An unbiased sample covariance has the variance
        (mu22 - mu11^2) / n + (mu20 mu02 + mu11^2) / (n (n - 1)).
        """
        joint = self.product.ndim == 2

        def pairs(x: Array) -> tuple[Array, Array]:
            return (x[:, None], x[None, :]) if joint else (x, x)

        a, b = pairs(self.first / n)  # the means of x_i and x_j, about which the moments are
        mu20, mu02 = pairs((diagonal_of(self.product) if joint else self.product) / n)
        mu11 = self.product / n
        mu22 = self.squares / n - 2 * b * self.mixed / n - 2 * a * self.mixed.T / n
        mu22 = mu22 + b**2 * mu20 + a**2 * mu02 + 4 * a * b * mu11 - 3 * a**2 * b**2
        mu11, mu20, mu02 = mu11 - a * b, mu20 - a**2, mu02 - b**2
        small = (mu20 * mu02 + mu11**2) / (n - 1)
        return mu11 * (n / (n - 1)), safe_sqrt((mu22 - mu11**2 + small) / n)
