"""Sampled moments of a network with random weights, with their standard errors.

Central moments up to the fourth are merged batch by batch. The sums are of powers about the running
mean, not of the draws themselves. So nothing cancels when the mean is large against the deviation, and
constant draws have no variance beyond rounding.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.covariance.numerics import safe_sqrt
from moment_jax.posterior import sample_params

S = TypeVar("S", bound="JointSums")


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
    output = jax.eval_shape(lambda k: fn(sample_params(params, k)), key)
    if not hasattr(output, "shape"):
        raise TypeError(
            "`monte_carlo(fn, params, key, num_samples)` needs an fn that returns one array. Got "
            f"{type(output).__name__}. Pick one output, as in lambda params: fn(params)[0]."
        )
    dtype = jnp.result_type(output.dtype, 0.0)
    # Batches of equal size; surplus draws of the last one are not counted.
    num_batches = -(-num_samples // batch_size)
    batch_size = -(-num_samples // num_batches)

    def add_batch(sums: tuple[Any, ...], batch: Array) -> tuple[tuple[Any, ...], None]:
        indices = batch * batch_size + jnp.arange(batch_size)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, indices)
        draws = jax.vmap(lambda k: fn(sample_params(params, k)))(keys).astype(dtype)
        draws, kept = draws.reshape(batch_size, -1), indices < num_samples
        return tuple(merge(old, type(old).of(draws, kept)) for old in sums), None

    kinds = (CentralSums, JointSums) if covariance else (CentralSums,)
    empty: tuple[Any, ...] = tuple(kind.empty(output.size, dtype) for kind in kinds)
    (sums, *joint), _ = jax.lax.scan(add_batch, empty, jnp.arange(num_batches))
    mean, variance, error = (
        x.reshape(output.shape) for x in (sums.mean, sums.variance(), sums.variance_error())
    )
    deviation, certain = safe_sqrt(variance), variance == 0
    return MonteCarloMoments(
        mean=mean,
        variance=variance,
        standard_deviation=deviation,
        mean_error=deviation / jnp.sqrt(sums.num_draws),
        variance_error=error,
        sd_error=jnp.where(certain, 0, error / jnp.where(certain, 1, 2 * deviation)),
        covariance=joint[0].covariance() if covariance else None,
        covariance_error=joint[0].covariance_error() if covariance else None,
    )


def _at_least(name: str, value: int, lowest: int, why: str) -> int:
    value = operator.index(value)
    if value < lowest:
        raise ValueError(
            f"`monte_carlo(fn, params, key, num_samples)` needs {name} >= {lowest}. Got {value}; "
            f"{why}."
        )
    return value


class JointSums(NamedTuple):
    """Sums over the draws of every pair of entries (x, y) of a vector, about the means."""

    num_draws: Array  # n, a scalar
    mean: Array  # m, (D,)
    product: Array  # sum (x_i - m_i) (x_j - m_j), (D, D)
    square_product: Array  # sum (x_i - m_i)^2 (x_j - m_j), (D, D)
    square_square: Array  # sum (x_i - m_i)^2 (x_j - m_j)^2, (D, D)

    @staticmethod
    def total(x: Array, y: Array) -> Array:
        """The sum over the draws (n, D) of the products of pairs."""
        return x.T @ y

    @staticmethod
    def pairs(x: Array) -> tuple[Array, Array]:
        """A vector as the first and as the second member of each pair."""
        return x[:, None], x[None, :]

    @staticmethod
    def own(product: Array) -> Array:
        """What each entry has with itself."""
        return jnp.diagonal(product)

    @classmethod
    def empty(cls, size: int, dtype: jnp.dtype) -> Self:
        """The sums of no draws."""
        none = jnp.zeros((1, size), dtype)
        return cls(jnp.zeros((), dtype), none[0], *(cls.total(none, none) for _ in range(3)))

    @classmethod
    def of(cls, draws: Array, kept: Array) -> Self:
        """The sums of draws (n, D) over those kept, (n,) booleans, of which the first is true."""
        num_draws, kept = jnp.sum(kept).astype(draws.dtype), kept[:, None]
        # Relative to the first draw, so that the mean of constant draws is exact.
        mean = draws[0] + jnp.sum(jnp.where(kept, draws - draws[:1], 0), axis=0) / num_draws
        x = jnp.where(kept, draws - mean[None], 0)
        return cls(num_draws, mean, cls.total(x, x), cls.total(x**2, x), cls.total(x**2, x**2))

    def about(self, mean: Array) -> Self:
        """The same sums about another centre."""
        n, product = self.num_draws, self.product
        first, other = self.pairs(self.mean - mean)
        first_square, other_square = self.pairs(self.own(product))
        mixed = 2 * other * self.square_product
        return type(self)(
            n,
            mean,
            product + n * first * other,
            self.square_product + other * first_square + 2 * first * product + n * first**2 * other,
            self.square_square
            + mixed
            + mixed.T
            + other**2 * first_square
            + first**2 * other_square
            + 4 * first * other * product
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
        first, other = self.pairs(self.own(covariance))
        small = (first * other + covariance**2) / (n - 1)
        return safe_sqrt((joint - covariance**2 + small) / n)


class CentralSums(JointSums):
    """The same sums of each entry with itself alone, (D,)."""

    @staticmethod
    def total(x: Array, y: Array) -> Array:
        """The sum over the draws (n, D) of the products."""
        return jnp.sum(x * y, axis=0)

    @staticmethod
    def pairs(x: Array) -> tuple[Array, Array]:
        """Each entry twice."""
        return x, x

    @staticmethod
    def own(product: Array) -> Array:
        """The sums themselves."""
        return product

    variance, variance_error = JointSums.covariance, JointSums.covariance_error


def merge(a: S, b: S) -> S:
    """The sums over two sets of draws: the update of Chan, Golub and LeVeque, to fourth order."""
    count = a.num_draws + b.num_draws
    mean = a.mean + (b.mean - a.mean) * (b.num_draws / count)
    _, _, *left = a.about(mean)
    _, _, *right = b.about(mean)
    return type(a)(count, mean, *(x + y for x, y in zip(left, right, strict=True)))
