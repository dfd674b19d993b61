"""Products of two random arrays, such as gates."""

from __future__ import annotations

import dataclasses
from functools import singledispatch
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moment_jax.covariance import Covariance, Diagonal, Separable, TokenBlock, TokenCorrelated
from moment_jax.covariance.numerics import safe_divide, safe_sqrt, weighted
from moment_jax.propagation.branches import Branch, through_gain
from moment_jax.propagation.dense import branches_of, spread
from moment_jax.propagation.graph import Node
from moment_jax.propagation.moments import Moments, fresh
from moment_jax.propagation.origins import assumed, cross_of, with_cross
from moment_jax.propagation.propagator import Propagator, rule
from moment_jax.xla import diagonal_of

Array = jax.Array


class Shared(NamedTuple):
    """Common origin of two factors a and b: dense layers of one array, then elementwise functions."""

    entered: Any  # covariance of the array, (T, D)
    left: Array  # kernel of a, (D, F)
    right: Array  # kernel of b
    left_gain: Array  # gain of a, (T, F)
    right_gain: Array


@rule("mul")
def _product(propagator: Propagator, node: Node) -> Moments | None:
    """Moments to second order in the noise, with the correlation of factors of a common origin."""
    if len(node.nodes) != 2:
        return None
    a, b = (spread(propagator.moments(x), node.shape) for x in node.operands)
    tokens, features = a.natural()
    (mean_a, cov_a), (mean_b, cov_b) = (m.sequence(tokens, features) for m in (a, b))
    by_a, by_b = cov_a.rescale(mean_b), cov_b.rescale(mean_a)
    mean, cov = mean_a * mean_b, by_a.add(by_b, hadamard(cov_a, cov_b))
    known_a, known_b = (
        branches_of(m, own, tokens, features) for m, own in ((a, mean_a), (b, mean_b))
    )
    shared = next(filter(None, map(_shared, *_alike(known_a, known_b))), None)
    if shared is not None:
        bound = safe_sqrt(by_a.variance()) * safe_sqrt(by_b.variance())
        within, cov = _correlated(cov, shared, mean_a, mean_b, bound)
        mean = mean + within
    cross = None if shared else cross_of(propagator, node, node.operands, tokens, features)
    if cross is not None:
        mean = mean + jnp.einsum("tdtd->td", cross)
        cov = with_cross(cov, _owed(cross, mean_a, mean_b))
    left = through_gain(known_a, mean_b, cov_a, by_a, mean_a)
    right = through_gain(known_b, mean_a, cov_b, by_b, mean_b)
    branches = tuple(
        dataclasses.replace(a, paths=(*a.paths, *b.paths))
        for a, b in zip(*_alike(left, right), strict=True)
    )
    text = "" if shared is not None else assumed("factors", node.operands, cross is not None)
    propagator.note(node, "product", text)
    out = fresh(mean, cov, node.shape, tokens, features)
    return dataclasses.replace(out, branches=branches)


def _owed(cross: Array, mean_a: Array, mean_b: Array) -> Array:
    """Half of what Cov[a, b], (T, D, T, D), adds to Cov[a * b]; `with_cross` adds its transpose too."""
    added = cross * mean_b[:, :, None, None] * mean_a[None, None]
    return added + cross * jnp.transpose(cross, (2, 3, 0, 1)) / 2


def _alike(
    left: tuple[Branch, ...], right: tuple[Branch, ...]
) -> tuple[list[Branch], list[Branch]]:
    """Pairs of branches of both factors that start at the same array."""
    pairs = [(a, b) for a in left for b in right if a.inner is b.inner and a.mean is b.mean]
    return [a for a, _ in pairs], [b for _, b in pairs]


def _shared(a: Branch, b: Branch) -> Shared | None:
    if not (len(a.paths) == len(b.paths) == 1):
        return None
    left, right = a.paths[0], b.paths[0]
    if left.output is not None or right.output is not None:
        return None
    return Shared(a.entered, left.hidden, right.hidden, left.gain, right.gain)


@singledispatch
def _correlated(
    cov: Any, shared: Shared, mean_a: Array, mean_b: Array, bound: Array
) -> tuple[Array, Any]:
    """Cov[a_tf, b_tf], and the covariance of a * b given their common origin; here densely.

    Args:
      cov: covariance of the product of independent factors.
      shared: their common origin.
      mean_a: (T, F).
      mean_b: (T, F).
      bound: on the size of what is added to half the variance, (T, F).
    """
    dense = shared.entered.to_dense()
    cross = jnp.einsum("io,tisj,jp->tosp", shared.left, dense, shared.right)
    cross = cross * shared.left_gain[:, :, None, None] * shared.right_gain[None, None]
    within = jnp.einsum("tftf->tf", cross)
    return within, with_cross(cov, _owed(cross, mean_a, mean_b))


@_correlated.register
def _correlated_block(
    cov: TokenBlock, shared: Shared, mean_a: Array, mean_b: Array, bound: Array
) -> tuple[Array, TokenBlock]:
    cross = jnp.einsum("io,tij,jp->top", shared.left, shared.entered.blocks, shared.right)
    cross = cross * shared.left_gain[:, :, None] * shared.right_gain[:, None, :]
    added = cross * mean_b[:, :, None] * mean_a[:, None, :]
    blocks = cov.blocks + added + jnp.swapaxes(added, 1, 2) + cross * jnp.swapaxes(cross, 1, 2)
    return diagonal_of(cross), TokenBlock(blocks)


@_correlated.register
def _correlated_diagonal(
    cov: Diagonal, shared: Shared, mean_a: Array, mean_b: Array, bound: Array
) -> tuple[Array, Diagonal]:
    within = _within(shared)
    added = jnp.clip(within * mean_a * mean_b, -bound, bound)
    return within, Diagonal(cov.variances + 2 * added)


def _within(shared: Shared) -> Array:
    """Cov[a_tf, b_tf] for a diagonal covariance of the origin's features, (T, F)."""
    within = shared.entered.variance() @ (shared.left * shared.right)
    return within * shared.left_gain * shared.right_gain


@_correlated.register
def _correlated_tokens(
    cov: TokenCorrelated, shared: Shared, mean_a: Array, mean_b: Array, bound: Array
) -> tuple[Array, TokenCorrelated]:
    entered = shared.entered
    within = _within(shared)
    added = jnp.clip(within * mean_a * mean_b, -bound, bound)
    total = jnp.sum(entered.variance(), axis=0)
    own = safe_divide(total @ (shared.left * shared.right), jnp.sum(total)[None])
    gram = _token_gram(entered, shared, own, mean_a, mean_b)
    return within, TokenCorrelated.from_moments(
        cov.variance() + 2 * added, cov.token_gram() + gram + gram.T
    )


@_correlated.register
def _correlated_separable(
    cov: Separable, shared: Shared, mean_a: Array, mean_b: Array, bound: Array
) -> tuple[Array, Separable]:
    entered = shared.entered
    features = entered.feature_gram()
    total = jnp.broadcast_to(jnp.sum(diagonal_of(features)), (1, 1))
    mapped = shared.left.T @ safe_divide(features, total) @ shared.right  # (F, F)
    own = diagonal_of(mapped)
    energy = jnp.sum(entered.variance(), axis=1, keepdims=True)
    within = energy * own[None, :] * shared.left_gain * shared.right_gain
    added = jnp.clip(within * mean_a * mean_b, -bound, bound)
    gram = _token_gram(entered, shared, own, mean_a, mean_b)
    left = weighted(shared.left_gain * mean_b, entered.pool)
    right = weighted(shared.right_gain * mean_a, entered.pool)
    feature = mapped * (left.T @ (entered.token_gram() @ right))
    return within, cov.from_moments(
        cov.variance() + 2 * added,
        cov.token_gram() + gram + gram.T,
        cov.feature_gram() + feature + feature.T,
        cov.pool,
    )


def _token_gram(
    entered: Covariance, shared: Shared, own: Array, mean_a: Array, mean_b: Array
) -> Array:
    """sum_f Cov[a_tf, b_sf] E[b_tf] E[a_sf], (T, T)."""
    left, right = shared.left_gain * mean_b * own[None, :], shared.right_gain * mean_a
    return entered.token_gram() * (left @ right.T)


@singledispatch
def hadamard(a: Any, b: Any) -> Any:
    """The entrywise product: the covariance of a * b for independent a, b of mean zero."""
    return type(a).project(a.to_dense() * b.to_dense())


@hadamard.register
def _hadamard_diagonal(a: Diagonal, b: Diagonal) -> Diagonal:
    return Diagonal(a.variances * b.variances)


@hadamard.register
def _hadamard_separable(a: Separable, b: Separable) -> Separable:
    return type(a)(
        a.scale * b.scale,
        a.token_correlation * b.token_correlation,
        a.feature_correlation * b.feature_correlation,
        a.pool,
    )
