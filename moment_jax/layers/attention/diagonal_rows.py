"""Attention for `Diagonal`, any rows of one head; entries of queries, keys and values independent.

The scores S_ac = q_a . k_c / sqrt(K) of one row share the query, so that

    Cov[S_ac, S_af] = own_ac [c = f] + sum_d Var[q_ad] k_cd k_fd / K

with own_ac = sum_d (q_ad^2 + Var[q_ad]) Var[k_cd] / K. Rows are independent of each other, so a block
of them can run in a kernel. In the second term all entries of a query are taken as equally noisy, so
that one matrix k k^T serves all rows.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from moment_jax.covariance.numerics import nonnegative, safe_divide
from moment_jax.expectations.softmax_mean import quick_expected_softmax
from moment_jax.layers.attention.inputs import Centres, root_width
from moment_jax.layers.attention.mix import Output
from moment_jax.layers.attention.score_noise import left_within, saturation
from moment_jax.layers.attention.squared_products import of_each, squared_products
from moment_jax.xla import on_chip

Array = jax.Array


class Part(NamedTuple):
    """One head's queries, keys or values."""

    mean: Array  # (T, K)
    variance: Array  # (T, K)


class Own(NamedTuple):
    """Data of the queries' own tokens."""

    key: Array  # mean, (T, K)
    variance: Array  # of the input, (T, D)
    query_kernel: Array  # (D, K)


class Shared(NamedTuple):
    """Variance of the shared input of keys and values, and one head's kernels."""

    variance: Array  # (S, D)
    key_kernel: Array  # (D, K)
    value_kernel: Array  # (D, K)


class _Rows(NamedTuple):
    """Cov[S_ac, S_af] = own_ac [c = f] + query_a (k k^T)_cf."""

    own: Array  # (T, S)
    query: Array  # variance of an entry of each query, over K, (T, 1)
    key: Array  # k, (S, K)

    def expected_softmax(self, scores: Array, mask: Array | None) -> Array:
        return quick_expected_softmax(scores, self, mask)

    def variance(self) -> Array:
        """Var[S_ac], (T, S)."""
        return self.own + self.query * of_each(self.key**2)

    def matvec(self, weights: Array) -> Array:
        """sum_f Cov[S_ac, S_af] weights_af, (T, S)."""
        return self.own * weights + self.query * ((weights @ self.key) @ self.key.T)


class Rows(NamedTuple):
    """Some queries, and all keys and values, of one head; see `HeadMoments`.

    The mean excludes the covariance of weights with values: see `shared_mean`.
    """

    query: Part
    key: Part
    value: Part
    shared_noise: Array | None  # sum_d Cov[q_ad, k_cd], (T, S)

    @property
    def centres(self) -> Centres:
        """Mean queries, keys and values."""
        return Centres(self.query.mean, self.key.mean, self.value.mean)

    def shared_scores(self) -> Array | None:
        """sum_d Cov[q_ad, k_cd] through the shared input, (T, S)."""
        return self.shared_noise

    def rows(self) -> _Rows:
        """Covariance of the scores, from noise in keys and in queries."""
        q, k, width = self.query, self.key, self.query.mean.shape[1]
        own = (q.mean**2 + q.variance) @ k.variance.T / width
        return _Rows(own, jnp.mean(q.variance, axis=1, keepdims=True) / width, k.mean)

    def output(self, rows: _Rows, weights: Array, mean: Array, order: int) -> Output:
        """The variance, (T, K)."""
        return Output(*_variance(self.value, rows, weights, mean, order))


def _variance(v: Part, rows: _Rows, weights: Array, mean: Array, order: int) -> tuple[Array, Array]:
    """Variance of weights @ values, (T, K), and the softmax's gain, (T, 1).

    The contribution of the queries' noise is computed as a sum over features, and spread over them as
    for independent keys. Per feature it would take T^2 K^2 products.
    """
    noise, key_size = of_each(v.variance), of_each(rows.key**2)
    values, ones = of_each(v.mean**2) + noise, jnp.ones_like(noise)  # E |v_c|^2, (1, S)
    second = v.mean**2 + v.variance
    squared, pulled = weights**2, weights * ((weights @ rows.key) @ rows.key.T)
    # Sums over keys, with weights W^2 own, W^2 |k|^2 and W (W k) k^T.
    own_second, own_mean, own_one, own_values = _sums(
        squared * rows.own, (second, v.mean), (ones, values)
    )
    key_second, key_mean, key_one, by_values = _sums(
        squared, (second, v.mean), (ones,), key_size, (v.variance,)
    )
    pulled_mean, pulled_one = _sums(pulled, (v.mean,), (ones,))
    size = _sum(mean**2) + _sum(by_values)  # E |A_a|^2 of the averages A, (T, 1)
    pattern = (
        (own_second + rows.query * key_second)
        - 2 * mean * (own_mean + rows.query * key_mean)
        + mean**2 * (own_one + rows.query * key_one)
    )
    pattern = nonnegative(pattern)

    def crossed(values: Array, weighing: Array) -> Array:
        """Weighted sums of E <A_a, v_c> over keys, (T, 1)."""
        return _sum(mean * values) + _sums(weighing * weights, (), (noise,))[0]

    by_keys = own_values - 2 * crossed(own_mean, squared * rows.own) + size * own_one
    by_query = (
        squared_products(rows.key, v.mean, noise, weights)
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


def shared_mean(
    q: Part, k: Part, shared: Shared, weights: Array, own: Own | None, own_weights: Array | None
) -> Array:
    """sum_c Cov[W_ac, v_cd]: weights and values share the random input, (T, K).

    By Stein's lemma Cov[W_ac, v_cd] = sum_f W_ac (1[c=f] - W_af) Cov[S_af, v_cd]; the key k_c shares
    its token with v_c, the query q_a with v_a. Takes the queries `q` of these rows, all keys `k`, E[W]
    (T, S), the queries' own tokens `own` (None if queries come from another sequence) and each query's
    weight on its own token, (T, 1).
    """
    shift = (q.mean @ shared.key_kernel.T) * ((weights - weights**2) @ shared.variance)
    if own is not None and own_weights is not None:
        offset = own.key - weights @ k.mean
        shift = shift + (offset @ own.query_kernel.T) * (own_weights * own.variance)
    return shift @ shared.value_kernel / root_width(q.mean)


def _sum(array: Array) -> Array:
    """The sum over features, (T, 1)."""
    return jnp.sum(array, axis=1, keepdims=True)


def _sums(
    weights: Array,
    columns: tuple[Array, ...],
    rows: tuple[Array, ...],
    scale: Array | None = None,
    unscaled: tuple[Array, ...] = (),
) -> list[Array]:
    """sum_c weights_ac scale_c x_c over keys, (T, n) for each x; `unscaled` ones without scale.

    One wide product for the compiler; one by one on chip, where a single column takes the room of 128.
    Weights are (T, S), columns and unscaled (S, n), rows and scale (1, S).
    """
    if on_chip():
        scaled = weights if scale is None else weights * scale
        sums = [scaled @ column for column in columns]
        sums += [_sum(scaled * row) for row in rows]
        return sums + [weights @ column for column in unscaled]
    parts = [*columns, *(row.T for row in rows)]
    ends = [sum(part.shape[1] for part in (*parts, *unscaled)[:n]) for n in range(1, len(parts))]
    wide = jnp.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]
    if scale is not None:
        ends.append(wide.shape[1])
        wide = jnp.concatenate([scale.T * wide, *unscaled], axis=1)
    return jnp.split(weights @ wide, ends, axis=1)
