"""Sampled moments of a network with random weights, with their standard errors."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moment_jax.covariance.numerics import safe_sqrt
from moment_jax.posterior import sample_params
from moment_jax.reference.sample_moments import CentralSums, JointSums, merge

Array = jax.Array
_Sums = tuple[CentralSums, JointSums | None]


class MonteCarloMoments(NamedTuple):
    """Moments of sampled outputs, and the standard error of each estimate.

    All have the shape of the output, except the covariance of its n entries and its error, which are
    (n, n) in C order, or None if not requested.
    """

    mean: Array
    variance: Array
    standard_deviation: Array
    mean_error: Array
    variance_error: Array
    sd_error: Array
    covariance: Array | None = None
    covariance_error: Array | None = None


def monte_carlo(
    fn: Callable[[Any], Array],
    params: Any,
    key: Array,
    num_samples: int,
    *,
    batch_size: int = 128,
    covariance: bool = False,
) -> MonteCarloMoments:
    """Moments of `fn(draw of params)` by sampling, with standard errors.

    Draw i has the key `fold_in(key, i)`, so up to rounding the estimate does not depend on the batch
    size. Memory is that of `batch_size` evaluations of `fn`. Standard errors assume only finite fourth
    moments: those of variance and standard deviation use the sampled fourth central moment, not the
    Gaussian formula.

    Args:
      fn: a function of one draw of the parameters (arrays in place of beliefs) that returns one array
        of any shape; it is vmapped.
      params: any pytree with `Posterior` leaves.
      key: a JAX random key.
      num_samples: number of draws, at least 2 (static).
      batch_size: draws evaluated at a time (static).
      covariance: also estimate the (n, n) covariance of all n entries of the output.

    Returns:
      Unbiased mean and variance, the standard deviation, and their standard errors, in the dtype of
      the output (the default floating-point type if that is boolean or integer).

    Raises:
      ValueError: if num_samples < 2 or batch_size < 1. TypeError: if `fn` does not return one array.

    Source: Transformer derivation, Eq. 1 and 7 (its Monte Carlo estimates).

    >>> import moment_jax as mj
    >>> belief = mj.posterior.Factorized(jnp.ones(2), jnp.array([0.0, 4.0]))
    >>> truth = mj.monte_carlo(lambda draw: draw, belief, jax.random.key(0), 1000)
    >>> print(truth.mean[0], truth.standard_deviation[0])  # the first entry is certain
    1.0 0.0
    >>> bool(abs(truth.standard_deviation[1] - 2) < 4 * truth.sd_error[1])
    True
    """
    num_samples = _at_least("num_samples", num_samples, 2, "a variance needs two draws")
    batch_size = _at_least("batch_size", batch_size, 1, "a batch needs a draw")
    output = _output(fn, params, key)
    # Batches of equal size; surplus draws of the last one are not counted.
    num_batches = -(-num_samples // batch_size)
    batch_size = -(-num_samples // num_batches)

    def add_batch(sums: _Sums, batch: Array) -> tuple[_Sums, None]:
        indices = batch * batch_size + jnp.arange(batch_size)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, indices)
        draws = jax.vmap(lambda k: fn(sample_params(params, k)))(keys).astype(output.dtype)
        kept = indices < num_samples
        joint = JointSums.of(draws.reshape(batch_size, -1), kept) if covariance else None
        return _merged(sums, (CentralSums.of(draws, kept), joint)), None

    total, _ = jax.lax.scan(add_batch, _empty(output, covariance), jnp.arange(num_batches))
    return _moments(*total)


def _at_least(name: str, value: int, lowest: int, why: str) -> int:
    value = operator.index(value)
    if value < lowest:
        raise ValueError(
            f"`monte_carlo(fn, params, key, num_samples)` needs {name} >= {lowest}. Got {value}; "
            f"{why}."
        )
    return value


def _output(fn: Callable[[Any], Array], params: Any, key: Array) -> jax.ShapeDtypeStruct:
    """Shape of the output, and the floating-point type of its moments."""
    output = jax.eval_shape(lambda k: fn(sample_params(params, k)), key)
    if not hasattr(output, "shape"):
        raise TypeError(
            "`monte_carlo(fn, params, key, num_samples)` needs an fn that returns one array. Got "
            f"{type(output).__name__}. Pick one output, as in lambda params: fn(params)[0]."
        )
    return jax.ShapeDtypeStruct(output.shape, jnp.result_type(output.dtype, 0.0))


def _empty(output: jax.ShapeDtypeStruct, covariance: bool) -> _Sums:
    joint = JointSums.empty(output.size, output.dtype) if covariance else None
    return CentralSums.empty(output.shape, output.dtype), joint


def _merged(a: _Sums, b: _Sums) -> _Sums:
    joint = None if a[1] is None or b[1] is None else merge(a[1], b[1])
    return merge(a[0], b[0]), joint


def _moments(sums: CentralSums, joint: JointSums | None) -> MonteCarloMoments:
    variance, variance_error = sums.variance(), sums.variance_error()
    deviation = safe_sqrt(variance)
    certain = variance == 0
    return MonteCarloMoments(
        mean=sums.mean,
        variance=variance,
        standard_deviation=deviation,
        mean_error=deviation / jnp.sqrt(sums.num_draws),
        variance_error=variance_error,
        sd_error=jnp.where(certain, 0, variance_error / jnp.where(certain, 1, 2 * deviation)),
        covariance=None if joint is None else joint.covariance(),
        covariance_error=None if joint is None else joint.covariance_error(),
    )
