"""Spectra and mixing times beside dense eigendecompositions and powers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moment_jax as mj
from tests.brownian.chains import random_chain, sphere_tokens, stationary_by_eigenvector
from tests.builders import assert_close

brownian = mj.brownian


@pytest.mark.parametrize("size", [7, 100])
def test_eigenpairs(size):
    """By a dense decomposition, and where the chain is larger than one Krylov space, without."""
    count = min(size, 7)
    tokens = sphere_tokens(size, 6, seed=3)
    query, key = np.random.default_rng(5).normal(size=(2, 6, 6))
    scores = brownian.attention_scores(tokens, query, key)
    chain = np.asarray(jax.nn.softmax(scores, axis=1))
    expected = np.linalg.eigvals(chain)
    expected = expected[np.argsort(-np.abs(expected))][:count]
    values, vectors, residuals = map(np.asarray, brownian.eigenpairs(chain, count))
    assert_close(np.abs(values), np.abs(expected))
    assert_close(chain @ vectors, values[None, :] * vectors)
    if size == 7:
        assert_close(np.sort(values.real), np.sort(expected.real))
        assert residuals.max() < 1e-12


def test_reversible_eigenpairs_of_a_larger_chain():
    """Double eigenvalues, of a walk on a ring; and all tokens the same, Krylov spaces of dimension 1."""
    eye, size = np.eye(100), 100
    ring = 0.5 * eye + 0.25 * (np.roll(eye, 1, axis=0) + np.roll(eye, -1, axis=0))
    expected = np.repeat(0.5 + 0.5 * np.cos(2 * np.pi * np.arange(4) / size), 2)[1:]
    law = np.full(size, 1 / size)
    pairs = brownian.reversible_eigenpairs(ring, law, 7)
    assert_close(pairs.values, expected)
    assert_close(np.einsum("i,ik,il->kl", law, pairs.vectors, pairs.vectors), np.eye(7))
    same = np.full((size, size), 1 / size)
    assert_close(brownian.stationary(same), law)
    assert_close(brownian.reversible_eigenpairs(same, law, 7).values, np.eye(7)[0])
    assert brownian.mixing_time(same) == 1


def test_reversible_eigenpairs_are_eigenpairs():
    transition = np.asarray(brownian.transition_matrix(sphere_tokens()))
    law = np.asarray(brownian.stationary(transition))
    values, vectors, _ = map(np.asarray, brownian.reversible_eigenpairs(transition, law, 7))
    assert_close(transition @ vectors, values[None, :] * vectors)
    assert_close(vectors[:, 0], np.ones(7))
    assert_close(np.einsum("i,ik,il->kl", law, vectors, vectors), np.eye(7))
    assert_close(values, np.asarray(brownian.eigenpairs(transition, 7).values).real)
    assert_close(brownian.spectral_gap(transition), 1 - values[1])


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
