"""Products of two random arrays, such as gates."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from moment_jax.covariance import Diagonal, Separable
from moment_jax.covariance.numerics import definite, safe_divide, safe_sqrt
from moment_jax.covariance.separable import NARROW
from moment_jax.covariance.token_gram import at_landmarks, count_of, pulled, whole
from moment_jax.posterior import Factorized, OutputShared
from moment_jax.propagation.branches import Branch, Path, itself, through_gain
from moment_jax.propagation.graph import Node, independent
from moment_jax.propagation.moments import Moments
from moment_jax.propagation.propagator import Propagator, rule
from moment_jax.propagation.regions import follow, fork
from moment_jax.xla import diagonal_of


@rule("mul")
def _product(propagator: Propagator, node: Node) -> Moments | None:
    """Moments to second order in the noise, with the correlation of factors of a common origin."""
    if len(node.nodes) != 2:
        return None
    m, other = (propagator.moments(x).broadcast(node.shape) for x in node.operands)
    a = m.sequence()
    b = other.sequence(*a.axes)
    shared = None
    if not independent(*node.operands):
        pairs = _alike((*a.branches, itself(a)), (*b.branches, itself(b)))
        shared = _common(propagator, node, pairs)
        if shared is None:
            return None
    by_a, by_b = a.cov.rescale(b.mean), b.cov.rescale(a.mean)
    mean, cov = a.mean * b.mean, by_a.add(by_b, hadamard(a.cov, b.cov))
    if shared is not None:
        (left,), (right,) = (branch.paths for branch in shared)
        bound = safe_sqrt(by_a.variance()) * safe_sqrt(by_b.variance())
        factors = left, right, a.mean, b.mean
        within, cov = _correlated(cov, shared[0].entered, factors, bound)
        mean = mean + within
    after = _alike(through_gain(a, b.mean, by_a), through_gain(b, a.mean, by_b))
    branches = tuple(dataclasses.replace(x, paths=(*x.paths, *y.paths)) for x, y in after)
    propagator.note(node, "product", "" if shared is not None else "factors independent")
    return a.changed(mean, cov, node.shape, branches)


def _common(
    propagator: Propagator, node: Node, pairs: list[tuple[Branch, Branch]]
) -> tuple[Branch, Branch] | None:
    """The pair of branches that start at the array which is all that the factors have in common.

    Or at any, if the factors are columns of one array, made by weights of their own.
    """
    pairs = [
        pair for pair in pairs if all(len(x.paths) == 1 and x.paths[0].output is None for x in pair)
    ]
    source = fork(node.nodes)
    if source is None:
        return None
    m = propagator.moments(source)
    places = [follow(x, source) for x in node.nodes]
    if places[0] is None or places[1] is None:
        starts = [m.mean, *(x.mean for x in m.known.values())]
        pairs = [pair for pair in pairs if any(pair[0].inner is x for x in starts)]
    else:
        left, right = (m.places.ravel()[p] % m.mean.shape[1] for p in places)
        families = {type(w.posterior) for w in source.weights}
        if not families <= {Factorized, OutputShared} or np.intersect1d(left, right).size:
            return None
    return pairs[0] if pairs else None


def _alike(left: tuple[Branch, ...], right: tuple[Branch, ...]) -> list[tuple[Branch, Branch]]:
    """Pairs of branches of both factors that start at the same array."""
    return [(a, b) for a in left for b in right if a.inner is b.inner and a.mean is b.mean]


def _correlated(
    cov: Any, entered: Any, factors: tuple[Path, Path, Array, Array], bound: Array
) -> tuple[Array, Any]:
    """Cov[a_tf, b_tf], and the covariance of a * b given that of independent factors.

    `entered` is the covariance of their common origin (T, D), `factors` their paths from there and their
    means (T, F), `bound` (T, F) that of what is added to half the variance of a * b.
    """
    a, b, mean_a, mean_b = factors
    kernel_a, kernel_b, gain_a, gain_b = a.hidden, b.hidden, a.gain, b.gain
    if isinstance(cov, Diagonal):
        within = entered.variance() @ (kernel_a * kernel_b) * (gain_a * gain_b)
        added = 2 * jnp.clip(within * mean_a * mean_b, -bound, bound)
        return within, Diagonal(cov.variance() + added)
    if isinstance(cov, Separable):
        mapped = kernel_a.T @ entered.features @ kernel_b  # (F, F)
        mapped = safe_divide(mapped, jnp.sum(diagonal_of(entered.features)))
        own = diagonal_of(mapped)
        energy = jnp.sum(entered.variance(), axis=1, keepdims=True)
        within = energy * own[None, :] * (gain_a * gain_b)
        variance = cov.variance() + 2 * jnp.clip(within * mean_a * mean_b, -bound, bound)
        # sum_f Cov[a_tf, b_sf] E[b_tf] E[a_sf], (T, T)
        gram = whole(entered.tokens) * ((gain_a * mean_b * own[None, :]) @ (gain_b * mean_a).T)
        pool = entered.pool[:, None]
        left, right = pool * gain_a * mean_b, pool * gain_b * mean_a
        feature = mapped * (left.T @ (whole(entered.tokens) @ right))
        tokens, features = (
            definite(both) if cov.shape[1] <= NARROW else both
            for both in (whole(cov.tokens) + gram + gram.T, cov.features + feature + feature.T)
        )
        tokens = at_landmarks(tokens, count_of(cov.tokens))
        return within, Separable.unchecked(variance, tokens, features, cov.pool)
    cross = jnp.einsum("io,tisj,jp->tosp", kernel_a, entered.to_dense(), kernel_b)
    cross = cross * gain_a[:, :, None, None] * gain_b[None, None]
    own = jnp.einsum("tftf->tf", cross)
    added = cross * mean_b[:, :, None, None] * mean_a[None, None]
    added = added + cross * jnp.transpose(cross, (2, 3, 0, 1)) / 2
    # Variances are to second order and `added` to first: add less of it where it takes more away.
    owed = -2 * jnp.einsum("tftf->tf", added)
    below = 1 - 8 * jnp.finfo(owed.dtype).eps  # allow for rounding
    left = safe_divide(cov.variance(), jnp.maximum(owed, 0))
    share = jnp.where(owed > cov.variance(), safe_sqrt(below * left), 1)
    added = share[:, :, None, None] * added * share[None, None]
    return own, cov.projected(cov.to_dense() + added + jnp.transpose(added, (2, 3, 0, 1)))


def hadamard(a: Any, b: Any) -> Any:
    """The entrywise product: the covariance of a * b for independent a, b of mean zero."""
    if isinstance(a, Diagonal):
        return Diagonal(a.variances * b.variances)
    if isinstance(a, Separable):
        tokens = a.tokens * b.tokens * jnp.sum(a.shares() * b.shares())
        features = a.features * b.features
        size = safe_divide(pulled(a.pool, tokens) @ a.pool, jnp.sum(diagonal_of(features)))
        return Separable.unchecked(a.variances * b.variances, tokens, features * size, a.pool)
    return type(a).project(a.to_dense() * b.to_dense())
