"""Observation models p(y | f) of a target y given the network's output f, and their noise."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.covariance.fields import check_variances
from moment_jax.covariance.numerics import vector_variance


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Gaussian:
    """y = f + noise, the noise Gaussian with the same variance for every example.

    Args:
      noise_variance: a scalar, (D,) variances of independent noises, or a (D, D) covariance; D is
        the number of features of y. In the squared units of y, and positive (definite). It is a pytree
        leaf; to learn it, learn its logarithm. Tokens of a sequence have independent noise.
    """

    noise_variance: Array | float


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeteroscedasticGaussian:
    """y_d = f_d + exp(f_{D+d} / 2) noise_d: the network also predicts the noise.

    The network has 2 D outputs: D means, then D log noise variances. Both are random and may be
    correlated with each other.
    """


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Categorical:
    """y in {0, ..., C-1} with p(y | f) = softmax(f)_y, f the (C,) logits.

    Args:
      num_points: points of the cubature over the logits (see `moment_jax.objectives.cubature`), rounded
        up to a power of two. None for 128. Four times as many points cut the error by more than half.
    """

    num_points: int | None = dataclasses.field(default=None, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Bernoulli:
    """y_d = 1 with probability sigmoid(f_d), else 0, independently; f has one logit per entry of y."""


Likelihood = Gaussian | HeteroscedasticGaussian | Categorical | Bernoulli


def noise_array(name: str, likelihood: Gaussian, mean: Array) -> Array:
    """The noise as (D,) variances, or as a (D, D) covariance if it was given as one."""
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
    """The noise variances in the shape of the mean, (D,) or (T, D)."""
    return jnp.broadcast_to(vector_variance(noise), mean.shape)


def flat_noise(noise: Array, mean: Array) -> Array:
    """Covariance of the noise over the flattened output, (M, M), or (M,) variances."""
    if noise.ndim == 1:
        return noise_like(noise, mean).reshape(-1)
    return jnp.kron(jnp.eye(mean.size // len(noise), dtype=noise.dtype), noise)
