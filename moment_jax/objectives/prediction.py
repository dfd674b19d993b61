"""Predictive distributions: what a likelihood makes of the moments of a network's output.

All are pytrees, of one example or of any batch (...).
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy import stats

from moment_jax.covariance.numerics import safe_sqrt
from moment_jax.objectives.moments import labels_of, of_label, over_batch
from moment_jax.objectives.predictive import TokenUncertainty
from moment_jax.xla import diagonal_of


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CategoricalPredictive:
    """A class of C, with the log of its predictive probabilities.

    Args:
      log_probs: (..., C).
      uncertainty: entropies in nats, (...) each.
    """

    log_probs: Array
    uncertainty: TokenUncertainty

    @property
    def probs(self) -> Array:
        """The predictive probabilities E[softmax(f)], (..., C)."""
        return jnp.exp(self.log_probs)

    @property
    def label(self) -> Array:
        """The likeliest class, (...) integers."""
        return jnp.argmax(self.log_probs, axis=-1)

    @property
    def entropy(self) -> Array:
        """The entropy of the prediction, nats: `aleatoric` + `epistemic`."""
        return self.uncertainty.total

    @property
    def aleatoric(self) -> Array:
        """The expected entropy of softmax(f), nats: what would remain if the weights were known."""
        return self.uncertainty.aleatoric

    @property
    def epistemic(self) -> Array:
        """The mutual information of the class and the weights, nats."""
        return self.uncertainty.epistemic

    def log_prob(self, y: Array) -> Array:
        """Log probability of each class y (...), integers; NaN, or an error, for one out of range."""
        labels = labels_of("log_prob", y, self.log_probs)
        return over_batch(of_label, self.log_probs, labels)

    def sample(self, key: Array) -> Array:
        """One class for each prediction, (...) integers."""
        return jax.random.categorical(key, self.log_probs)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BernoulliPredictive:
    """Binary targets y_d, taken one by one.

    Args:
      probs: the predictive probabilities of y_d = 1, (..., D).
      complement: those of y_d = 0, which keep their digits near zero.
      aleatoric: the expected entropy, nats: what would remain if the weights were known.
    """

    probs: Array
    complement: Array
    aleatoric: Array

    @property
    def label(self) -> Array:
        """The likelier value, (..., D) integers."""
        return (self.probs > self.complement).astype(jnp.int32)

    @property
    def entropy(self) -> Array:
        """The entropy of each prediction, nats."""
        yes, no = (jax.scipy.special.xlogy(p, p) for p in (self.probs, self.complement))
        return -(yes + no)

    @property
    def epistemic(self) -> Array:
        """The mutual information of each target and the weights, nats."""
        return jnp.maximum(self.entropy - self.aleatoric, 0)

    def log_prob(self, y: Array) -> Array:
        """Log probability of targets y (..., D), from 0 to 1, summed over the last axis."""
        y, xlogy = _fitting(y, self.probs), jax.scipy.special.xlogy
        return jnp.sum(xlogy(y, self.probs) + xlogy(1 - y, self.complement), axis=-1)

    def sample(self, key: Array) -> Array:
        """One target for each prediction, (..., D) integers."""
        return jax.random.bernoulli(key, self.probs).astype(jnp.int32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GaussianPredictive:
    """Real targets y ~ N(mean, cov), noise included.

    Args:
      mean: (..., D).
      cov: covariance of the last axis, (..., D, D).
    """

    mean: Array
    cov: Array

    @property
    def variance(self) -> Array:
        """The variance of each target, noise included, (..., D)."""
        return diagonal_of(self.cov)

    @property
    def sd(self) -> Array:
        """The standard deviation of each target, noise included, (..., D)."""
        return safe_sqrt(self.variance)

    def quantile(self, p: Array | float) -> Array:
        """The p-quantile of each target, (..., D)."""
        return self.mean + self.sd * stats.norm.ppf(p)

    def interval(self, level: float = 0.9) -> tuple[Array, Array]:
        """The central interval that holds each target with this probability, (..., D) each."""
        if not 0 < level < 1:
            raise ValueError(f"`interval` needs a level between 0 and 1. Got {level}.")
        half = self.sd * stats.norm.ppf(0.5 + level / 2)
        return self.mean - half, self.mean + half

    def log_prob(self, y: Array) -> Array:
        """Log density of targets y (..., D), jointly over the last axis, (...), in nats."""
        y = _fitting(y, self.mean)
        return jnp.asarray(stats.multivariate_normal.logpdf(y, self.mean, self.cov))

    def sample(self, key: Array) -> Array:
        """One draw of each target, (..., D)."""
        return jax.random.multivariate_normal(key, self.mean, self.cov, method="svd")


def _fitting(y: Array, like: Array) -> Array:
    """Targets in the shape of their predictions; (...) will do for (..., 1)."""
    y = jnp.asarray(y)
    if y.shape == like.shape[:-1] and like.shape[-1] == 1:
        y = y[..., None]
    if y.shape != like.shape:
        raise ValueError(
            f"`log_prob` needs targets of the shape of their predictions, {tuple(like.shape)}. Got "
            f"{tuple(y.shape)}."
        )
    return y
