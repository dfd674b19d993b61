"""Residual connections: x + f(x), with the covariance between x and its own branch.

Cov[x, f(x)] = Cov[x] J^T, J the expected Jacobian of the branch. `Full` keeps all of it. `Diagonal`
keeps the part between a feature and itself, through the feed-forward layer and through the values of
attention. What passes through queries and keys links only different features, so it drops it, and also
everything of a branch that attends to a memory. `Separable` keeps its two Gram matrices, with gains and
attention averaged over the tokens.
"""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.covariance import Covariance, Diagonal, Separable
from moment_jax.covariance.numerics import pooled, safe_divide, safe_sqrt, weighted
from moment_jax.layers.attention.inputs import merge_heads, split_heads
from moment_jax.layers.attention.tangent import AttentionTangent
from moment_jax.layers.feed_forward import FeedForwardTangent
from moment_jax.layers.norm_tangent import NormTangent
from moment_jax.xla import diagonal_of, materialized

S = TypeVar("S", bound=Covariance)
Tangent = AttentionTangent | FeedForwardTangent
Cross = tuple[Array, Array, Array]
"""Cov[x, f(x)] as `Separable` holds it: Cov[x_td, f_td], (T, D); sum_d Cov[x_td, f_sd], (T, T); and
Cov[sum_t x_td, sum_s f_se], (D, D), pooled as x is."""


def residual(
    mean: Array,
    cov: S,
    branch_mean: Array,
    branch_cov: S,
    tangent: Tangent,
    norm: NormTangent | None = None,
) -> tuple[Array, S]:
    """Moments of x + f(x), in the structure of `cov`.

    Args:
      mean: E[x], (T, D).
      cov: covariance of x.
      branch_mean: E[f(x)], (T, D).
      branch_cov: covariance of f(x), in the structure of `cov`.
      tangent: the branch, linearised as its covariance was.
      norm: the linearised normalisation that the branch starts with; None for none.

    Source: Transformer derivation, sections 4.5 and 4.6, without assuming independence.
    """
    return materialized(mean + branch_mean), _add(cov, branch_cov, tangent, norm)


def _add(cov: Any, branch: Any, tangent: Tangent, norm: NormTangent | None) -> Any:
    """Covariance of x + f(x); by default through dense covariances."""
    if isinstance(cov, Diagonal):
        return _add_diagonal(cov, branch, tangent, norm)
    if isinstance(cov, Separable):
        return _add_separable(cov, branch, tangent, norm)

    def carried(change: Array) -> Array:
        return tangent(change if norm is None else norm(change))

    dense = cov.to_dense()
    cross = jax.vmap(jax.vmap(carried))(dense)  # Cov[x_td, f_se]
    total = dense + branch.to_dense() + cross + jnp.transpose(cross, (2, 3, 0, 1))
    return type(cov).project(total)


def _add_diagonal(
    cov: Diagonal, branch: Diagonal, tangent: Tangent, norm: NormTangent | None
) -> Diagonal:
    if isinstance(tangent, FeedForwardTangent):
        returned = tangent.diagonal()
    else:
        paths = tangent.value_paths()
        if paths is None:
            return cov.add(branch)
        returned = jnp.einsum("ht,hd->td", tangent.mixing.own, paths)
    if norm is not None:
        returned = returned * norm.diagonal
    cross = _bounded(cov.variance() * returned, cov, branch)
    return Diagonal(cov.variances + branch.variances + 2 * cross)


def _add_separable(
    cov: Separable, branch: Separable, tangent: Tangent, norm: NormTangent | None
) -> Separable:
    entering = cov.scale if norm is None else cov.scale * norm.diagonal
    features = cov.feature_gram() if norm is None else norm.feature_cross(cov)
    if isinstance(tangent, FeedForwardTangent):
        cross = _through_feed_forward(cov, entering, features, tangent)
    elif tangent.source_kernels is None:
        cross = _through_queries(cov, entering, features, tangent)
    else:
        cross = _through_mixing(cov, entering, features, tangent, *tangent.source_kernels)
    variance, token_gram, feature_gram = cross
    return cov.from_crossed(
        cov.variance() + branch.variance() + 2 * _bounded(variance, cov, branch),
        cov.token_gram() + branch.token_gram() + token_gram + token_gram.T,
        cov.feature_gram() + branch.feature_gram() + feature_gram + feature_gram.T,
        cov.pool,
    )


def _bounded(cross: Array, cov: Covariance, branch: Covariance) -> Array:
    """Clip a covariance between x and its branch to the Cauchy-Schwarz bound, entry by entry."""
    bound = safe_sqrt(cov.variance()) * safe_sqrt(branch.variance())
    return jnp.clip(cross, -bound, bound)


def _through_feed_forward(
    cov: Separable, entering: Array, features: Array, tangent: FeedForwardTangent
) -> Cross:
    assert isinstance(tangent.input_cov, Separable)
    assert tangent.average_jacobian is not None
    feature_gram = features @ tangent.average_jacobian
    # The part between a feature and itself: token by token with the feature covariance of the branch's
    # input, which is close to that of x, then shifted to the right sum over the tokens.
    inner = tangent.input_cov.feature_gram()
    pulled = inner @ tangent.hidden_kernel if tangent.pulled is None else tangent.pulled
    paths = pulled * materialized(tangent.output_kernel.T)
    own = safe_divide(tangent.gain @ paths.T, diagonal_of(inner)[None, :] + 0 * entering)
    with_sum = entering * _with_sum(cov)
    missing = diagonal_of(feature_gram) - jnp.sum(with_sum * own, axis=0)
    missing = _over(missing, jnp.sum(with_sum, axis=0))
    returned = entering * (own + missing[None])
    token_gram = cov.token_correlation * (cov.scale @ returned.T)
    return cov.scale * returned, token_gram, feature_gram


def _over(total: Array, sums: Array) -> Array:
    """Divide covariances of sums over tokens, (..., D), by those of x with the branch's input."""
    return safe_divide(total, jnp.broadcast_to(sums, total.shape))


def _with_sum(cov: Separable) -> Array:
    """Cov[p_t x_td, sum_s p_s x_sd] over the scale of x_td, (T, D), with the pool's weights p.

    Times the scale of x', summed over t, it is the covariance of the sums of x' and x.
    """
    return weighted(cov.token_correlation @ weighted(cov.scale, cov.pool), cov.pool)


def _through_queries(
    cov: Separable, entering: Array, features: Array, tangent: AttentionTangent
) -> Cross:
    """A branch that attends to a memory depends on x through its queries only."""
    h = tangent.mixing.weights.shape[0]
    v = split_heads(tangent.value, h)
    own = pooled(cov.token_correlation * (cov.scale @ entering.T), cov.pool)
    own = weighted(own, cov.pool)
    own = safe_divide(own, jnp.broadcast_to(jnp.sum(own), own.shape))
    output = tangent.output_kernel.reshape(h, -1, tangent.output_kernel.shape[1])
    jacobian = tangent.query_jacobian(own, v, tangent.mixing.weights @ v)
    bent = split_heads(features @ tangent.query_kernel, h) @ jacobian
    sums = jnp.sum(entering * _with_sum(cov), axis=0)
    by_scores = entering * _over(jnp.einsum("hdk,hkd->d", bent, output), sums)[None]
    token_gram = cov.token_correlation * (cov.scale @ by_scores.T)
    return cov.scale * by_scores, token_gram, jnp.einsum("hik,hko->io", bent, output)


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
    # Normalised covariances of each input token with the sum over tokens; rows are output tokens.
    columns = pooled(tokens, cov.pool)
    energy = jnp.sum(weighted(columns, cov.pool))
    columns = safe_divide(columns, jnp.broadcast_to(energy, columns.shape))
    normal = weighted(jnp.broadcast_to(columns, tokens.shape), cov.pool)
    v = split_heads(tangent.value, h)
    output = tangent.output_kernel.reshape(h, -1, tangent.output_kernel.shape[1])
    linked = tangent.mixing.weights * normal[None]  # (H, T, S)
    mean = tangent.mixing.weights @ v
    by_query = tangent.query_jacobian(diagonal_of(normal), v, mean)
    by_query = split_heads(tangent.query_kernel, h) @ by_query
    by_key = split_heads(key_kernel, h) @ tangent.key_jacobian(linked, v, mean)
    by_value = split_heads(features @ value_kernel, h)
    bent = split_heads(features @ merge_heads(by_query + by_key), h)  # (H, D, K)
    straight = by_value * jnp.sum(linked, axis=(1, 2))[:, None, None]
    feature_gram = jnp.einsum("hik,hko->io", straight + bent, output)

    # The part between a feature and itself: through the values of every head, and through the scores.
    sums = jnp.sum(entering * _with_sum(cov), axis=0)
    paths = _over(jnp.einsum("hdk,hkd->hd", by_value, output), sums)
    by_scores = entering * _over(jnp.einsum("hdk,hkd->d", bent, output), sums)[None]
    size = safe_sqrt(jnp.sum(entering**2, axis=1))
    carried = (tangent.mixing.weights * cov.token_correlation[None]) @ size
    carried = safe_divide(carried, jnp.broadcast_to(size, carried.shape))
    variance = scale * (entering * (carried.T @ paths) + by_scores)
    shares = paths @ sums
    shares = safe_divide(shares, jnp.broadcast_to(energy, shares.shape))
    mixed = jnp.einsum("h,htc->tc", shares, tangent.mixing.weights)
    token_gram = tokens @ mixed.T + cov.token_correlation * (scale @ by_scores.T)
    return variance, token_gram, feature_gram
