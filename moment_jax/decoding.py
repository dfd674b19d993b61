"""Sequences from a random network, token by token: greedy, or sampled.

The model is an `mj.Bayesian` whose network takes integers (..., T) and returns the logits that follow
each token, (..., T, V). It has to be causal, as the places after the prefix hold zeros. Or it is a
function of one sequence, integers (T,): a plain network, whose logits (T, V) count as certain, or
`model(ids) -> (mean, cov)`. `cov` is of any structure, whose variances are used, or an array of
variances (T, V) or of covariances (T, V, V). A mean of -inf masks a token.

Tokens are chosen by the predictive distribution E[softmax(logits)], not by softmax(E[logits]). Weights
are averaged anew at each token, so a sequence shares no draw of them. Each token costs a whole pass.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.covariance import Covariance
from moment_jax.covariance.fields import need
from moment_jax.discrete import checked_temperature, gumbel_max
from moment_jax.objectives.cubature import TokenUncertainty, probabilities_with_uncertainty

__all__ = ["Decoded", "greedy", "sample"]

Model = Callable[[Array], Any]


class Decoded(NamedTuple):
    """The tokens after a prompt; log-probability and uncertainty of padding are 0."""

    tokens: Array  # (length,) int32, with the end token, then padding of -1
    log_probs: Array  # (length,), predictive, in nats; -inf where all tokens are masked
    uncertainty: TokenUncertainty  # of each token's prediction, (length,) each, in nats


def greedy(
    model: Model, prompt: Array, length: int, *, end: int | None = None,
    num_points: int | None = None,
) -> Decoded:  # fmt: skip
    """The likeliest token of the predictive distribution at each position; of equals, the first.

    Args:
      model: an `mj.Bayesian`, a plain network or a function, see this module.
      prompt: integers (P,), at least one, or TypeError. For several of one length use `jax.vmap`.
      length: number of tokens to produce. A sequence of which all next tokens are masked ends there.
      end: the token after which there is padding; None for none; or ValueError.
      num_points: points of the integral over the logits, see `mj.objectives.class_probabilities`.

    >>> def model(ids):  # a token is followed by the next one, almost surely
    ...     mean = 9.0 * jax.nn.one_hot((ids + 1) % 3, 3)
    ...     return mean, jnp.ones_like(mean)
    >>> greedy(model, jnp.array([0]), 4, end=0).tokens.tolist()
    [1, 2, 0, -1]
    """

    def likeliest(_: Array, log_probs: Array) -> Array:
        return jnp.where(jnp.any(log_probs > -jnp.inf), jnp.argmax(log_probs), -1)

    return _decode("greedy", likeliest, model, prompt, length, end, num_points)


def sample(
    key: Array, model: Model, prompt: Array, length: int, *, temperature: Array | float = 1.0,
    end: int | None = None, num_points: int | None = None,
) -> Decoded:  # fmt: skip
    """A sequence drawn token by token from the predictive distribution, by Gumbel-max.

    Arguments and errors are those of `greedy`, a JAX random key, and a temperature, a positive scalar:
    tokens are drawn with probabilities proportional to p^(1 / temperature). Inside `jit` anything below
    the root of the smallest number, and NaN, counts as that root, which draws the likeliest tokens. The
    log-probabilities and uncertainties are those of the predictive distribution itself. Draws of a
    longer sequence begin with those of a shorter one. Source: handwritten notes.
    """

    def drawn(position: Array, log_probs: Array) -> Array:
        largest = jnp.max(log_probs)
        # Relative to the largest: else division by a small temperature could make all of them -inf.
        relative = log_probs - jnp.where(largest > -jnp.inf, largest, 0)
        likeliest = "For the likeliest tokens, use greedy."
        tau = checked_temperature("sample", temperature, log_probs.dtype, likeliest)
        return gumbel_max(jax.random.fold_in(key, position), relative / tau)

    return _decode("sample", drawn, model, prompt, length, end, num_points)


def _moments(model: Any, ids: Array) -> tuple[Array, Any]:
    """Mean and covariance of the logits (T, V) of one sequence."""
    if hasattr(model, "beliefs"):  # an `mj.Bayesian`, which takes a batch
        mean, cov = jax.tree.map(lambda x: x[0], model(ids[None]))
        return mean, cov
    found = model(ids)
    return found if isinstance(found, tuple) else (found, jnp.zeros_like(found))


def _decode(
    name: str, choose: Callable[[Array, Array], Array], model: Model, prompt: Array, length: int,
    end: int | None, num_points: int | None,
) -> Decoded:  # fmt: skip
    prompt = jnp.asarray(prompt)
    right: Any = jnp.issubdtype(prompt.dtype, jnp.integer)
    need(name, right, "a prompt of integers", prompt.dtype, error=TypeError)
    right, came = prompt.ndim == 1 and prompt.size and length >= 1, f"{prompt.shape} and {length}"
    rule = "a prompt (P,) of one token or more, and length >= 1"
    need(name, right, rule, came, "For several prompts, use jax.vmap.")
    whole = jnp.pad(prompt.astype(jnp.int32), (0, length))
    if getattr(model, "verify", False):
        _moments(model, whole[:-1])  # held to its network, which cannot be done inside the loop

    def advance(carry: tuple[Array, Array], position: Array) -> tuple[Any, Any]:
        whole, finished = carry
        mean, cov = _moments(model, whole[:-1])
        spread = cov.variance() if isinstance(cov, Covariance) else cov
        shape = (whole.size - 1, mean.shape[-1])
        right = mean.shape == shape and spread.shape in (shape, (*shape, shape[1]))
        rule = "a model with mean logits (T, V) and variances (T, V) or covariances (T, V, V)"
        need(name, right, f"{rule}, T = {shape[0]}", f"{mean.shape} and {spread.shape}")
        known = end is None or 0 <= end < shape[1]
        need(name, known, f"end from 0 to {shape[1] - 1}", end)
        at = prompt.size - 1 + position
        given = mean[at], spread[at]
        log_probs, parts = probabilities_with_uncertainty(*given, num_points=num_points)
        chosen = choose(position, log_probs).astype(jnp.int32)  # -1 if all are masked
        emitted = jnp.where(finished, -1, chosen)
        result = jax.tree.map(lambda x: jnp.where(finished, 0, x), (log_probs[chosen], parts))
        whole = whole.at[at + 1].set(jnp.maximum(emitted, 0))
        ended = finished | (chosen < 0) | (False if end is None else chosen == end)
        return (whole, ended), (emitted, *result)

    _, decoded = jax.lax.scan(advance, (whole, jnp.zeros((), bool)), jnp.arange(length))
    return Decoded(*decoded)
