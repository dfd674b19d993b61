"""How good predictions are: proper scores and calibration. Pure functions, safe under jit."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array


class ReliabilityCurve(NamedTuple):
    """Confidence against accuracy in bins of equal width: (num_bins,) each, zero where empty."""

    confidence: Array
    accuracy: Array
    num_examples: Array


def negative_log_likelihood(probabilities: Array, labels: Array) -> Array:
    """Mean of -log p(label), in nats for each example.

    Args:
      probabilities: (N, C), rows sum to one. Held above the smallest normal number, so that a label
        thought impossible costs 87 nats in float32, and not infinitely many.
      labels: (N,) integers in 0 .. C-1.

    Raises:
      ValueError: if shapes do not fit, here and in the metrics below.
    """
    _check_classes("negative_log_likelihood", probabilities, labels)
    chosen = jnp.take_along_axis(probabilities, labels[:, None], axis=1)[:, 0]
    return -jnp.mean(jnp.log(jnp.maximum(chosen, jnp.finfo(chosen.dtype).tiny)))


def accuracy(probabilities: Array, labels: Array) -> Array:
    """Share of examples whose most probable class (the first of equals) is the label."""
    _check_classes("accuracy", probabilities, labels)
    hits = jnp.argmax(probabilities, axis=1) == labels
    return jnp.mean(hits.astype(probabilities.dtype))


def brier_score(probabilities: Array, labels: Array) -> Array:
    """Mean over the examples of sum_c (p_c - [label = c])^2.

    This is the multi-class convention, from 0 to 2: with two classes, twice the binary score.
    """
    _check_classes("brier_score", probabilities, labels)
    truth = jax.nn.one_hot(labels, probabilities.shape[1], dtype=probabilities.dtype)
    return jnp.mean(jnp.sum((probabilities - truth) ** 2, axis=1))


def reliability_curve(probabilities: Array, labels: Array, num_bins: int = 15) -> ReliabilityCurve:
    """Mean confidence, accuracy and number of the examples in each bin of confidence.

    Confidence is the probability of the most probable class. The bins ((b-1) / num_bins, b /
    num_bins] have equal width.
    """
    _check_classes("reliability_curve", probabilities, labels)
    if num_bins < 1:
        raise ValueError(f"`reliability_curve` needs num_bins >= 1. Got {num_bins}.")
    confidence = jnp.max(probabilities, axis=1)
    hits = (jnp.argmax(probabilities, axis=1) == labels).astype(confidence.dtype)
    bins = jnp.clip(jnp.ceil(confidence * num_bins).astype(jnp.int32) - 1, 0, num_bins - 1)
    values = jnp.stack([confidence, hits, jnp.ones_like(confidence)], axis=1)
    sums = jax.ops.segment_sum(values, bins, num_segments=num_bins)
    count = sums[:, 2]
    means = sums[:, :2] / jnp.maximum(count, 1)[:, None]
    return ReliabilityCurve(means[:, 0], means[:, 1], count)


def expected_calibration_error(probabilities: Array, labels: Array, num_bins: int = 15) -> Array:
    """Mean over the examples of |confidence - accuracy| of their bin (see `reliability_curve`)."""
    curve = reliability_curve(probabilities, labels, num_bins)
    gap = jnp.abs(curve.confidence - curve.accuracy)
    return jnp.sum(gap * curve.num_examples) / probabilities.shape[0]


def gaussian_negative_log_likelihood(mean: Array, variance: Array, targets: Array) -> Array:
    """Mean over all entries of -log N(target; mean, variance), in nats; arrays of one shape."""
    _check_same("gaussian_negative_log_likelihood", mean, variance, targets)
    quadratic = (targets - mean) ** 2 / variance
    return 0.5 * jnp.mean(math.log(2 * math.pi) + jnp.log(variance) + quadratic)


def gaussian_crps(mean: Array, variance: Array, targets: Array) -> Array:
    """Continuous ranked probability score of Gaussian predictions, mean over all entries.

    In the units of the targets: the integral over x of (F(x) - [x >= target])^2, F the predicted
    distribution function. With z = (target - mean) / sd it is sd (z (2 Phi(z) - 1) + 2 phi(z) - 1 /
    sqrt(pi)), and |target - mean| where the variance is zero, also in its derivatives (that by the
    variance is zero there). Lower is better; a tail costs less than in the negative log-likelihood.

    Args:
      mean: any shape.
      variance: the same shape, not negative.
      targets: the same shape.

    Raises:
      ValueError: if the shapes differ.

    Source: Gneiting and Raftery (2007), Strictly proper scoring rules, Eq. 21 (with the sign turned).

    >>> import jax.numpy as jnp
    >>> mean, target = jnp.zeros(2), jnp.array([0.0, 3.0])
    >>> round(float(gaussian_crps(mean, jnp.ones(2), target)), 3)
    1.335
    >>> float(gaussian_crps(mean, jnp.zeros(2), target))
    1.5
    """
    _check_same("gaussian_crps", mean, variance, targets)
    known = variance <= 0
    sd = jnp.sqrt(jnp.where(known, 1, variance))
    error = targets - mean
    z = error / sd
    norm = jax.scipy.stats.norm
    score = sd * (z * (2 * norm.cdf(z) - 1) + 2 * norm.pdf(z) - 1 / math.sqrt(math.pi))
    return jnp.mean(jnp.where(known, jnp.abs(error), score))


def interval_coverage(mean: Array, variance: Array, targets: Array, level: float = 0.95) -> Array:
    """Share of the targets in the central Gaussian interval that should hold `level` of them."""
    _check_same("interval_coverage", mean, variance, targets)
    if not 0 < level < 1:
        raise ValueError(f"`interval_coverage` needs 0 < level < 1. Got {level}.")
    width = jax.scipy.special.ndtri(jnp.asarray((1 + level) / 2, mean.dtype))
    inside = jnp.abs(targets - mean) <= width * jnp.sqrt(variance)
    return jnp.mean(inside.astype(mean.dtype))


def _check_classes(name: str, probabilities: Array, labels: Array) -> None:
    if probabilities.ndim != 2 or tuple(labels.shape) != (probabilities.shape[0],):
        raise ValueError(
            f"`{name}` needs probabilities (N, C) and labels (N,). Got "
            f"{tuple(probabilities.shape)} and {tuple(labels.shape)}. For one-hot labels, pass "
            "jnp.argmax(labels, axis=1)."
        )
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(f"`{name}` needs integer labels. Got {labels.dtype}.")


def _check_same(name: str, mean: Array, variance: Array, targets: Array) -> None:
    shapes = [tuple(array.shape) for array in (mean, variance, targets)]
    if len(set(shapes)) != 1:
        raise ValueError(
            f"`{name}` needs mean, variance and targets of one shape. Got {shapes[0]}, {shapes[1]} "
            f"and {shapes[2]}."
        )
