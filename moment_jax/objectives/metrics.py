"""Proper scores and calibration of predictions. Pure functions, safe under jit.

Labels out of range and negative variances raise an error if their values are known; in compiled code
they make the score NaN, as does a NaN prediction.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.covariance.fields import check_array, check_variances, known_values
from moment_jax.objectives.cubature import wide


class ReliabilityCurve(NamedTuple):
    """Confidence against accuracy in bins of equal width: (num_bins,) each, zero where empty."""

    confidence: Array
    accuracy: Array
    num_examples: Array


def negative_log_likelihood(probabilities: Array, labels: Array) -> Array:
    """Mean of -log p(label) over the examples, in nats.

    Args:
      probabilities: (N, C), rows sum to one. Clipped at the smallest normal number, so that a label of
        probability zero costs 87 nats in float32 instead of infinity.
      labels: (N,) integers in 0 .. C-1.

    Raises:
      ValueError: if shapes do not fit, there is no example, or a known label is out of range; likewise
        in the metrics below. TypeError: if the probabilities are not floating-point numbers.
    """
    valid = _check_classes("negative_log_likelihood", probabilities, labels)
    chosen = jnp.take_along_axis(probabilities, labels[:, None], axis=1)[:, 0]
    chosen = jnp.where(valid, chosen, jnp.nan)
    return -jnp.mean(jnp.log(jnp.maximum(chosen, jnp.finfo(chosen.dtype).tiny)))


def accuracy(probabilities: Array, labels: Array) -> Array:
    """Share of examples whose most probable class (the first one in a tie) is the label."""
    valid = _check_classes("accuracy", probabilities, labels)
    return jnp.mean(_hits(probabilities, labels, valid))


def brier_score(probabilities: Array, labels: Array) -> Array:
    """Mean over the examples of sum_c (p_c - [label = c])^2.

    This is the multi-class convention, from 0 to 2; with two classes, twice the binary score.
    """
    valid = _check_classes("brier_score", probabilities, labels)
    truth = jax.nn.one_hot(labels, probabilities.shape[1], dtype=probabilities.dtype)
    truth = jnp.where(valid[:, None], truth, jnp.nan)
    return jnp.mean(jnp.sum((probabilities - truth) ** 2, axis=1))


def reliability_curve(probabilities: Array, labels: Array, num_bins: int = 15) -> ReliabilityCurve:
    """Mean confidence, accuracy and number of the examples in each bin of confidence.

    Confidence is the probability of the most probable class. The bins ((b-1) / num_bins, b /
    num_bins] have equal width.
    """
    valid = _check_classes("reliability_curve", probabilities, labels)
    if num_bins < 1:
        raise ValueError(f"`reliability_curve` needs num_bins >= 1. Got {num_bins}.")
    (probabilities,) = wide(probabilities)  # counts beyond 256 are none in bfloat16
    confidence = jnp.max(probabilities, axis=1)
    hits = _hits(probabilities, labels, valid)
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


def gaussian_negative_log_likelihood(targets: Array, *, mean: Array, variance: Array) -> Array:
    """Mean over all entries of -log N(target; mean, variance), in nats; arrays of one shape."""
    _check_same("gaussian_negative_log_likelihood", targets, mean, variance)
    quadratic = (targets - mean) ** 2 / variance
    return 0.5 * jnp.mean(math.log(2 * math.pi) + jnp.log(variance) + quadratic)


def gaussian_crps(targets: Array, *, mean: Array, variance: Array) -> Array:
    """Continuous ranked probability score of Gaussian predictions, mean over all entries.

    In the units of the targets: the integral over x of (F(x) - [x >= target])^2, F the predicted
    distribution function. With z = (target - mean) / sd it is sd (z (2 Phi(z) - 1) + 2 phi(z) - 1 /
    sqrt(pi)). Where the variance is zero it is |target - mean|, with a zero derivative in the variance.
    Lower is better; outliers cost less than in the negative log-likelihood.

    Args:
      targets: any shape.
      mean: the same shape.
      variance: the same shape, not negative.

    Raises:
      ValueError: if the shapes differ, there is no target, or a known variance is negative; likewise in
        the other two Gaussian scores. TypeError: if the moments are not floating-point numbers.

    Source: Gneiting and Raftery (2007), Strictly proper scoring rules, Eq. 21 (with the sign turned).

    >>> import jax.numpy as jnp
    >>> mean, target = jnp.zeros(2), jnp.array([0.0, 3.0])
    >>> round(float(gaussian_crps(target, mean=mean, variance=jnp.ones(2))), 3)
    1.335
    >>> float(gaussian_crps(target, mean=mean, variance=jnp.zeros(2)))
    1.5
    """
    _check_same("gaussian_crps", targets, mean, variance)
    known = variance == 0
    sd = jnp.sqrt(jnp.where(known, 1, variance))
    error = targets - mean
    z = error / sd
    norm = jax.scipy.stats.norm
    score = sd * (z * (2 * norm.cdf(z) - 1) + 2 * norm.pdf(z) - 1 / math.sqrt(math.pi))
    return jnp.mean(jnp.where(known, jnp.abs(error), score))


def interval_coverage(
    targets: Array, *, mean: Array, variance: Array, level: float = 0.95
) -> Array:
    """Share of the targets inside the central Gaussian interval of probability `level`."""
    _check_same("interval_coverage", targets, mean, variance)
    if not 0 < level < 1:
        raise ValueError(f"`interval_coverage` needs 0 < level < 1. Got {level}.")
    width = jax.scipy.special.ndtri(jnp.asarray((1 + level) / 2, mean.dtype))
    room = width * jnp.sqrt(variance) - jnp.abs(targets - mean)
    return jnp.mean(jnp.where(jnp.isnan(room), room, room >= 0))


def _hits(probabilities: Array, labels: Array, valid: Array) -> Array:
    """1 where the most probable class is the label, else 0, (N,); NaN where either is invalid."""
    hits = (jnp.argmax(probabilities, axis=1) == labels).astype(probabilities.dtype)
    return jnp.where(valid & ~jnp.isnan(jnp.max(probabilities, axis=1)), hits, jnp.nan)


def _check_classes(name: str, probabilities: Array, labels: Array) -> Array:
    """Check the arguments; return which labels are in range, (N,)."""
    check_array(name, probabilities)
    if not hasattr(labels, "shape"):
        raise TypeError(f"`{name}` needs arrays. Got {type(labels).__name__}. Use jnp.asarray.")
    if probabilities.ndim != 2 or tuple(labels.shape) != (probabilities.shape[0],):
        raise ValueError(
            f"`{name}` needs probabilities (N, C) and labels (N,). Got "
            f"{tuple(probabilities.shape)} and {tuple(labels.shape)}. For one-hot labels, pass "
            "jnp.argmax(labels, axis=1)."
        )
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(f"`{name}` needs integer labels. Got {labels.dtype}.")
    size, known = probabilities.shape[1], known_values(labels)
    if labels.shape[0] == 0:
        raise ValueError(f"`{name}` needs at least one example. Got {tuple(probabilities.shape)}.")
    if known is not None and not (known.min() >= 0 and known.max() < size):
        raise ValueError(
            f"`{name}` needs labels from 0 to {size - 1}, the columns of the probabilities. Got "
            f"{known.min()} to {known.max()}. Leave out unlabelled examples."
        )
    return (labels >= 0) & (labels < size)


def _check_same(name: str, targets: Array, mean: Array, variance: Array) -> None:
    for moment in (mean, variance):
        check_array(name, moment)
    shapes = [jnp.shape(array) for array in (targets, mean, variance)]
    if len(set(shapes)) != 1:
        raise ValueError(
            f"`{name}` needs targets, mean and variance of one shape. Got {shapes[0]}, {shapes[1]} "
            f"and {shapes[2]}."
        )
    if 0 in shapes[0]:
        raise ValueError(f"`{name}` needs at least one target. Got {shapes[0]}.")
    check_variances(name, variance)
