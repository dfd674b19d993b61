"""Examples of every family, the textbook covariance that defines each, and all their methods."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from moment_jax.posterior import GaussianPrior
from tests.builders import KERNEL_FAMILIES, VECTOR_FAMILIES, random_belief

Point, Factorized, OutputShared, KroneckerEigen, FullNormal = KERNEL_FAMILIES
IN, OUT = 3, 2
KERNEL, VECTOR, TENSOR = (IN, OUT), (IN,), (2, 2, 2)
RANDOM_FAMILIES = KERNEL_FAMILIES[1:]
MEMBERS = [
    *((family, KERNEL) for family in KERNEL_FAMILIES),
    *((family, VECTOR) for family in VECTOR_FAMILIES),
    (Factorized, TENSOR),
    (OutputShared, TENSOR),
    (KroneckerEigen, TENSOR),
]
"""Every family with the ranks of arrays that it is for."""
RANDOM_MEMBERS = [(family, shape) for family, shape in MEMBERS if family is not Point]

TOL = {"rtol": 1e-10, "atol": 1e-10}
KEY = jax.random.key(7, impl="rbg")  # compiles in less time than the default
PRIOR = GaussianPrior(0.25, 0.5)


def name_of(value):
    """A readable test id."""
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return value.__name__ if isinstance(value, type) else None


def random(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


def example(family, shape=KERNEL, *, seed=0, dtype=np.float64):
    """A belief of this family."""
    generator = np.random.default_rng(seed)
    belief = random_belief(generator, family, generator.normal(size=shape), 1.0)
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), belief)


def without_variance(family, shape=KERNEL):
    """A belief of this family whose covariance is zero."""
    belief = example(family, shape)
    zeros = {name: jnp.zeros_like(getattr(belief, name)) for name in covariances(family)}
    return dataclasses.replace(belief, **zeros)


def covariances(family):
    """The fields that hold variances or covariances."""
    names = [field.name for field in dataclasses.fields(family)[1:]]
    return [name for name in names if not name.endswith("basis")]


def stack(beliefs):
    """Beliefs stacked along a leading axis."""
    leaves = zip(*map(jax.tree.leaves, beliefs), strict=True)
    return type(beliefs[0])(*(jnp.asarray(np.stack(leaf)) for leaf in leaves))


def dense_cov(belief):
    """The covariance matrix (n, n) of the flattened weights, from the family's definition."""
    mean = np.asarray(belief.mean)
    if isinstance(belief, Point):
        return np.zeros((mean.size, mean.size))
    if isinstance(belief, Factorized):
        return np.diag(np.ravel(belief.variance))
    if isinstance(belief, OutputShared):
        return np.kron(np.eye(mean.shape[0]), np.diag(belief.variance))
    if isinstance(belief, KroneckerEigen):
        basis = np.kron(belief.in_basis, belief.out_basis)
        return (basis * np.ravel(belief.variance)) @ basis.T
    return np.asarray(belief.cov).reshape(mean.size, mean.size)


def method_inputs(belief):
    """What `all_methods` gives a kernel: mean and variance of inputs, and an asymmetric moment."""
    n = belief.shape[0]
    inputs = random(30, 2, 3, n), random(31, 2, 3, n) ** 2, random(32, 2, 3, n, n)
    return tuple(x.astype(belief.mean.dtype) for x in inputs)


def all_methods(belief):
    """The result of every method that a belief about an array of this rank has."""
    results = {
        "sample": belief.sample(KEY),
        "marginal_variance": belief.marginal_variance(),
        "kl": belief.kl(PRIOR),
    }
    if len(belief.shape) == 2:
        mean, variance, moment = map(jnp.asarray, method_inputs(belief))
        results["noise_variance"] = belief.noise_variance(mean, variance)
        results["noise_block"] = belief.noise_block(moment)
        results["input_metric"] = belief.input_metric()
    if len(belief.shape) == 1:
        results["vector_cov"] = belief.vector_cov()
    return results


# One compilation for each family and shape, which all tests share.
compiled_methods = jax.jit(all_methods)


def assert_gradient(value_and_grad, inputs, direction, step=1e-3):
    """Compare a gradient along a direction with central differences of fourth order.

    They are as good as they say themselves: the error is below what halving the step changes, and
    the rounding.
    """
    centre, gradient = value_and_grad(inputs)
    along = sum(map(np.vdot, jax.tree.leaves(gradient), jax.tree.leaves(direction)))

    def value(step):
        moved = jax.tree.map(lambda x, d: np.asarray(x) + step * np.asarray(d), inputs, direction)
        return float(value_and_grad(moved)[0])

    def difference(step):
        near, far = (value(k * step) - value(-k * step) for k in (1, 2))
        return (8 * near - far) / (12 * step)

    coarse, fine = difference(step), difference(step / 2)
    rounding = 100 * np.finfo(np.float64).eps * abs(float(centre)) / step
    assert abs(along - fine) <= abs(coarse - fine) + rounding
