"""What keys and values of `Separable`, and queries, owe to the random input that they share.

The input is read as Cov[x_ti, x_sj] = P_ts F_ij, with its token Gram matrix over the sum of its entries
and the covariance of its sum over the tokens, as its noise is elsewhere. Then scores and
values are correlated: it moves the mean of weights @ values, and adds to its covariance.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from moment_jax.covariance import Separable
from moment_jax.covariance.numerics import pooled, weighted
from moment_jax.layers.attention.inputs import Centres, SharedInput, split_heads
from moment_jax.xla import rows_diagonal

Array = jax.Array


class Reach(Protocol):
    """Weights W times a token pattern P."""

    @property
    def array(self) -> Array:
        """W P, (T, S)."""
        ...

    def met(self, left: Array) -> Array:
        """U P W^T for other weights U, (T, T)."""
        ...


class Links(NamedTuple):
    """What one head's queries, keys and values share: Cov[k_cd, v_fe] = tokens_cf key_value_de."""

    tokens: Array  # token Gram matrix of the input over the sum of its entries, (S, S)
    key_value: Array  # (K, K)
    query_key: Array | None  # (K, K); None where queries are made of another sequence
    query_value: Array | None  # (K, K)


def make_links(shared: SharedInput[Separable], pattern: Array, num_heads: int) -> Links:
    """The links of every head, leading axis H but for `tokens`, which is the `pattern`."""
    feature_gram = shared.cov.feature_gram()

    def pair(left: Array, right: Array) -> Array:
        left, right = split_heads(left, num_heads), split_heads(feature_gram @ right, num_heads)
        return jnp.swapaxes(left, 1, 2) @ right

    query, key, value = shared.query_kernel, shared.key_kernel, shared.value_kernel
    key_value = pair(key, value)
    if query is None:
        return Links(pattern, key_value, None, None)
    return Links(pattern, key_value, pair(query, key), pair(query, value))


def shared_mean(centres: Centres, links: Links, weights: Array, gain: Array, reach: Array) -> Array:
    """sum_c Cov[W_ac, v_cd]: weights and values share the random input, (T, K).

    By Stein's lemma Cov[W_ac, v_cd] = sum_f E[dW_ac/dS_af] Cov[S_af, v_cd], with
    Cov[S_af, v_cd] = (P_fc (q_a Ckv)_d + P_ac (k_f Cqv)_d) / sqrt(K).

    Args:
      centres: means of queries, keys and values.
      links: what they share.
      weights: mean attention weights W, (T, S).
      gain: saturation of the softmax over sqrt(K), (T,).
      reach: W P, (T, S).
    """
    tokens = links.tokens
    spread = weights @ rows_diagonal(tokens) - jnp.sum(weights * reach, axis=1)
    by_key = spread[:, None] * (centres.query @ links.key_value)
    if links.query_value is None:
        return gain[:, None] * by_key
    linked = weights * tokens
    by_query = linked @ centres.key - jnp.sum(linked, axis=1, keepdims=True) * (
        weights @ centres.key
    )
    return gain[:, None] * (by_key + by_query @ links.query_value)


def score_value(
    centres: Centres,
    links: Links,
    weights: Array,
    mean: Array,
    gain: Array,
    reach: Reach,
    metric: Array,
    pool: Array | None = None,
) -> tuple[Array, Array]:
    """Covariance of the scores' part of the output with the values' part: Gram matrices (T, T), (K, K).

    The first is sum_de Cov[sum_f u_af^d S_af, sum_c W_bc v_ce] metric_de, with the scores' part of the
    weights, u_af^d = gain_a W_af (v_fd - A_ad); the second, without a metric, is that of both sums over
    the tokens, with weights `pool` (T,) where there are some. The arguments are those of `shared_mean`,
    the mean A = W v, (T, K), and the metric, (K, K).
    """
    valued, averaged = centres.value @ metric, mean @ metric
    by_key = centres.query @ links.key_value  # (T, K)
    lean = by_key @ valued.T - jnp.sum(by_key * averaged, axis=1, keepdims=True)
    token_gram = reach.met(weights * lean)
    total = pooled(reach.array, pool)
    near = weighted(gain, pool)[:, None] * weights * total[None, :]
    centred = near @ centres.value - jnp.sum(near, axis=1, keepdims=True) * mean
    feature_gram = centred.T @ by_key
    if links.query_value is None:
        return gain[:, None] * token_gram, feature_gram
    by_query = centres.key @ links.query_value  # (S, K)
    turn = weights @ jnp.sum(valued * by_query, axis=1)
    turn = turn - jnp.sum(averaged * (weights @ by_query), axis=1)
    token_gram = token_gram + turn[:, None] * reach.array.T
    own = weighted(gain, pool) * total
    far = (centres.value.T * (own @ weights)[None, :]) @ by_query
    far = far - (own[:, None] * mean).T @ (weights @ by_query)
    return gain[:, None] * token_gram, feature_gram + far
