"""Laws of Markov chains beside their textbook forms; diffusion maps with known coordinates."""

import jax
import numpy as np
import pytest
from scipy.stats import spearmanr

import moment_jax as mj
from tests.brownian.test_identities import sphere_tokens
from tests.builders import assert_close

brownian = mj.brownian
SWAP = np.array([[0.0, 1.0], [1.0, 0.0]])
TWO_CLASSES = np.array([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]])
CAUSAL = np.array([[1.0, 0.0, 0.0], [0.3, 0.7, 0.0], [0.2, 0.3, 0.5]])
ONE = np.ones((1, 1))


def random_chain(count=6, seed=0):
    """Irreversible, with some zeros, but with every state reachable from every other."""
    weights = np.random.default_rng(seed).uniform(size=(count, count))
    weights = np.where(weights > 0.6, weights, 0) + 0.1 * np.roll(np.eye(count), 1, axis=1)
    return weights / np.sum(weights, axis=1, keepdims=True)


def stationary_by_eigenvector(transition):
    """The left eigenvector of eigenvalue one, by numpy's dense eigendecomposition."""
    values, vectors = np.linalg.eig(np.asarray(transition).T)
    vector = vectors[:, np.argmin(np.abs(values - 1))].real
    return vector / vector.sum()


@pytest.mark.parametrize("seed", range(2))
def test_stationary_law_is_the_left_eigenvector(seed):
    transition = random_chain(seed=seed)
    law = brownian.stationary(transition)
    assert_close(law, stationary_by_eigenvector(transition))
    assert_close(transition.T @ law, law)


def test_entropy_rate_and_detailed_balance():
    transition = random_chain()
    law = brownian.stationary(transition)
    p = np.asarray(transition)
    logs = np.where(p > 0, np.log(np.where(p > 0, p, 1)), 0)
    flow = np.asarray(law)[:, None] * p
    assert_close(brownian.entropy_rate(transition, law), -(flow * logs).sum())
    assert_close(brownian.detailed_balance_gap(transition, law), np.abs(flow - flow.T).sum() / 2)
    uniform = np.full((4, 4), 0.25)
    assert_close(brownian.entropy_rate(uniform, np.full(4, 0.25)), np.log(4.0))


def test_reducible_chains():
    with pytest.raises(ValueError, match="one closed class"):
        brownian.stationary(TWO_CLASSES)
    classes = brownian.chain_classes(TWO_CLASSES)
    assert not classes.unique
    with pytest.raises(ValueError, match="several closed classes"):
        brownian.mixing_time(TWO_CLASSES)
    assert_close(brownian.spectral_gap(TWO_CLASSES), np.zeros(()))
    # One closed class is enough: a causal mask walks to the first token.
    assert_close(brownian.stationary(CAUSAL), np.array([1.0, 0.0, 0.0]))
    classes = brownian.chain_classes(CAUSAL)
    assert (classes.unique, classes.period) == (True, 1)
    assert classes.recurrent.tolist() == [True, False, False]


def test_periodic_chains():
    assert brownian.chain_classes(SWAP).period == 2
    assert brownian.chain_classes(np.roll(np.eye(5), 1, axis=1)).period == 5
    assert brownian.chain_classes(random_chain()).period == 1
    assert_close(brownian.stationary(SWAP), np.array([0.5, 0.5]))
    assert_close(brownian.spectral_gap(SWAP), np.zeros(()))
    with pytest.raises(ValueError, match="period 2"):
        brownian.mixing_time(SWAP)
    assert brownian.mixing_time((np.eye(2) + SWAP) / 2) == 1


def test_one_state():
    assert_close(brownian.stationary(ONE), np.ones(1))
    assert brownian.spectral_gap(ONE) == 1
    assert brownian.mixing_time(ONE) == 0
    assert brownian.entropy_rate(ONE, np.ones(1)) == 0


def test_inside_compiled_code():
    def first(scores):
        return brownian.stationary(jax.nn.softmax(scores, axis=1))[0]

    compiled = jax.jit(jax.value_and_grad(first))
    scores = np.log(random_chain() + 0.01)
    value, slope = compiled(scores)
    chain = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    assert_close(value, stationary_by_eigenvector(chain)[0])
    step = 1e-5 * np.outer(np.eye(6)[1], np.eye(6)[2])
    difference = (compiled(scores + step)[0] - compiled(scores - step)[0]) / 2e-5
    assert_close(slope[1, 2], difference, 1e-8)


def test_spectral_gap():
    """Of a reversible chain, and of one whose eigenvalues are complex."""
    query, key = np.random.default_rng(5).normal(size=(2, 6, 6))
    tokens = sphere_tokens(7, 6, seed=3)
    turning = jax.nn.softmax(brownian.attention_scores(tokens, query, key), axis=1)
    for transition in (brownian.transition_matrix(sphere_tokens()), turning):
        second = np.sort(np.abs(np.linalg.eigvals(np.asarray(transition))))[-2]
        assert_close(brownian.spectral_gap(transition), 1 - second)


def test_mixing_time_is_the_first_step_below():
    transition = 0.95 * np.eye(6) + 0.05 * random_chain()
    law = stationary_by_eigenvector(transition)
    steps = brownian.mixing_time(transition, distance=0.1)

    def distance(power):
        return np.abs(np.linalg.matrix_power(transition, power) - law).sum(axis=1).max() / 2

    assert distance(steps) <= 0.1 < distance(steps - 1)


# -- diffusion maps -----------------------------------------------------------------------------------

diffusion_map = jax.jit(brownian.diffusion_map)


def test_diffusion_distance_is_the_distance_in_the_map():
    points = np.random.default_rng(3).normal(size=(12, 3))
    walk = brownian.row_normalize(brownian.gaussian_kernel(points, points, bandwidth=1.0))
    walk, law = np.asarray(walk), np.asarray(brownian.stationary(walk))
    for time in (0, 1, 3):
        found = brownian.diffusion_map(points, count=11, time=time, bandwidth=1.0, density_power=0)
        assert_close(found.law, law)
        # sqrt(sum_k (P^t_ik - P^t_jk)^2 / p_k), from the powers of P
        weighted = np.linalg.matrix_power(walk, time) / np.sqrt(law)[None, :]
        distances = np.sum((weighted[:, None] - weighted[None]) ** 2, axis=-1)
        apart = np.asarray(found.coordinates)[:, None] - np.asarray(found.coordinates)[None]
        assert_close(np.sum(apart**2, axis=-1), distances, 1e-9)


def noisy(curve, noise):
    """Points (400, 5) near a curve in two or three dimensions."""
    x = np.stack([*curve, *np.zeros((5 - len(curve), 400))], axis=1)
    return x + noise * np.random.default_rng(4).normal(size=x.shape)


def test_a_swiss_roll_is_unrolled():
    turn, height = np.random.default_rng(6).uniform(size=(2, 400))
    turn = 1.5 * np.pi * (1 + 2 * turn)
    roll = noisy([turn * np.cos(turn), 2 * height, turn * np.sin(turn)], 0.1)
    found = diffusion_map(roll, bandwidth=1.4)
    assert abs(spearmanr(found.coordinates[:, 0], turn).statistic) > 0.95
