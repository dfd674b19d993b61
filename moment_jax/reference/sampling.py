"""Sampled moments of a network with random weights, with their standard errors.

Central moments up to the fourth are merged batch by batch. The sums are of powers about the running
mean, not of the draws themselves. So nothing cancels when the mean is large against the deviation, and
constant draws have no variance beyond rounding.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.covariance.numerics import safe_sqrt
from moment_jax.posterior import sample_params

S = TypeVar("S", "CentralSums", "JointSums")


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

    def add_batch(sums: tuple[Any, ...], batch: Array) -> tuple[tuple[Any, ...], None]:
        indices = batch * batch_size + jnp.arange(batch_size)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, indices)
        draws = jax.vmap(lambda k: fn(sample_params(params, k)))(keys).astype(output.dtype)
        kept = indices < num_samples
        central = CentralSums.of(draws, kept)
        if not covariance:
            return (merge(sums[0], central),), None
        joint = JointSums.of(draws.reshape(batch_size, -1), kept)
        return (merge(sums[0], central), merge(sums[1], joint)), None

    empty: tuple[Any, ...] = (CentralSums.empty(output.shape, output.dtype),)
    if covariance:
        empty = (*empty, JointSums.empty(output.size, output.dtype))
    total, _ = jax.lax.scan(add_batch, empty, jnp.arange(num_batches))
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


def _moments(sums: CentralSums, joint: JointSums | None = None) -> MonteCarloMoments:
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


class CentralSums(NamedTuple):
    """Sums over the draws of each entry x, about its mean m."""

    num_draws: Array  # n, a scalar
    mean: Array  # m
    second: Array  # sum (x - m)^2
    third: Array  # sum (x - m)^3
    fourth: Array  # sum (x - m)^4

    @classmethod
    def empty(cls, shape: tuple[int, ...], dtype: jnp.dtype) -> CentralSums:
        """The sums of no draws."""
        return cls(jnp.zeros((), dtype), *(jnp.zeros(shape, dtype) for _ in range(4)))

    @classmethod
    def of(cls, draws: Array, kept: Array) -> CentralSums:
        """The sums of draws (n, ...) over those kept, (n,) booleans, of which the first is true."""
        num_draws, mean, centred = _centred(draws, kept)
        return cls(num_draws, mean, *(jnp.sum(centred**power, axis=0) for power in (2, 3, 4)))

    def about(self, mean: Array) -> CentralSums:
        """The same sums about another centre."""
        d, n = self.mean - mean, self.num_draws
        return CentralSums(
            n,
            mean,
            self.second + n * d**2,
            self.third + 3 * d * self.second + n * d**3,
            self.fourth + 4 * d * self.third + 6 * d**2 * self.second + n * d**4,
        )

    def variance(self) -> Array:
        """Unbiased estimate of each entry's variance."""
        return self.second / (self.num_draws - 1)

    def variance_error(self) -> Array:
        """Standard error of `variance`, whatever the distribution.

        An unbiased sample variance has the variance (mu4 - mu2^2 (n - 3)/(n - 1)) / n.
        """
        n = self.num_draws
        second, fourth = self.second / n, self.fourth / n
        square = (fourth - second**2 * (n - 3) / (n - 1)) / n
        return safe_sqrt(square)


class JointSums(NamedTuple):
    """Sums over the draws of every pair of entries (x, y) of a vector, about the means."""

    num_draws: Array  # n, a scalar
    mean: Array  # m, (D,)
    product: Array  # sum (x_i - m_i) (x_j - m_j), (D, D)
    square_product: Array  # sum (x_i - m_i)^2 (x_j - m_j), (D, D)
    square_square: Array  # sum (x_i - m_i)^2 (x_j - m_j)^2, (D, D)

    @classmethod
    def empty(cls, size: int, dtype: jnp.dtype) -> JointSums:
        """The sums of no draws."""
        pairs = (jnp.zeros((size, size), dtype) for _ in range(3))
        return cls(jnp.zeros((), dtype), jnp.zeros((size,), dtype), *pairs)

    @classmethod
    def of(cls, draws: Array, kept: Array) -> JointSums:
        """The sums of draws (n, D) over those kept, (n,) booleans, of which the first is true."""
        num_draws, mean, centred = _centred(draws, kept)
        squared = centred**2
        return cls(num_draws, mean, centred.T @ centred, squared.T @ centred, squared.T @ squared)

    def about(self, mean: Array) -> JointSums:
        """The same sums about another centre."""
        n = self.num_draws
        d = self.mean - mean
        first, other = d[:, None], d[None, :]
        square = jnp.diagonal(self.product)
        mixed = 2 * other * self.square_product
        return JointSums(
            n,
            mean,
            self.product + n * first * other,
            self.square_product
            + other * square[:, None]
            + 2 * first * self.product
            + n * first**2 * other,
            self.square_square
            + mixed
            + mixed.T
            + other**2 * square[:, None]
            + first**2 * square[None, :]
            + 4 * first * other * self.product
            + n * first**2 * other**2,
        )

    def covariance(self) -> Array:
        """Unbiased estimate of the covariance, (D, D)."""
        return self.product / (self.num_draws - 1)

    def covariance_error(self) -> Array:
        """Standard error of `covariance`, whatever the distribution.

        An unbiased sample covariance has the variance
        (mu22 - mu11^2) / n + (mu20 mu02 + mu11^2) / (n (n - 1)).
        """
        n = self.num_draws
        joint, covariance = self.square_square / n, self.product / n
        variance = jnp.diagonal(covariance)
        small = (variance[:, None] * variance[None, :] + covariance**2) / (n - 1)
        return safe_sqrt((joint - covariance**2 + small) / n)


def merge(a: S, b: S) -> S:
    """The sums over two sets of draws: the update of Chan, Golub and LeVeque, to fourth order."""
    count = a.num_draws + b.num_draws
    mean = a.mean + (b.mean - a.mean) * (b.num_draws / count)
    _, _, *left = a.about(mean)
    _, _, *right = b.about(mean)
    return type(a)(count, mean, *(x + y for x, y in zip(left, right, strict=True)))


def _centred(draws: Array, kept: Array) -> tuple[Array, Array, Array]:
    """Number and mean of the kept draws, and their deviations from it (zero for the others)."""
    num_draws = jnp.sum(kept).astype(draws.dtype)
    kept = jnp.expand_dims(kept, range(1, draws.ndim))
    # Relative to the first draw, so that the mean of constant draws is exact.
    mean = draws[0] + jnp.sum(jnp.where(kept, draws - draws[:1], 0), axis=0) / num_draws
    return num_draws, mean, jnp.where(kept, draws - mean[None], 0)
