"""Laws of Markov chains, each beside its textbook form."""

import jax
import numpy as np
import pytest

import moment_jax as mj
from tests.brownian.chains import random_chain, stationary_by_eigenvector
from tests.builders import assert_close

brownian = mj.brownian
SWAP = np.array([[0.0, 1.0], [1.0, 0.0]])
TWO_CLASSES = np.array([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]])
CAUSAL = np.array([[1.0, 0.0, 0.0], [0.3, 0.7, 0.0], [0.2, 0.3, 0.5]])
ONE = np.ones((1, 1))


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
    assert_close(brownian.eigenpairs(ONE, 1).values.real, np.ones(1))


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


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: brownian.stationary(np.array([[0.5, 0.4], [0.5, 0.5]])), "Row 0 sums to 0.9"),
        (lambda: brownian.stationary(np.array([[1.5, -0.5], [0.5, 0.5]])), "none negative"),
        (lambda: brownian.stationary(np.array([[np.nan, 1.0], [0.5, 0.5]])), "finite"),
        (lambda: brownian.stationary(np.ones((2, 3))), r"\(T, T\)"),
        (lambda: brownian.detailed_balance_gap(SWAP, np.ones(3)), "law"),
        (lambda: brownian.entropy_rate(SWAP, np.ones(3)), "law"),
    ],
)
def test_bad_input(call, words):
    with pytest.raises(ValueError, match=words):
        call()
