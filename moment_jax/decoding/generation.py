"""Decoding token by token: greedily, or by draws from the predictive distribution."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from moment_jax.decoding import checks
from moment_jax.decoding.checks import State, Step
from moment_jax.discrete import gumbel_max
from moment_jax.objectives.uncertainty import TokenUncertainty, probabilities_with_uncertainty

Array = jax.Array
Choice = Callable[[Array, Array], Array]  # position, log-probabilities (B, V) -> tokens (B,) or -1


class Decoded(NamedTuple):
    """One sequence for each row."""

    tokens: Array  # (B, length) int32, the end token among them, padding after it
    log_probs: Array  # (B,), the sum of the tokens' predictive log-probabilities, in nats
    uncertainty: TokenUncertainty  # (B, length) each, in nats, of the prediction of each token


def greedy(
    step: Step,
    state: State,
    first_tokens: Array,
    length: int,
    *,
    end: int | None = None,
    pad: int = -1,
    num_points: int | None = None,
) -> Decoded:
    """The likeliest token of the predictive distribution, again and again, for every row.

    Args:
      step: (state, tokens (B,)) -> moments of the next logits and the state; see this package.
      state: a pytree of arrays, each with a leading axis B.
      first_tokens: integers (B,), that which each sequence begins with; not among the results. Values
        are not checked: what a token that does not exist means is up to the step.
      length: number of tokens to produce.
      end: the token after which a row emits nothing but padding; None for none. The step goes on to see
        a finished row's last token.
      pad: what a finished row emits; the step never sees it.
      num_points: points of the integral over the logits; None for the default of
        `mj.objectives.class_probabilities`.

    Returns:
      Tokens, log-probabilities and uncertainties. Of equal probabilities the first token counts. Padding
      has log-probability and uncertainty 0. A row for which every token is masked finishes there, with
      padding and a log-probability of -inf.

    Raises:
      ValueError: if length < 1, or there is no token `end`, or shapes do not fit, or the state comes
        back in others.
      TypeError: if tokens are not integers, or length, end or pad are not Python ints.

    >>> import jax.numpy as jnp
    >>> def step(state, tokens):  # a token is followed by the next one, almost surely
    ...     mean = 9.0 * jnp.eye(3)[(tokens + 1) % 3]
    ...     return mean, jnp.ones_like(mean), state
    >>> greedy(step, (), jnp.array([0, 1]), 3, end=0).tokens.tolist()
    [[1, 2, 0], [2, 0, -1]]
    """

    def likeliest(_: Array, log_probs: Array) -> Array:
        return jnp.where(jnp.any(log_probs > -jnp.inf, axis=1), jnp.argmax(log_probs, axis=1), -1)

    return _generate("greedy", likeliest, step, state, first_tokens, length, end, pad, num_points)


def sample(
    key: Array,
    step: Step,
    state: State,
    first_tokens: Array,
    length: int,
    *,
    temperature: Array | float = 1.0,
    end: int | None = None,
    pad: int = -1,
    num_points: int | None = None,
) -> Decoded:
    """Sequences drawn token by token from the predictive distribution (Gumbel-max), one for each row.

    Each token is drawn from the marginal E[softmax(logits)] given the tokens before it: the weights are
    averaged anew at each token, and no draw of them is shared by a sequence. To see what one network
    would say, draw its weights (`mj.nn` modules' `sample`) and give a step with zero covariance.

    Args:
      key: a JAX random key; the draws of a longer sequence begin with those of a shorter one.
      step: as for `greedy`.
      state: as for `greedy`.
      first_tokens: as for `greedy`.
      length: number of tokens to produce.
      temperature: tokens are drawn with probabilities proportional to p^(1 / temperature): a positive
        scalar. Inside `jit`, where its value is not known, anything not above the root of the smallest
        number (1e-19 in float32; NaN too) counts as that: the likeliest tokens are drawn then.
      end: as for `greedy`.
      pad: as for `greedy`.
      num_points: as for `greedy`.

    Returns:
      Tokens, log-probabilities and uncertainties, both of the predictive distribution itself (that of
      temperature 1); padding and fully masked rows are as for `greedy`.

    Raises:
      ValueError: as for `greedy`, and for a temperature that is known and not positive and finite.
      TypeError: as for `greedy`.

    Source: handwritten notes, z = argmax_i (g_i + log pi_i).
    """
    checks.check_finite("sample", "temperature", temperature, positive=True)

    def drawn(position: Array, log_probs: Array) -> Array:
        largest = jnp.max(log_probs, axis=1, keepdims=True)
        # Relative to the largest, no quotient by a small temperature makes all of them -inf.
        relative = log_probs - jnp.where(largest > -jnp.inf, largest, 0)
        lowest = float(jnp.finfo(log_probs.dtype).tiny) ** 0.5
        tau = jnp.asarray(temperature, log_probs.dtype)
        tau = jnp.where(tau > lowest, tau, lowest)
        return gumbel_max(jax.random.fold_in(key, position), relative / tau)

    return _generate("sample", drawn, step, state, first_tokens, length, end, pad, num_points)


def _generate(
    name: str,
    choose: Choice,
    step: Step,
    state: State,
    first_tokens: Array,
    length: int,
    end: int | None,
    pad: int,
    num_points: int | None,
) -> Decoded:
    tokens = checks.as_tokens(name, first_tokens, 1)
    num_rows = tokens.shape[0]
    state = checks.as_state(name, state, num_rows)
    length = checks.whole_number(name, "length", length, 1)
    pad = checks.whole_number(name, "pad", pad, -(2**31))
    size, dtype = checks.check_step(name, step, state, tokens)
    end = checks.check_end(name, end, size)
    predict = jax.vmap(partial(probabilities_with_uncertainty, num_points=num_points))
    rows = jnp.arange(num_rows)

    def advance(carry: tuple, position: Array) -> tuple:
        state, last, finished, total = carry
        mean, cov, state = step(state, last)
        log_probs, uncertainty = predict(mean, cov)
        chosen = choose(position, log_probs)
        stuck = chosen < 0
        chosen = jnp.where(stuck, 0, chosen).astype(jnp.int32)
        gain = jnp.where(finished, 0, log_probs[rows, chosen])
        emitted = jnp.where(finished | stuck, pad, chosen)
        uncertainty = jax.tree.map(lambda part: jnp.where(finished, 0, part), uncertainty)
        last = jnp.where(finished | stuck, last, chosen)
        finished = finished | stuck if end is None else finished | stuck | (chosen == end)
        return (state, last, finished, total + gain), (emitted, uncertainty)

    start = (state, tokens, jnp.zeros(num_rows, bool), jnp.zeros(num_rows, dtype))
    by_position: tuple[Array, TokenUncertainty]
    carry, by_position = jax.lax.scan(advance, start, jnp.arange(length))
    emitted, uncertainty = jax.tree.map(jnp.transpose, by_position)
    return Decoded(emitted, carry[-1], uncertainty)
