"""Scores and calibration of class probabilities. Pure functions, safe under jit.

Labels out of range raise an error if their values are known; in compiled code they make the score NaN,
as does a NaN prediction.
"""

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.covariance.fields import check_array, known_values
from moment_jax.objectives.cubature import wide


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


def expected_calibration_error(probabilities: Array, labels: Array, num_bins: int = 15) -> Array:
    """Mean over the examples of |confidence - accuracy|, both the averages of an example's bin.

    Confidence is the probability of the most probable class. The bins ((b-1) / num_bins, b / num_bins]
    have equal width.
    """
    valid = _check_classes("expected_calibration_error", probabilities, labels)
    if num_bins < 1:
        raise ValueError(f"`expected_calibration_error` needs num_bins >= 1. Got {num_bins}.")
    (probabilities,) = wide(probabilities)  # sums of many examples are none in bfloat16
    confidence = jnp.max(probabilities, axis=1)
    bins = jnp.clip(jnp.ceil(confidence * num_bins).astype(jnp.int32) - 1, 0, num_bins - 1)
    excess = confidence - _hits(probabilities, labels, valid)
    return jnp.sum(jnp.abs(jax.ops.segment_sum(excess, bins, num_bins))) / len(excess)


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
