"""Beam search over the predictive distribution."""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.decoding import checks
from moment_jax.decoding.checks import State, Step
from moment_jax.objectives.predictive import log_class_probabilities


class Beams(NamedTuple):
    """The best sequences found, best first; scores of -inf where there is none."""

    tokens: Array  # (num_beams, length) int32, the end token among them, padding of -1 after it
    scores: Array  # (num_beams,), log_probs / number of tokens ** length_penalty
    log_probs: Array  # (num_beams,), sums of predictive log-probabilities, in nats


def beam_search(
    step: Step,
    state: State,
    first_token: Array,
    length: int,
    num_beams: int,
    *,
    end: int | None = None,
    length_penalty: Array | float = 0.0,
    num_points: int | None = None,
) -> Beams:
    """The sequences of the highest scores that a beam of `num_beams` hypotheses finds.

    At every position all continuations of all hypotheses compete. Those among the best `num_beams` that
    end are kept with their score; the best `num_beams` others go on. After `length` tokens both are
    ranked together. With num_beams >= V^(length - 1) nothing is ever dropped, and the search is
    exhaustive. With one beam and no length penalty it is `greedy`.

    Args:
      step: (state, tokens (B,)) -> moments of the next logits and the state; see this package. Here B
        is num_beams.
      state: of the one sequence, a pytree of arrays with a leading axis 1.
      first_token: an integer (), the token before the sequence, not among the results. For several
        sequences use `jax.vmap` over state and first_token.
      length: number of tokens to produce.
      num_beams: number of hypotheses; at most V^length, the number of sequences.
      end: the token that ends a hypothesis; None for none.
      length_penalty: a score is the log-probability divided by the number of tokens (with the end token)
        to this power: 0 ranks by probability, which prefers short sequences, 1 by the average per token.
        Inside `jit`, where its value is unknown, NaN counts as 0.
      num_points: points of the integral over the logits; None for the default of
        `mj.objectives.class_probabilities`.

    Returns:
      Tokens, scores and log-probabilities. If there are fewer possible sequences than beams, the rest is
      padding with scores of -inf. Ties go to the token that comes first.

    Raises:
      ValueError: if length or num_beams < 1, or there are fewer sequences than beams, or there is no
        token `end`, or the length penalty is known and not finite, or shapes do not fit.
      TypeError: if the token is not an integer, or length, num_beams or end are not Python ints.

    >>> import jax.numpy as jnp
    >>> def step(state, tokens):
    ...     mean = jnp.log(jnp.array([[0.3, 0.4, 0.3], [0.4, 0.3, 0.3], [0.9, 0.1, 0.0]]))[tokens]
    ...     return mean, jnp.zeros_like(mean), state
    >>> beams = beam_search(step, (), 0, 2, num_beams=3)
    >>> beams.tokens[0].tolist(), round(float(jnp.exp(beams.scores[0])), 3)
    ([2, 0], 0.27)
    """
    name = "beam_search"
    first = checks.as_tokens(name, first_token, 0)[None]
    state = checks.as_state(name, state, 1)
    length = checks.whole_number(name, "length", length, 1)
    num_beams = checks.whole_number(name, "num_beams", num_beams, 1)
    _check_penalty(length_penalty)
    state = jax.tree.map(lambda leaf: jnp.repeat(leaf, num_beams, axis=0), state)
    last = jnp.repeat(first, num_beams)
    size, dtype = checks.check_step(name, step, state, last)
    end = checks.check_end(name, end, size)
    if num_beams > size**length:
        raise ValueError(
            f"`{name}` needs num_beams <= {size}^{length} = {size**length}, the number of sequences. "
            f"Got {num_beams}."
        )
    weights = _weights(length, length_penalty, dtype)
    predict = jax.vmap(partial(log_class_probabilities, num_points=num_points))

    def advance(carry: tuple, at: tuple[Array, Array]) -> tuple:
        state, last, alive, ended = carry
        position, weight = at
        mean, cov, state = step(state, last)
        totals = alive.log_probs[:, None] + predict(mean, cov)
        ended = _with_ended(ended, alive, totals, position, weight, end)
        parents, chosen, log_probs = _best_that_go_on(totals, end)
        tokens = alive.tokens[parents].at[:, position].set(chosen)
        state = jax.tree.map(lambda leaf: leaf[parents], state)
        alive = Beams(tokens, log_probs * weight, log_probs)
        return (state, chosen, alive, ended), None

    # Only the first beam starts alive: copies of one hypothesis would be found twice.
    nothing = jnp.full(num_beams, -jnp.inf, dtype)
    empty = jnp.full((num_beams, length), checks.PAD, jnp.int32)
    first_alone = nothing.at[0].set(0)
    start = state, last, Beams(empty, first_alone, first_alone), Beams(empty, nothing, nothing)
    (_, _, alive, ended), _ = jax.lax.scan(advance, start, (jnp.arange(length), weights))
    best = _best(ended, alive)
    exists = best.scores > -jnp.inf
    return best._replace(tokens=jnp.where(exists[:, None], best.tokens, checks.PAD))


def _check_penalty(value: Array | float) -> None:
    """Raise unless it is a scalar and, where it is known, finite."""
    if jnp.ndim(value) != 0:
        raise ValueError(
            f"`beam_search` needs a scalar length_penalty. Got shape {jnp.shape(value)}."
        )
    if not isinstance(value, jax.core.Tracer) and not math.isfinite(value):
        raise ValueError(f"`beam_search` needs a finite length_penalty. Got {float(value)}.")


def _weights(length: int, penalty: Array | float, dtype: jnp.dtype) -> Array:
    """The factor of a log-probability at each length, (length,), positive and finite."""
    power = jnp.asarray(penalty, dtype)
    power = jnp.where(jnp.isnan(power), 0, power)
    weights = jnp.arange(1, length + 1).astype(dtype) ** -power
    # 0 and inf would give NaN with log-probabilities of -inf and 0.
    return jnp.clip(weights, jnp.finfo(dtype).tiny, jnp.finfo(dtype).max)


def _with_ended(
    ended: Beams, alive: Beams, totals: Array, position: Array, weight: Array, end: int | None
) -> Beams:
    """The finished hypotheses, including those that end now and are among the best of all."""
    if end is None:
        return ended
    num_beams, size = totals.shape
    log_probs, index = jax.lax.top_k(totals.reshape(-1), num_beams)
    ends = index % size == end
    log_probs = jnp.where(ends, log_probs, -jnp.inf)
    tokens = alive.tokens[index // size].at[:, position].set(end)
    return _best(ended, Beams(tokens, log_probs * weight, log_probs))


def _best_that_go_on(totals: Array, end: int | None) -> tuple[Array, Array, Array]:
    """Parent, token and log-probability of the best continuations that do not end."""
    num_beams, size = totals.shape
    if end is not None:
        totals = totals.at[:, end].set(-jnp.inf)
    log_probs, index = jax.lax.top_k(totals.reshape(-1), num_beams)
    return index // size, (index % size).astype(jnp.int32), log_probs


def _best(first: Beams, second: Beams) -> Beams:
    """The best half of both by their scores; ties go to the first."""
    both = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), first, second)
    _, chosen = jax.lax.top_k(both.scores, first.scores.shape[0])
    return jax.tree.map(lambda leaf: leaf[chosen], both)
