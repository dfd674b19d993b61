"""log E_q[p(y | f)], the score of a prediction, from the output's mean and covariance."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from moment_jax.objectives.cubature import count_points, log_expected_softmax
from moment_jax.objectives.likelihoods import (
    Categorical,
    Gaussian,
    Likelihood,
    noise_array,
    noise_like,
    noise_matrix,
)
from moment_jax.objectives.moments import (
    Cov,
    as_label,
    check_logits,
    check_output,
    has_pairs,
    matrix,
    of_label,
    variances,
)
from moment_jax.xla import diagonal_of

Array = jax.Array
_NAME = "log_marginal"


def log_marginal(likelihood: Likelihood, target: Array, mean: Array, cov: Cov) -> Array:
    """Log E[p(target | f)] for a Gaussian output f ~ N(mean, cov), in nats.

    This is the logarithm of the posterior predictive (Eq. 1), never below `expected_log_likelihood`
    (Jensen). Use it to score predictions. As the data term of a variational objective (Eq. 13) it gives
    no bound on the evidence.

    Gaussian: log N(target; mean, cov + noise), by Cholesky. Eq. 13 as printed leaves out the noise; the
    propagated covariance alone may be singular.

    Categorical: the log of the target's predictive probability, by the cubature of
    `class_probabilities`; finite where that probability underflows.

    Args:
      likelihood: Gaussian or Categorical.
      target: Gaussian: y, of the mean's shape. Categorical: an integer class index of shape ().
      mean: Gaussian: (D,), or (T, D) for a whole sequence. Categorical: (C,) logits.
      cov: variances in the mean's shape, or all covariances, in the mean's shape twice. For
        Gaussian also a structure such as `Diagonal` or `Full`. The noise is independent between tokens.

    Returns:
      A scalar: the joint log density of one example's features and tokens. NaN in compiled code where
      a class index is out of range.

    Raises:
      ValueError: if shapes do not fit, or a known class index is out of range.
      TypeError: if the likelihood is neither of the two, or the covariance is of another type.

    Source: Transformer derivation, Eq. 1 and 13.
    """
    if isinstance(likelihood, Gaussian):
        return _gaussian(likelihood, jnp.asarray(target), mean, cov)
    if isinstance(likelihood, Categorical):
        logits_cov = check_logits(_NAME, mean, cov)
        label = as_label(_NAME, target, mean.shape[0])
        num_points = count_points(likelihood.num_points, mean.shape[0])
        return of_label(log_expected_softmax(mean, logits_cov, num_points), label)
    raise TypeError(
        f"`{_NAME}` needs Gaussian or Categorical. Got {type(likelihood).__name__}. With a random "
        "noise variance there is no closed form: score predictive_gaussian's moments with "
        "gaussian_negative_log_likelihood."
    )


def _gaussian(likelihood: Gaussian, target: Array, mean: Array, cov: Cov) -> Array:
    check_output(_NAME, target, mean, cov)
    noise = noise_array(_NAME, likelihood, mean)
    residual = target - mean
    constant = mean.size * math.log(2 * math.pi)
    if noise.ndim == 1 and not has_pairs(mean, cov):
        total = variances(mean, cov) + noise_like(noise, mean)
        return -0.5 * (constant + jnp.sum(jnp.log(total) + residual**2 / total))
    factor = jnp.linalg.cholesky(matrix(mean, cov) + noise_matrix(noise, mean))
    white = jax.scipy.linalg.solve_triangular(factor, residual.reshape(-1), lower=True)
    log_det = 2 * jnp.sum(jnp.log(diagonal_of(factor)))
    return -0.5 * (constant + log_det + jnp.sum(white**2))
