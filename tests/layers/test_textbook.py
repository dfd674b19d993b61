"""Layers beside the textbook: dense, products, norms; attention where it is linear."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moment_jax as mj
from moment_jax.covariance import Covariance, Full
from tests.builders import (
    ALL_STRUCTURES,
    KERNEL_FAMILIES,
    assert_close,
    random_cov,
    random_dense_params,
)

KEYS = jax.random.split(jax.random.key(1), 8)
SHAPE, OUT = (3, 4), 5
MEAN = jax.random.normal(KEYS[0], SHAPE)


def assert_exact(structure, transform, cov, arguments, exact):
    """The transform's moments for each of the arguments are projections of the exact ones."""

    @jax.jit
    def both(cov, exact):
        def one(argument, moments):
            mean, found = transform(MEAN, cov, argument)
            assert type(found) is structure
            projected = structure.project(moments.cov).to_dense()
            variance = jnp.einsum("tdtd->td", moments.cov)
            ours = mean, found.to_dense(), found.variance()
            return ours, (moments.mean, projected, variance)

        return list(map(one, arguments, exact))

    for ours, expected in both(cov, exact):
        for one, other in zip(ours, expected, strict=True):
            assert_close(one, other, 1e-11)


@pytest.mark.parametrize("structure", ALL_STRUCTURES)
def test_dense_is_the_projection_of_the_exact_moments(structure: type[Covariance]):
    layers = [random_dense_params(KEYS[2], family, (SHAPE[1], OUT)) for family in KERNEL_FAMILIES]
    cov = random_cov(KEYS[1], structure, SHAPE)
    exact = [mj.reference.dense(MEAN, cov.to_dense(), params) for params in layers]
    assert_exact(structure, mj.dense, cov, layers, exact)


@pytest.mark.parametrize("structure", ALL_STRUCTURES)
def test_matmul_is_the_projection_of_the_exact_moments(structure: type[Covariance]):
    others = [random_cov(KEYS[3], other, (SHAPE[1], OUT)) for other in ALL_STRUCTURES]
    cov, mean = random_cov(KEYS[1], structure, SHAPE), jax.random.normal(KEYS[4], (SHAPE[1], OUT))
    kernels = [mj.posterior.FullNormal(mean, other.to_dense()) for other in others]
    exact = [mj.reference.dense(MEAN, cov.to_dense(), mj.DenseParams(kernel)) for kernel in kernels]
    assert_exact(structure, lambda m, c, other: mj.matmul(m, c, mean, other), cov, others, exact)


# -- norms: variances of any structure by their Jacobian ----------------------------------------------


def plain(x, centres):
    x = x - jnp.mean(x) if centres else x
    return x / jnp.sqrt(jnp.mean(x**2) + 1e-6)


@pytest.mark.parametrize("structure", ALL_STRUCTURES)
@pytest.mark.parametrize("centres", [True, False])
def test_variances_are_those_of_the_jacobian(centres, structure):
    mean = jax.random.normal(KEYS[0], (4, 6)) + 0.5
    cov = random_cov(KEYS[1], structure, (4, 6))
    faint = 1e-4  # in units of the noise, at which the deviation is that of the mean

    @jax.jit
    def both(cov):
        small = cov.rescale(jnp.full((1, 6), faint))
        _, out = mj.layer_norm(mean, small, mj.NormParams(), centres=centres)
        jacobians = jax.vmap(jax.jacobian(lambda x: plain(x, centres)))(mean)
        exact = jnp.einsum("tij,tjtk,tik->ti", jacobians, cov.to_dense(), jacobians)
        return out.variance() / faint**2, exact

    np.testing.assert_allclose(*both(cov), rtol=1e-5, atol=1e-9)


# -- attention, with certain queries and keys ---------------------------------------------------------


@pytest.mark.parametrize("certain", [(), ("output",)])
def test_attention_with_random_values_alone_is_linear(certain):
    """For a certain input `Separable` keeps both Gram matrices, with separate noise in each head.

    All values of a head have one token pattern, which is the structure's own for this family.
    """
    families = dict.fromkeys(("query", "key", *certain), mj.posterior.Point)
    families = {"value": mj.posterior.OutputShared, "output": mj.posterior.Factorized, **families}
    shapes = {"output": (OUT - 1, SHAPE[1])}
    params = mj.AttentionParams(
        *(
            random_dense_params(key, families[name], shapes.get(name, (SHAPE[1], OUT - 1)))
            for key, name in zip(KEYS, ("query", "key", "value", "output"), strict=False)
        )
    )

    @jax.jit
    def run(mean):
        covs = (s.zeros(SHAPE, jnp.float64) for s in (mj.Separable, Full))
        results = (mj.attention(mean, cov, params, num_heads=2) for cov in covs)
        (mean, ours), (expected_mean, textbook) = results
        textbook = textbook.to_dense()
        tokens, features = jnp.einsum("tdsd->ts", textbook), jnp.einsum("tdse->de", textbook)
        return (mean, ours.token_gram(), ours.features), (expected_mean, tokens, features)

    for actual, expected in zip(*run(MEAN), strict=True):
        assert_close(actual, expected)
