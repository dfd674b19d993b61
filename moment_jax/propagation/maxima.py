"""Maxima over windows."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from moment_jax.expectations import ElementwiseMoments
from moment_jax.propagation.graph import Node
from moment_jax.propagation.moments import Moments, fresh, gather
from moment_jax.propagation.propagator import Propagator, rule
from moment_jax.propagation.windows import pool_places


@rule("reduce_window_max")
def _window_max(propagator: Propagator, node: Node) -> Moments:
    """Pairwise maxima, by Clark's mean and variance of the larger of two correlated Gaussians.

    Covariances with other entries are weighted by the probability of being the larger.
    """
    x = propagator.moments(node.operands[0])
    # Pad with an entry of the window itself, which leaves the maximum unchanged.
    seen = np.sort(pool_places(node, x), axis=-1)
    first = np.min(np.where(seen < 0, x.mean.size, seen), axis=-1, keepdims=True)
    seen = np.where(seen < 0, first, seen)
    size, count = seen.shape[1], seen.shape[2]
    wide = np.concatenate([seen[:, :, i] for i in range(count)], axis=1)
    cov = gather(x.cov, wide)
    means = [x.mean.reshape(-1)[seen[:, :, i]] for i in range(count)]
    between = _between(x.cov, seen)
    mean, shares, variance = _largest(means, between)
    gated = cov.rescale(jnp.concatenate(shares, axis=1))
    linear = gated.map_features(jnp.concatenate([jnp.eye(size, dtype=mean.dtype)] * count))
    # The variances are these; the linear part shrinks where its own are larger.
    own = linear.variance()
    ratio = jnp.where(own > variance, variance / jnp.where(own > 0, own, 1), 1)
    moments = ElementwiseMoments(mean, variance, jnp.sqrt(ratio), jnp.zeros_like(variance))
    propagator.note(node, "maximum over windows", "entries Gaussian, maxima too (Clark)")
    return fresh(mean, linear.elementwise(moments), node.shape, *x.natural())


def _between(cov: Any, seen: np.ndarray) -> list[list[Array]]:
    """Covariances of every pair of entries of a window, (T, D) each."""
    token, feature = np.divmod(seen, cov.shape[1])
    independent, correlated = hasattr(cov, "variances"), hasattr(cov, "token_correlation")
    dense: Any = None if independent or correlated else cov.to_dense()

    def pair(i: int, j: int) -> Array:
        (t, d), (s, e) = ((token[:, :, k], feature[:, :, k]) for k in (i, j))
        if independent:
            return cov.variance()[t, d] if i == j else jnp.zeros(t.shape, cov.dtype)
        if correlated:
            return cov.scale[t, d] * cov.scale[s, e] * cov.token_correlation[t, s]
        return dense[t, d, s, e]

    return [[pair(i, j) for j in range(seen.shape[2])] for i in range(seen.shape[2])]


def _largest(means: list[Array], between: list[list[Array]]) -> tuple[Array, list[Array], Array]:
    """The largest of several Gaussians: mean, probability of each being it, and variance."""
    mean, variance = means[0], between[0][0]
    cross = list(between[0])  # Cov[largest so far, entry i]
    shares = [jnp.ones_like(mean)]
    for i in range(1, len(means)):
        spread = variance + between[i][i] - 2 * cross[i]
        positive = spread > jnp.finfo(mean.dtype).tiny
        theta = jnp.sqrt(jnp.where(positive, spread, 1))
        gap = mean - means[i]
        alpha = gap / theta
        p = jnp.where(positive, jax.scipy.stats.norm.cdf(alpha), (gap >= 0).astype(mean.dtype))
        density = jnp.where(positive, theta * jax.scipy.stats.norm.pdf(alpha), 0)
        new = mean * p + means[i] * (1 - p) + density
        # Clark's variance, arranged so that little cancels.
        second = variance * p + between[i][i] * (1 - p)
        second += gap * (gap * p * (1 - p) + density * (1 - 2 * p))
        variance = jnp.maximum(second - density**2, 0)
        cross = [p * c + (1 - p) * between[i][j] for j, c in enumerate(cross)]
        shares = [*(s * p for s in shares), 1 - p]
        mean = new
    return mean, shares, variance
