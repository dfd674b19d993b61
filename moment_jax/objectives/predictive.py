"""Predictive distributions p(y* | x*), from the moments of a network's output (Eq. 1).

They are what a likelihood makes of the moments: pytrees, of one example or of any batch (...). Scores
of labels out of range raise an error if their values are known; in compiled code they are NaN, as they
are of a NaN prediction.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy import special, stats

from moment_jax.covariance.fields import need, register_fields
from moment_jax.covariance.numerics import safe_sqrt
from moment_jax.linalg import inverse_root
from moment_jax.objectives.checks import labels_of, of_label, over_batch
from moment_jax.objectives.cubature import gaussian_points, log_softmax_rows, wide
from moment_jax.xla import diagonal_of, inlined

JOINT_POINTS = 2048  # of the cubature for several labels


class Logits(NamedTuple):
    """Gaussian logits, in K equal parts."""

    mean: Array  # (..., K, C)
    cov: Array  # (..., K, C, C), or variances


@register_fields
@dataclasses.dataclass(frozen=True)
class CategoricalPredictive:
    """A class of C, with the log of its predictive probabilities."""

    log_probs: Array  # (..., C)
    entropy: Array  # of the prediction, nats, (...): `aleatoric` + `epistemic`
    aleatoric: Array  # the expected entropy of softmax(f), nats: what would remain if f were known
    epistemic: Array  # the mutual information of the class and the weights, nats
    logits: Logits | None  # None where there are covariances of more than 32 classes

    @property
    def probs(self) -> Array:
        """The predictive probabilities E[softmax(f)], (..., C)."""
        return jnp.exp(self.log_probs)

    @property
    def label(self) -> Array:
        """The likeliest class, (...) integers."""
        return jnp.argmax(self.log_probs, axis=-1)

    def log_prob(self, y: Array) -> Array:
        """Log probability of each class y (...), integers; NaN, or an error, for one out of range."""
        labels = labels_of("log_prob", y, self.log_probs)
        return over_batch(of_label, self.log_probs, labels)

    def joint_log_prob(self, labels: Array) -> Array:
        """Log probability of several labels (..., L) of one input together, (...), in nats.

        All of them see the same weights: log E[prod_l softmax(f)_l] over the logits f, by 2,048 points.
        ValueError for labels out of range, or for more than 32 classes but in `Diagonal`.
        """
        return self._over_logits("joint_log_prob", labels, lambda logs: logs)

    def expected_accuracy(self, y: Array) -> Array:
        """Probability that drawn weights give y (...) the largest logit, (...); else as above."""
        y = jnp.asarray(y)[..., None]
        return jnp.exp(self._over_logits("expected_accuracy", y, _likeliest))

    def _over_logits(self, name: str, labels: Array, scores: Callable[[Array], Array]) -> Array:
        """Log E[exp(sum of the scores of the labels)]; `scores` of log probabilities (P, C)."""
        if self.logits is None:
            raise ValueError(
                f"`{name}` needs at most 32 classes, whose logits are kept. Got "
                f"{self.log_probs.shape[-1]}. Use sampled networks, model.sample(key), or mj.Diagonal."
            )
        labels, (*lead, size) = jnp.asarray(labels), self.log_probs.shape
        like = jnp.broadcast_to(self.log_probs[..., None, :], (*lead, *labels.shape[-1:], size))

        def of_part(labels: Array, mean: Array, cov: Array) -> Array:
            logs = scores(log_softmax_rows(gaussian_points(mean, cov, JOINT_POINTS)))
            return of_label(logs.T, labels).sum(axis=0)

        def of_input(given: Any) -> Array:
            logs = jax.vmap(of_part, (None, 0, 0))(*given)
            return special.logsumexp(logs) - math.log(logs.size)

        given = labels_of(name, labels, like), *wide(*self.logits)
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[len(lead) :]), given)
        return jax.lax.map(of_input, flat, batch_size=64).reshape(lead)

    def sample(self, key: Array) -> Array:
        """One class for each prediction, (...) integers."""
        return jax.random.categorical(key, self.log_probs)


def _likeliest(logs: Array) -> Array:
    """0 for the likeliest class of each row (P, C), else -inf; NaN in a row of NaN."""
    first = jax.nn.one_hot(logs.argmax(axis=1), logs.shape[1], dtype=bool)
    return jnp.where(first, 0, -jnp.inf) + 0 * logs.max(axis=1, keepdims=True)


@register_fields
@dataclasses.dataclass(frozen=True)
class BernoulliPredictive:
    """Binary targets y_d, taken one by one."""

    probs: Array  # the predictive probabilities of y_d = 1, (..., D)
    complement: Array  # those of y_d = 0, which keep their digits near zero
    aleatoric: Array  # the expected entropy, nats: what would remain if the weights were known

    @property
    def label(self) -> Array:
        """The likelier value, (..., D) integers."""
        return (self.probs > self.complement).astype(jnp.int32)

    @property
    def entropy(self) -> Array:
        """The entropy of each prediction, nats."""
        yes, no = (special.xlogy(p, p) for p in (self.probs, self.complement))
        return -(yes + no)

    @property
    def epistemic(self) -> Array:
        """The mutual information of each target and the weights, nats."""
        return jnp.maximum(self.entropy - self.aleatoric, 0)

    def log_prob(self, y: Array) -> Array:
        """Log probability of targets y (..., D), from 0 to 1, summed over the last axis."""
        y, xlogy = _fitting(y, self.probs), special.xlogy
        return jnp.sum(xlogy(y, self.probs) + xlogy(1 - y, self.complement), axis=-1)

    def sample(self, key: Array) -> Array:
        """One target for each prediction, (..., D) integers."""
        return jax.random.bernoulli(key, self.probs).astype(jnp.int32)


@register_fields
@dataclasses.dataclass(frozen=True)
class GaussianPredictive:
    """Real targets y ~ N(mean, cov), noise included."""

    mean: Array  # (..., D)
    cov: Array  # of the last axis, (..., D, D)

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
        need("interval", 0 < level < 1, "a level between 0 and 1", level)
        return self.quantile(0.5 - level / 2), self.quantile(0.5 + level / 2)

    def log_prob(self, y: Array) -> Array:
        """Log density of targets y (..., D), jointly over the last axis, (...), in nats."""
        return over_batch(log_normal, _fitting(y, self.mean) - self.mean, self.cov)

    def sample(self, key: Array) -> Array:
        """One draw of each target, (..., D)."""
        return jax.random.multivariate_normal(key, self.mean, self.cov, method="svd")


@register_fields
@dataclasses.dataclass(frozen=True)
class MixturePredictive(GaussianPredictive):
    """Real targets, a mixture of K Gaussian predictions; `cov` is within and between them."""

    parts: GaussianPredictive  # means (..., K, D), covariances (..., K, D, D)
    log_weights: Array  # of the parts, (..., K)

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
        y = jnp.broadcast_to(_fitting(y, self.mean)[..., None, :], self.parts.mean.shape)
        return special.logsumexp(self.log_weights + self.parts.log_prob(y), axis=-1)

    def sample(self, key: Array) -> Array:
        """One draw of each target, (..., D), of the same part for all."""
        of_part, of_target = jax.random.split(key)
        # All rows have the same weights.
        weights = self.log_weights.reshape(-1, self.log_weights.shape[-1])[0]
        part = jax.random.categorical(of_part, weights)
        mean, cov = self.parts.mean[..., part, :], self.parts.cov[..., part, :, :]
        return GaussianPredictive(mean, cov).sample(of_target)


@inlined
def averaged(predictions: Sequence[Any]) -> Any:
    """The equal mixture of predictive distributions of one kind and shape.

    Of classes it is one of their kind again, in which what the parts disagree on is `epistemic`. Of real
    values it is a `MixturePredictive`.
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
        cov, parts = jnp.mean(stacked.cov + between, axis=0), GaussianPredictive(means, covs)
        return MixturePredictive(mean, cov, parts, weights)
    if isinstance(stacked, BernoulliPredictive):
        return jax.tree.map(lambda x: x.mean(axis=0), stacked)
    logs = special.logsumexp(stacked.log_probs, axis=0) - jnp.log(len(predictions))
    total = -jnp.sum(jnp.exp(logs) * jnp.where(jnp.isfinite(logs), logs, 0), axis=-1)
    aleatoric = stacked.aleatoric.mean(axis=0)
    epistemic = jnp.maximum(total - aleatoric, 0)
    each = [x.logits for x in predictions]
    logits = jax.tree.map(lambda *x: jnp.concatenate(x, axis=logs.ndim - 1), *each)
    return CategoricalPredictive(logs, total, aleatoric, epistemic, logits)


def _as_mixture(prediction: GaussianPredictive) -> MixturePredictive:
    """A prediction, of one part if it is none."""
    if isinstance(prediction, MixturePredictive):
        return prediction
    mean, cov = prediction.mean, prediction.cov
    parts = GaussianPredictive(mean[..., None, :], cov[..., None, :, :])
    return MixturePredictive(mean, cov, parts, jnp.zeros_like(mean[..., :1]))


@inlined
def log_normal(residual: Array, cov: Array) -> Array:
    """Log N(residual; 0, cov) of a vector (M,), with variances (M,) or a covariance (M, M)."""
    if cov.ndim == 1:
        log_det, quadratic = jnp.sum(jnp.log(cov)), jnp.sum(residual**2 / cov)
    else:
        root = inverse_root(cov)
        log_det = -2 * jnp.sum(jnp.log(diagonal_of(root)))
        quadratic = jnp.sum((root @ residual) ** 2)
    return -0.5 * (residual.size * math.log(2 * math.pi) + log_det + quadratic)


def _fitting(y: Array, like: Array) -> Array:
    """Targets in the shape of their predictions; (...) will do for (..., 1)."""
    y = jnp.asarray(y)
    if y.shape == like.shape[:-1] and like.shape[-1] == 1:
        y = y[..., None]
    rule = f"targets of the shape of their predictions, {like.shape}"
    need("log_prob", y.shape == like.shape, rule, y.shape)
    return y
