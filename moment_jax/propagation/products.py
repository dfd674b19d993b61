"""Products of two random arrays, such as gates."""

import dataclasses
from collections.abc import Iterable
from functools import singledispatch
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from moment_jax.covariance import Diagonal, Separable, TokenBlock, TokenCorrelated
from moment_jax.covariance.numerics import safe_divide, safe_sqrt, weighted
from moment_jax.propagation.branches import Branch, Path, through_gain
from moment_jax.propagation.dense import branches_of, spread
from moment_jax.propagation.graph import Node
from moment_jax.propagation.moments import Moments, fresh
from moment_jax.propagation.origins import assumed, cross_of, with_cross
from moment_jax.propagation.propagator import Propagator, rule
from moment_jax.xla import diagonal_of


class Shared(NamedTuple):
    """Factors a and b of a common origin: dense layers of one array, then elementwise functions."""

    entered: Any  # covariance of the array, (T, D)
    left: Path  # to a, (T, F)
    right: Path  # to b
    mean_a: Array
    mean_b: Array
    bound: Array  # on the size of what is added to half the variance of a * b, (T, F)


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
    pairs = _alike(known_a, known_b)
    shared = next((pair for pair in pairs if all(map(_is_one_layer, pair))), None)
    cross = None
    if shared is not None:
        bound = safe_sqrt(by_a.variance()) * safe_sqrt(by_b.variance())
        (left,), (right,) = (branch.paths for branch in shared)
        origin = Shared(shared[0].entered, left, right, mean_a, mean_b, bound)
        within, cov = _correlated(cov, origin)
        mean = mean + within
    else:
        cross = cross_of(propagator, node, node.operands, tokens, features)
    if cross is not None:
        mean = mean + jnp.einsum("tdtd->td", cross)
        cov = with_cross(cov, _owed(cross, mean_a, mean_b))
    after_a = through_gain(known_a, mean_b, cov_a, by_a, mean_a)
    after_b = through_gain(known_b, mean_a, cov_b, by_b, mean_b)
    branches = tuple(
        dataclasses.replace(x, paths=(*x.paths, *y.paths)) for x, y in _alike(after_a, after_b)
    )
    text = "" if shared is not None else assumed("factors", node.operands, cross is not None)
    propagator.note(node, "product", text)
    return fresh(mean, cov, node.shape, tokens, features, branches)


def _owed(cross: Array, mean_a: Array, mean_b: Array) -> Array:
    """Half of what Cov[a, b], (T, D, T, D), adds to Cov[a * b]; `with_cross` adds its transpose too."""
    added = cross * mean_b[:, :, None, None] * mean_a[None, None]
    return added + cross * jnp.transpose(cross, (2, 3, 0, 1)) / 2


def _alike(left: Iterable[Branch], right: Iterable[Branch]) -> list[tuple[Branch, Branch]]:
    """Pairs of branches of both factors that start at the same array."""
    return [(a, b) for a in left for b in right if a.inner is b.inner and a.mean is b.mean]


def _is_one_layer(branch: Branch) -> bool:
    return len(branch.paths) == 1 and branch.paths[0].output is None


@singledispatch
def _correlated(cov: Any, shared: Shared) -> tuple[Array, Any]:
    """Cov[a_tf, b_tf], and the covariance of a * b given that of independent factors; here densely."""
    left, right = shared.left, shared.right
    dense = shared.entered.to_dense()
    cross = jnp.einsum("io,tisj,jp->tosp", left.hidden, dense, right.hidden)
    cross = cross * left.gain[:, :, None, None] * right.gain[None, None]
    within = jnp.einsum("tftf->tf", cross)
    return within, with_cross(cov, _owed(cross, shared.mean_a, shared.mean_b))


@_correlated.register
def _correlated_block(cov: TokenBlock, shared: Shared) -> tuple[Array, TokenBlock]:
    left, right = shared.left, shared.right
    cross = jnp.einsum("io,tij,jp->top", left.hidden, shared.entered.blocks, right.hidden)
    cross = cross * left.gain[:, :, None] * right.gain[:, None, :]
    added = cross * shared.mean_b[:, :, None] * shared.mean_a[:, None, :]
    blocks = cov.blocks + added + jnp.swapaxes(added, 1, 2) + cross * jnp.swapaxes(cross, 1, 2)
    return diagonal_of(cross), TokenBlock(blocks)


@_correlated.register
def _correlated_diagonal(cov: Diagonal, shared: Shared) -> tuple[Array, Diagonal]:
    within = _within(shared)
    return within, Diagonal(cov.variances + 2 * _added(within, shared))


def _within(shared: Shared) -> Array:
    """Cov[a_tf, b_tf] for a diagonal covariance of the origin's features, (T, F)."""
    within = shared.entered.variance() @ (shared.left.hidden * shared.right.hidden)
    return within * shared.left.gain * shared.right.gain


def _added(within: Array, shared: Shared) -> Array:
    return jnp.clip(within * shared.mean_a * shared.mean_b, -shared.bound, shared.bound)


@_correlated.register
def _correlated_tokens(cov: TokenCorrelated, shared: Shared) -> tuple[Array, TokenCorrelated]:
    within = _within(shared)
    total = jnp.sum(shared.entered.variance(), axis=0)
    own = total @ (shared.left.hidden * shared.right.hidden)
    gram = _token_gram(shared, safe_divide(own, jnp.sum(total)[None]))
    return within, TokenCorrelated.from_moments(
        cov.variance() + 2 * _added(within, shared), cov.token_gram() + gram + gram.T
    )


@_correlated.register
def _correlated_separable(cov: Separable, shared: Shared) -> tuple[Array, Separable]:
    entered, left, right = shared.entered, shared.left, shared.right
    features = entered.feature_gram()
    total = jnp.broadcast_to(jnp.sum(diagonal_of(features)), (1, 1))
    mapped = left.hidden.T @ safe_divide(features, total) @ right.hidden  # (F, F)
    own = diagonal_of(mapped)
    energy = jnp.sum(entered.variance(), axis=1, keepdims=True)
    within = energy * own[None, :] * left.gain * right.gain
    gram = _token_gram(shared, own)
    gain_a = weighted(left.gain * shared.mean_b, entered.pool)
    gain_b = weighted(right.gain * shared.mean_a, entered.pool)
    feature = mapped * (gain_a.T @ (entered.token_gram() @ gain_b))
    return within, cov.from_moments(
        cov.variance() + 2 * _added(within, shared),
        cov.token_gram() + gram + gram.T,
        cov.feature_gram() + feature + feature.T,
        cov.pool,
    )


def _token_gram(shared: Shared, own: Array) -> Array:
    """sum_f Cov[a_tf, b_sf] E[b_tf] E[a_sf], (T, T)."""
    left = shared.left.gain * shared.mean_b * own[None, :]
    return shared.entered.token_gram() * (left @ (shared.right.gain * shared.mean_a).T)


def hadamard(a: Any, b: Any) -> Any:
    """The entrywise product: the covariance of a * b for independent a, b of mean zero."""
    if isinstance(a, Diagonal):
        return Diagonal(a.variances * b.variances)
    if isinstance(a, Separable):
        tokens = a.token_correlation * b.token_correlation
        features = a.feature_correlation * b.feature_correlation
        return type(a)(a.scale * b.scale, tokens, features, a.pool)
    return type(a).project(a.to_dense() * b.to_dense())
