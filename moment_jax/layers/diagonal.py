"""Layers of `Diagonal`: entries are independent, also those of queries, keys and values."""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from moment_jax.covariance import Diagonal
from moment_jax.covariance.numerics import nonnegative, safe_divide
from moment_jax.expectations.activations import Formula
from moment_jax.expectations.softmax_mean import quick_expected_softmax
from moment_jax.layers import rules
from moment_jax.layers.dense import dense
from moment_jax.layers.params import AttentionParams, DenseParams
from moment_jax.layers.rules import Attending, Carry
from moment_jax.xla import diagonal_matrix, diagonal_of, materialized


def norm(
    mean: Array, cov: Diagonal, *, epsilon: Array | float, centres: bool
) -> tuple[Array, Diagonal, Carry]:
    """The rule of `layer_norm`: see there."""
    variance, d = cov.variances, mean.shape[1]

    def average(array: Array) -> Array:
        return jnp.mean(array, axis=1, keepdims=True)

    noise = average(variance)
    normal, inverse = rules.normalized(mean, noise * (1 - centres / d), epsilon, centres)
    linked = variance * normal
    pulled = linked - average(linked) if centres else linked
    squares = (d - 2 * centres) * average(variance**2) + centres * noise**2
    out = rules.normalized_mean(normal, inverse, pulled, average(normal * linked), squares)
    # The diagonal of J diag(v) J^T, J = (P - n n^T / D) / sqrt(q): a sum of squares, up to rounding.
    kept = (1 - 2 * (centres + normal**2) / d) * variance
    gained = normal**2 * average(normal * linked)
    if centres:
        gained = gained + noise + 2 * normal * average(linked)
    carried = inverse**2 * nonnegative(kept + gained / d)
    gain = inverse * (1 - (centres + normal**2) / d)
    return out, Diagonal.unchecked(carried), lambda cross: cross.rescale(gain)


class _Rows(NamedTuple):
    """Cov[S_ac, S_af] = own_ac [c = f] + z_ac z_af query_a (k k^T)_cf: noise of keys, and of the query.

    All entries of a query are taken as equally noisy, so that one matrix k k^T serves all rows.
    """

    own: Array  # (T, S)
    query: Array  # (T, 1)
    key: Array  # (S, K)
    slope: Array | None = None  # z, the factor of each score; None for one

    def variance(self) -> Array:
        by_query = self.query * jnp.sum(self.key**2, axis=1)[None]
        return self.own + self._sloped(self._sloped(by_query))

    def matvec(self, weights: Array) -> Array:
        by_query = self.query * ((self._sloped(weights) @ self.key) @ self.key.T)
        return self.own * weights + self._sloped(by_query)

    def _sloped(self, scores: Array) -> Array:
        return scores if self.slope is None else self.slope * scores


def attention(
    mean: Array, cov: Diagonal, memory: tuple[Array, Diagonal] | None, params: AttentionParams,
    attending: Attending,
) -> tuple[Array, Diagonal, Carry]:  # fmt: skip
    """The rule of `attention` and `cross_attention`: see there."""
    h, mask, turns, *_ = attending
    source, source_cov = (mean, cov) if memory is None else memory

    def part(x: Array, cov: Diagonal, p: DenseParams, turn: Array | None) -> tuple[Array, Array]:
        y, y_cov = dense(x, cov, p)
        squared = None if turn is None else turn**2
        return rules.split_heads(y, h, turn), rules.split_heads(y_cov.variances, h, squared)

    linked = None  # sum_d Cov[q_ad, k_ad] of a token with itself, (H, T)
    kernels = [rules.split_heads(p.kernel.mean, h) for p in (params.query, params.key)]
    if memory is None:
        linked = jnp.sum(kernels[0] * kernels[1], axis=2) @ cov.variances.T
    q = part(mean, cov, params.query, turns[0])
    k = part(source, source_cov, params.key, turns[1])
    noise = [each.score_variance() for each in attending.noise]
    v = part(source, source_cov, params.value, None)
    heads = *q, *k, *v, linked, mask, attending.scale, attending.bias, noise
    one_head = partial(_head, cap=attending.cap)
    num_scores = h * len(mean) * len(source)
    out, variance, own = rules.each_head(one_head, heads, num_scores)
    out, variance = rules.merge_heads(out), rules.merge_heads(variance)
    out, out_cov = dense(out, Diagonal.unchecked(variance), params.output)

    def carry(cross: Any, with_memory: Any = None) -> Any:
        """Through the values, from a token to itself; not from a memory's tokens to others."""
        del with_memory
        if memory is not None or cross is None:
            return None
        value, output = params.value.kernel.mean, params.output.kernel.mean
        if cross.kernels or len(value) != output.shape[1]:
            gain = jnp.repeat(own, value.shape[1] // h, axis=0).T
            return cross.map_features(value).rescale(gain).map_features(output)
        paths = jnp.sum((value * output.T).reshape(len(value), h, -1), axis=2)  # (D, H)
        return cross.rescale(own.T @ paths.T)

    return out, out_cov, carry


def _head(head: Any, cap: Formula | None) -> tuple[Array, Array, Array]:
    """Mean and variance (T, K) of one head's averages, and each query's weight on its own token."""
    q, q_variance, k, k_variance, v, v_variance, linked, mask, scale, bias, noise = head
    width = q.shape[1]
    scores = q @ k.T
    if linked is not None:
        scores = scores + diagonal_matrix(linked)
    scores = materialized(scores / width**0.5)
    own = (q**2 + q_variance) @ k_variance.T / width
    by_query = jnp.mean(q_variance, axis=1, keepdims=True) / width
    rows = _Rows(own, by_query, k)
    scores, slope = rules.shaped(scores, rows.variance, scale, bias, cap)
    if slope is not None:
        rows = _Rows(slope**2 * own, by_query, k, slope)
    rows = rows._replace(own=sum(noise, start=rows.own))
    own = rows.variance()
    weights = materialized(quick_expected_softmax(scores, rows, mask))
    mean = weights @ v
    squared = weights**2
    noisy = squared * own
    second = v**2 + v_variance
    by_values = squared @ v_variance
    one = jnp.sum(noisy, axis=1, keepdims=True)
    by_scores = nonnegative(noisy @ second - 2 * mean * (noisy @ v) + mean**2 * one)
    # The law of total variance: the softmax keeps a part of its Jacobian.
    total = jnp.sum(by_scores, axis=1, keepdims=True)
    whole = weights @ jnp.sum(second, axis=1, keepdims=True)
    averaged = jnp.sum(mean**2 + by_values, axis=1, keepdims=True)
    gain, left = rules.kept_jacobian(total, whole, averaged)
    by_scores = by_scores * safe_divide(jnp.minimum(gain**2 * total, left), total)
    own_weights = diagonal_of(weights) if len(weights) == weights.shape[1] else mean[:, 0]
    return mean, by_values + by_scores, own_weights
