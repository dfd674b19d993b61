"""Categorical distributions by their log-probabilities, and those of random logits.

A log-probability of -inf is a category that cannot occur. A row of -inf is no distribution; it gives
zeros (and log-probabilities of -inf), never NaN.
"""

import math

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.covariance import Covariance
from moment_jax.layers.ends import softmax
from moment_jax.layers.params import S


def check_categories(name: str, log_probs: Array) -> Array:
    """`log_probs` in float32 at least; ValueError unless the last axis has a category."""
    log_probs = jnp.asarray(log_probs)
    if log_probs.ndim == 0 or log_probs.shape[-1] == 0:
        raise ValueError(
            f"`{name}` needs log-probabilities of shape (..., K) with K >= 1 categories. Got "
            f"{tuple(log_probs.shape)}."
        )
    return log_probs.astype(jnp.promote_types(log_probs.dtype, jnp.float32))


def log_probabilities(logits: Array) -> Array:
    """Normalised log-probabilities, exact from 0 down to -inf.

    Args:
      logits: (..., K), unnormalised; -inf for a category that cannot occur.

    Returns:
      (..., K): logits - logsumexp(logits), exactly -inf for a category that cannot occur. Derivatives
      are finite, and zero there.

    Raises:
      ValueError: if there is no category axis, or it is empty.

    >>> import jax.numpy as jnp
    >>> log_probabilities(jnp.array([5.0, -jnp.inf, -1e6])).tolist()
    [0.0, -inf, -1000005.0]
    """
    logits = check_categories("log_probabilities", logits)
    possible = logits > -jnp.inf
    shifted = centred(logits, possible)
    total = jnp.sum(jnp.where(possible, jnp.exp(shifted), 0), axis=-1, keepdims=True)
    # The largest term is exp(0) = 1, so the sum is at least 1 unless nothing is possible.
    return jnp.where(possible, shifted - jnp.log(jnp.maximum(total, 1)), -jnp.inf)


def centred(logits: Array, possible: Array) -> Array:
    """Logits minus the largest possible one; 0 where not possible."""
    largest = jnp.max(logits, axis=-1, keepdims=True, where=possible, initial=-jnp.inf)
    largest = jax.lax.stop_gradient(jnp.where(largest > -jnp.inf, largest, 0))
    return jnp.where(possible, jnp.where(possible, logits, 0) - largest, 0)


def categorical_kl(log_probs: Array, prior_log_probs: Array | None = None) -> Array:
    """KL(p || prior) = sum_k p_k (log p_k - log prior_k), in nats, with 0 log 0 = 0.

    Args:
      log_probs: (..., K), normalised or not.
      prior_log_probs: broadcastable to (..., K), normalised or not; None for the uniform distribution
        over all K categories.

    Returns:
      (...,), not negative; inf if p_k > 0 where the prior is 0. Derivatives are finite everywhere, and
      zero with respect to entries of -inf.

    Raises:
      ValueError: if there is no category axis, or it is empty, or the two have different sizes.

    >>> import jax.numpy as jnp
    >>> round(float(categorical_kl(jnp.array([0.0, -jnp.inf]))), 6)  # log 2
    0.693147
    """
    log_probs = log_probabilities(log_probs)
    size = log_probs.shape[-1]
    if prior_log_probs is None:
        prior = jnp.full((size,), -math.log(size), log_probs.dtype)
    else:
        prior = log_probabilities(prior_log_probs)
        if prior.shape[-1] != size:
            raise ValueError(
                f"`categorical_kl` needs as many categories in the prior, {size}. Got one of shape "
                f"{tuple(prior.shape)}."
            )
    prior, log_probs = jnp.broadcast_arrays(prior, log_probs)
    possible, allowed = log_probs > -jnp.inf, prior > -jnp.inf
    both = possible & allowed
    ratio = jnp.where(both, log_probs, 0) - jnp.where(both, prior, 0)
    probs = jnp.where(both, jnp.exp(jnp.where(both, log_probs, 0)), 0)
    # Rounding may leave a sum just below zero.
    total = jnp.sum(probs * ratio, axis=-1)
    total = jnp.where(total < 0, 0, total)
    forbidden = jnp.any(possible & ~allowed & (jnp.exp(log_probs) > 0), axis=-1)
    return jnp.where(forbidden, jnp.inf, total)


def categorical_entropy(log_probs: Array) -> Array:
    """Entropy -sum_k p_k log p_k of rows (..., K), normalised or not, in nats: (...,)."""
    log_probs = log_probabilities(log_probs)
    possible = log_probs > -jnp.inf
    safe = jnp.where(possible, log_probs, 0)
    return -jnp.sum(jnp.where(possible, jnp.exp(safe) * safe, 0), axis=-1)


def perplexity(log_probs: Array) -> Array:
    """Exp of the entropy, (..., K) -> (...,): the effective number of categories."""
    return jnp.exp(categorical_entropy(log_probs))


def code_usage(codes: Array, num_codes: int) -> Array:
    """The relative frequency of each code among `codes`.

    `perplexity(jnp.log(code_usage(codes, K)))` is the effective number of codes in use.

    Args:
      codes: integers of any shape; those outside 0 .. num_codes - 1 (such as the -1 of an impossible
        row) are not counted.
      num_codes: K.

    Returns:
      (K,), summing to one; zeros if there is nothing to count.

    Raises:
      ValueError: if num_codes < 1. TypeError: if the codes are not integers.
    """
    if num_codes < 1:
        raise ValueError(f"`code_usage` needs num_codes >= 1. Got {num_codes}.")
    codes = jnp.asarray(codes)
    if not jnp.issubdtype(codes.dtype, jnp.integer):
        raise TypeError(f"`code_usage` needs integer codes. Got {codes.dtype}.")
    # One-hot rows ignore codes out of range; with indexing, -1 would count as the last code.
    counts = jnp.sum(jax.nn.one_hot(codes.reshape(-1), num_codes), axis=0)
    return counts / jnp.maximum(jnp.sum(counts), 1)


def category_moments(mean: Array, cov: S) -> tuple[Array, S]:
    """Mean and covariance of pi = softmax(logits), row by row: `mj.softmax`.

    A variable z_t | pi_t ~ Categorical(pi_t) with random pi_t is distributed as Categorical(E[pi_t]), so
    one draw needs only the mean. The covariance matters if several draws, or several rows, share pi.

    Args:
      mean: E[logits], (T, K); -inf for a category that cannot occur.
      cov: covariance of the logits, a structure of shape (T, K).

    Returns:
      Mean (T, K), rows summing to one, and covariance of pi in the same structure.
    """
    return softmax(mean, cov)


def log_category_probabilities(mean: Array, cov: Covariance) -> Array:
    """Log E[pi], (T, K), normalised: the distribution of z under random logits, for `gumbel_softmax`.

    Errors are those of `mj.softmax` (0.5 %, 4 % and 10 % of E[pi] at a logit sd of 1, 2 and 3). Results
    are -inf exactly where the mean is; others are at least the logarithm of the smallest normal number.
    """
    probs, _ = softmax(mean, cov)
    log_probs = jnp.log(jnp.maximum(probs, jnp.finfo(probs.dtype).tiny))
    return log_probabilities(jnp.where(mean > -jnp.inf, log_probs, -jnp.inf))
