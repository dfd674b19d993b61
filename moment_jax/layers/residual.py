"""Residual connections: x + f(x), with the covariance between x and its own branch.

Cov[x, f(x)] = Cov[x] J^T, J the expected Jacobian of the branch. Each structure keeps of it what it can
hold: `Full` all; `TokenBlock` each token's own block; `TokenCorrelated` and `Diagonal` what a feature
gets back of itself, through the feed-forward layer and through the values of attention (what passes
through queries and keys links different features only, and they hold none of it, nor anything of a
branch that attends to a memory); `Separable` the two Gram matrices of it, with gains and attention
averaged over the tokens.
"""

from __future__ import annotations

from functools import singledispatch
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from moment_jax.covariance import (
    Covariance,
    Diagonal,
    Full,
    Separable,
    TokenBlock,
    TokenCorrelated,
)
from moment_jax.covariance.numerics import safe_divide, safe_sqrt, weighted
from moment_jax.layers.attention.inputs import split_heads
from moment_jax.layers.attention.tangent import AttentionTangent
from moment_jax.layers.feed_forward import FeedForwardTangent
from moment_jax.layers.norm import NormTangent

Array = jax.Array
S = TypeVar("S", bound=Covariance)
Tangent = AttentionTangent | FeedForwardTangent


def residual(
    mean: Array,
    cov: S,
    branch_mean: Array,
    branch_cov: S,
    tangent: Tangent,
    norm: NormTangent | None = None,
) -> tuple[Array, S]:
    """Moments of x + f(x).

    Args:
      mean: E[x], (T, D).
      cov: covariance of x.
      branch_mean: E[f(x)], (T, D).
      branch_cov: covariance of f(x), in the structure of `cov`.
      tangent: the branch, linearised as its covariance was.
      norm: a normalisation that the branch begins with, linearised; None where there is none.

    Returns:
      Mean (T, D) and covariance of the sum, in the structure of `cov`.

    Source: Transformer derivation, sections 4.5 and 4.6, without the independence that it assumes.
    """
    return mean + branch_mean, _add(cov, branch_cov, tangent, norm)


@singledispatch
def _add(cov: Any, branch: Any, tangent: Tangent, norm: NormTangent | None) -> Any:
    raise TypeError(f"`residual` knows no structure {type(cov).__name__}; register it with `_add`.")


@_add.register
def _add_full(cov: Full, branch: Full, tangent: Tangent, norm: NormTangent | None) -> Full:
    def carried(change: Array) -> Array:
        return tangent(change if norm is None else norm(change))

    cross = jax.vmap(jax.vmap(carried))(cov.cov)  # Cov[x_td, f_se]
    return Full(cov.cov + branch.cov + cross + jnp.transpose(cross, (2, 3, 0, 1)))


@_add.register
def _add_token_block(
    cov: TokenBlock, branch: TokenBlock, tangent: Tangent, norm: NormTangent | None
) -> TokenBlock:
    if isinstance(tangent, FeedForwardTangent):
        jacobian = tangent.jacobian()
    elif tangent.source_kernels is None:
        return cov.add(branch)
    else:
        h, value_kernel = tangent.mixing.weights.shape[0], tangent.source_kernels[1]
        value = value_kernel.reshape(value_kernel.shape[0], h, -1)
        output = tangent.output_kernel.reshape(h, -1, tangent.output_kernel.shape[1])
        jacobian = jnp.einsum("ihk,ht,hko->tio", value, tangent.own_weights(), output)
    carried = cov.blocks if norm is None else cov.blocks @ norm.jacobian()
    cross = carried @ jacobian
    return TokenBlock(cov.blocks + branch.blocks + cross + jnp.swapaxes(cross, 1, 2))


@_add.register
def _add_diagonal(
    cov: Diagonal, branch: Diagonal, tangent: Tangent, norm: NormTangent | None
) -> Diagonal:
    if isinstance(tangent, FeedForwardTangent):
        returned = tangent.diagonal()
    else:
        paths = tangent.value_paths()
        if paths is None:
            return cov.add(branch)
        returned = jnp.einsum("ht,hd->td", tangent.own_weights(), paths)
    if norm is not None:
        returned = returned * norm.gain
    cross = _bounded(cov.variance() * returned, cov, branch)
    return Diagonal(cov.variances + branch.variances + 2 * cross)


@_add.register
def _add_token_correlated(
    cov: TokenCorrelated,
    branch: TokenCorrelated,
    tangent: Tangent,
    norm: NormTangent | None,
) -> TokenCorrelated:
    scale = cov.scale
    entering = scale if norm is None else scale * norm.gain
    if isinstance(tangent, FeedForwardTangent):
        returned = entering * tangent.diagonal()
        cross = scale * returned
        gram = cov.correlation * (scale @ returned.T)
    else:
        value_paths = tangent.value_paths()
        if value_paths is None:
            return cov.add(branch)

        def head(weights: Array, paths: Array) -> tuple[Array, Array]:
            source = entering * paths[None, :]
            variance = scale * ((weights * cov.correlation) @ source)
            return variance, (cov.correlation * (scale @ source.T)) @ weights.T

        parts = jax.vmap(head)(tangent.mixing.weights, value_paths)
        cross, gram = (jnp.sum(part, axis=0) for part in parts)
    cross = _bounded(cross, cov, branch)
    return TokenCorrelated.from_moments(
        cov.variance() + branch.variance() + 2 * cross,
        cov.token_gram() + branch.token_gram() + gram + gram.T,
    )


class _Cross(NamedTuple):
    """Cov[x, f(x)] as `Separable` can hold it."""

    variance: Array  # Cov[x_td, f_td], (T, D)
    token_gram: Array  # sum_d Cov[x_td, f_sd], (T, T)
    feature_gram: Array  # sum_t Cov[x_td, f_te], (D, D)


@_add.register
def _add_separable(
    cov: Separable, branch: Separable, tangent: Tangent, norm: NormTangent | None
) -> Separable:
    entering = cov.scale if norm is None else cov.scale * norm.gain
    features = cov.feature_gram() if norm is None else norm.feature_cross(cov)
    if isinstance(tangent, FeedForwardTangent):
        cross = _through_feed_forward(cov, entering, features, tangent)
    elif tangent.source_kernels is None:
        cross = _through_queries(cov, entering, features, tangent)
    else:
        cross = _through_mixing(cov, entering, features, tangent, *tangent.source_kernels)
    return Separable.from_moments(
        cov.variance() + branch.variance() + 2 * _bounded(cross.variance, cov, branch),
        cov.token_gram() + branch.token_gram() + cross.token_gram + cross.token_gram.T,
        cov.feature_gram() + branch.feature_gram() + cross.feature_gram + cross.feature_gram.T,
        cov.pool,
    )


def _through_feed_forward(
    cov: Separable, entering: Array, features: Array, tangent: FeedForwardTangent
) -> _Cross:
    assert isinstance(tangent.input_cov, Separable)
    feature_gram = features @ tangent.average_jacobian()
    # What a feature gets of itself: token by token with the features of the branch's input, which
    # are nearly those of x, and then moved to the right sum over the tokens.
    inner = tangent.input_cov.feature_gram()
    paths = (inner @ tangent.hidden_kernel) * tangent.output_kernel.T
    own = safe_divide(tangent.gain @ paths.T, jnp.diagonal(inner)[None, :] + 0 * entering)
    missing = jnp.diagonal(feature_gram) - _pooled(cov.scale * entering * own, cov)
    returned = entering * (own + _per_feature(missing, cov, entering)[None])
    return _Cross(
        cov.scale * returned, cov.token_correlation * (cov.scale @ returned.T), feature_gram
    )


def _per_feature(total: Array, cov: Separable, entering: Array) -> Array:
    """Sums over the tokens of covariances (..., D), over sum_t s_td entering_td."""
    return safe_divide(total, jnp.broadcast_to(_pooled(cov.scale * entering, cov), total.shape))


def _pooled(rows: Array, cov: Separable) -> Array:
    """The sum over the tokens, with the weights of the covariance where it has some."""
    return jnp.sum(weighted(rows, cov.pool), axis=0)


def _through_queries(
    cov: Separable, entering: Array, features: Array, tangent: AttentionTangent
) -> _Cross:
    """With a memory, the branch knows x by its queries alone."""
    h = tangent.mixing.weights.shape[0]
    v = split_heads(tangent.value, h)
    own = weighted(jnp.sum(cov.scale * entering, axis=1), cov.pool)
    own = safe_divide(own, jnp.broadcast_to(jnp.sum(own), own.shape))
    output = tangent.output_kernel.reshape(h, -1, tangent.output_kernel.shape[1])
    bent = split_heads(features @ tangent.query_kernel, h) @ _query_jacobian(tangent, own, v)
    by_scores = entering * _per_feature(jnp.einsum("hdk,hkd->d", bent, output), cov, entering)[None]
    return _Cross(
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
) -> _Cross:
    scale, h = cov.scale, tangent.mixing.weights.shape[0]
    tokens = cov.token_correlation * (scale @ entering.T)
    energy = _pooled(jnp.diagonal(tokens), cov)
    # Rows are those of the sum over the tokens of the output.
    normal = weighted(safe_divide(tokens, jnp.broadcast_to(energy, (1, 1))), cov.pool)
    v = split_heads(tangent.value, h)
    output = tangent.output_kernel.reshape(h, -1, tangent.output_kernel.shape[1])
    by_query, by_key, by_value = (
        split_heads(features @ kernel, h)
        for kernel in (tangent.query_kernel, key_kernel, value_kernel)
    )
    linked = tangent.mixing.weights * normal[None]  # (H, T, S)
    mean_query = _query_jacobian(tangent, jnp.diagonal(normal), v)
    mean_key = _key_jacobian(tangent, linked, v)
    bent = by_query @ mean_query + by_key @ mean_key  # (H, D, K)
    straight = by_value * jnp.sum(linked, axis=(1, 2))[:, None, None]
    feature_gram = jnp.einsum("hik,hko->io", straight + bent, output)

    # What a feature gets of itself: through the values of every head, and through all scores.
    paths = _per_feature(jnp.einsum("hdk,hkd->hd", by_value, output), cov, entering)
    by_scores = entering * _per_feature(jnp.einsum("hdk,hkd->d", bent, output), cov, entering)[None]
    size = safe_sqrt(jnp.sum(entering**2, axis=1))
    carried = (tangent.mixing.weights * cov.token_correlation[None]) @ size
    carried = safe_divide(carried, jnp.broadcast_to(size, carried.shape))
    variance = scale * (entering * (carried.T @ paths) + by_scores)
    shares = paths @ _pooled(scale * entering, cov)
    shares = safe_divide(shares, jnp.broadcast_to(energy, shares.shape))
    mixed = jnp.einsum("h,htc->tc", shares, tangent.mixing.weights)
    gram = tokens @ mixed.T + cov.token_correlation * (scale @ by_scores.T)
    return _Cross(variance, gram, feature_gram)


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


def _bounded(cross: Array, cov: Covariance, branch: Covariance) -> Array:
    """A covariance between x and its branch within Cauchy and Schwarz, entry by entry."""
    bound = safe_sqrt(cov.variance()) * safe_sqrt(branch.variance())
    return jnp.clip(cross, -bound, bound)
