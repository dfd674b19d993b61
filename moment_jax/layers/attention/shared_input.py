"""Dependence between queries, keys and values of `Separable` through their shared random input.

The input's covariance is Cov[x_ti, x_sj] = P_ts F_ij, with its token Gram matrix over the sum of its
entries and the covariance of its sum over tokens. It correlates scores and values, which shifts the
mean of weights @ values and adds to its covariance.
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
    """Shared noise of one head's queries, keys and values: Cov[k_cd, v_fe] = tokens_cf key_value_de."""

    tokens: Array  # token Gram matrix of the input over the sum of its entries, (S, S)
    key_value: Array  # (K, K)
    query_key: Array | None  # (K, K); None if queries come from another sequence
    query_value: Array | None  # (K, K)


def make_links(
    shared: SharedInput[Separable], pattern: Array, key: Array, value: Array, num_heads: int
) -> Links:
    """The links of all heads, leading axis H except for `tokens`.

    `pattern` is the input's token pattern (S, S); `key` and `value` are F times the kernels of keys and
    values, (D, H K).
    """
    key, value = split_heads(key, num_heads), split_heads(value, num_heads)

    def pair(left: Array, right: Array) -> Array:
        return jnp.swapaxes(split_heads(left, num_heads), 1, 2) @ right

    key_value = pair(shared.key_kernel, value)
    if shared.query_kernel is None:
        return Links(pattern, key_value, None, None)
    return Links(
        pattern, key_value, pair(shared.query_kernel, key), pair(shared.query_kernel, value)
    )


class Linked(NamedTuple):
    """Cov[S_af, v_cd] = (P_fc by_key_ad + P_ac by_query_fd) / sqrt(K), of scores and values."""

    tokens: Array  # P, (S, S)
    by_key: Array  # q Ckv, (T, K)
    by_query: Array | None  # k Cqv, (S, K); None if queries come from another sequence
    seen: Array | None  # W times `by_query`, (T, K)

    @classmethod
    def of(cls, centres: Centres, links: Links, weights: Array) -> Linked:
        """Build from means, mean weights W (T, S) and links."""
        by_key = centres.query @ links.key_value
        if links.query_value is None:
            return cls(links.tokens, by_key, None, None)
        by_query = centres.key @ links.query_value
        return cls(links.tokens, by_key, by_query, weights @ by_query)


def shared_mean(linked: Linked, weights: Array, gain: Array, reach: Array) -> Array:
    """sum_c Cov[W_ac, v_cd]: weights and values share the random input, (T, K).

    By Stein's lemma Cov[W_ac, v_cd] = sum_f E[dW_ac/dS_af] Cov[S_af, v_cd]. Takes the mean weights W
    (T, S), `gain`, the softmax's saturation over sqrt(K) (T,), and `reach`, W P (T, S).
    """
    tokens, by_key, by_query, seen = linked
    spread = weights @ rows_diagonal(tokens) - jnp.sum(weights * reach, axis=1)
    by_key = spread[:, None] * by_key
    if by_query is None or seen is None:
        return gain[:, None] * by_key
    own = weights * tokens
    by_query = own @ by_query - jnp.sum(own, axis=1, keepdims=True) * seen
    return gain[:, None] * (by_key + by_query)


def score_value(
    linked: Linked,
    weights: Array,
    value: Array,
    mean: Array,
    gain: Array,
    reach: Reach,
    under: tuple[Array, Array],
    pool: Array | None = None,
) -> tuple[Array, Array]:
    """Covariance of the output's scores part with its values part: Gram matrices (T, T), (K, K).

    The first is sum_de Cov[sum_f u_af^d S_af, sum_c W_bc v_ce] metric_de, where u_af^d = gain_a W_af
    (v_fd - A_ad) is the scores' part of the weights. The second, without a metric, is that of both sums
    over tokens, weighted by `pool` (T,). Arguments are those of `shared_mean`, the mean values v (S, K)
    and averages A = W v (T, K), and both times the metric in `under`, up to a common shift.
    """
    (valued, averaged), by_key = under, linked.by_key
    lean = by_key @ valued.T - jnp.sum(by_key * averaged, axis=1, keepdims=True)
    token_gram = reach.met(weights * lean)
    total = pooled(reach.array, pool)
    near = weighted(gain, pool)[:, None] * weights * total[None, :]
    centred = near @ value - jnp.sum(near, axis=1, keepdims=True) * mean
    feature_gram = centred.T @ by_key
    if linked.by_query is None or linked.seen is None:
        return gain[:, None] * token_gram, feature_gram
    turn = weights @ jnp.sum(valued * linked.by_query, axis=1)
    turn = turn - jnp.sum(averaged * linked.seen, axis=1)
    token_gram = token_gram + turn[:, None] * reach.array.T
    own = weighted(gain, pool) * total
    far = (value.T * (own @ weights)[None, :]) @ linked.by_query
    far = far - (own[:, None] * mean).T @ linked.seen
    return gain[:, None] * token_gram, feature_gram + far
