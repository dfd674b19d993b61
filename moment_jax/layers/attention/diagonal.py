"""Attention for `Diagonal`, one head at a time; entries of queries, keys and values independent.

The scores S_ac = q_a . k_c / sqrt(K) of one row share the query, so that

    Cov[S_ac, S_af] = own_ac [c = f] + sum_d Var[q_ad] k_cd k_fd / K

with own_ac = sum_d (q_ad^2 + Var[q_ad]) Var[k_cd] / K. In the second term all entries of a query are
taken as equally noisy, so that one matrix k k^T serves all rows. Rows are independent of each other.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from moment_jax.covariance import Diagonal
from moment_jax.covariance.numerics import nonnegative, safe_divide
from moment_jax.expectations.softmax_mean import quick_expected_softmax
from moment_jax.layers.attention.inputs import (
    Centres,
    Inputs,
    Mixing,
    Projection,
    merge_heads,
    root_width,
    split_heads,
)
from moment_jax.layers.attention.mix import Output, each_head, mix
from moment_jax.layers.attention.score_noise import left_within, saturation
from moment_jax.xla import diagonal_matrix, diagonal_of


def mix_diagonal(inputs: Inputs[Diagonal]) -> tuple[Array, Diagonal, Mixing]:
    """Moments of the concatenated heads: mean (T, H K), variance, and own weights (H, T)."""
    h, shared, noise = inputs.num_heads, inputs.shared, None
    key, value = (split_heads(kernel, h) for kernel in (shared.key_kernel, shared.value_kernel))
    variance = shared.cov.variances
    energy = jnp.mean(variance, axis=1)[None, :]
    if shared.query_kernel is not None:
        linked = jnp.sum(split_heads(shared.query_kernel, h) * key, axis=2)  # (H, D)
        noise = (variance @ linked.T).T

    def mix_one(one: Any) -> tuple[Array, Array, Array | None]:
        query, key, value, link, noise, mask = one
        head = Head(query, key, value, energy, link, noise)
        mean, variance, mixing = mix(head, mask, inputs.order)
        return mean, variance, None if noise is None else diagonal_of(mixing.weights)

    parts = (_part(p, h) for p in (inputs.query, inputs.key, inputs.value))
    each = (*parts, jnp.swapaxes(key, 1, 2) @ value, noise, inputs.mask)
    mean, variance, own = each_head(mix_one, each, inputs.num_scores())
    return merge_heads(mean), Diagonal(merge_heads(variance)), Mixing(None, own=own)


class Part(NamedTuple):
    """One head's queries, keys or values."""

    mean: Array  # (T, K)
    variance: Array  # (T, K)


def _part(projection: Projection[Diagonal], num_heads: int) -> Part:
    return Part(
        split_heads(projection.mean, num_heads), split_heads(projection.cov.variances, num_heads)
    )


class Head(NamedTuple):
    """One head, see `HeadMoments`."""

    query: Part
    key: Part
    value: Part
    energy: Array  # average variance of the features of each key's token, (1, S)
    link: Array  # key_kernel^T value_kernel, (K, K)
    noise: Array | None  # sum_d Cov[q_ad, k_ad] of own tokens, (T,); None with a memory

    @property
    def centres(self) -> Centres:
        """Mean queries, keys and values."""
        return Centres(self.query.mean, self.key.mean, self.value.mean)

    def shared_scores(self) -> Array | None:
        """sum_d Cov[q_ad, k_cd] through the shared input, (T, S)."""
        return None if self.noise is None else diagonal_matrix(self.noise)

    def rows(self) -> "_Rows":
        """Covariance of the scores, from noise in keys and in queries."""
        q, k, width = self.query, self.key, self.query.mean.shape[1]
        own = (q.mean**2 + q.variance) @ k.variance.T / width
        return _Rows(own, jnp.mean(q.variance, axis=1, keepdims=True) / width, k.mean)

    def output(self, rows: "_Rows", weights: Array, mean: Array, order: int) -> Output:
        """The variance, (T, K)."""
        variance, gain = _variance(self.value, rows, weights, mean, order)
        return Output(variance, gain, gain * self._shared_mean(weights) if order == 2 else None)

    def _shared_mean(self, weights: Array) -> Array:
        """sum_c Cov[W_ac, v_cd]: weights and values share the random input, (T, K).

        By Stein's lemma Cov[W_ac, v_cd] = sum_f W_ac (1[c=f] - W_af) Cov[S_af, v_cd]; the key k_c
        shares its token with v_c.

        Budget: features of a token count as equally noisy, and what the query shares with the value of
        its own token is left out. On the sampled cases the mean moves by .003 sd at most, where the
        structure has it wrong by .01 to .27.
        """
        spread = _sum((weights - weights**2) * self.energy)
        return spread * (self.query.mean @ self.link) / root_width(self.query.mean)


class _Rows(NamedTuple):
    """Cov[S_ac, S_af] = own_ac [c = f] + query_a (k k^T)_cf."""

    own: Array  # (T, S)
    query: Array  # variance of an entry of each query, over K, (T, 1)
    key: Array  # k, (S, K)

    def expected_softmax(self, scores: Array, mask: Array | None) -> Array:
        return quick_expected_softmax(scores, self, mask)

    def variance(self) -> Array:
        """Var[S_ac], (T, S)."""
        return self.own + self.query * _of_each(self.key**2)

    def matvec(self, weights: Array) -> Array:
        """sum_f Cov[S_ac, S_af] weights_af, (T, S)."""
        return self.own * weights + self.query * ((weights @ self.key) @ self.key.T)


def _variance(v: Part, rows: _Rows, weights: Array, mean: Array, order: int) -> tuple[Array, Array]:
    """Variance of weights @ values, (T, K), and the softmax's gain, (T, 1).

    The contribution of the queries' noise is computed as a sum over features, and spread over them as
    for independent keys. Per feature it would take T^2 K^2 products.
    """
    noise = _of_each(v.variance)
    values, ones = _of_each(v.mean**2) + noise, jnp.ones_like(noise)  # E |v_c|^2, (1, S)
    squared, pulled = weights**2, weights * ((weights @ rows.key) @ rows.key.T)
    # Sums over keys, with weights W^2 Var[S], W^2 own, W^2 and W (W k) k^T.
    noisy_second, noisy_mean, noisy_one = _sums(
        squared * rows.variance(), (v.mean**2 + v.variance, v.mean), (ones,)
    )
    own_mean, own_one, own_values = _sums(squared * rows.own, (v.mean,), (ones, values))
    by_values = squared @ v.variance
    pulled_mean, pulled_one = _sums(pulled, (v.mean,), (ones,))
    size = _sum(mean**2) + _sum(by_values)  # E |A_a|^2 of the averages A, (T, 1)
    pattern = noisy_second - 2 * mean * noisy_mean + mean**2 * noisy_one
    pattern = nonnegative(pattern)

    def crossed(values: Array, weighing: Array) -> Array:
        """Weighted sums of E <A_a, v_c> over keys, (T, 1)."""
        return _sum(mean * values) + _sums(weighing * weights, (), (noise,))[0]

    by_keys = own_values - 2 * crossed(own_mean, squared * rows.own) + size * own_one
    by_query = (
        _squared_products(rows.key, v.mean, noise, weights)
        - 2 * crossed(pulled_mean, pulled)
        + size * pulled_one
    )
    total = nonnegative(by_keys + rows.query * nonnegative(by_query))
    gain = jnp.ones_like(total)
    if order == 2:
        within = left_within(_sums(weights, (), (values,))[0], size)
        gain = saturation(total, within)
        # A row with all its weight on one key is pure rounding. XLA may compute it twice with different
        # rounding, so the gain alone does not bound it.
        total = jnp.minimum(gain**2 * total, within)
    share = safe_divide(pattern, _sum(pattern))
    return by_values + share * total, gain


def _squared_products(k: Array, v: Array, noise: Array, weights: Array) -> Array:
    """sum_cf W_ac W_af (k_c . k_f) (v_c . v_f + [c = f] noise_c), (T, 1).

    Takes keys (S, K), values (S, K), the values' noise summed over features (1, S), and weights W (T,
    S). It needs S^2 products of features shared by all rows, or K^2 numbers per row: T S min(S, K^2)
    products in all, where plain attention takes 2 T S K. It is the main cost of long sequences.
    """
    t, (s, width) = weights.shape[0], k.shape
    if t * width**2 < (t + 2 * width) * s:  # |sum_c W_ac k_c v_c^T|^2 is cheaper
        own = jnp.sum(weights**2 * (_of_each(k**2) * noise), axis=1, keepdims=True)
        pairs = (k[:, :, None] * v[:, None, :]).reshape(s, -1)
        return _sum((weights @ pairs) ** 2) + own
    products = (k @ k.T) * (v @ v.T + diagonal_matrix(noise[0]))
    return _sum(weights * (weights @ products))


def _sum(array: Array) -> Array:
    """The row sums, (T, 1)."""
    return jnp.sum(array, axis=1, keepdims=True)


def _of_each(array: Array) -> Array:
    """The row sums of (S, K), as one row (1, S)."""
    return jnp.sum(array, axis=1)[None, :]


def _sums(weights: Array, columns: tuple[Array, ...], rows: tuple[Array, ...]) -> list[Array]:
    """sum_c weights_ac x_c over keys, (T, n) for each x: columns (S, n), and rows (1, S).

    As one wide product.
    """
    parts = [*columns, *(row.T for row in rows)]
    if len(parts) == 1:
        return [weights @ parts[0]]
    ends = [sum(part.shape[1] for part in parts[:n]) for n in range(1, len(parts))]
    return jnp.split(weights @ jnp.concatenate(parts, axis=1), ends, axis=1)
