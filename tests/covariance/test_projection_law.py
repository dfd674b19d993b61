"""The law of all structures: op(S) == project(op(Full(S))), and its consequences."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moment_jax.covariance import Covariance, Full, Separable
from tests.builders import (
    ALL_STRUCTURES,
    KERNEL_FAMILIES,
    Pairs,
    assert_close,
    random_cov,
    random_dense,
    random_kernel,
    random_psd,
    rank_one,
)

SHAPE = (4, 5)
STRUCTURES = [*ALL_STRUCTURES, Pairs]  # and one of a user, of whose operations none is his own
structures = pytest.mark.parametrize("structure", STRUCTURES)
KEYS = jax.random.split(jax.random.key(0), 12)
MEAN = jax.random.normal(KEYS[0], SHAPE)


GAIN, SECOND = jax.random.normal(KEYS[1], SHAPE), 0.3 * jax.random.normal(KEYS[2], SHAPE)
POSITIVE = jax.random.uniform(KEYS[3], SHAPE, minval=0.1)
SIGNED = jax.random.normal(KEYS[3], SHAPE)
NARROWER, SQUARE = (jax.random.normal(KEYS[4], (5, size)) for size in (3, 5))
FEWER_TOKENS = jax.random.normal(KEYS[5], (3, 4))
LOW_RANK = [
    jax.random.normal(key, (*SHAPE, *rest))
    for key, rest in zip(KEYS[6:9], [(), (2,), (2,)], strict=True)
]
VECTOR, PSD = jnp.arange(1.0, 6.0), random_psd(KEYS[9], 5)
KERNELS = {family.__name__: random_kernel(KEYS[10], family, (5, 3)) for family in KERNEL_FAMILIES}


class Gain:
    """Moments of an elementwise function: any with gain^2 var + second^2 <= variance."""

    def __init__(self, variance):
        self.gain, self.second = GAIN, SECOND
        self.variance = GAIN**2 * variance + SECOND**2 + 0.1


OPERATIONS = {
    "identity": lambda cov: cov,
    "rescale": lambda cov: cov.rescale(POSITIVE),
    "rescale_signed": lambda cov: cov.rescale(SIGNED),
    "map_features": lambda cov: cov.map_features(NARROWER),
    "map_tokens": lambda cov: cov.map_tokens(FEWER_TOKENS),
    "map_low_rank": lambda cov: cov.map_low_rank(*LOW_RANK),
    "add": lambda cov: cov.add(cov.map_features(SQUARE)),
    "add_shared": lambda cov: cov.add(type(cov).shared(4, PSD)),
    "add_shared_diagonal": lambda cov: cov.add(type(cov).shared(4, VECTOR)),
    "add_independent": lambda cov: cov.add(cov.independent(jnp.abs(SIGNED))),
    "gain_noise": lambda cov: cov.gain_noise(MEAN, VECTOR),
    "gain_noise_full": lambda cov: cov.gain_noise(MEAN, PSD),
    "elementwise": lambda cov: cov.elementwise(Gain(cov.variance())),
} | {
    f"weight_noise_{name}": lambda cov, kernel=kernel: cov.weight_noise(MEAN, kernel)
    for name, kernel in KERNELS.items()
}
# `rescale` is exact for every member, signed scales included. The law asks for less: a projection sees
# only the dense array and takes scales to be positive.
EXACT = {"identity", "rescale", "rescale_signed"}


def textbook(dense):
    """The dense result of every operation."""
    return {name: operation(Full(dense)).to_dense() for name, operation in OPERATIONS.items()}


@pytest.fixture(scope="module")
def run():
    """Result, dense, variance, textbook and its projection, for each operation on a batch of two."""
    compiled = jax.jit(jax.vmap(textbook))  # one program for all structures

    @functools.cache
    def program(structure: type[Covariance]):
        def one(name, cov, exact):
            ours = OPERATIONS[name](cov)
            expected = exact if name in EXACT else structure.project(exact).to_dense()
            return ours, ours.to_dense(), ours.variance(), exact, expected

        def every(cov, exact):
            return {name: one(name, cov, exact[name]) for name in exact}

        return jax.jit(jax.vmap(every))

    def run(covs: list[Covariance]):
        exact = compiled(jnp.stack([cov.to_dense() for cov in covs]))
        return program(type(covs[0]))(jax.tree.map(lambda *x: jnp.stack(x), *covs), exact)

    return run


@pytest.fixture(scope="module")
def results(run):
    """The same for random members."""
    every = functools.cache(lambda s: run([random_cov(key, s, SHAPE) for key in KEYS[10:]]))
    return lambda structure, name: every(structure)[name]


@structures
@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_is_projection_of_dense_operation(structure, name, results):
    ours, dense, variance, exact, expected = results(structure, name)
    assert type(ours) is structure
    assert_close(dense, expected)
    assert_close(variance, np.einsum("btdtd->btd", exact))
    size = dense.shape[1] * dense.shape[2]
    assert np.linalg.eigvalsh(dense.reshape(2, size, size)).min() >= -1e-10


# Operations that keep the covariance of the token sum exact for any covariance.
OF_THE_SUM = {
    **{
        name: operation
        for name, operation in OPERATIONS.items()
        if name.startswith(("identity", "map_features", "add", "weight_noise", "gain_noise"))
    },
    "gains": lambda cov: cov.rescale(SIGNED[:1]),
    "average": lambda cov: cov.map_tokens(jnp.full((1, 4), 0.25)),
    "fields_alone": lambda cov: jax.tree.map(lambda leaf: 1 * leaf, cov),
}


@pytest.fixture(scope="module")
def of_the_sum():
    """Covariances of the token sum and variances, ours and the textbook's, of a general covariance."""

    @jax.jit
    def both(dense):
        ours = {name: operation(Separable.project(dense)) for name, operation in OF_THE_SUM.items()}
        exact = {name: operation(Full(dense)).to_dense() for name, operation in OF_THE_SUM.items()}
        return {
            name: (
                (ours[name].feature_gram(), ours[name].variance()),
                (jnp.einsum("tdse->de", exact[name]), jnp.einsum("tdtd->td", exact[name])),
            )
            for name in OF_THE_SUM
        }

    return both(random_dense(KEYS[11], SHAPE))


@pytest.mark.parametrize("name", OF_THE_SUM)
def test_separable_keeps_the_covariance_of_the_sum_of_any_covariance(name: str, of_the_sum):
    """The covariance is not a member of the structure, and its scale is far from rank one."""
    (ours, variance), (expected, expected_variance) = of_the_sum[name]
    assert_close(ours, expected)
    if name == "average":
        assert_close(variance, expected_variance)


@pytest.fixture(scope="module")
def further(run):
    """Results for general members at two distances from rank one."""
    member = rank_one(Separable.project(random_dense(KEYS[11], SHAPE)))
    scales = [member.scale * jnp.exp(distance * MEAN) for distance in (0.1, 0.05)]
    return run([dataclasses.replace(member, scale=s, sum_variance=None) for s in scales])


@pytest.mark.parametrize("name", OPERATIONS)
def test_separable_approaches_the_law_as_its_scale_approaches_rank_one(name: str, further):
    """The deviation of a general member falls at least in proportion to its distance from rank one."""
    _, dense, _, _, expected = further[name]
    sizes = np.maximum(np.linalg.norm(expected.reshape(2, -1), axis=1), 1e-6)  # certain: zero
    far, near = np.linalg.norm((dense - expected).reshape(2, -1), axis=1) / sizes
    assert far < 0.1, far
    assert near <= 0.7 * far + 1e-12, (far, near)


@structures
def test_eager_equals_compiled_in_float32(structure: type[Covariance]):
    cov = jax.tree.map(
        lambda leaf: leaf.astype(jnp.float32), random_cov(KEYS[11], structure, SHAPE)
    )

    def chain(cov, kernel, vector):
        return cov.map_features(kernel).add(type(cov).shared(4, vector)).to_dense()

    arrays = jnp.ones((5, 3), jnp.float32), jnp.ones((3,), jnp.float32)
    eager, compiled = chain(cov, *arrays), jax.jit(chain)(cov, *arrays)
    assert eager.dtype == compiled.dtype == jnp.float32
    assert_close(eager, compiled, 1e-5)


@structures
def test_queries_equal_the_dense_ones(structure: type[Covariance]):
    cov = random_cov(KEYS[11], structure, SHAPE)
    dense = cov.to_dense()
    metric = jax.random.normal(KEYS[1], (5, 5))
    blocks = jnp.einsum("tdte->tde", dense)
    assert cov.shape == SHAPE
    assert_close(cov.variance(), jnp.einsum("tdtd->td", dense))
    assert_close(cov.token_blocks(), blocks)
    assert_close(cov.token_gram(), jnp.einsum("tdsd->ts", dense))
    assert_close(cov.token_gram(metric[0]), jnp.einsum("tdsd,d->ts", dense, metric[0]))
    assert_close(cov.token_gram(metric), jnp.einsum("tdse,de->ts", dense, metric))


@structures
def test_projection_of_a_member_is_the_member(structure: type[Covariance]):
    cov = rank_one(structure.project(random_dense(KEYS[11], SHAPE)))
    assert_close(structure.project(cov.to_dense()).to_dense(), cov.to_dense())


@structures
def test_zeros_shared_and_independent(structure: type[Covariance]):
    assert not structure.zeros(SHAPE).to_dense().any()
    assert structure.zeros(SHAPE).dtype == jnp.float32
    vector = random_psd(KEYS[9], 5)
    shared = jnp.broadcast_to(vector[None, :, None, :], (*SHAPE, *SHAPE))
    expected = structure.project(shared).to_dense()
    assert_close(structure.shared(4, vector).to_dense(), expected)
    variance = jax.random.uniform(KEYS[9], SHAPE)
    independent = jnp.diag(variance.ravel()).reshape(*SHAPE, *SHAPE)
    assert_close(structure.independent(variance).to_dense(), independent)


@structures
def test_gradients_are_finite_at_zero_covariance(structure: type[Covariance]):
    @jax.jit
    @jax.grad
    def gradient(cov):
        results = [operation(cov) for operation in OPERATIONS.values()]
        return sum(jnp.sum(r.variance()) + jnp.sum(r.token_gram() ** 2) for r in results)

    gradients = gradient(structure.zeros(SHAPE, jnp.float64))
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


def test_correlations_stay_correlations():
    """After many steps no correlation exceeds one, and the diagonal is one."""
    cov = random_cov(KEYS[0], Separable, SHAPE)
    for key in jax.random.split(KEYS[1], 10):
        cov = cov.map_features(jax.random.normal(key, (5, 5)) / 5**0.5).add(
            Separable.shared(4, jnp.full((5,), 0.1))
        )
        for correlation in (cov.token_correlation, cov.feature_correlation):
            assert jnp.max(jnp.abs(correlation)) <= 1
            assert_close(jnp.diagonal(correlation), jnp.ones(len(correlation)))


def test_dense_shapes_are_checked():
    for structure in ALL_STRUCTURES:
        with pytest.raises(ValueError, match=r"\(T, D, T, D\)"):
            structure.project(jnp.zeros((4, 5)))
