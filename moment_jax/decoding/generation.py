"""Greedy decoding, and sampling from the predictive distribution."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.decoding import checks
from moment_jax.decoding.checks import State, Step
from moment_jax.discrete import gumbel_max
from moment_jax.discrete.sampling import checked_temperature
from moment_jax.objectives.uncertainty import TokenUncertainty, probabilities_with_uncertainty

Choice = Callable[[Array, Array], Array]  # position, log-probabilities (B, V) -> tokens (B,) or -1


class Decoded(NamedTuple):
    """One sequence per row."""

    tokens: Array  # (B, length) int32, with the end token, then padding of -1
    log_probs: Array  # (B,), the sum of the tokens' predictive log-probabilities, in nats
    uncertainty: TokenUncertainty  # (B, length) each, in nats, of each token's prediction


def greedy(
    step: Step,
    state: State,
    first_tokens: Array,
    length: int,
    *,
    end: int | None = None,
    num_points: int | None = None,
) -> Decoded:
    """The likeliest token of the predictive distribution at each position, for every row.

    Args:
      step: (state, tokens (B,)) -> moments of the next logits and the state; see this package.
      state: a pytree of arrays, each with a leading axis B.
      first_tokens: integers (B,), the tokens before each sequence, not among the results. Their values
        are not checked.
      length: number of tokens to produce.
      end: the token after which a row is padding, -1; None for none. The step keeps seeing a finished
        row's last token.
      num_points: points of the integral over the logits; None for the default of
        `mj.objectives.class_probabilities`.

    Returns:
      Tokens, log-probabilities and uncertainties. Ties go to the token that comes first. Padding has
      log-probability and uncertainty 0. A row whose tokens are all masked finishes there, with padding
      and a log-probability of -inf.

    Raises:
      ValueError: if length < 1, or there is no token `end`, or shapes do not fit, or the state changes
        its shapes.
      TypeError: if tokens are not integers, or length or end are not Python ints.

    >>> import jax.numpy as jnp
    >>> def step(state, tokens):  # a token is followed by the next one, almost surely
    ...     mean = 9.0 * jnp.eye(3)[(tokens + 1) % 3]
    ...     return mean, jnp.ones_like(mean), state
    >>> greedy(step, (), jnp.array([0, 1]), 3, end=0).tokens.tolist()
    [[1, 2, 0], [2, 0, -1]]
    """

    def likeliest(_: Array, log_probs: Array) -> Array:
        return jnp.where(jnp.any(log_probs > -jnp.inf, axis=1), jnp.argmax(log_probs, axis=1), -1)

    return _generate("greedy", likeliest, step, state, first_tokens, length, end, num_points)


def sample(
    key: Array,
    step: Step,
    state: State,
    first_tokens: Array,
    length: int,
    *,
    temperature: Array | float = 1.0,
    end: int | None = None,
    num_points: int | None = None,
) -> Decoded:
    """Sequences drawn token by token from the predictive distribution (Gumbel-max), one per row.

    Each token is drawn from the marginal E[softmax(logits)] given the tokens before it: weights are
    averaged anew at each token, and a sequence shares no draw of them. For the sequences of one network,
    draw its weights (`sample` of `mj.nn` modules) and use a step with zero covariance.

    Arguments are those of `greedy`, a JAX random key, and a temperature, a positive scalar: tokens are
    drawn with probabilities proportional to p^(1 / temperature). Inside `jit` its value is unknown:
    anything below the root of the smallest number (1e-19 in float32), and NaN, counts as that root,
    which draws the likeliest tokens. Draws of a longer sequence begin with those of a shorter one.

    Returns:
      Tokens, and the log-probabilities and uncertainties of the predictive distribution itself
      (temperature 1). Padding and fully masked rows are as for `greedy`.

    Raises:
      ValueError: as for `greedy`, and for a temperature that is known and not positive and finite.
      TypeError: as for `greedy`.

    Source: handwritten notes, z = argmax_i (g_i + log pi_i).
    """

    def drawn(position: Array, log_probs: Array) -> Array:
        largest = jnp.max(log_probs, axis=1, keepdims=True)
        # Relative to the largest: else division by a small temperature could make all of them -inf.
        relative = log_probs - jnp.where(largest > -jnp.inf, largest, 0)
        likeliest = "For the likeliest tokens, use greedy."
        tau = checked_temperature("sample", temperature, log_probs.dtype, likeliest)
        return gumbel_max(jax.random.fold_in(key, position), relative / tau)

    return _generate("sample", drawn, step, state, first_tokens, length, end, num_points)


def _generate(
    name: str,
    choose: Choice,
    step: Step,
    state: State,
    first_tokens: Array,
    length: int,
    end: int | None,
    num_points: int | None,
) -> Decoded:
    tokens = checks.as_tokens(name, first_tokens, 1)
    num_rows = tokens.shape[0]
    state = checks.as_state(name, state, num_rows)
    length = checks.whole_number(name, "length", length, 1)
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
        emitted = jnp.where(finished | stuck, checks.PAD, chosen)
        uncertainty = jax.tree.map(lambda part: jnp.where(finished, 0, part), uncertainty)
        last = jnp.where(finished | stuck, last, chosen)
        finished = finished | stuck if end is None else finished | stuck | (chosen == end)
        return (state, last, finished, total + gain), (emitted, uncertainty)

    start = (state, tokens, jnp.zeros(num_rows, bool), jnp.zeros(num_rows, dtype))
    by_position: tuple[Array, TokenUncertainty]
    carry, by_position = jax.lax.scan(advance, start, jnp.arange(length))
    emitted, uncertainty = jax.tree.map(jnp.transpose, by_position)
    return Decoded(emitted, carry[-1], uncertainty)
