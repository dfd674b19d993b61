"""Maxima, minima and comparisons of random arrays, by the moments of their difference (Clark)."""

import jax.numpy as jnp
import numpy as np
from jax import Array

from moment_jax.covariance import Full
from moment_jax.expectations import ElementwiseMoments, rectified
from moment_jax.propagation.errors import refuse, register
from moment_jax.propagation.graph import Node
from moment_jax.propagation.moments import Moments, as_rows, entries, fresh
from moment_jax.propagation.propagator import Propagator, rule

LARGEST = 2**12  # entries whose dense covariance is formed


@rule("reduce_max", "reduce_min")
def _largest(propagator: Propagator, node: Node) -> Moments | None:
    """A tournament of maxima of two, with all covariances."""
    m, axes = propagator.moments(node.operands[0]), node.params["axes"]
    left = tuple(i for i in range(m.ndim) if i not in axes)
    places = as_rows(m.places, axes, left)
    if places.size > LARGEST or np.prod(m.cov.shape) > LARGEST:
        raise refuse(
            f"`{node.op}` of more than {LARGEST} random entries", node.source, register(node)
        )
    sign = 1 if node.op == "reduce_max" else -1
    mean, cov = sign * m.array().transpose(*axes, *left).ravel(), entries(m.cov, places.ravel())
    count = len(places)
    while count > 1:  # a last one without an opponent meets itself
        index = np.arange(len(mean)).reshape(count, -1)
        half = (count + 1) // 2
        others = np.concatenate([index[half:], index[half - 1 : half]])[:half]
        mean, cov = _winners(mean, cov, index[:half].ravel(), others.ravel())
        count = half
    tokens, features = (tuple(left.index(i) for i in g if i in left) for g in m.natural())
    rows = as_rows(np.arange(node.size).reshape(node.shape), tokens, features)
    cov = entries(Full.unchecked(cov[:, None, :, None]), rows)
    propagator.note(node, "maximum" if sign > 0 else "minimum", "entries jointly Gaussian")
    whole = propagator.structure.project(cov)
    return fresh(sign * mean[rows], whole, node.shape, tokens, features)


def _winners(mean: Array, cov: Array, x: np.ndarray, y: np.ndarray) -> tuple[Array, Array]:
    """Moments of the maxima of these pairs of entries of a Gaussian vector."""
    rows = cov[x] - cov[y]
    between = rows[:, x] - rows[:, y]
    moments: ElementwiseMoments = rectified(mean[x] - mean[y], jnp.diagonal(between))
    p = moments.gain[:, None]
    mixed = p * cov[x] + (1 - p) * cov[y]
    linear = p.T * mixed[:, x] + (1 - p.T) * mixed[:, y]
    left = moments.variance - moments.gain**2 * jnp.diagonal(between)
    rest = moments._replace(variance=left, gain=0 * moments.gain)
    columns = ElementwiseMoments(*(a[:, None] for a in rest))
    bent = Full.unchecked(between[:, None, :, None]).elementwise(columns)
    return mean[y] + moments.mean, linear + bent.cov[:, 0, :, 0]
