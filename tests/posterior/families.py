"""Examples of every family, and the textbook covariance that defines each."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from moment_jax.posterior import (
    Factorized,
    FullNormal,
    GaussianPrior,
    MatrixNormal,
    OutputShared,
    Point,
    Posterior,
)

IN, OUT = 3, 2
KERNEL_FAMILIES = (Point, Factorized, OutputShared, MatrixNormal, FullNormal)
VECTOR_FAMILIES = (Point, Factorized, FullNormal)
TENSOR_FAMILIES = (Point, Factorized, FullNormal)
KEY = jax.random.key(7)


def random(seed, *shape, dtype=np.float64):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def random_psd(seed, n, rank=None):
    """A random covariance: well conditioned, or singular where a rank is given."""
    factor = random(seed, n, n if rank is None else rank)
    return factor @ factor.T + (0.5 * jnp.eye(n) if rank is None else 0)


def example(family, shape=(IN, OUT), *, seed=0, rank=None, dtype=np.float64):
    """A belief of this family; `rank` makes its covariance matrices singular."""
    n = int(np.prod(shape))
    mean = random(seed, *shape)
    fields = {
        Point: lambda: (),
        Factorized: lambda: (random(seed + 1, *shape) ** 2,),
        OutputShared: lambda: (random(seed + 1, shape[-1]) ** 2,),
        MatrixNormal: lambda: (
            random_psd(seed + 1, shape[0], rank),
            random_psd(seed + 2, shape[1], rank),
        ),
        FullNormal: lambda: (random_psd(seed + 1, n, rank).reshape(*shape, *shape),),
    }[family]()
    return jax.tree.map(lambda leaf: leaf.astype(dtype), family(mean, *fields))


def without_variance(family, shape=(IN, OUT)):
    """A belief of this family whose covariance is zero."""
    belief = example(family, shape)
    return family(belief.mean, *(0 * leaf for leaf in jax.tree.leaves(belief)[1:]))


def dense_cov(belief: Posterior):
    """The covariance matrix (n, n) of the flattened weights, from the family's definition."""
    mean = np.asarray(belief.mean)
    if isinstance(belief, Point):
        return np.zeros((mean.size, mean.size))
    if isinstance(belief, Factorized):
        return np.diag(np.ravel(belief.variance))
    if isinstance(belief, OutputShared):
        return np.kron(np.eye(mean.shape[0]), np.diag(belief.variance))
    if isinstance(belief, MatrixNormal):
        return np.kron(belief.in_cov, belief.out_cov)
    return np.asarray(belief.cov).reshape(mean.size, mean.size)


def dense_kernel_cov(belief: Posterior):
    """The same as Cov[w_io, w_jp], (in, out, in, out)."""
    return dense_cov(belief).reshape(*belief.shape, *belief.shape)


PRIORS = {
    "standard": GaussianPrior(),
    "scalars": GaussianPrior(0.3, 2.0),
    "per_output": GaussianPrior(jnp.array([0.1, -0.4]), jnp.array([0.5, 3.0])),
    "per_input": GaussianPrior(variance=jnp.array([[0.2], [1.0], [5.0]])),
    "per_entry": GaussianPrior(random(20, IN, OUT), 0.1 + random(21, IN, OUT) ** 2),
}

ANY_METHODS: dict[str, Callable] = {
    "sample": lambda belief: belief.sample(KEY),
    "marginal_variance": lambda belief: belief.marginal_variance(),
    "kl": lambda belief: belief.kl(GaussianPrior(0.25, 0.5)),
}
KERNEL_METHODS: dict[str, Callable] = {
    **ANY_METHODS,
    "noise_variance": lambda belief: belief.noise_variance(
        random(30, 4, IN).astype(belief.mean.dtype),
        (random(31, 4, IN) ** 2).astype(belief.mean.dtype),
    ),
    "noise_block": lambda belief: belief.noise_block(
        random(32, 4, IN, IN).astype(belief.mean.dtype)
    ),
    "input_metric": lambda belief: belief.input_metric(),
}
VECTOR_METHODS: dict[str, Callable] = {
    **ANY_METHODS,
    "vector_cov": lambda belief: belief.vector_cov(),
}
CALLS = [
    *(
        (family, (IN, OUT), method)
        for family in KERNEL_FAMILIES
        for method in KERNEL_METHODS.items()
    ),
    *((family, (IN,), method) for family in VECTOR_FAMILIES for method in VECTOR_METHODS.items()),
    *((family, (2, 3, 2), method) for family in TENSOR_FAMILIES for method in ANY_METHODS.items()),
]
"""Every family, with every rank of array it is for, and every method it then has."""


def call_name(value):
    """A readable test id."""
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, tuple) and isinstance(value[0], str):
        return value[0]
    return "x".join(map(str, value)) if isinstance(value, tuple) else None
