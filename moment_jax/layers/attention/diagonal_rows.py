"""Attention for `Diagonal`, any rows of one head; entries of queries, keys and values independent.

The scores S_ac = q_a . k_c / sqrt(K) of one row share the query, so that

    Cov[S_ac, S_af] = own_ac [c = f] + sum_d Var[q_ad] k_cd k_fd / K

with own_ac = sum_d (q_ad^2 + Var[q_ad]) Var[k_cd] / K. Rows are independent of each other, so a block
of them can run in a kernel. In the second term all entries of a query are taken as equally noisy, so
that one matrix k k^T serves all rows.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from moment_jax.covariance.numerics import nonnegative, safe_divide
from moment_jax.expectations.softmax_mean import quick_expected_softmax
from moment_jax.layers.attention.inputs import Centres, root_width
from moment_jax.layers.attention.mix import Output
from moment_jax.layers.attention.score_noise import left_within, saturation
from moment_jax.layers.attention.squared_products import of_each, squared_products
from moment_jax.xla import on_chip


class Part(NamedTuple):
    """One head's queries, keys or values."""

    mean: Array  # (T, K)
    variance: Array  # (T, K)


class Shared(NamedTuple):
    """What one head's keys and values owe to the input that they share."""

    energy: Array  # average variance of each token's features, (1, S)
    link: Array  # key_kernel^T value_kernel, (K, K)


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
    noise = of_each(v.variance)
    values, ones = of_each(v.mean**2) + noise, jnp.ones_like(noise)  # E |v_c|^2, (1, S)
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


def shared_mean(q: Part, weights: Array, shared: Shared) -> Array:
    """sum_c Cov[W_ac, v_cd]: weights and values share the random input, (T, K).

    By Stein's lemma Cov[W_ac, v_cd] = sum_f W_ac (1[c=f] - W_af) Cov[S_af, v_cd]; the key k_c shares
    its token with v_c. Takes the queries `q` of these rows and E[W], (T, S).

    Budget: features of a token count as equally noisy, and what the query shares with the value of its
    own token is left out. On the sampled cases the mean moves by .003 sd at most, where the structure
    has it wrong by .01 to .27.
    """
    spread = _sum((weights - weights**2) * shared.energy)
    return spread * (q.mean @ shared.link) / root_width(q.mean)


def _sum(array: Array) -> Array:
    """The sum over features, (T, 1)."""
    return jnp.sum(array, axis=1, keepdims=True)


def _sums(weights: Array, columns: tuple[Array, ...], rows: tuple[Array, ...]) -> list[Array]:
    """sum_c weights_ac x_c over keys, (T, n) for each x: columns (S, n), and rows (1, S).

    One wide product for the compiler; one by one on chip, where a single column takes the room of 128.
    """
    if on_chip():
        return [*(weights @ column for column in columns), *(_sum(weights * row) for row in rows)]
    parts = [*columns, *(row.T for row in rows)]
    if len(parts) == 1:
        return [weights @ parts[0]]
    ends = [sum(part.shape[1] for part in parts[:n]) for n in range(1, len(parts))]
    return jnp.split(weights @ jnp.concatenate(parts, axis=1), ends, axis=1)
