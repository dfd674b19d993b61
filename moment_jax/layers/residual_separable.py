"""The covariance of x with a branch f(x), as `Separable` holds it: two Gram matrices and variances.

Gains and attention are averaged over the tokens, as they enter the sum over the tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from moment_jax.covariance import Separable
from moment_jax.covariance.numerics import paired, pooled, safe_divide, safe_sqrt, weighted
from moment_jax.layers.attention.inputs import merge_heads, split_heads
from moment_jax.layers.attention.tangent import AttentionTangent
from moment_jax.layers.feed_forward import FeedForwardTangent
from moment_jax.layers.norm_tangent import NormTangent
from moment_jax.xla import diagonal_of, product_with_transposed, rows_diagonal

Array = jax.Array
Tangent = AttentionTangent | FeedForwardTangent


class Cross(NamedTuple):
    """Cov[x, f(x)] as `Separable` can hold it."""

    variance: Array  # Cov[x_td, f_td], (T, D)
    token_gram: Array  # sum_d Cov[x_td, f_sd], (T, T)
    feature_gram: Array  # Cov[sum_t x_td, sum_s f_se], (D, D), pooled as x is


def separable_cross(cov: Separable, tangent: Tangent, norm: NormTangent | None) -> Cross:
    """Cov[x, f(x)], where f begins with a normalisation if there is one.

    Args:
      cov: covariance of x, (T, D).
      tangent: the branch, linearised.
      norm: its normalisation, linearised.
    """
    entering = cov.scale if norm is None else cov.scale * norm.diagonal
    features = cov.feature_gram() if norm is None else norm.feature_cross(cov)
    if isinstance(tangent, FeedForwardTangent):
        return _through_feed_forward(cov, entering, features, tangent)
    if tangent.source_kernels is None:
        return _through_queries(cov, entering, features, tangent)
    return _through_mixing(cov, entering, features, tangent, *tangent.source_kernels)


def _through_feed_forward(
    cov: Separable, entering: Array, features: Array, tangent: FeedForwardTangent
) -> Cross:
    assert isinstance(tangent.input_cov, Separable)
    feature_gram = features @ tangent.average_jacobian()
    # What a feature gets of itself: token by token with the features of the branch's input, which
    # are nearly those of x, and then moved to the right sum over the tokens.
    inner = tangent.input_cov.feature_gram()
    paths = (inner @ tangent.hidden_kernel) * tangent.output_kernel.T
    own = safe_divide(tangent.gain @ paths.T, diagonal_of(inner)[None, :] + 0 * entering)
    missing = diagonal_of(feature_gram) - _sums(cov, entering * own)
    returned = entering * (own + _per_feature(missing, cov, entering)[None])
    return Cross(
        cov.scale * returned, cov.token_correlation * (cov.scale @ returned.T), feature_gram
    )


def _per_feature(total: Array, cov: Separable, entering: Array) -> Array:
    """Covariances of sums over the tokens, (..., D), over that of x with what enters the branch."""
    sums = cov.share(_sums(cov, entering))
    return safe_divide(cov.share(total), jnp.broadcast_to(sums, total.shape))


def _sums(cov: Separable, entering: Array) -> Array:
    """Cov[sum_t x_td, sum_s x'_sd], where x' has the scale `entering`, (D,)."""
    rows = weighted(cov.scale, cov.pool)
    return paired(weighted(entering, cov.pool), rows, cov.token_correlation)


def _through_queries(
    cov: Separable, entering: Array, features: Array, tangent: AttentionTangent
) -> Cross:
    """With a memory, the branch knows x by its queries alone."""
    h = tangent.mixing.weights.shape[0]
    v = split_heads(tangent.value, h)
    own = pooled(cov.token_correlation * (cov.scale @ entering.T), cov.pool)
    own = weighted(own, cov.pool)
    own = safe_divide(own, jnp.broadcast_to(jnp.sum(own), own.shape))
    output = tangent.output_kernel.reshape(h, -1, tangent.output_kernel.shape[1])
    jacobian = cov.share(_query_jacobian(tangent, own, v))
    bent = split_heads(features @ tangent.query_kernel, h) @ jacobian
    by_scores = entering * _per_feature(jnp.einsum("hdk,hkd->d", bent, output), cov, entering)[None]
    return Cross(
        cov.scale * by_scores,
        cov.token_correlation * (cov.scale @ by_scores.T),
        jnp.einsum("hik,hko->io", bent, output),
    )


def _through_mixing(
    cov: Separable,
    entering: Array,
    features: Array,
    tangent: AttentionTangent,
    key_kernel: Array,
    value_kernel: Array,
) -> Cross:
    scale, h = cov.scale, tangent.mixing.weights.shape[0]
    tokens = cov.token_correlation * (scale @ entering.T)
    # Columns of the input's covariance with its sum over the tokens; rows are the output's tokens.
    columns = pooled(tokens, cov.pool)
    energy = jnp.sum(weighted(columns, cov.pool))
    columns = safe_divide(columns, jnp.broadcast_to(energy, columns.shape))
    normal = weighted(jnp.broadcast_to(columns, tokens.shape), cov.pool)
    v = split_heads(tangent.value, h)
    output = tangent.output_kernel.reshape(h, -1, tangent.output_kernel.shape[1])
    linked = tangent.mixing.weights * normal[None]  # (H, T, S)
    by_query = cov.share(_query_jacobian(tangent, rows_diagonal(normal), v))
    by_query = split_heads(tangent.query_kernel, h) @ by_query
    by_key = split_heads(key_kernel, h) @ cov.share(_key_jacobian(tangent, linked, v))
    by_value = split_heads(features @ value_kernel, h)
    bent = split_heads(features @ merge_heads(by_query + by_key), h)  # (H, D, K)
    straight = by_value * cov.share(jnp.sum(linked, axis=(1, 2)))[:, None, None]
    feature_gram = jnp.einsum("hik,hko->io", straight + bent, output)

    # What a feature gets of itself: through the values of every head, and through all scores.
    paths = _per_feature(jnp.einsum("hdk,hkd->hd", by_value, output), cov, entering)
    by_scores = entering * _per_feature(jnp.einsum("hdk,hkd->d", bent, output), cov, entering)[None]
    size = safe_sqrt(jnp.sum(entering**2, axis=1))
    carried = (tangent.mixing.weights * cov.token_correlation[None]) @ size
    carried = safe_divide(carried, jnp.broadcast_to(size, carried.shape))
    variance = scale * (entering * (carried.T @ paths) + by_scores)
    shares = paths @ _sums(cov, entering)
    shares = safe_divide(shares, jnp.broadcast_to(energy, shares.shape))
    mixed = jnp.einsum("h,htc->tc", shares, tangent.mixing.weights)
    gram = product_with_transposed(tokens, mixed) + cov.token_correlation * (scale @ by_scores.T)
    return Cross(variance, gram, feature_gram)


def _query_jacobian(tangent: AttentionTangent, own: Array, v: Array) -> Array:
    """The average Jacobian of a head's output with respect to its queries, (H, K, K).

    d A_a / d q_a = sum_c W_ac k_c (v_c - A_a)^T / sqrt(K), averaged with the variance of the tokens.

    Args:
      tangent: of the attention.
      own: shares of the tokens, (T,).
      v: mean values, (H, S, K).
    """
    weights = tangent.mixing.weights
    h, _, width = v.shape
    k, mean, shares = split_heads(tangent.key, h), weights @ v, own[None]
    if tangent.mixing.gain is not None:
        shares = shares * tangent.mixing.gain
    else:
        shares = jnp.broadcast_to(shares, weights.shape[:2])
    seen = jnp.einsum("ht,htc->hc", shares, weights)
    result = jnp.einsum("hcd,hc,hce->hde", k, seen, v)
    result = result - jnp.einsum("htd,ht,hte->hde", weights @ k, shares, mean)
    return result / jnp.sqrt(jnp.asarray(width, v.dtype))


def _key_jacobian(tangent: AttentionTangent, linked: Array, v: Array) -> Array:
    """The same with respect to its keys, averaged with the tokens' covariance times W, (H, T, S).

    d A_a / d k_c = W_ac q_a (v_c - A_a)^T / sqrt(K).
    """
    h, _, width = v.shape
    if tangent.mixing.gain is not None:
        linked = linked * tangent.mixing.gain[:, :, None]
    mean = tangent.mixing.weights @ v
    left = linked @ v - jnp.sum(linked, axis=2)[..., None] * mean
    result = jnp.einsum("htd,hte->hde", split_heads(tangent.query, h), left)
    return result / jnp.sqrt(jnp.asarray(width, v.dtype))
