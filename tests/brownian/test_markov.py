"""Laws of Markov chains, each beside its textbook form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moment_jax as mj
from tests.brownian.chains import random_chain, stationary_by_eigenvector
from tests.builders import assert_close

brownian = mj.brownian
SWAP = jnp.array([[0.0, 1.0], [1.0, 0.0]])
TWO_CLASSES = jnp.array([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]])
CAUSAL = jnp.array([[1.0, 0.0, 0.0], [0.3, 0.7, 0.0], [0.2, 0.3, 0.5]])
ONE = jnp.ones((1, 1))


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
    uniform = jnp.full((4, 4), 0.25)
    assert_close(brownian.entropy_rate(uniform, jnp.full(4, 0.25)), jnp.log(4.0))


def test_reducible_chains():
    with pytest.raises(ValueError, match="one closed class"):
        brownian.stationary(TWO_CLASSES)
    classes = brownian.chain_classes(TWO_CLASSES)
    assert not classes.unique
    with pytest.raises(ValueError, match="several closed classes"):
        brownian.mixing_time(TWO_CLASSES)
    assert_close(brownian.spectral_gap(TWO_CLASSES), jnp.zeros(()))
    # One closed class is enough: a causal mask walks to the first token.
    assert_close(brownian.stationary(CAUSAL), jnp.array([1.0, 0.0, 0.0]))
    classes = brownian.chain_classes(CAUSAL)
    assert (classes.unique, classes.period) == (True, 1)
    assert classes.recurrent.tolist() == [True, False, False]


def test_periodic_chains():
    assert brownian.chain_classes(SWAP).period == 2
    assert brownian.chain_classes(jnp.roll(jnp.eye(5), 1, axis=1)).period == 5
    assert brownian.chain_classes(random_chain()).period == 1
    assert_close(brownian.stationary(SWAP), jnp.array([0.5, 0.5]))
    assert_close(brownian.spectral_gap(SWAP), jnp.zeros(()))
    with pytest.raises(ValueError, match="period 2"):
        brownian.mixing_time(SWAP)
    assert brownian.mixing_time((jnp.eye(2) + SWAP) / 2) == 1


def test_one_state():
    assert_close(brownian.stationary(ONE), jnp.ones(1))
    assert brownian.spectral_gap(ONE) == 1
    assert brownian.mixing_time(ONE) == 0
    assert brownian.entropy_rate(ONE, jnp.ones(1)) == 0
    assert_close(brownian.eigenpairs(ONE, 1).values.real, jnp.ones(1))


def test_inside_compiled_code():
    transition = random_chain()
    law = jax.jit(brownian.stationary)(transition)
    assert_close(law, stationary_by_eigenvector(transition))
    slope = jax.grad(lambda s: brownian.stationary(jax.nn.softmax(s, axis=1))[0])(jnp.eye(3))
    step = 1e-5 * jnp.eye(3)[1][:, None] * jnp.eye(3)[2][None, :]

    def first(scores):
        return brownian.stationary(jax.nn.softmax(scores, axis=1))[0]

    assert_close(slope[1, 2], (first(jnp.eye(3) + step) - first(jnp.eye(3) - step)) / 2e-5, 1e-8)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: brownian.stationary(jnp.array([[0.5, 0.4], [0.5, 0.5]])), "Row 0 sums to 0.9"),
        (lambda: brownian.stationary(jnp.array([[1.5, -0.5], [0.5, 0.5]])), "none negative"),
        (lambda: brownian.stationary(jnp.array([[jnp.nan, 1.0], [0.5, 0.5]])), "finite"),
        (lambda: brownian.stationary(jnp.ones((2, 3))), r"\(T, T\)"),
        (lambda: brownian.detailed_balance_gap(SWAP, jnp.ones(3)), "law"),
        (lambda: brownian.entropy_rate(SWAP, jnp.ones(3)), "law"),
    ],
)
def test_bad_input(call, words):
    with pytest.raises(ValueError, match=words):
        call()
