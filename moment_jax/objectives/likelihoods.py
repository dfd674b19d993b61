"""Observation models p(y | f) of a target y given the network's output f, and their noise.

Each is a function of the output's `mj.Moments`, of one example or of any batch: its predictive
distribution, `likelihood(moments)`.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from moment_jax.covariance import Moments
from moment_jax.covariance.fields import check_array, check_variances, need
from moment_jax.expectations.quadrature import expected
from moment_jax.linalg import psd_cholesky
from moment_jax.objectives import predictive
from moment_jax.objectives.cubature import normal_points, probabilities_with_uncertainty
from moment_jax.xla import diagonal_matrix

MOST_KEPT = 32  # classes whose covariances a prediction keeps
NOISES = 128  # values of several random noises, for their predictive distribution


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Gaussian:
    """y = f + noise, the noise Gaussian with the same variance for every example.

    The noise variance is a scalar, or (D,) variances of independent noises; D is the number of features
    of y. In the squared units of y, and positive. It is a pytree leaf.
    None where it is to be learned: `mj.Bayesian` then owns its logarithm, `mj.fit` trains it. Tokens of
    a sequence have independent noise.
    """

    noise_variance: Array | float | None = None

    def __call__(self, moments: Moments) -> predictive.GaussianPredictive:
        """The distribution of y: the moments of f plus the noise."""
        check_array("Gaussian", moments.mean)
        noise = diagonal_matrix(noise_array("Gaussian", self, moments.mean))
        features = moments.features
        cov = features + jnp.broadcast_to(noise, features.shape)
        return predictive.GaussianPredictive(moments.mean, cov)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeteroscedasticGaussian:
    """y_d = f_d + exp(f_{D+d} / 2) noise_d: the network also predicts the noise.

    The network has 2 D outputs: D means, then D log noise variances. Both are random and may be
    correlated with each other.
    """

    def __call__(self, moments: Moments) -> predictive.MixturePredictive:
        """The distribution of y, with its exact mean and variance: a mixture over values of the noise.

        Var[y] = Var[mu] + exp(E[g] + Var[g] / 2). Given the noise exp(g) y is Gaussian. Doubt about the
        noise gives its density heavy tails: for one target, the 33 values reach 6 standard deviations of
        the log noise on both sides.
        """
        rule = "2 D outputs of shape (..., 2 D): D means, then D log noise variances"
        shape = moments.mean.shape
        need("HeteroscedasticGaussian", shape[-1] % 2 == 0, rule, shape)
        both = (jnp.split(x, 2, axis=-1) for x in (moments.mean, moments.variance))
        (mean, log_noise), (variance, spread) = both
        variance = variance + bounded_exp(log_noise + spread / 2)
        size = mean.shape[-1]
        points, log_weights = (jnp.asarray(x, mean.dtype) for x in _noise_points(size))
        # The log noise first: the Cholesky factor then conditions the mean on it.
        order = jnp.arange(-size, size)
        features = moments.features[..., order[:, None], order]
        flat = features.reshape(-1, 2 * size, 2 * size)
        root = jax.vmap(psd_cholesky)(flat).reshape(features.shape)
        shift = points @ jnp.swapaxes(root[..., :size], -1, -2)
        log_noise, means = jnp.split(moments.mean[..., None, order] + shift, 2, axis=-1)
        rest = root[..., size:, size:]
        known = (rest @ jnp.swapaxes(rest, -1, -2))[..., None, :, :]
        noise = diagonal_matrix(bounded_exp(log_noise))
        parts = predictive.GaussianPredictive(means, known + noise)
        weights = jnp.broadcast_to(log_weights, means.shape[:-1])
        return predictive.MixturePredictive(mean, diagonal_matrix(variance), parts, weights)


def _noise_points(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Points (K, D) of a standard normal variable, and the logarithms of their weights (K,)."""
    if size > 1:
        return normal_points(size, NOISES), np.full(NOISES, -math.log(NOISES))
    points = np.linspace(-6, 6, 33)[:, None]
    logs = -(points[:, 0] ** 2) / 2
    return points, logs - np.logaddexp.reduce(logs)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Categorical:
    """y in {0, ..., C-1} with p(y | f) = softmax(f)_y, f the (C,) logits.

    The points of the cubature over the logits (see `class_probabilities`) are rounded up to a power of
    two; None for 128. Four times as many cut the error by more than half.
    """

    num_points: int | None = dataclasses.field(default=None, metadata={"static": True})

    def __call__(self, moments: Moments) -> predictive.CategoricalPredictive:
        """The predictive probabilities E[softmax(f)], and their uncertainty."""
        known = moments.variance if moments.cov.entrywise else moments.features
        points = {"num_points": self.num_points}
        log_probs, parts = probabilities_with_uncertainty(moments.mean, known, **points)
        kept = known.ndim == moments.mean.ndim or known.shape[-1] <= MOST_KEPT
        mean, cov = (jnp.expand_dims(x, moments.mean.ndim - 1) for x in (moments.mean, known))
        logits = predictive.Logits(mean, cov) if kept else None
        return predictive.CategoricalPredictive(log_probs, *parts, logits)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Bernoulli:
    """y_d = 1 with probability sigmoid(f_d), else 0, independently; f has one logit per entry of y."""

    def __call__(self, moments: Moments) -> predictive.BernoulliPredictive:
        """The predictive probabilities E[sigmoid(f)], and their uncertainty, entry by entry."""
        mean, variance = moments.mean, moments.variance
        yes, no = (expected(jax.nn.sigmoid, m, variance) for m in (mean, -mean))
        return predictive.BernoulliPredictive(yes, no, expected(_entropy_of_logit, mean, variance))


def _entropy_of_logit(logit: Array) -> Array:
    """The entropy of a Bernoulli variable, in nats."""
    p = jax.nn.sigmoid(logit)
    return -p * jax.nn.log_sigmoid(logit) - (1 - p) * jax.nn.log_sigmoid(-logit)


Likelihood = Gaussian | HeteroscedasticGaussian | Categorical | Bernoulli


def noise_array(name: str, likelihood: Gaussian, mean: Array) -> Array:
    """The noise as (D,) variances."""
    came = "Gaussian(), whose noise is to be learned"
    mend = "Use it in mj.Bayesian(network, mj.Gaussian())."
    need(name, likelihood.noise_variance is not None, "Gaussian(noise_variance)", came, mend)
    noise, size = jnp.asarray(likelihood.noise_variance, mean.dtype), mean.shape[-1]
    rule = f"Gaussian(noise_variance) with a scalar or ({size},) for {size} means"
    need(name, noise.shape in ((), (size,)), rule, noise.shape)
    check_variances(f"{name}` with `Gaussian(noise_variance)", likelihood.noise_variance)
    return jnp.broadcast_to(noise, (size,))


def bounded_exp(exponent: Array) -> Array:
    """Exp, capped at the square root of the largest number so that products do not overflow."""
    return jnp.exp(jnp.minimum(exponent, math.log(float(jnp.finfo(exponent.dtype).max)) / 2))
