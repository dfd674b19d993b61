"""Fields computed on first access behave like ordinary fields."""

from __future__ import annotations

import pickle

import jax
import jax.numpy as jnp
import pytest

import moment_jax as mj
from tests.builders import ALL_STRUCTURES, assert_close

MAPPED = jax.random.normal(jax.random.key(0), (4, 3))


def covariance(structure: type[mj.Covariance]) -> mj.Covariance:
    return structure.independent(jnp.ones((2, 4))).add(structure.shared(2, jnp.eye(4)))


@pytest.mark.parametrize("structure", ALL_STRUCTURES)
def test_fields_first_read_in_a_loop_can_be_read_after_it(structure: type[mj.Covariance]) -> None:
    @jax.jit
    def run(kernel: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
        cov = covariance(structure).map_features(kernel)
        _, read = jax.lax.scan(lambda _, x: (None, jax.tree.leaves(cov)), None, jnp.zeros(1))
        return [leaf[0] for leaf in read], jax.tree.leaves(cov)

    for inside, after in zip(*run(MAPPED), strict=True):
        assert_close(inside, after)


@pytest.mark.parametrize("structure", ALL_STRUCTURES)
def test_pickled(structure: type[mj.Covariance]) -> None:
    cov = covariance(structure).map_features(MAPPED)
    again = pickle.loads(pickle.dumps(cov))
    assert type(again) is structure
    assert_close(again.to_dense(), cov.to_dense())


@pytest.mark.parametrize("structure", [mj.TokenCorrelated, mj.Separable])
def test_missing_attribute(structure: type[mj.Covariance]) -> None:
    with pytest.raises(AttributeError, match="has no attribute `nothing`"):
        covariance(structure).nothing  # noqa: B018
