"""Attention for `Separable`: one head at a time, in token and feature Gram matrices.

The input x of queries, keys and values is read as Cov[x_ti, x_sj] = G_ts F_ij / tr F, with its token and
feature Gram matrices G and F, and so are the queries, keys and values of a head. Per head, the
covariance Cov[S_ac, S_bf] of the scores S = q k^T / sqrt(K) is

    alpha_ab Kc_cf + beta_ab KK_cf,    alpha = (q Fk q^T + <Fq, Fk> Qc) / K,    beta = Qc / K,

made one Kronecker product, with the token Gram matrices Qc and Kc of queries and keys, their feature
Gram matrices Fq and Fk over their traces, and KK = k Fq k^T. Softmax sees contrasts of keys alone, so Fk
is that of the keys less their average, taken before the keys' covariance is projected. The T^4
covariance is never formed.

The heads' averages are not projected to the structure: between them and the output projection each
token has its own correlation of features, which would be lost. Variances and Gram matrices are those
of the projected output, from the values times the output kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from moment_jax.covariance import Separable
from moment_jax.covariance.feature_gram import FeatureGram, column_noise
from moment_jax.covariance.marginals import fit_marginals
from moment_jax.covariance.numerics import safe_divide, vector_cov
from moment_jax.expectations import expected_softmax, masked_softmax
from moment_jax.layers.attention.inputs import Inputs, Mixing, merge_heads, split_heads
from moment_jax.layers.attention.rows import (
    Products,
    RowCovariance,
    Term,
    inner_noise,
    score_noise,
)
from moment_jax.layers.attention.shared_input import (
    Centres,
    Links,
    make_links,
    score_value,
    shared_mean,
)
from moment_jax.layers.attention.values import ValueNoise, over_trace
from moment_jax.layers.params import DenseParams
from moment_jax.posterior import Point

Array = jax.Array

_MANY_SCORES = 2**21
"""Scores of all heads beyond which heads are mixed one after another."""


class _Head(NamedTuple):
    """One head."""

    query: Array  # mean, (T, K)
    key: Array  # (S, K)
    value: Array  # (S, K)
    query_features: Array  # feature Gram matrix, (K, K)
    contrasts: Array  # that of the keys less their average, (K, K)
    value_features: Array  # (K, K)
    metric: Array  # under which the token Gram matrix is wanted, (K, K)
    kernel: Array  # of the output, (K, D)


class _Tokens(NamedTuple):
    """What all heads have in common: token Gram matrices over their traces, (T, T) each."""

    query: Array
    key: Array
    value: Array
    centre: Array  # what takes the average off: a (S, S) quadratic form in keys


class _Mixed(NamedTuple):
    """One head's output."""

    mean: Array  # (T, K)
    weights: Array  # (T, S)
    reach: Array  # weights times the values' token pattern, (T, S)
    gain: Array  # of the softmax, (T,)
    token_gram: Array  # all but the averages of random values, under the metric, (T, T)
    feature_gram: Array  # all but the averages of random values, (K, K)
    energy: Array  # variance by the scores, summed over the features, (T,)
    variance: Array  # variance of the projected output by the scores, (T, D)


def attend_separable(inputs: Inputs[Separable]) -> tuple[Array, Separable, Mixing]:
    """Moments of the output: mean (T, D), covariance, and how the tokens were mixed."""
    h, output = inputs.num_heads, inputs.output
    kernel = output.kernel.mean
    noise_metric = vector_cov(output.kernel.input_metric())
    metric = kernel @ kernel.T + noise_metric
    heads, tokens = _heads(inputs, metric)
    links = make_links(inputs.shared, h)
    mixed = _each_head(
        lambda head, link, mask: _head(head, tokens, link, mask, inputs.order),
        heads,
        links,
        inputs.mask,
    )
    values = ValueNoise(inputs.value.cov, mixed.weights, mixed.reach)
    mean = merge_heads(mixed.mean)
    cov = _output_cov(output, values, mixed, mean, noise_metric)
    return output.mean_output(mean), cov, Mixing(mixed.weights, mixed.gain)


def _each_head(
    mix: Callable[[_Head, Links | None, Array | None], _Mixed],
    heads: _Head,
    links: Links | None,
    mask: Array | None,
) -> _Mixed:
    """All heads at once, or one after another where their (T, S) arrays are many and large.

    One after another keeps the arrays of a single head alive, in the backward pass as well.
    """
    h, t, _ = heads.query.shape
    if h * t * heads.key.shape[1] <= _MANY_SCORES:
        axes = None if links is None else Links._make((None, 0, 0, 0))
        return jax.vmap(mix, in_axes=(0, axes, None if mask is None else 0))(heads, links, mask)

    def one(head: tuple[_Head, tuple[Array, ...] | None, Array | None]) -> _Mixed:
        own = None if links is None or head[1] is None else Links(links.tokens, *head[1])
        return mix(head[0], own, head[2])

    return jax.lax.map(jax.checkpoint(one), (heads, None if links is None else links[1:], mask))


def _output_cov(
    output: DenseParams, values: ValueNoise, mixed: _Mixed, mean: Array, noise_metric: Array
) -> Separable:
    """Covariance of the projected output, its random kernel and bias included."""
    kernel = output.kernel.mean
    split = kernel.reshape(*mixed.feature_gram.shape[:2], -1)
    variance, feature_gram = values.map_features(kernel)
    variance = variance + jnp.sum(mixed.variance, axis=0)
    feature_gram = feature_gram + jnp.einsum("hko,hkp->op", split, mixed.feature_gram @ split)
    token_gram = values.token_gram(kernel @ kernel.T + noise_metric)
    token_gram = token_gram + jnp.sum(mixed.token_gram, axis=0)
    features = FeatureGram(feature_gram)
    if not isinstance(output.kernel, Point):
        by_scores = jax.vmap(_outer)(mixed.energy, jax.vmap(jnp.diagonal)(mixed.feature_gram))
        mixed_variance = values.variance() + merge_heads(by_scores)
        variance = variance + output.kernel.noise_variance(mean, mixed_variance)
        token_gram = token_gram + (mean @ noise_metric) @ mean.T
        if output.kernel.uncorrelated:
            features = features.plus(column_noise(output.kernel, mean, mixed_variance))
        else:
            moment = values.feature_gram() + _block_diagonal(mixed.feature_gram) + mean.T @ mean
            features = FeatureGram(feature_gram + output.kernel.noise_block(moment))
    variance = fit_marginals(variance, jnp.diagonal(token_gram), features.diag())
    cov = Separable.from_moments(variance, token_gram, features)
    if output.bias is None or isinstance(output.bias, Point):
        return cov
    return cov.add(Separable.shared(mean.shape[0], output.bias.vector_cov()))


def _outer(rows: Array, columns: Array) -> Array:
    """Rows times columns, over the columns' sum."""
    total = jnp.broadcast_to(jnp.sum(columns), columns.shape)
    return rows[:, None] * safe_divide(columns, total)[None, :]


def _heads(inputs: Inputs[Separable], metric: Array) -> tuple[_Head, _Tokens]:
    h = inputs.num_heads
    contrasts, centre = _contrasts(inputs)
    kernel = inputs.output.kernel.mean
    heads = _Head(
        split_heads(inputs.query.mean, h),
        split_heads(inputs.key.mean, h),
        split_heads(inputs.value.mean, h),
        inputs.query.cov.features().blocks(h),
        contrasts,
        inputs.value.cov.features().blocks(h),
        FeatureGram(metric).blocks(h),
        kernel.reshape(h, kernel.shape[0] // h, -1),
    )
    query, key, value = (
        over_trace(p.cov.token_gram()) for p in (inputs.query, inputs.key, inputs.value)
    )
    return heads, _Tokens(query, key, value, centre)


def _contrasts(inputs: Inputs[Separable]) -> tuple[Array, Array]:
    """Feature Gram matrices of every head's keys less their average, and the form that centres."""
    mean, cov, kernel = inputs.key_input
    h = inputs.num_heads
    used = jnp.ones(mean.shape[0], mean.dtype)
    if inputs.mask is not None:  # the average of the keys that any query may look at
        used = jnp.any(inputs.mask, axis=(0, 1)).astype(mean.dtype)
    share = used / jnp.maximum(jnp.sum(used), 1)
    centre = jnp.diag(used) - share[:, None] * used[None, :]
    tokens = cov.token_gram()
    part = safe_divide(jnp.sum(tokens * centre), jnp.trace(tokens))  # of all the input's variance
    features = cov.features()
    centred = used[:, None] * (mean - (share @ mean)[None, :])
    if kernel.uncorrelated:
        total = part * features.diag() + jnp.sum(centred**2, axis=0)
        noise = FeatureGram(diagonal=kernel.noise_variance(0 * total, total))
    else:
        moment = part * features.dense() + centred.T @ centred
        noise = FeatureGram(kernel.noise_block(moment))
    return part * features.map(kernel.mean).blocks(h) + noise.blocks(h), centre


def _head(
    head: _Head, tokens: _Tokens, links: Links | None, mask: Array | None, order: int
) -> _Mixed:
    width = jnp.asarray(head.query.shape[1], head.query.dtype)
    scores = head.query @ head.key.T
    if order == 2 and links is not None:
        scores = scores + links.tokens * jnp.trace(links.query_key)
    scores = scores / jnp.sqrt(width)
    rows = _rows(head, tokens, width)
    weights = masked_softmax(scores, mask) if order == 1 else expected_softmax(scores, rows, mask)
    mean, reach = weights @ head.value, weights @ tokens.value

    products = _products(head, tokens, weights, mean, reach)
    noise = score_noise(rows, weights, products, order)
    token_gram = noise.token_gram
    inner = inner_noise(rows, weights, noise.gain)
    feature_gram = head.value.T @ inner @ head.value
    feature_gram = feature_gram + jnp.sum(inner * tokens.value) * head.value_features
    noisy = weights**2 * rows.variance()
    independent = jnp.sum(noisy * products.spread(), axis=1)
    size = safe_divide(jnp.maximum(jnp.diagonal(token_gram), 0), independent)
    energy, variance = _by_independent_keys(head, tokens, noisy, weights, mean, reach)
    if links is not None:
        gain = noise.gain / jnp.sqrt(width)
        linked = weights @ links.tokens
        centres = Centres(head.query, head.key, head.value)
        crossed_tokens, crossed_features = score_value(
            centres, links, weights, mean, gain, linked, head.metric
        )
        token_gram = token_gram + crossed_tokens + crossed_tokens.T
        feature_gram = feature_gram + crossed_features + crossed_features.T
        if order == 2:
            mean = mean + shared_mean(centres, links, weights, gain, linked)
    return _Mixed(
        mean,
        weights,
        reach,
        noise.gain,
        token_gram,
        feature_gram,
        size * energy,
        size[:, None] * variance,
    )


def _products(head: _Head, tokens: _Tokens, weights: Array, mean: Array, reach: Array) -> Products:
    value, average = head.value @ head.metric, mean @ head.metric
    noise = jnp.sum(head.value_features * head.metric)
    return Products(
        head.value @ value.T + noise * tokens.value,
        mean @ value.T + noise * reach,
        mean @ average.T + noise * (reach @ weights.T),
    )


def _by_independent_keys(
    head: _Head, tokens: _Tokens, noisy: Array, weights: Array, mean: Array, reach: Array
) -> tuple[Array, Array]:
    """Variance by scores whose keys are independent: over the head's features, (T,), and (T, D).

    Args:
      head: one head.
      tokens: what the heads have in common.
      noisy: Var[S_ac] times the squared weights, (T, S).
      weights: W, (T, S).
      mean: W v, (T, K).
      reach: W times the token pattern of the values, (T, S).
    """
    overlap = jnp.sum(reach * weights, axis=1, keepdims=True)
    spread = jnp.diagonal(tokens.value)[None, :] - 2 * reach + overlap
    by_noise = jnp.sum(noisy * spread, axis=1, keepdims=True)
    total = jnp.sum(noisy, axis=1, keepdims=True)

    def by_mean(value: Array, average: Array) -> Array:
        return noisy @ value**2 - 2 * average * (noisy @ value) + average**2 * total

    energy = jnp.sum(by_mean(head.value, mean), axis=1)
    energy = energy + by_noise[:, 0] * jnp.trace(head.value_features)
    projected = jnp.sum((head.value_features @ head.kernel) * head.kernel, axis=0)
    variance = by_mean(head.value @ head.kernel, mean @ head.kernel)
    variance = variance + by_noise * projected[None, :]
    return jnp.maximum(energy, 0), jnp.maximum(variance, 0)


def _rows(head: _Head, tokens: _Tokens, width: Array) -> RowCovariance:
    """Covariance of the scores, one Kronecker product in the place of two.

    The keys' side is the average that the queries have over the tokens; the queries' side keeps, for
    every pair of tokens, the total variance of contrasts of keys.
    """
    key_mean = (head.key @ head.query_features) @ head.key.T
    by_key = jnp.sum(tokens.key * tokens.centre)
    by_mean = jnp.sum(key_mean * tokens.centre)
    both = jnp.sum(head.query_features * head.contrasts)
    near = (head.query @ head.contrasts) @ head.query.T + both * tokens.query
    share = safe_divide(jnp.mean(jnp.diagonal(near)), by_key)
    keys = share * tokens.key + jnp.mean(jnp.diagonal(tokens.query)) * key_mean
    total = jnp.broadcast_to(jnp.sum(keys * tokens.centre), (1, 1))
    queries = safe_divide(near + by_mean * tokens.query, total) / width
    return RowCovariance((Term(queries, keys),))


def _block_diagonal(blocks: Array) -> Array:
    h, k, _ = blocks.shape
    eye = jnp.eye(h, dtype=blocks.dtype)
    return (blocks[:, :, None, :] * eye[:, None, :, None]).reshape(h * k, h * k)
