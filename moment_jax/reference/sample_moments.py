"""Central moments of a stream of draws, up to the fourth, merged batch by batch.

The sums are of powers about the running mean, not of the draws themselves. So nothing cancels when the
mean is large against the deviation, and constant draws have no variance beyond rounding.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from moment_jax.covariance.numerics import safe_sqrt

Array = jax.Array
S = TypeVar("S", "CentralSums", "JointSums")


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
