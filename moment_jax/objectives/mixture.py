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
    """Real targets, an equal mixture of K Gaussian predictions.

    Args:
      mean: (..., D).
      cov: covariance of the last axis, within and between the parts, (..., D, D).
      parts: the predictions, stacked: means (..., K, D), covariances (..., K, D, D).
    """

    parts: GaussianPredictive

    def quantile(self, p: Array | float) -> Array:
        """The p-quantile of each target, (..., D), by bisection between those of the parts."""
        each, mean, sd = self.parts.quantile(p), self.parts.mean, self.parts.sd

        def halved(_: Array, ends: tuple[Array, Array]) -> tuple[Array, Array]:
            middle = (ends[0] + ends[1]) / 2
            below = stats.norm.cdf(middle[..., None, :], mean, sd).mean(axis=-2) < p
            return jnp.where(below, middle, ends[0]), jnp.where(below, ends[1], middle)

        low, high = jax.lax.fori_loop(0, 40, halved, (each.min(axis=-2), each.max(axis=-2)))
        return (low + high) / 2

    def log_prob(self, y: Array) -> Array:
        """Log density of targets y (..., D), jointly over the last axis, (...), in nats."""
        y = jnp.broadcast_to(fitting(y, self.mean)[..., None, :], self.parts.mean.shape)
        each = self.parts.log_prob(y)
        return logsumexp(each, axis=-1) - jnp.log(each.shape[-1])

    def sample(self, key: Array) -> Array:
        """One draw of each target, (..., D), of the same part for all."""
        of_part, of_target = jax.random.split(key)
        part = jax.random.randint(of_part, (), 0, self.parts.mean.shape[-2])
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
        each = map(_parts, predictions)
        means, covs = zip(*((x.mean, x.cov) for x in each), strict=True)
        parts = GaussianPredictive(jnp.concatenate(means, axis=-2), jnp.concatenate(covs, axis=-3))
        return MixturePredictive(mean, jnp.mean(stacked.cov + between, axis=0), parts)
    if isinstance(stacked, BernoulliPredictive):
        return jax.tree.map(lambda x: x.mean(axis=0), stacked)
    logs = logsumexp(stacked.log_probs, axis=0) - jnp.log(len(predictions))
    total = -jnp.sum(jnp.exp(logs) * jnp.where(jnp.isfinite(logs), logs, 0), axis=-1)
    aleatoric = stacked.uncertainty.aleatoric.mean(axis=0)
    parts = TokenUncertainty(total, aleatoric, jnp.maximum(total - aleatoric, 0))
    return CategoricalPredictive(logs, parts)


def _parts(prediction: GaussianPredictive) -> GaussianPredictive:
    """The parts of a prediction, which may be one, on an axis before the targets'."""
    if isinstance(prediction, MixturePredictive):
        return prediction.parts
    return GaussianPredictive(prediction.mean[..., None, :], prediction.cov[..., None, :, :])
