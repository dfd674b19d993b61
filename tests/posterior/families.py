"""Examples of every family, the textbook covariance that defines each, and all their methods."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from moment_jax.posterior import GaussianPrior, Posterior
from tests.builders import KERNEL_FAMILIES, VECTOR_FAMILIES

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


def name_of(value: object) -> str | None:
    """A readable test id."""
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return value.__name__ if isinstance(value, type) else None


def random(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def random_psd(seed: int, n: int, rank: int | None = None) -> np.ndarray:
    """A random covariance: well conditioned, or singular where a rank is given."""
    factor = random(seed, n, n if rank is None else rank)
    return factor @ factor.T + (0.5 * np.eye(n) if rank is None else 0)


def example(family, shape=KERNEL, *, seed=0, rank=None, dtype=np.float64, array=jnp.asarray):
    """A belief of this family; `rank` makes its covariance matrices singular."""
    n = int(np.prod(shape))
    kernel = (shape[0], n // shape[0])
    fields = {
        Point: lambda: (),
        Factorized: lambda: (0.1 + random(seed + 1, *shape) ** 2,),
        OutputShared: lambda: (0.1 + random(seed + 1, kernel[1]) ** 2,),
        KroneckerEigen: lambda: (
            *(np.linalg.qr(random(seed + axis, n, n))[0] for axis, n in enumerate(kernel)),
            0.1 + random(seed + 1, *kernel) ** 2,
        ),
        FullNormal: lambda: (random_psd(seed + 1, n, rank).reshape(*shape, *shape),),
    }[family]()
    return family(*(array(field, dtype) for field in (random(seed, *shape), *fields)))


def without_variance(family, shape=KERNEL) -> Posterior:
    """A belief of this family whose covariance is zero."""
    belief = example(family, shape)
    zeros = {name: jnp.zeros_like(getattr(belief, name)) for name in covariances(family)}
    return dataclasses.replace(belief, **zeros)


def covariances(family) -> list[str]:
    """The fields that hold variances or covariances."""
    names = [field.name for field in dataclasses.fields(family)[1:]]
    return [name for name in names if not name.endswith("basis")]


def stack(beliefs: list[Posterior]) -> Posterior:
    """Beliefs stacked along a leading axis."""
    leaves = zip(*map(jax.tree.leaves, beliefs), strict=True)
    return type(beliefs[0])(*(jnp.asarray(np.stack(leaf)) for leaf in leaves))


def dense_cov(belief: Posterior) -> np.ndarray:
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


def method_inputs(belief: Posterior) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What `all_methods` gives a kernel: mean and variance of inputs, and an asymmetric moment."""
    n = belief.shape[0]
    inputs = random(30, 2, 3, n), random(31, 2, 3, n) ** 2, random(32, 2, 3, n, n)
    return tuple(x.astype(belief.mean.dtype) for x in inputs)


def all_methods(belief: Posterior) -> dict[str, jax.Array]:
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


def assert_gradient(value_and_grad, inputs, direction, step=1e-3) -> None:
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
