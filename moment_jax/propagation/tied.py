"""A product with a weight on which its other factor depends, such as a tied embedding."""

from typing import Any

import jax
import jax.numpy as jnp

from moment_jax.covariance.numerics import safe_divide, safe_sqrt
from moment_jax.layers.dense import dense
from moment_jax.propagation import arrays, regions
from moment_jax.propagation.arrays import Base, Moments
from moment_jax.propagation.dense import read_dense, readings
from moment_jax.propagation.errors import LINEARISE, refuse, shapes
from moment_jax.propagation.graph import Node, weights_in
from moment_jax.propagation.propagator import PATTERNS, Propagator
from moment_jax.propagation.weights import covariance_with, overlap

LARGEST = 2**24  # most entries of the Jacobian of a factor with a tied weight


def _tied(propagator: Propagator, node: Node) -> Moments | None:
    """A product with a weight on which its other factor depends, such as a tied embedding.

    It is a dense layer of its own kernel, and what the covariance of x and the kernel, K, adds: E[dx dw]
    to the mean, and to the covariance, beside cross terms of first order, those of both in dx dw. K is
    the Jacobian of x at the means of all weights times the belief's covariance.
    """
    if not node.tied:
        return None
    known = regions.BY_ROW - {"argmax"} | {"dot_general", "concatenate", "belief", "pad"}
    reading, found = next(readings(node), None) if node.op == "dot_general" else None, None
    if reading is not None:
        _, value, weight, own, other = reading
        same = (w for w in weights_in(value) if overlap([w], [weight]))
        differentiable = all(n.op in known for n in regions.between(value, []))
        batch = any(value.shape[i] > 1 for i in own.batch)
        if differentiable and not batch and all(w.posterior is weight.posterior for w in same):
            found = read_dense(propagator, node)
    if reading is None or found is None:
        raise refuse(
            f"`{node.op}` of random {shapes(node.operands)}, one of them a weight on which another "
            "depends",
            node.source,
            f"One weight can be used twice in products such as a tied embedding. Else {LINEARISE}.",
        )
    belief = weight.posterior
    rows = arrays.as_rows(arrays.numbered(value.shape), own.free, own.contracted)
    columns = arrays.as_rows(weight.places, other.contracted, other.free)
    sizes = value.size * belief.mean.size, rows.size * columns.size, node.size**2
    if max(sizes) > LARGEST:
        raise refuse(
            f"a product with a tied weight, with a covariance of more than {LARGEST} entries",
            node.source,
            f"Use weights of its own, or {LINEARISE}.",
        )

    def of_weight(w: Any) -> Any:
        return regions.compute([value], {arrays.Same(belief): w})[0].astype(w.dtype).reshape(-1)

    x, layer = found.x, found.layer

    def compute() -> tuple[Any, ...]:
        jacobian = jax.jacrev(of_weight)(belief.mean).reshape(value.size, -1)
        shared = covariance_with(belief, jacobian)[rows[:, :, None, None], columns[None, None]]
        mean, out = dense(x.mean, x.cov, layer)
        kernel = layer.kernel.mean
        cross = jnp.einsum("dv,tdeu,se->tvsu", kernel, shared, x.mean)
        # The Jacobian at the means may be steeper than expected: keep to Cauchy's inequality.
        through, noise = x.cov.map_features(kernel), x.cov.weight_noise(x.mean, layer.kernel)
        share = safe_divide(through.sd() * noise.sd(), jnp.abs(jnp.einsum("tvtv->tv", cross)))
        share = jnp.where(share > 0, safe_sqrt(jnp.minimum(share, 1)), 0)
        cross = share[:, :, None, None] * cross * share[None, None]
        bent = jnp.einsum("tdeu,sedv->tvsu", shared, shared)
        out = out.add(out.projected(cross + jnp.transpose(cross, (2, 3, 0, 1)) + bent))
        return mean + jnp.einsum("tddv->tv", shared), out

    propagator.note(node, "tied weights", "input and kernel jointly Gaussian, to first order")
    shape = len(x.order), layer.kernel.shape[1]
    return Moments(Base(shape, compute, None), found.places)


# Before the others, which assume that operands and weights are independent.
PATTERNS.insert(0, _tied)
