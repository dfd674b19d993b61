"""Both normalisations pass the variances of any structure through their Jacobian."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moment_jax as mj
from tests.builders import ALL_STRUCTURES, random_cov

SHAPE = 4, 6


def plain(x, centres):
    x = x - jnp.mean(x) if centres else x
    return x / jnp.sqrt(jnp.mean(x**2) + 1e-6)


@pytest.mark.parametrize("structure", ALL_STRUCTURES)
@pytest.mark.parametrize("normalise", [mj.layer_norm, mj.rms_norm])
def test_variances_are_those_of_the_jacobian(normalise, structure):
    mean = jax.random.normal(jax.random.key(0), SHAPE) + 0.5
    cov = random_cov(jax.random.key(1), structure, SHAPE)

    @jax.jit
    def both(cov):
        _, out = normalise(mean, cov, mj.NormParams(), order=1)
        jacobians = jax.vmap(jax.jacobian(lambda x: plain(x, normalise is mj.layer_norm)))(mean)
        exact = jnp.einsum("tij,tjtk,tik->ti", jacobians, cov.to_dense(), jacobians)
        return out.variance(), exact

    np.testing.assert_allclose(*both(cov), rtol=1e-5, atol=1e-9)
