"""The observation noise of a Gaussian likelihood in the forms that the formulas need."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from moment_jax.covariance.checks import check_variances
from moment_jax.objectives.likelihoods import Gaussian
from moment_jax.xla import diagonal_matrix, diagonal_of

Array = jax.Array


def noise_array(name: str, likelihood: Gaussian, mean: Array) -> Array:
    """The noise as (D,) variances, or as a (D, D) covariance where it was given as one.

    Raises:
      ValueError: if the noise is none of a scalar, (D,) and (D, D), D = mean.shape[-1], or known to be
        negative.
    """
    noise = jnp.asarray(likelihood.noise_variance, mean.dtype)
    size = mean.shape[-1]
    if noise.shape not in ((), (size,), (size, size)):
        raise ValueError(
            f"`{name}` needs Gaussian(noise_variance) with a scalar, ({size},) or ({size}, "
            f"{size}): the last axis of the mean is {size}. Got {tuple(noise.shape)}."
        )
    axes = "d" if noise.ndim == 2 else ""
    check_variances(f"{name}` with `Gaussian(noise_variance)", likelihood.noise_variance, axes)
    return jnp.broadcast_to(noise, (size,)) if noise.ndim == 0 else noise


def noise_like(noise: Array, mean: Array) -> Array:
    """The noise's variances in the shape of the mean, (D,) or (T, D)."""
    variance = noise if noise.ndim == 1 else diagonal_of(noise)
    return variance if mean.ndim == 1 else jnp.broadcast_to(variance[None], mean.shape)


def noise_matrix(noise: Array, mean: Array) -> Array:
    """The noise's covariance over the flattened output, (M, M): independent tokens."""
    block = diagonal_matrix(noise) if noise.ndim == 1 else noise
    return block if mean.ndim == 1 else jnp.kron(jnp.eye(mean.shape[0], dtype=noise.dtype), block)
