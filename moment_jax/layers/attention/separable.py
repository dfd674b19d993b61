"""Attention for `Separable`: one head at a time, in token and feature Gram matrices.

The input x of queries, keys and values is read as Cov[x_ti, x_sj] = G_ts F_ij / tr F, with its token and
feature Gram matrices G and F. Per head, Cov[S_ac, S_bf] of the scores S = q k^T / sqrt(K) is

    alpha_ab Kc_cf + beta_ab KK_cf,    alpha = (q Fk q^T + <Fq, Fk> Qc) / K,    beta = Qc / K,

made one Kronecker product (`RowCovariance.as_one_term`), with the token Gram matrices Qc and Kc of
queries and keys, their feature Gram matrices Fq and Fk over their traces, and KK = k Fq k^T. Softmax
sees contrasts of keys alone, so Fk is that of the keys less their average, taken before the keys'
covariance is projected. The T^4 covariance is never formed.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from moment_jax.covariance import Separable
from moment_jax.covariance.feature_gram import FeatureGram
from moment_jax.covariance.marginals import fit_marginals
from moment_jax.covariance.numerics import safe_divide
from moment_jax.expectations import expected_softmax, masked_softmax
from moment_jax.layers.attention.inputs import (
    Inputs,
    Mixing,
    Projection,
    merge_heads,
    split_heads,
)
from moment_jax.layers.attention.rows import RowCovariance, Term, average, independent_variance
from moment_jax.layers.attention.shared_input import (
    Centres,
    Links,
    make_links,
    score_value,
    shared_mean,
)
from moment_jax.layers.attention.value_noise import Averages, diagonal_blocks, over_trace

Array = jax.Array


class _Head(NamedTuple):
    """One head's part of a projection."""

    mean: Array  # (T, K)
    scale: Array  # (T, K)
    tokens: Array  # token correlation, (T, T)
    feature_gram: Array  # (K, K)

    def variance(self) -> Array:
        return self.scale**2

    def token_gram(self) -> Array:
        return self.tokens * (self.scale @ self.scale.T)

    def metric(self) -> Array:
        """The feature Gram matrix over its trace."""
        return over_trace(self.feature_gram)

    def mixed(self, inner: Array) -> Array:
        """sum_cf inner_cf Cov[x_cd, x_fe], (K, K)."""
        features = safe_divide(self.feature_gram, self.scale.T @ self.scale)
        return features * (self.scale.T @ (self.tokens * inner) @ self.scale)


class _Contrast(NamedTuple):
    """One head's keys less their average."""

    feature_gram: Array  # (K, K)
    centre: Array  # what takes the average off: a (S, S) quadratic form in keys


class _Mixed(NamedTuple):
    """One head's output."""

    mean: Array  # (T, K)
    pattern: Array  # of the variances, (T, K)
    by_values: Array  # token Gram matrix of the averages of random values, (T, T)
    token_gram: Array  # all but that, (T, T)
    feature_gram: Array  # all but that, (K, K)
    weights: Array  # (T, S)
    gain: Array  # of the softmax, (T,)


def mix_separable(inputs: Inputs[Separable]) -> tuple[Array, Separable, Mixing]:
    """Moments of the concatenated heads: mean (T, H K), covariance, and weights (H, T, S)."""
    num_heads = inputs.num_heads
    links = make_links(inputs.shared, num_heads)
    mixed = jax.vmap(
        lambda q, k, v, contrast, link, mask: _head(q, k, v, contrast, link, mask, inputs.order),
        in_axes=(
            *(_Head._make((0, 0, None, 0)),) * 3,
            0,
            None if links is None else Links._make((None, 0, 0, 0)),
            None if inputs.mask is None else 0,
        ),
    )(
        _heads(inputs.query, num_heads),
        _heads(inputs.key, num_heads),
        _heads(inputs.value, num_heads),
        _contrasts(inputs),
        links,
        inputs.mask,
    )
    averages = Averages(inputs.value.cov, mixed.weights, mixed.by_values)
    feature_gram = averages.feature_gram() + _block_diagonal(mixed.feature_gram)
    columns = jnp.diagonal(feature_gram).reshape(num_heads, -1)
    rows = jax.vmap(jnp.diagonal)(mixed.by_values + mixed.token_gram)
    variance = jax.vmap(fit_marginals)(mixed.pattern, rows, columns)

    def token_gram_by(metric: Array) -> Array:
        metric = jnp.diag(metric) if metric.ndim == 1 else metric
        own = diagonal_blocks(metric, num_heads)
        total = jnp.einsum("hdd->h", mixed.feature_gram)
        shares = safe_divide(jnp.sum(own * mixed.feature_gram, axis=(1, 2)), total)
        by_scores = jnp.sum(shares[:, None, None] * mixed.token_gram, axis=0)
        return averages.token_gram(metric) + by_scores

    cov = Separable.from_moments(
        merge_heads(variance),
        jnp.sum(mixed.by_values + mixed.token_gram, axis=0),
        feature_gram,
        token_gram_by,
    )
    return merge_heads(mixed.mean), cov, Mixing(mixed.weights, mixed.gain)


def _heads(projection: Projection[Separable], num_heads: int) -> _Head:
    cov = projection.cov
    return _Head(
        split_heads(projection.mean, num_heads),
        split_heads(cov.scale, num_heads),
        cov.token_correlation,
        cov.features().blocks(num_heads),
    )


def _contrasts(inputs: Inputs[Separable]) -> _Contrast:
    """Feature Gram matrices of every head's keys less their average."""
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
    gram = part * features.map(kernel.mean).blocks(h) + noise.blocks(h)
    return _Contrast(gram, jnp.broadcast_to(centre, (h, *centre.shape)))


def _head(
    q: _Head,
    k: _Head,
    v: _Head,
    contrast: _Contrast,
    links: Links | None,
    mask: Array | None,
    order: int,
) -> _Mixed:
    width = jnp.asarray(q.mean.shape[1], q.mean.dtype)
    scores = q.mean @ k.mean.T
    if order == 2 and links is not None:
        scores = scores + links.tokens * jnp.trace(links.query_key)
    scores = scores / jnp.sqrt(width)
    rows = _rows(q, k, contrast, width)
    weights = masked_softmax(scores, mask) if order == 1 else expected_softmax(scores, rows, mask)
    mean = weights @ v.mean

    average_of = average(rows, weights, mean, v.mean, v.token_gram(), order)
    token_gram = average_of.by_scores
    feature_gram = v.mean.T @ average_of.inner @ v.mean + v.mixed(average_of.inner)
    if links is not None:
        gain = average_of.gain / jnp.sqrt(width)
        reach = weights @ links.tokens
        centres = Centres(q.mean, k.mean, v.mean)
        crossed_tokens, crossed_features = score_value(centres, links, weights, mean, gain, reach)
        token_gram = token_gram + crossed_tokens + crossed_tokens.T
        feature_gram = feature_gram + crossed_features + crossed_features.T
    pattern = independent_variance(rows, weights, mean, v.mean, v.variance())
    if order == 2 and links is not None:
        mean = mean + shared_mean(centres, links, weights, gain, reach)
    return _Mixed(
        mean, pattern, average_of.by_values, token_gram, feature_gram, weights, average_of.gain
    )


def _rows(q: _Head, k: _Head, contrast: _Contrast, width: Array) -> RowCovariance:
    query_cov, query_metric, key_cov = q.token_gram(), q.metric(), k.token_gram()
    spread = jnp.broadcast_to(jnp.sum(key_cov * contrast.centre), (1, 1))
    key_metric = safe_divide(contrast.feature_gram, spread)
    query_mean = (q.mean @ key_metric) @ q.mean.T
    shared = jnp.sum(query_metric * key_metric)
    two = RowCovariance(
        (
            Term((query_mean + shared * query_cov) / width, key_cov),
            Term(query_cov / width, (k.mean @ query_metric) @ k.mean.T),
        )
    )
    return two.as_one_term(contrast.centre)


def _block_diagonal(blocks: Array) -> Array:
    h, k, _ = blocks.shape
    eye = jnp.eye(h, dtype=blocks.dtype)
    return (blocks[:, :, None, :] * eye[:, None, :, None]).reshape(h * k, h * k)
