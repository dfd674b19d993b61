"""Tied weights: a product with a weight on which its other factor depends, such as a tied embedding."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moment_jax.covariance.numerics import safe_divide, safe_sqrt
from moment_jax.layers.dense import dense
from moment_jax.propagation.dense import read_dense
from moment_jax.propagation.errors import LINEARISE, refuse, shapes
from moment_jax.propagation.graph import Node, weights_in
from moment_jax.propagation.linearisation import covariance_with
from moment_jax.propagation.moments import Moments
from moment_jax.propagation.primitives import evaluate
from moment_jax.propagation.propagator import PATTERNS, Propagator
from moment_jax.propagation.regions import BY_ROW, between, compute
from moment_jax.propagation.weights import Weight, overlap

LARGEST = 2**24  # most entries of a Jacobian
_DIFFERENTIABLE = BY_ROW | {"dot_general", "concatenate", "belief", "pad"}


def _tied(propagator: Propagator, node: Node) -> Moments | None:
    """A dense layer of its own kernel, and the covariance of input and kernel to first order."""
    if not node.tied:
        return None
    side = int(isinstance(node.operands[0], Weight))
    value, weight = node.operands[side], node.operands[1 - side]
    found = None
    if node.op == "dot_general" and isinstance(value, Node) and isinstance(weight, Weight):
        same = (w for w in weights_in(value) if overlap([w], [weight]))
        known = all(n.op in _DIFFERENTIABLE - {"argmax"} for n in between(value, None))
        if known and all(w.posterior is weight.posterior for w in same):
            found = read_dense(propagator, node)
    if found is None:
        raise refuse(
            f"`{node.op}` of random {shapes(node.operands)}, one of them a weight on which another "
            "depends",
            node.source,
            f"One weight can be used twice in products such as a tied embedding. Else {LINEARISE}.",
        )
    belief = weight.posterior
    n, sizes = belief.mean.size, (value.size, node.size)
    if max(sizes) * max(n, node.size) > LARGEST:
        raise refuse(
            f"a product with a tied weight whose Jacobian has more than {LARGEST} entries",
            node.source,
            f"Use weights of its own, or {LINEARISE}.",
        )

    def product(x: Any, w: Any) -> Any:
        kernel = w.reshape(-1)[weight.places].astype(node.dtype)
        pair = (kernel, x) if side else (x, kernel)
        return evaluate(node.primitive, list(pair), node.params)[0].reshape(-1)

    def of_weight(w: Any) -> Any:
        return compute([value], {id(belief): w})[0].astype(value.dtype).reshape(-1)

    x, w = propagator.moments(value).array().astype(value.dtype), belief.mean
    jacobian = jax.jacrev(of_weight)(w).reshape(value.size, n)
    shared = covariance_with(belief, jacobian).T.reshape(n, *value.shape)  # Cov[x, w]
    units = jnp.eye(n, dtype=w.dtype)
    by_input = jax.vmap(lambda c: product(c, w))(shared)  # (n, node.size)
    by_kernel = jax.vmap(lambda unit: product(x, unit))(units)
    within = jnp.sum(jax.vmap(product)(shared, units), axis=0)  # E[dx dw]
    order = np.argsort(found.places.ravel())
    cross = (by_input.T @ by_kernel)[order][:, order]
    mean, cov = dense(found.x.mean, found.x.cov, found.layer)
    # The Jacobian at the means may be steeper than expected: keep to Cauchy's inequality.
    through = found.x.cov.map_features(found.layer.kernel.mean).variance()
    noise = found.x.cov.weight_noise(found.x.mean, found.layer.kernel).variance()
    bound = safe_sqrt(through) * safe_sqrt(noise)
    share = safe_divide(bound.ravel(), jnp.abs(jnp.diagonal(cross)))
    share = safe_sqrt(jnp.where(jnp.diagonal(cross) == 0, 1, jnp.minimum(share, 1)))
    cross = share[:, None] * cross * share[None]
    own = cov.projected((cross + cross.T).reshape(2 * mean.shape))
    propagator.note(node, "tied weights", "input and kernel jointly Gaussian, to first order")
    return Moments(mean + within[order].reshape(mean.shape), cov.add(own), found.places)


PATTERNS.insert(
    0, _tied
)  # before the others, which assume that operands and weights are independent
