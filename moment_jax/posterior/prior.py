"""The Gaussian prior, its log density, and the KL divergence from it."""

import dataclasses
import math

import jax.numpy as jnp
from jax import Array

from moment_jax.covariance.fields import register_fields


@register_fields
@dataclasses.dataclass(frozen=True)
class GaussianPrior:
    """Prior N(mean, variance) of the entries of one array of weights, independent of each other.

    Both fields are differentiable, so the prior can be learned (empirical Bayes). `kl` casts them to the
    dtype of the belief.

    Args:
      mean: prior mean, a scalar or an array that broadcasts to the shape of the weights.
      variance: prior variance, likewise; assumed positive.

    >>> from moment_jax.posterior import Factorized, GaussianPrior
    >>> prior = GaussianPrior(variance=4.0)
    >>> belief = Factorized(jnp.zeros((2, 3)), jnp.full((2, 3), 4.0))
    >>> print(f"{belief.kl(prior):.3f}")
    0.000
    """

    mean: Array | float = 0.0
    variance: Array | float = 1.0


def log_density(prior: GaussianPrior, weights: Array) -> Array:
    """Sum of log N(weights; prior.mean, prior.variance) over all entries: a scalar."""
    prior_mean, prior_variance = _moments(prior, weights)
    squares = (weights - prior_mean) ** 2 / prior_variance
    return -0.5 * jnp.sum(squares + jnp.log(prior_variance) + math.log(2 * math.pi))


def divergence(prior: GaussianPrior, mean: Array, variance: Array, log_variance: Array) -> Array:
    """KL(N(mean, Cov) || prior), a scalar, for any covariance of the entries.

    The prior's entries are independent, so only the diagonal and the log-determinant of Cov matter.
    The latter is passed as one term per entry, so that large terms cancel before they are summed: for
    independent entries the log of each variance; -inf where Cov is singular.

    Source: Transformer derivation, Eq. 12, extended to any prior and covariance.
    """
    prior_mean, prior_variance = _moments(prior, mean)
    squares = (variance + (mean - prior_mean) ** 2) / prior_variance
    return 0.5 * jnp.sum(squares - 1 - (log_variance - jnp.log(prior_variance)))


def _moments(prior: GaussianPrior, weights: Array) -> tuple[Array, Array]:
    """The prior's mean and variance in the shape and dtype of the weights."""
    if not isinstance(prior, GaussianPrior):
        raise TypeError(
            f"`kl(prior)` needs a GaussianPrior. Got {type(prior).__name__}. "
            "For a variance s, use GaussianPrior(variance=s)."
        )
    dtype = jnp.result_type(weights, 0.0)
    fields = [jnp.asarray(field, dtype) for field in (prior.mean, prior.variance)]
    try:
        mean, variance = (jnp.broadcast_to(field, weights.shape) for field in fields)
    except ValueError:
        raise ValueError(
            f"`kl(prior)` needs a prior mean and variance that broadcast to the shape of the "
            f"weights, {tuple(weights.shape)}. Got {fields[0].shape} and {fields[1].shape}. Use "
            "scalars, or arrays of that shape."
        ) from None
    return mean, variance
