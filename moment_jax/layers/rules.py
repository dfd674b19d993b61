"""The one registry: a structure, and how its layers compute; and what all rules of attention share.

A rule takes the mean (T, D) of a layer's input and its covariance, and returns those of its output and
`carry`: the layer linearised, as the function that makes Cov[u, output] of Cov[u, input] for any array
u, in the structure's own form (`Covariance.with_itself`). So a residual sum is
`cov.add_branch(branch, carry(cov.with_itself()))`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from moment_jax.covariance import Covariance, Full
from moment_jax.covariance.numerics import nonnegative, safe_divide
from moment_jax.expectations.activations import Formula

Carry = Callable[..., Any]
"""(Cov[u, input]) -> Cov[u, output]; attention to a memory also takes Cov[u, memory]; None is zero."""

_MANY_SCORES = 2**21  # heads with more scores than this in total run one at a time


class ScoreNoise(NamedTuple):
    """The random part of a bias of scores: factor * w[places], w of independent entries.

    Independent of all else. Examples: T5's table of relative positions; ALiBi's slopes, whose factor is
    minus the distance; a head's temperature, whose factor is the mean of the scores.
    """

    variance: Array  # of w, (N,)
    places: np.ndarray | Array  # (H, T, S) integers, known while tracing
    factor: Array  # (H, T, S); T and S may be 1

    def score_variance(self) -> Array:
        """Of each score, (H, T, S)."""
        return self.factor**2 * self.variance[self.places]


class Attending(NamedTuple):
    """Settings of attention: softmax(mask(cap(scale * q k^T / sqrt(K)) + bias + noise)) v.

    Scale, bias and factors of noise have the shape (H, T, S), where T and S may be 1.
    """

    num_heads: int
    mask: Array | None  # (H, T, S) boolean, True where a query may look
    turns: tuple[Array | None, Array | None] = (None, None)
    """Rotary positions: (T, K, K) matrices that multiply each query, and each key."""
    scale: Array | None = None
    bias: Array | None = None
    noise: tuple[ScoreNoise, ...] = ()
    cap: Formula | None = None
    """The moments of a function of one scaled score, exact where nothing is random."""


class Rules(NamedTuple):
    """How the layers of one structure compute."""

    norm: Callable[..., tuple[Array, Any, Carry]]
    """(mean, cov, *, epsilon, centres)."""
    attention: Callable[..., tuple[Array, Any, Carry]]
    """(mean, cov, memory, params, attending); memory is None, or a pair (mean, cov)."""
    feed_forward: Callable[..., tuple[Array, Any, Carry]] | None = None
    """(mean, cov, params, moments of the activation); None for one layer after the other."""


RULES: dict[type[Covariance], Rules] = {}


def rules_of(structure: type[Covariance]) -> Rules:
    """The rules of a structure; those of `Full`, projected, for one of a user's own."""
    for base in structure.__mro__:
        if base in RULES:
            return RULES[base]
    norm, attention, _ = RULES[Full]
    return Rules(_by_projection(norm), _by_projection(attention))


def _by_projection(rule: Callable[..., tuple[Array, Full, Carry]]) -> Callable[..., Any]:
    def projected(mean: Array, cov: Covariance, *rest: Any, **options: Any) -> Any:
        # A memory is a pair (mean, cov).
        dense = ((x[0], Full.of(x[1])) if type(x) is tuple else x for x in rest)
        out, full, carry = rule(mean, Full.of(cov), *dense, **options)
        return out, cov.projected(full.cov), carry

    return projected


def normalized(mean: Array, variance: Any, epsilon: Any, centres: bool) -> tuple[Array, Array]:
    """E[c] / sqrt(q), (T, D), and 1 / sqrt(q), q = |E[c]|^2 / D + variance + epsilon, (T, 1)."""
    if centres:
        mean = mean - jnp.mean(mean, axis=1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.mean(mean**2, axis=1, keepdims=True) + epsilon + variance)
    return mean * inverse, inverse


def normalized_mean(
    normal: Array, inverse: Array, pulled: Array, along: Array, squares: Array
) -> Array:
    """E[c / sqrt(Q)], Q = |c|^2 / D + epsilon, to second order about q = E[Q], (T, D).

    Of `normal` n = E[c] / sqrt(q), `inverse` 1 / sqrt(q), `pulled` Cov[c] n, `along` n . Cov[c] n / D,
    and `squares`, the sum of the squared entries of each token's Cov[c], (T, 1).
    """
    small = inverse**2 / normal.shape[1]
    return normal + small * (normal * (0.75 * small * squares + 1.5 * along) - pulled)


# -- heads: (T, H K) arrays as (H, T, K) -----------------------------------------------------------


def split_heads(array: Array, num_heads: int, turn: Array | None = None) -> Array:
    """(T, H K) -> (H, T, K), heads outermost; each token multiplied by its (K, K) matrix `turn`."""
    t, width = array.shape
    heads = array.reshape(t, num_heads, width // num_heads).swapaxes(0, 1)
    return heads if turn is None else jnp.einsum("htj,tjk->htk", heads, turn)


def merge_heads(array: Array) -> Array:
    """(H, T, K) -> (T, H K)."""
    h, t, k = array.shape
    return array.swapaxes(0, 1).reshape(t, h * k)


def shaped(
    scores: Array, variance: Callable[[], Array], scale: Array | None, bias: Array | None,
    cap: Formula | None,
) -> tuple[Array, Array | None]:  # fmt: skip
    """The mean scores after scale, cap and bias, and their slope by q k^T / sqrt(K); None for one.

    `variance` is that of the scores q k^T / sqrt(K).
    """
    scores, slope = scores if scale is None else scale * scores, scale
    if cap is not None:
        f = cap(scores, variance() if scale is None else scale**2 * variance())
        scores, slope = f.mean, f.gain if scale is None else f.gain * scale
    return scores if bias is None else scores + bias, slope


def kept_jacobian(found: Array, second: Array, averaged: Array) -> tuple[Array, Array]:
    """The average fraction of its Jacobian that the softmax keeps under noise, and a bound, per row.

    By Price's theorem noise passes through the expected Jacobian, diag(E[w]) - E[w w^T], smaller
    than diag(w) - w w^T at the mean weights w. It is taken as one gain per row times the latter, such
    that the law of total variance holds: gain^2 V + gain W = W. V is the variance `found` of weights @
    values by the scores' noise through the Jacobian at w, W = E[v^2] - E[A^2] beyond rounding, of the
    averages A, which is returned too. The gain is 0 where a row has all its weight on one key.
    """
    left = left_within(second, averaged)
    ratio = safe_divide(nonnegative(found), left)
    return jnp.where(left > 0, 2 / (1 + jnp.sqrt(1 + 4 * ratio)), 0), left


def left_within(second: Array, averaged: Array) -> Array:
    """The variance of values under the weights, E[v^2] - E[A^2], and 0 where that is rounding."""
    left = second - averaged
    return jnp.where(left > 16 * jnp.finfo(left.dtype).eps * second, left, 0)


def each_head(one_head: Callable[[Any], Any], heads: Any, num_scores: int) -> Any:
    """`one_head` of each head, along the leading axis H of every array.

    Of many scores one after another with checkpoints: one head's arrays are alive, also backward.
    """
    if num_scores <= _MANY_SCORES:
        return jax.vmap(one_head)(heads)
    return jax.lax.map(jax.checkpoint(one_head), heads)
