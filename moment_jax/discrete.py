"""Draws of categorical variables: Gumbel-max and Gumbel-softmax.

Pure functions on log-probabilities (..., K), normalised or not; -inf is a category that cannot occur,
whose derivatives are zero. A row of -inf is no distribution: it gives zeros, never NaN. Both raise a
ValueError if there is no category axis, or it is empty.
"""

import math

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.covariance.fields import need

__all__ = ["gumbel_max", "gumbel_softmax"]


def gumbel_max(key: Array, log_probs: Array) -> Array:
    """One draw of Categorical(pi) for every row: argmax_k (g_k + log pi_k), g_k ~ Gumbel(0, 1).

    They are integers (...,), -1 for a row of -inf, which `jax.nn.one_hot` maps to zeros, as
    `gumbel_softmax` does. Categories of -inf are never drawn. Frequencies are exact down to
    probabilities of about 1e-19; rarer events do not happen. Source: handwritten notes.

    >>> gumbel_max(jax.random.key(0), jnp.array([[0.0, -jnp.inf], [-jnp.inf, -1e30]])).tolist()
    [0, 1]
    """
    return _winner(*_perturbed("gumbel_max", key, log_probs))


def gumbel_softmax(
    key: Array, log_probs: Array, temperature: Array | float, *, straight_through: bool = False
) -> Array:
    """A relaxed draw of Categorical(pi): softmax((g + log pi) / temperature).

    With the same key the noise is that of `gumbel_max`, so the limit for temperature -> 0 is the one-hot
    vector of that draw. For fixed noise it is differentiable in log_probs and in the temperature
    (pathwise gradients); gradients are noisier at lower temperatures.

    Args:
      key: a JAX random key.
      log_probs: log pi, (..., K), normalised or not (no +inf).
      temperature: tau, a positive scalar, else ValueError. Inside `jit` its value is unknown: anything
        below the root of the smallest number (1e-19 in float32), and NaN, counts as that root. The
        result is one-hot then.
      straight_through: return the one-hot vector of `gumbel_max` with the gradient of the relaxed draw,
        which is biased.

    Returns:
      (..., K), nonnegative, rows summing to one, in the dtype of log_probs. Source: handwritten notes.
    """
    scores, possible = _perturbed("gumbel_softmax", key, log_probs)
    codes = "For draws of codes, use gumbel_max, or straight_through=True."
    tau = checked_temperature("gumbel_softmax", temperature, scores.dtype, codes)
    # Below -1e4 every exponential is 0; clipping keeps quotients by a tiny temperature finite.
    scaled = jnp.maximum(_centred(scores, possible) / tau, -1e4)
    weights = jnp.where(possible, jnp.exp(scaled), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    relaxed = weights / jnp.where(total > 0, total, 1)
    if straight_through:
        hard = jax.nn.one_hot(_winner(scores, possible), scores.shape[-1], dtype=scores.dtype)
        # The difference is exactly zero, so the value is one-hot to the last bit.
        relaxed = hard + (relaxed - jax.lax.stop_gradient(relaxed))
    given = jnp.result_type(log_probs)
    return relaxed.astype(given) if jnp.issubdtype(given, jnp.floating) else relaxed


def _perturbed(name: str, key: Array, log_probs: Array) -> tuple[Array, Array]:
    """G + log pi (0 where impossible), and which categories are possible."""
    log_probs = jnp.asarray(log_probs)
    shape, rule = log_probs.shape, "log-probabilities of shape (..., K) with K >= 1 categories"
    need(name, shape and shape[-1], rule, shape)
    log_probs = log_probs.astype(jnp.promote_types(log_probs.dtype, jnp.float32))
    possible = log_probs > -jnp.inf
    # Centred, so that large logits do not cost the noise its precision.
    logits = _centred(log_probs, possible)
    # Uniforms of 32 bits would cut the tails at 1e-7, and with them every rarer category.
    noise = jax.random.gumbel(key, logits.shape, logits.dtype, mode="highest")
    return jnp.where(possible, logits + noise, 0), possible


def _winner(scores: Array, possible: Array) -> Array:
    index = jnp.argmax(jnp.where(possible, scores, -jnp.inf), axis=-1)
    return jnp.where(jnp.any(possible, axis=-1), index, -1)


def checked_temperature(
    name: str, temperature: Array | float, dtype: jnp.dtype, instead: str
) -> Array:
    """The temperature; unknown values below the root of the smallest number count as that root."""
    shape, mend = jnp.shape(temperature), "For several, use jax.vmap."
    need(name, shape == (), "one temperature, a scalar", f"shape {shape}", mend)
    known = isinstance(temperature, jax.core.Tracer) or 0 < float(temperature) < math.inf
    need(name, known, "a temperature > 0, and finite", temperature, instead)
    lowest = float(jnp.finfo(dtype).tiny) ** 0.5
    tau = jnp.asarray(temperature, dtype)
    return jnp.where(tau > lowest, tau, lowest)


def _centred(logits: Array, possible: Array) -> Array:
    """Logits minus the largest possible one; 0 where not possible."""
    largest = jnp.max(logits, axis=-1, keepdims=True, where=possible, initial=-jnp.inf)
    largest = jax.lax.stop_gradient(jnp.where(largest > -jnp.inf, largest, 0))
    return jnp.where(possible, jnp.where(possible, logits, 0) - largest, 0)
