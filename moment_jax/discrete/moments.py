"""Categorical variables with random logits: moments of pi, and the expected KL divergence."""

from __future__ import annotations

import functools
import math
from typing import TypeVar

import jax
import jax.numpy as jnp

from moment_jax.covariance import Covariance
from moment_jax.discrete.categorical import categorical_kl, log_probabilities
from moment_jax.layers.softmax import softmax
from moment_jax.objectives.cubature import count_points, gaussian_points
from moment_jax.objectives.moments import check_logits
from moment_jax.xla import diagonal_of

Array = jax.Array
S = TypeVar("S", bound=Covariance)


def category_moments(mean: Array, cov: S, mask: Array | None = None) -> tuple[Array, S]:
    """Mean and covariance of pi = softmax(logits), row by row: `mj.softmax`.

    A variable z_t | pi_t ~ Categorical(pi_t) under random pi has the law Categorical(E[pi_t]): whoever
    draws one z needs the mean alone. What the covariance adds is that z's of several draws, or of
    several rows, share their pi.

    Args:
      mean: E[logits], (T, K).
      cov: covariance of the logits, a structure of shape (T, K).
      mask: (T, K) boolean, False where a category cannot occur; None for everywhere.

    Returns:
      Mean (T, K), rows summing to one, and covariance of pi in the same structure.
    """
    return softmax(mean, cov, mask=mask)


def log_category_probabilities(mean: Array, cov: Covariance, mask: Array | None = None) -> Array:
    """Log E[pi], (T, K), normalised: the law of z under random logits, as `gumbel_softmax` takes it.

    The errors are those of `mj.softmax` (0.5 %, 4 % and 10 % of E[pi] at a logit sd of 1, 2 and 3).
    Masked categories are exactly -inf; others not below the logarithm of the smallest normal number.
    """
    probs, _ = softmax(mean, cov, mask=mask)
    log_probs = jnp.log(jnp.maximum(probs, jnp.finfo(probs.dtype).tiny))
    return log_probabilities(log_probs, mask)


def expected_categorical_kl(
    mean: Array, cov: Array, prior_log_probs: Array | None = None, *, num_points: int | None = None
) -> Array:
    """E[KL(softmax(f) || prior)], f ~ N(mean, cov), in nats, by a deterministic cubature.

    It is never below KL(E[softmax(f)] || prior) (convexity). The difference of the two is the mutual
    information between the code and the weights, the epistemic part. Nothing is random; points and
    accuracy are those of `mj.objectives.expected_log_likelihood`.

    Args:
      mean: E[f], (K,).
      cov: their variances (K,), or covariance (K, K), positive semidefinite.
      prior_log_probs: (K,), normalised or not, finite; None for the uniform distribution.
      num_points: points of the cubature, rounded up to a power of two; None for 512, or 8 for each
        category where that is more.

    Returns:
      A scalar, with finite derivatives at any covariance, zero included (Price's theorem).

    Raises:
      ValueError: if shapes do not fit. TypeError: if `cov` is a structure.
    """
    name = "expected_categorical_kl"
    cov = check_logits(name, mean, cov)
    if prior_log_probs is None:
        prior = jnp.full(mean.shape, -math.log(mean.shape[0]), mean.dtype)
    else:
        prior = log_probabilities(jnp.asarray(prior_log_probs, mean.dtype))
        if prior.shape != mean.shape:
            raise ValueError(
                f"`{name}` needs a prior of the shape of the mean, {tuple(mean.shape)}. Got "
                f"{tuple(prior.shape)}."
            )
    return _expected_kl(mean, cov, prior, count_points(num_points, mean.shape[0], default=512))


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def _expected_kl(mean: Array, cov: Array, prior: Array, num_points: int) -> Array:
    points = gaussian_points(mean, cov, num_points)
    return jnp.mean(categorical_kl(points, prior[None, :]))


@_expected_kl.defjvp
def _expected_kl_jvp(
    num_points: int, primals: tuple[Array, Array, Array], tangents: tuple[Array, Array, Array]
) -> tuple[Array, Array]:
    """Price's theorem: dE[g]/dmean = E[g'], dE[g]/dcov = E[g'']/2, over the same points.

    With p = softmax(f), h = log p - log prior and d = h - g: g' = p d, and
    g'' = diag(p (1 + d)) - p p^T (1 + d_i + d_j).
    """
    mean, cov, prior = primals
    mean_dot, cov_dot, prior_dot = tangents
    log_probs = log_probabilities(gaussian_points(mean, cov, num_points))
    probs, ratio = jnp.exp(log_probs), log_probs - prior[None, :]
    values = jnp.sum(probs * ratio, axis=1)
    deviation = ratio - values[:, None]
    if cov_dot.ndim == 1:
        diagonal, pulled = cov_dot, probs * cov_dot[None, :]
    else:
        diagonal, pulled = diagonal_of(cov_dot), probs @ ((cov_dot + cov_dot.T) / 2)
    slope = jnp.mean(probs * deviation, axis=0) @ mean_dot
    curved = (probs * (1 + deviation)) @ diagonal
    paired = jnp.sum(pulled * probs * (1 + 2 * deviation), axis=1)
    tangent = slope + jnp.mean(curved - paired) / 2 - jnp.mean(probs, axis=0) @ prior_dot
    return jnp.mean(values), tangent
