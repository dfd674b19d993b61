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
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from moment_jax.covariance import (
    Covariance,
    Diagonal,
    Separable,
    TokenBlock,
    TokenCorrelated,
)
from moment_jax.covariance.numerics import safe_sqrt
from moment_jax.layers.feed_forward import FeedForwardTangent
from moment_jax.layers.norm_tangent import NormTangent
from moment_jax.layers.residual_separable import Tangent, separable_cross
from moment_jax.xla import product_with_transposed

Array = jax.Array
S = TypeVar("S", bound=Covariance)


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
    """By the dense covariances; what structures do in their own way follows."""

    def carried(change: Array) -> Array:
        return tangent(change if norm is None else norm(change))

    dense = cov.to_dense()
    cross = jax.vmap(jax.vmap(carried))(dense)  # Cov[x_td, f_se]
    total = dense + branch.to_dense() + cross + jnp.transpose(cross, (2, 3, 0, 1))
    return type(cov).project(total)


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
        returned = returned * norm.diagonal
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
    entering = scale if norm is None else scale * norm.diagonal
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
            return variance, product_with_transposed(cov.correlation * (scale @ source.T), weights)

        parts = jax.vmap(head)(tangent.mixing.weights, value_paths)
        cross, gram = (jnp.sum(part, axis=0) for part in parts)
    cross = _bounded(cross, cov, branch)
    return TokenCorrelated.from_moments(
        cov.variance() + branch.variance() + 2 * cross,
        cov.token_gram() + branch.token_gram() + gram + gram.T,
    )


@_add.register
def _add_separable(
    cov: Separable, branch: Separable, tangent: Tangent, norm: NormTangent | None
) -> Separable:
    cross = separable_cross(cov, tangent, norm)
    return cov.from_crossed(
        cov.variance() + branch.variance() + 2 * _bounded(cross.variance, cov, branch),
        cov.token_gram() + branch.token_gram() + cross.token_gram + cross.token_gram.T,
        cov.feature_gram() + branch.feature_gram() + cross.feature_gram + cross.feature_gram.T,
        cov.pool,
    )


def _bounded(cross: Array, cov: Covariance, branch: Covariance) -> Array:
    """A covariance between x and its branch within Cauchy and Schwarz, entry by entry."""
    bound = safe_sqrt(cov.variance()) * safe_sqrt(branch.variance())
    return jnp.clip(cross, -bound, bound)
