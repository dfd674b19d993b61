"""Gumbel draws, the Gumbel-max trick, its relaxation, and temperature schedules."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax
from jax import Array

from moment_jax.discrete.categorical import centred, check_categories


def gumbel(key: Array, shape: Sequence[int], dtype: jnp.dtype | type = jnp.float32) -> Array:
    """Independent draws of Gumbel(0, 1).

    Both tails are exact down to probabilities of about 1e-19, as the underlying uniform variables have
    64 bits. Plain float32 uniforms would cut the tails at 1e-7, and with them every category that is
    rarer. Half-precision draws are rounded from float32.

    Args:
      key: a JAX random key.
      shape: of the result.
      dtype: a floating-point type.

    Raises:
      TypeError: if dtype is not a floating-point type.

    Source: handwritten notes, g_i ~ Gumbel.
    """
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"`gumbel` needs a floating-point dtype, such as jnp.float32. Got {jnp.dtype(dtype)}."
        )
    fine = jnp.promote_types(dtype, jnp.float32)
    return jax.random.gumbel(key, tuple(shape), fine, mode="highest").astype(dtype)


def gumbel_max(key: Array, log_probs: Array) -> Array:
    """One draw of Categorical(pi) for every row: argmax_k (g_k + log pi_k), g_k ~ Gumbel(0, 1).

    Args:
      key: a JAX random key.
      log_probs: log pi, (..., K), normalised or not (no +inf). Categories of -inf are never drawn.
        Frequencies are exact down to probabilities of about 1e-19; rarer events do not happen.

    Returns:
      Integers (...,) in 0 .. K - 1; -1 for a row of -inf, which `jax.nn.one_hot` maps to zeros, as
      `gumbel_softmax` does.

    Raises:
      ValueError: if there is no category axis, or it is empty.

    Source: handwritten notes, z = argmax_i (g_i + log pi_i).

    >>> import jax, jax.numpy as jnp
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
      log_probs: log pi, (..., K), normalised or not (no +inf). Categories of -inf get exactly 0, and a
        gradient of exactly 0; a row of -inf gives zeros.
      temperature: tau, a positive scalar. Inside `jit` its value is unknown: anything below the root of
        the smallest number (1e-19 in float32), and NaN, counts as that root. The result is one-hot then.
      straight_through: return the one-hot vector of `gumbel_max` with the gradient of the relaxed draw,
        which is biased.

    Returns:
      (..., K), nonnegative, rows summing to one, in the dtype of log_probs.

    Raises:
      ValueError: if there is no category axis, or it is empty; if temperature is no scalar, or known and
        not positive and finite.

    Source: handwritten notes, z_i = softmax((g_i + log pi_i) / tau).
    """
    scores, possible = _perturbed("gumbel_softmax", key, log_probs)
    codes = "For draws of codes, use gumbel_max, or straight_through=True."
    tau = checked_temperature("gumbel_softmax", temperature, scores.dtype, codes)
    # Below -1e4 every exponential is 0; clipping keeps quotients by a tiny temperature finite.
    scaled = jnp.maximum(centred(scores, possible) / tau, -1e4)
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
    log_probs = check_categories(name, log_probs)
    possible = log_probs > -jnp.inf
    # Centred, so that large logits do not cost the noise its precision.
    logits = centred(log_probs, possible)
    noise = gumbel(key, logits.shape, logits.dtype)
    return jnp.where(possible, logits + noise, 0), possible


def _winner(scores: Array, possible: Array) -> Array:
    index = jnp.argmax(jnp.where(possible, scores, -jnp.inf), axis=-1)
    return jnp.where(jnp.any(possible, axis=-1), index, -1)


def checked_temperature(
    name: str, temperature: Array | float, dtype: jnp.dtype, instead: str
) -> Array:
    """The temperature; unknown values below the root of the smallest number count as that root."""
    if jnp.ndim(temperature) != 0:
        raise ValueError(
            f"`{name}` needs one temperature, a scalar. Got shape {jnp.shape(temperature)}. For "
            "several, use jax.vmap."
        )
    if not isinstance(temperature, jax.core.Tracer) and not 0 < float(temperature) < float("inf"):
        raise ValueError(
            f"`{name}` needs a temperature > 0, and finite. Got {float(temperature)}. {instead}"
        )
    lowest = float(jnp.finfo(dtype).tiny) ** 0.5
    tau = jnp.asarray(temperature, dtype)
    return jnp.where(tau > lowest, tau, lowest)


def exponential_annealing(start: float, floor: float, num_steps: int) -> optax.Schedule:
    """A temperature that falls geometrically from `start` to `floor` in `num_steps`, then stays.

    It is `optax.exponential_decay` parametrised by its two ends. Any Optax schedule may be used.

    Args:
      start: the temperature at step 0, positive.
      floor: the temperature from step num_steps on, positive and not above start.
      num_steps: at least 1.

    Returns:
      A function of the step.

    Raises:
      ValueError: if a number is out of range.

    >>> schedule = exponential_annealing(1.0, 0.25, 100)
    >>> [round(float(schedule(step)), 3) for step in (0, 50, 100, 1000)]
    [1.0, 0.5, 0.25, 0.25]
    """
    if not 0 < floor <= start < float("inf"):
        raise ValueError(
            f"`exponential_annealing` needs 0 < floor <= start. Got floor {floor} and start {start}."
        )
    if num_steps < 1:
        raise ValueError(f"`exponential_annealing` needs num_steps >= 1. Got {num_steps}.")
    return optax.exponential_decay(start, num_steps, floor / start, end_value=floor)
