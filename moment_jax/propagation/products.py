"""Products of two random arrays, such as gates."""

from moment_jax.propagation.crosses import covariance
from moment_jax.propagation.graph import Node, is_random
from moment_jax.propagation.moments import Moments, fresh
from moment_jax.propagation.propagator import Propagator, rule


@rule("mul")
def _product(propagator: Propagator, node: Node) -> Moments | None:
    """Moments to second order in the noise, with the covariance of both factors."""
    if not all(map(is_random, node.operands)):
        return None
    m, other = (propagator.moments(x).broadcast(node.shape) for x in node.operands)
    axes = max(m, other, key=lambda x: x.mean.size).natural()
    a, b = m.sequence(*axes), other.sequence(*axes)
    cross = covariance(propagator, node, a, b)
    by_a, by_b, by_both = a.cov.rescale(b.mean), b.cov.rescale(a.mean), None
    mean = a.mean * b.mean
    if cross is not None:
        mean = mean + cross.own()
        by_both = cross.rescale(a.mean).T.rescale(b.mean).T
    cov = by_a.add_branch(by_b, by_both).add(a.cov.hadamard(b.cov, cross))
    propagator.note(node, "product", "factors independent" if cross is None else "")
    parents = (a, lambda c: c.rescale(b.mean)), (b, lambda c: c.rescale(a.mean))
    return fresh(mean, cov, node.shape, *axes, parents)
