"""Products of two random arrays, such as gates."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from moment_jax.covariance import Diagonal, Separable
from moment_jax.covariance.numerics import safe_divide, safe_sqrt, weighted
from moment_jax.propagation.branches import Branch, through_gain
from moment_jax.propagation.graph import Node
from moment_jax.propagation.moments import Moments
from moment_jax.propagation.origins import cross_of, with_cross
from moment_jax.propagation.propagator import Propagator, rule
from moment_jax.xla import diagonal_of


class Shared(NamedTuple):
    """Factors a and b of a common origin: dense layers of one array, then elementwise functions."""

    entered: Any  # covariance of the array, (T, D)
    kernel_a: Array  # (D, F)
    kernel_b: Array
    gain_a: Array  # of a's function, (T, F) or (1, F)
    gain_b: Array
    mean_a: Array  # (T, F)
    mean_b: Array
    bound: Array  # on the size of what is added to half the variance of a * b, (T, F)


@rule("mul")
def _product(propagator: Propagator, node: Node) -> Moments | None:
    """Moments to second order in the noise, with the correlation of factors of a common origin."""
    if len(node.nodes) != 2:
        return None
    m, other = (propagator.moments(x).broadcast(node.shape) for x in node.operands)
    a = m.sequence()
    b = other.sequence(*a.axes)
    by_a, by_b = a.cov.rescale(b.mean), b.cov.rescale(a.mean)
    mean, cov = a.mean * b.mean, by_a.add(by_b, hadamard(a.cov, b.cov))
    pairs = _alike(a.branches, b.branches)
    shared = next((pair for pair in pairs if all(map(_is_one_layer, pair))), None)
    assumed = ""
    if shared is not None:
        (left,), (right,) = (branch.paths for branch in shared)
        bound = safe_sqrt(by_a.variance()) * safe_sqrt(by_b.variance())
        kernels, gains = (left.hidden, right.hidden), (left.gain, right.gain)
        origin = Shared(shared[0].entered, *kernels, *gains, a.mean, b.mean, bound)
        within, cov = _correlated(cov, origin)
        mean = mean + within
    else:
        cross, assumed = cross_of(propagator, node, "factors", a.axes)
        if cross is not None:
            mean = mean + jnp.einsum("tdtd->td", cross)
            cov = with_cross(cov, _owed(cross, a.mean, b.mean))
    after = _alike(through_gain(a, b.mean, by_a), through_gain(b, a.mean, by_b))
    branches = tuple(dataclasses.replace(x, paths=(*x.paths, *y.paths)) for x, y in after)
    propagator.note(node, "product", assumed)
    return a.changed(mean, cov, node.shape, branches)


def _owed(cross: Array, mean_a: Array, mean_b: Array) -> Array:
    """Half of what Cov[a, b], (T, D, T, D), adds to Cov[a * b]; `with_cross` adds its transpose too."""
    added = cross * mean_b[:, :, None, None] * mean_a[None, None]
    return added + cross * jnp.transpose(cross, (2, 3, 0, 1)) / 2


def _alike(left: tuple[Branch, ...], right: tuple[Branch, ...]) -> list[tuple[Branch, Branch]]:
    """Pairs of branches of both factors that start at the same array."""
    return [(a, b) for a in left for b in right if a.inner is b.inner and a.mean is b.mean]


def _is_one_layer(branch: Branch) -> bool:
    return len(branch.paths) == 1 and branch.paths[0].output is None


def _correlated(cov: Any, shared: Shared) -> tuple[Array, Any]:
    """Cov[a_tf, b_tf], and the covariance of a * b given that of independent factors."""
    entered, kernel_a, kernel_b, gain_a, gain_b, mean_a, mean_b, _ = shared
    if isinstance(cov, Diagonal | Separable):
        return _correlated_grams(cov, shared)
    cross = jnp.einsum("io,tisj,jp->tosp", kernel_a, entered.to_dense(), kernel_b)
    cross = cross * gain_a[:, :, None, None] * gain_b[None, None]
    return jnp.einsum("tftf->tf", cross), with_cross(cov, _owed(cross, mean_a, mean_b))


def _correlated_grams(cov: Any, shared: Shared) -> tuple[Array, Any]:
    """`_correlated` in structures that keep variances, token and feature Gram matrices."""
    entered, kernel_a, kernel_b, gain_a, gain_b, mean_a, mean_b, bound = shared
    gains = gain_a * gain_b
    if isinstance(cov, Separable):
        features = entered.feature_gram()
        total = jnp.broadcast_to(jnp.sum(diagonal_of(features)), (1, 1))
        mapped = kernel_a.T @ safe_divide(features, total) @ kernel_b  # (F, F)
        own = diagonal_of(mapped)
        within = jnp.sum(entered.variance(), axis=1, keepdims=True) * own[None, :] * gains
    else:
        total = jnp.sum(entered.variance(), axis=0)
        own = safe_divide(total @ (kernel_a * kernel_b), jnp.sum(total)[None])
        within = entered.variance() @ (kernel_a * kernel_b) * gains
    variance = cov.variance() + 2 * jnp.clip(within * mean_a * mean_b, -bound, bound)
    if isinstance(cov, Diagonal):
        return within, Diagonal(variance)
    # sum_f Cov[a_tf, b_sf] E[b_tf] E[a_sf], (T, T)
    gram = entered.token_gram() * ((gain_a * mean_b * own[None, :]) @ (gain_b * mean_a).T)
    token_gram = cov.token_gram() + gram + gram.T
    left, right = (weighted(x, entered.pool) for x in (gain_a * mean_b, gain_b * mean_a))
    feature = mapped * (left.T @ (entered.token_gram() @ right))
    feature_gram = cov.feature_gram() + feature + feature.T
    return within, cov.from_moments(variance, token_gram, feature_gram, cov.pool)


def hadamard(a: Any, b: Any) -> Any:
    """The entrywise product: the covariance of a * b for independent a, b of mean zero."""
    if isinstance(a, Diagonal):
        return Diagonal(a.variances * b.variances)
    if isinstance(a, Separable):
        tokens = a.token_correlation * b.token_correlation
        features = a.feature_correlation * b.feature_correlation
        return type(a)(a.scale * b.scale, tokens, features, a.pool)
    return type(a).project(a.to_dense() * b.to_dense())
