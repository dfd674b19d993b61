"""`Moments`: the mean and the covariance of a network's output."""

from typing import Any, NamedTuple

from jax import Array


class Moments(NamedTuple):
    """Mean and covariance of an array of any shape, such as the outputs (B, ..., C) of a batch.

    A pair that unpacks, `mean, cov = model(x)`, and a pytree. `cov` is a structure: that of each
    example's output as a sequence (T, C), with the batch axes leading in its fields. The properties have
    the mean's shape.

    >>> import jax.numpy as jnp, moment_jax as mj
    >>> moments = mj.Moments(jnp.zeros((5, 2)), mj.Diagonal(jnp.full((5, 1, 2), 4.0)))
    >>> moments.sd.shape, moments.features.shape
    ((5, 2), (5, 2, 2))
    """

    mean: Array
    cov: Any

    @property
    def variance(self) -> Array:
        """The variance of each entry, in the mean's shape."""
        return self.cov.variance().reshape(self.mean.shape)

    @property
    def sd(self) -> Array:
        """The standard deviation of each entry, in the mean's shape."""
        return self.cov.sd().reshape(self.mean.shape)

    @property
    def features(self) -> Array:
        """The covariance of the last axis at each place, (..., C, C) for a mean (..., C)."""
        return self.cov.token_blocks().reshape(*self.mean.shape, -1)
