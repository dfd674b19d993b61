"""Sampled moments of a network with random weights, with their standard errors.

The sums are of powers, up to the fourth, about the mean of the first batch and not of the draws
themselves. So nothing cancels when the mean is large against the deviation, and constant draws have no
variance.
"""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.covariance.fields import need
from moment_jax.covariance.numerics import safe_sqrt
from moment_jax.posterior import sample_params


class MonteCarloMoments(NamedTuple):
    """Moments of sampled outputs and their standard errors, in the shape of the output."""

    mean: Array
    variance: Array
    standard_deviation: Array
    mean_error: Array
    variance_error: Array
    sd_error: Array


def monte_carlo(
    fn: Callable[[Any], Array], params: Any, key: Array, num_samples: int, *, batch_size: int = 128
) -> MonteCarloMoments:
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

    The covariance of all entries is the mean of the product of their deviations from a known mean.

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

    def add_batch(carry: tuple[Array, list[Array]], batch: Array) -> tuple[Any, None]:
        centre, sums = carry
        indices = batch * batch_size + jnp.arange(batch_size)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, indices)
        draws = jax.vmap(lambda k: fn(sample_params(params, k)))(keys).astype(dtype)
        draws, kept = draws.reshape(batch_size, -1), (indices < num_samples)[:, None]
        # Relative to the first draw, so that the mean of constant draws is exact.
        near = draws[0] + jnp.mean(draws - draws[:1], axis=0)
        centre = jax.lax.stop_gradient(jnp.where(batch == 0, near, centre))
        x = jnp.where(kept, draws - centre[None], 0)
        return (centre, [s + jnp.sum(x ** (i + 1), axis=0) for i, s in enumerate(sums)]), None

    none = jnp.zeros(output.size, dtype)
    start = none, [none] * 4
    (centre, sums), _ = jax.lax.scan(add_batch, start, jnp.arange(num_batches))
    n = num_samples
    shift, second, third, fourth = (x.reshape(output.shape) / n for x in sums)
    fourth = fourth - 4 * shift * third + 6 * shift**2 * second - 3 * shift**4  # about the mean
    second = second - shift**2
    variance = second * (n / (n - 1))
    # The variance of an unbiased sample variance, whatever the distribution.
    error = safe_sqrt((fourth - second**2 + 2 * second**2 / (n - 1)) / n)
    deviation, certain = safe_sqrt(variance), variance == 0
    return MonteCarloMoments(
        mean=centre.reshape(output.shape) + shift,
        variance=variance,
        standard_deviation=deviation,
        mean_error=deviation / num_samples**0.5,
        variance_error=error,
        sd_error=jnp.where(certain, 0, error / jnp.where(certain, 1, 2 * deviation)),
    )
