"""The law of all structures: op(S) == project(op(Full(S))), and what follows from it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moment_jax.covariance import Covariance, Full, Separable, TokenCorrelated
from tests.builders import (
    ALL_STRUCTURES,
    KERNEL_FAMILIES,
    assert_close,
    random_cov,
    random_dense,
    random_kernel,
    random_psd,
    rank_one,
)

SHAPE = (4, 5)
KEYS = jax.random.split(jax.random.key(0), 12)
MEAN = jax.random.normal(KEYS[0], SHAPE)


class Gain:
    """Moments of an elementwise function: any with gain^2 var + second^2 <= variance."""

    def __init__(self, variance):
        self.gain = jax.random.normal(KEYS[1], SHAPE)
        self.second = 0.3 * jax.random.normal(KEYS[2], SHAPE)
        self.variance = self.gain**2 * variance + self.second**2 + 0.1


OPERATIONS = {
    "identity": lambda cov: cov,
    "rescale": lambda cov: cov.rescale(jax.random.uniform(KEYS[3], SHAPE, minval=0.1)),
    "rescale_signed": lambda cov: cov.rescale(jax.random.normal(KEYS[3], SHAPE)),
    "map_features": lambda cov: cov.map_features(jax.random.normal(KEYS[4], (5, 3))),
    "map_tokens": lambda cov: cov.map_tokens(jax.random.normal(KEYS[5], (3, 4))),
    "map_low_rank": lambda cov: cov.map_low_rank(
        *(
            jax.random.normal(key, (*SHAPE, *rest))
            for key, rest in zip(KEYS[6:9], [(), (2,), (2,)], strict=True)
        )
    ),
    "add": lambda cov: cov.add(cov.map_features(jax.random.normal(KEYS[4], (5, 5)))),
    "add_shared": lambda cov: cov.add(type(cov).shared(4, random_psd(KEYS[9], 5))),
    "add_shared_diagonal": lambda cov: cov.add(type(cov).shared(4, jnp.arange(1.0, 6.0))),
    "add_independent": lambda cov: cov.add(cov.independent(jax.random.uniform(KEYS[3], SHAPE))),
    "gain_noise": lambda cov: cov.gain_noise(MEAN, jnp.arange(1.0, 6.0)),
    "gain_noise_full": lambda cov: cov.gain_noise(MEAN, random_psd(KEYS[9], 5)),
    "elementwise": lambda cov: cov.elementwise(Gain(cov.variance())),
} | {
    f"weight_noise_{family.__name__}": lambda cov, family=family: cov.weight_noise(
        MEAN, random_kernel(KEYS[10], family, (5, 3))
    )
    for family in KERNEL_FAMILIES
}
# `rescale` is exact for every member, signed scales included: more than the law asks (a projection
# sees only the dense array and takes scales to be positive).
EXACT = {"identity", "rescale", "rescale_signed"}


@pytest.mark.parametrize("structure", ALL_STRUCTURES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_is_projection_of_dense_operation(structure: type[Covariance], name: str):
    """One compiled program holds the operation, the textbook's, and the operation over a batch."""
    operation = OPERATIONS[name]

    @jax.jit
    def both(cov):
        ours = operation(cov)
        textbook = operation(Full(cov.to_dense())).to_dense()
        expected = textbook if name in EXACT else structure.project(textbook).to_dense()
        batch = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), cov)
        mapped = jax.vmap(lambda c: operation(c).to_dense())(batch)[1]
        return ours, ours.to_dense(), ours.variance(), textbook, expected, mapped

    cov = random_cov(KEYS[11], structure, SHAPE)
    ours, dense, variance, textbook, expected, mapped = both(cov)
    assert type(ours) is structure
    assert_close(dense, expected)
    assert_close(variance, jnp.einsum("tdtd->td", textbook))
    assert_close(mapped, dense)
    size = dense.shape[0] * dense.shape[1]
    assert np.linalg.eigvalsh(dense.reshape(size, size))[0] >= -1e-10


# What keeps the covariance of the sum over the tokens exact whatever the covariance.
OF_THE_SUM = {
    **{
        name: operation
        for name, operation in OPERATIONS.items()
        if name.startswith(("identity", "map_features", "add", "weight_noise", "gain_noise"))
    },
    "gains": lambda cov: cov.rescale(jax.random.normal(KEYS[3], (1, 5))),
    "average": lambda cov: cov.map_tokens(jnp.full((1, 4), 0.25)),
    "fields_alone": lambda cov: jax.tree.map(lambda leaf: 1 * leaf, cov),
}


@pytest.mark.parametrize("name", OF_THE_SUM)
def test_separable_keeps_the_covariance_of_the_sum_of_any_covariance(name: str):
    """No member of the structure, and a scale far from rank one."""
    dense, operation = random_dense(KEYS[11], SHAPE), OF_THE_SUM[name]

    @jax.jit
    def both(dense):
        ours, textbook = operation(Separable.project(dense)), operation(Full(dense)).to_dense()
        return ours.feature_gram(), jnp.einsum("tdse->de", textbook), ours, textbook

    ours, expected, result, textbook = both(dense)
    assert_close(ours, expected)
    if name == "average":
        assert_close(result.variance(), jnp.einsum("tdtd->td", textbook))


@pytest.mark.parametrize("name", OPERATIONS)
def test_separable_comes_to_the_law_as_its_scale_comes_to_rank_one(name: str):
    """General members: the deviation from the law falls at least as their distance from rank one."""
    operation, noise = OPERATIONS[name], jax.random.normal(KEYS[0], SHAPE)
    member = rank_one(Separable.project(random_dense(KEYS[11], SHAPE)))

    @jax.jit
    def deviation(distance):
        cov = dataclasses.replace(member, scale=member.scale * jnp.exp(distance * noise))
        cov = dataclasses.replace(cov, sum_variance=None)
        expected = operation(Full(cov.to_dense())).to_dense()
        if name not in EXACT:
            expected = Separable.project(expected).to_dense()
        size = jnp.maximum(jnp.linalg.norm(expected), 1e-6)  # certain weights add nothing
        return jnp.linalg.norm(operation(cov).to_dense() - expected) / size

    far, near = deviation(0.1), deviation(0.05)
    assert far < 0.1, float(far)
    assert near <= 0.7 * far + 1e-12, (float(far), float(near))


@pytest.mark.parametrize("structure", ALL_STRUCTURES)
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


@pytest.mark.parametrize("structure", ALL_STRUCTURES)
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
    assert_close(cov.token_matvec(MEAN), jnp.einsum("tde,te->td", blocks, MEAN))
    assert_close(cov.token_square_matvec(MEAN), jnp.einsum("tde,te->td", blocks**2, MEAN))


@pytest.mark.parametrize("structure", ALL_STRUCTURES)
def test_projection_of_a_member_is_the_member(structure: type[Covariance]):
    cov = rank_one(structure.project(random_dense(KEYS[11], SHAPE)))
    assert_close(structure.project(cov.to_dense()).to_dense(), cov.to_dense())


@pytest.mark.parametrize("structure", ALL_STRUCTURES)
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


@pytest.mark.parametrize("structure", ALL_STRUCTURES)
def test_gradients_are_finite_at_zero_covariance(structure: type[Covariance]):
    @jax.jit
    def total(cov):
        results = [operation(cov) for operation in OPERATIONS.values()]
        return sum(jnp.sum(r.variance()) + jnp.sum(r.token_gram() ** 2) for r in results)

    gradients = jax.grad(total)(structure.zeros(SHAPE, jnp.float64))
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


def test_correlations_stay_correlations():
    """Steps upon steps leave no correlation above one and a unit diagonal."""
    cov = random_cov(KEYS[0], TokenCorrelated, SHAPE)
    for key in jax.random.split(KEYS[1], 10):
        cov = cov.map_features(jax.random.normal(key, (5, 5)) / 5**0.5).add(
            TokenCorrelated.shared(4, jnp.full((5,), 0.1))
        )
        assert jnp.max(jnp.abs(cov.correlation)) <= 1
        assert_close(jnp.diagonal(cov.correlation), jnp.ones(4))


def test_dense_shapes_are_checked():
    for structure in ALL_STRUCTURES:
        with pytest.raises(ValueError, match=r"\(T, D, T, D\)"):
            structure.project(jnp.zeros((4, 5)))
