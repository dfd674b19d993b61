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
from moment_jax.propagation.moments import Base, Moments, as_rows
from moment_jax.propagation.primitives import factors
from moment_jax.propagation.propagator import PATTERNS, Propagator
from moment_jax.propagation.regions import BY_ROW, between, compute
from moment_jax.propagation.weights import Weight, overlap

LARGEST = 2**24  # most entries of a Jacobian
_DIFFERENTIABLE = BY_ROW | {"dot_general", "concatenate", "belief", "pad"}


def _tied(propagator: Propagator, node: Node) -> Moments | None:
    """A dense layer of its own kernel, and what the covariance of x and the kernel, K, adds.

    That is E[dx dw] to the mean, and to the covariance, beside cross terms of first order, those of both
    in dx dw. K is the Jacobian of x at the means of all weights times the belief's covariance.
    """
    if not node.tied:
        return None
    side = int(isinstance(node.operands[0], Weight))
    value, weight = node.operands[side], node.operands[1 - side]
    found = None
    if node.op == "dot_general" and isinstance(value, Node) and isinstance(weight, Weight):
        same = (w for w in weights_in(value) if overlap([w], [weight]))
        known = all(n.op in _DIFFERENTIABLE - {"argmax"} for n in between(value, []))
        if known and all(w.posterior is weight.posterior for w in same):
            batch = any(value.shape[i] > 1 for i in factors(node)[side].batch)
            found = None if batch else read_dense(propagator, node)
    if found is None:
        raise refuse(
            f"`{node.op}` of random {shapes(node.operands)}, one of them a weight on which another "
            "depends",
            node.source,
            f"One weight can be used twice in products such as a tied embedding. Else {LINEARISE}.",
        )
    belief, own, other = weight.posterior, factors(node)[side], factors(node)[1 - side]
    rows = as_rows(np.arange(value.size).reshape(value.shape), own.free, own.contracted)
    columns = as_rows(weight.places, other.contracted, other.free)
    sizes = value.size * belief.mean.size, rows.size * columns.size, node.size**2
    if max(sizes) > LARGEST:
        raise refuse(
            f"a product with a tied weight, with a covariance of more than {LARGEST} entries",
            node.source,
            f"Use weights of its own, or {LINEARISE}.",
        )

    def of_weight(w: Any) -> Any:
        return compute([value], {id(belief): w})[0].astype(w.dtype).reshape(-1)

    jacobian = jax.jacrev(of_weight)(belief.mean).reshape(value.size, -1)
    shared = covariance_with(belief, jacobian)[rows[:, :, None, None], columns[None, None]]
    x, cov, layer = found.x.mean, found.x.cov, found.layer
    mean, out = dense(x, cov, layer)
    kernel = layer.kernel.mean
    cross = jnp.einsum("dv,tdeu,se->tvsu", kernel, shared, x)
    # The Jacobian at the means may be steeper than expected: keep to Cauchy's inequality.
    through, noise = cov.map_features(kernel), cov.weight_noise(x, layer.kernel)
    share = safe_divide(through.sd() * noise.sd(), jnp.abs(jnp.einsum("tvtv->tv", cross)))
    share = jnp.where(share > 0, safe_sqrt(jnp.minimum(share, 1)), 0)
    cross = share[:, :, None, None] * cross * share[None, None]
    bent = jnp.einsum("tdeu,sedv->tvsu", shared, shared)
    out = out.add(out.projected(cross + jnp.transpose(cross, (2, 3, 0, 1)) + bent))
    propagator.note(node, "tied weights", "input and kernel jointly Gaussian, to first order")
    return Moments(Base(mean + jnp.einsum("tddv->tv", shared), out, None), found.places)


# Before the others, which assume that operands and weights are independent.
PATTERNS.insert(0, _tied)
