"""Spectra and mixing times beside dense eigendecompositions and powers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moment_jax as mj
from tests.brownian.chains import random_chain, sphere_tokens, stationary_by_eigenvector
from tests.builders import assert_close

brownian = mj.brownian


def test_eigenpairs():
    transition = random_chain(30)
    expected = np.linalg.eigvals(np.asarray(transition))
    expected = expected[np.argsort(-np.abs(expected))]
    values, vectors, residuals = brownian.eigenpairs(transition, 4)
    assert_close(jnp.abs(values), np.abs(expected[:4]))
    assert_close(transition @ vectors, values[None, :] * vectors)
    assert_close(jnp.sort(values.real), np.sort(expected[:4].real))
    assert residuals.max() < 1e-12


def test_eigenpairs_of_larger_chains_by_krylov_spaces():
    """Larger than one Krylov space, with double eigenvalues: a walk on a ring."""
    ring = sum(jnp.roll(jnp.eye(200), k, axis=0) * w for k, w in ((-1, 0.25), (0, 0.5), (1, 0.25)))
    expected = np.repeat(0.5 + 0.5 * np.cos(2 * np.pi * np.arange(4) / 200), 2)[1:]
    law = jnp.full(200, 1 / 200)
    pairs = brownian.reversible_eigenpairs(ring, law, 7)
    assert_close(pairs.values, expected)
    weighted = jnp.einsum("i,ik,il->kl", law, pairs.vectors, pairs.vectors)
    assert_close(weighted, jnp.eye(7))
    tokens = sphere_tokens(200, 6, seed=3)
    query, key = jax.random.normal(jax.random.key(5), (2, 6, 6))
    chain = jax.nn.softmax(brownian.attention_scores(tokens, query, key), axis=1)
    every = np.linalg.eigvals(np.asarray(chain))
    found = brownian.eigenpairs(chain, 5)
    assert_close(jnp.abs(found.values), np.sort(np.abs(every))[::-1][:5])
    assert_close(chain @ found.vectors, found.values[None, :] * found.vectors)


def test_reversible_eigenpairs_are_eigenpairs():
    transition = brownian.transition_matrix(sphere_tokens())
    law = brownian.stationary(transition)
    values, vectors, _ = brownian.reversible_eigenpairs(transition, law, 7)
    assert_close(transition @ vectors, values[None, :] * vectors)
    assert_close(vectors[:, 0], jnp.ones(7))
    assert_close(jnp.einsum("i,ik,il->kl", law, vectors, vectors), jnp.eye(7))
    assert_close(values, brownian.eigenpairs(transition, 7).values.real)
    assert_close(brownian.spectral_gap(transition), 1 - values[1])


def test_a_chain_of_rank_one():
    """All tokens the same: Krylov spaces have one dimension, and the walk mixes in a step."""
    transition = jnp.full((150, 150), 1 / 150)
    law = brownian.stationary(transition)
    assert_close(law, transition[0])
    values = brownian.reversible_eigenpairs(transition, law, 3).values
    assert_close(values, jnp.array([1.0, 0.0, 0.0]))
    assert brownian.mixing_time(transition) == 1


def test_mixing_time_is_the_first_step_below():
    transition = 0.95 * jnp.eye(6) + 0.05 * random_chain()
    law = stationary_by_eigenvector(transition)
    steps = brownian.mixing_time(transition, distance=0.1)

    def distance(power):
        return np.abs(np.linalg.matrix_power(transition, power) - law).sum(axis=1).max() / 2

    assert distance(steps) <= 0.1 < distance(steps - 1)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda p: brownian.eigenpairs(p, 7), "count <= T"),
        (lambda p: brownian.reversible_eigenpairs(p, jnp.ones(3), 1), "law"),
        (lambda p: brownian.mixing_time(p, distance=1.5), "distance < 1"),
    ],
)
def test_bad_input(call, words):
    with pytest.raises(ValueError, match=words):
        call(random_chain())
