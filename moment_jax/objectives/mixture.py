"""Averages of predictive distributions, such as those of several trainings."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy import stats
from jax.scipy.special import logsumexp

from moment_jax.objectives.predictive import (
    BernoulliPredictive,
    CategoricalPredictive,
    GaussianPredictive,
    TokenUncertainty,
    fitting,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MixturePredictive(GaussianPredictive):
    """Real targets, a mixture of K Gaussian predictions.

    Args:
      mean: (..., D).
      cov: covariance of the last axis, within and between the parts, (..., D, D).
      parts: the predictions, stacked: means (..., K, D), covariances (..., K, D, D).
      log_weights: of the parts, (..., K).
    """

    parts: GaussianPredictive
    log_weights: Array

    def quantile(self, p: Array | float) -> Array:
        """The p-quantile of each target, (..., D), by bisection between those of the parts."""
        each, mean, sd = self.parts.quantile(p), self.parts.mean, self.parts.sd
        weights = jnp.exp(self.log_weights)[..., None]

        def halved(_: Array, ends: tuple[Array, Array]) -> tuple[Array, Array]:
            middle = (ends[0] + ends[1]) / 2
            below = jnp.sum(weights * stats.norm.cdf(middle[..., None, :], mean, sd), axis=-2) < p
            return jnp.where(below, middle, ends[0]), jnp.where(below, ends[1], middle)

        low, high = jax.lax.fori_loop(0, 64, halved, (each.min(axis=-2), each.max(axis=-2)))
        return (low + high) / 2

    def log_prob(self, y: Array) -> Array:
        """Log density of targets y (..., D), jointly over the last axis, (...), in nats."""
        y = jnp.broadcast_to(fitting(y, self.mean)[..., None, :], self.parts.mean.shape)
        return logsumexp(self.log_weights + self.parts.log_prob(y), axis=-1)

    def sample(self, key: Array) -> Array:
        """One draw of each target, (..., D), of the same part for all."""
        of_part, of_target = jax.random.split(key)
        first = self.log_weights.reshape(-1, self.log_weights.shape[-1])[
            0
        ]  # all rows have the same
        part = jax.random.categorical(of_part, first)
        mean, cov = self.parts.mean[..., part, :], self.parts.cov[..., part, :, :]
        return GaussianPredictive(mean, cov).sample(of_target)


def averaged(predictions: Sequence[Any]) -> Any:
    """The equal mixture of predictive distributions of one kind and shape.

    Of classes it is one of their kind again: probabilities are averaged, and what the parts disagree on
    is `epistemic`. Of real values it is a `MixturePredictive`.
    """
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *predictions)
    if isinstance(stacked, GaussianPredictive):
        mean = stacked.mean.mean(axis=0)
        apart = stacked.mean - mean[None]
        between = apart[..., :, None] * apart[..., None, :]
        each = [_as_mixture(x) for x in predictions]
        means = jnp.concatenate([x.parts.mean for x in each], axis=-2)
        covs = jnp.concatenate([x.parts.cov for x in each], axis=-3)
        weights = jnp.concatenate([x.log_weights for x in each], axis=-1) - jnp.log(len(each))
        cov = jnp.mean(stacked.cov + between, axis=0)
        return MixturePredictive(mean, cov, GaussianPredictive(means, covs), weights)
    if isinstance(stacked, BernoulliPredictive):
        return jax.tree.map(lambda x: x.mean(axis=0), stacked)
    logs = logsumexp(stacked.log_probs, axis=0) - jnp.log(len(predictions))
    total = -jnp.sum(jnp.exp(logs) * jnp.where(jnp.isfinite(logs), logs, 0), axis=-1)
    aleatoric = stacked.uncertainty.aleatoric.mean(axis=0)
    parts = TokenUncertainty(total, aleatoric, jnp.maximum(total - aleatoric, 0))
    return CategoricalPredictive(logs, parts)


def _as_mixture(prediction: GaussianPredictive) -> MixturePredictive:
    """A prediction, of one part if it is none."""
    if isinstance(prediction, MixturePredictive):
        return prediction
    mean, cov = prediction.mean, prediction.cov
    parts = GaussianPredictive(mean[..., None, :], cov[..., None, :, :])
    return MixturePredictive(mean, cov, parts, jnp.zeros_like(mean[..., :1]))
