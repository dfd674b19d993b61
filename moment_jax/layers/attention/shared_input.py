"""The random input that queries, keys and values of `Separable`'s attention share.

The input is read as Cov[x_ti, x_sj] = P_ts F_ij: P is its token Gram matrix over the sum of its entries,
F the covariance of its sum over the tokens. Scores and values are then correlated, which moves the mean
of weights @ values. Budget: what this adds to the covariance is left out. On the sampled cases that is
.001 of the sd, where the structure loses .01 to .04.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from moment_jax.covariance import Separable
from moment_jax.layers.attention.inputs import Centres, SharedInput, split_heads
from moment_jax.xla import diagonal_of


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
    spread = jnp.sum(weights * (diagonal_of(tokens)[None, :] - reach), axis=1)
    by_key = spread[:, None] * (centres.query @ links.key_value)
    if links.query_value is None:
        return gain[:, None] * by_key
    linked = weights * tokens
    total = jnp.sum(linked, axis=1, keepdims=True)
    by_query = (linked @ centres.key - total * (weights @ centres.key)) @ links.query_value
    return gain[:, None] * (by_key + by_query)
