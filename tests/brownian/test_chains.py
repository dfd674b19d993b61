"""Laws of Markov chains, each beside its textbook form; dense, sparse and by products."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import sparse

import moment_jax as mj
from tests.brownian.chains import random_chain, sphere_tokens, stationary_by_eigenvector
from tests.builders import assert_close

brownian = mj.brownian
SWAP = jnp.array([[0.0, 1.0], [1.0, 0.0]])
TWO_CLASSES = jnp.array([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]])
CAUSAL = jnp.array([[1.0, 0.0, 0.0], [0.3, 0.7, 0.0], [0.2, 0.3, 0.5]])
ONE = jnp.ones((1, 1))


def by_products(transition):
    return brownian.TransitionOperator(
        lambda v: transition @ v, lambda p: transition.T @ p, len(transition), transition.dtype
    )


FORMS = {"dense": lambda p: p, "sparse": sparse.BCOO.fromdense, "products": by_products}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed", range(2))
def test_stationary_law_is_the_left_eigenvector(form, seed):
    transition = random_chain(seed=seed)
    law = brownian.stationary(FORMS[form](transition))
    assert_close(law, stationary_by_eigenvector(transition))
    assert_close(transition.T @ law, law)


def test_steps_are_powers():
    transition, start = random_chain(), jax.random.dirichlet(jax.random.key(0), jnp.ones(6))
    power = transition @ transition @ transition @ transition @ transition
    assert_close(brownian.k_step(transition, 5), power)
    assert_close(brownian.k_step(transition, 0), jnp.eye(6))
    for form in FORMS.values():
        assert_close(brownian.propagate(form(transition), start, 5), power.T @ start)


def test_attention_by_products_is_attention():
    x = sphere_tokens(11, 4)
    transition = brownian.transition_matrix(x)
    operator = brownian.attention_operator(x, rows=4)
    vectors = jax.random.normal(jax.random.key(1), (11, 3))
    assert_close(operator.forward(vectors), transition @ vectors)
    assert_close(operator.backward(vectors), transition.T @ vectors)
    assert_close(brownian.stationary(operator), brownian.stationary(transition))


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
    ring = brownian.grid_walk(200, dtype=jnp.float64)
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
    assert_close(brownian.spectral_gap(transition, law), 1 - values[1])


def test_a_chain_of_rank_one():
    """All tokens the same: Krylov spaces have one dimension, and the walk mixes in a step."""
    transition = jnp.full((150, 150), 1 / 150)
    law = brownian.stationary(transition)
    assert_close(law, transition[0])
    values = brownian.reversible_eigenpairs(transition, law, 3).values
    assert_close(values, jnp.array([1.0, 0.0, 0.0]))
    assert brownian.mixing_time(transition) == 1


def test_mixing_time_is_the_first_step_below():
    transition = brownian.lazy(random_chain(), 0.95)
    law = stationary_by_eigenvector(transition)
    steps = brownian.mixing_time(transition, distance=0.1)

    def distance(power):
        return np.abs(np.linalg.matrix_power(transition, power) - law).sum(axis=1).max() / 2

    assert distance(steps) <= 0.1 < distance(steps - 1)


@pytest.mark.parametrize("form", FORMS)
def test_hitting_times_by_first_step_analysis(form):
    transition = random_chain()
    target = jnp.arange(6) == 2
    times = brownian.hitting_times(FORMS[form](transition), target)
    assert_close(times, jnp.where(target, 0, 1 + transition @ times))
    walk = brownian.hitting_times(brownian.grid_walk(8, stay=0.0, dtype=jnp.float64),
                                  jnp.arange(8) == 0)  # fmt: skip
    assert_close(walk, jnp.arange(8) * (8 - jnp.arange(8.0)))  # i (n - i) on a ring


def test_hitting_times_where_the_chain_gets_lost():
    times = brownian.hitting_times(CAUSAL, jnp.array([False, True, False]))
    assert times.tolist() == [math.inf, 0.0, math.inf]
    times = brownian.hitting_times(CAUSAL, jnp.array([True, False, False]))
    assert_close(times[1], jnp.asarray(1 / 0.3))


@pytest.mark.parametrize("form", FORMS)
def test_absorption_probabilities(form):
    """Fair steps from i on 0 .. n end at n with probability i / n; many steps of a chain agree."""
    n = 7
    inner = 0.5 * (jnp.eye(n + 1, k=1) + jnp.eye(n + 1, k=-1))
    ends = (jnp.arange(n + 1) == 0) | (jnp.arange(n + 1) == n)
    ruin = jnp.where(ends[:, None], jnp.eye(n + 1), inner)
    won = brownian.absorption_probabilities(FORMS[form](ruin), jnp.arange(n + 1) == n)
    assert_close(won, jnp.arange(n + 1) / n)
    lost = brownian.absorption_probabilities(FORMS[form](CAUSAL), jnp.arange(3) == 2)
    assert lost.tolist() == [0.0, 0.0, 1.0]
    first = brownian.absorption_probabilities(FORMS[form](CAUSAL), jnp.arange(3) == 0)
    assert_close(first, brownian.k_step(CAUSAL, 4096)[:, 0])


def test_entropy_rate_and_balance_of_all_forms():
    transition = random_chain()
    law = brownian.stationary(transition)
    p = np.asarray(transition)
    logs = np.where(p > 0, np.log(np.where(p > 0, p, 1)), 0)
    flow = np.asarray(law)[:, None] * p
    for form in ("dense", "sparse"):
        given = FORMS[form](transition)
        assert_close(brownian.entropy_rate(given, law), -(flow * logs).sum())
        assert_close(brownian.detailed_balance_gap(given, law), np.abs(flow - flow.T).sum() / 2)
    uniform = jnp.full((4, 4), 0.25)
    assert_close(brownian.entropy_rate(uniform, jnp.full(4, 0.25)), jnp.log(4.0))


def test_absorbing_tokens():
    for form in ("dense", "sparse"):
        assert brownian.absorbing(FORMS[form](CAUSAL)).tolist() == [True, False, False]


def test_reducible_chains():
    with pytest.raises(ValueError, match="one closed class"):
        brownian.stationary(TWO_CLASSES)
    classes = brownian.chain_classes(TWO_CLASSES)
    assert not classes.unique
    assert not classes.irreducible
    with pytest.raises(ValueError, match="several closed classes"):
        brownian.mixing_time(TWO_CLASSES)
    assert_close(brownian.spectral_gap(TWO_CLASSES), jnp.zeros(()))
    # One closed class is enough: a causal mask walks to the first token.
    assert_close(brownian.stationary(CAUSAL), jnp.array([1.0, 0.0, 0.0]))
    classes = brownian.chain_classes(CAUSAL)
    assert (classes.unique, classes.irreducible, classes.period) == (True, False, 1)
    assert classes.recurrent.tolist() == [True, False, False]


def test_periodic_chains():
    assert brownian.chain_classes(SWAP).period == 2
    assert brownian.chain_classes(jnp.roll(jnp.eye(5), 1, axis=1)).period == 5
    assert brownian.chain_classes(by_products(random_chain())).period == 1
    assert_close(brownian.stationary(SWAP), jnp.array([0.5, 0.5]))
    assert_close(brownian.spectral_gap(SWAP), jnp.zeros(()))
    with pytest.raises(ValueError, match="period 2"):
        brownian.mixing_time(SWAP)
    assert brownian.mixing_time(brownian.lazy(SWAP)) == 1
    lazy = brownian.lazy(by_products(SWAP), 0.25)
    assert_close(lazy.forward(jnp.eye(2)), brownian.lazy(SWAP, 0.25))
    assert_close(lazy.backward(jnp.eye(2)), brownian.lazy(SWAP, 0.25).T)


def test_one_state():
    assert_close(brownian.stationary(ONE), jnp.ones(1))
    assert brownian.spectral_gap(ONE) == 1
    assert brownian.mixing_time(ONE) == 0
    assert brownian.entropy_rate(ONE, jnp.ones(1)) == 0
    assert brownian.hitting_times(ONE, jnp.array([True])).tolist() == [0.0]
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
        (lambda: brownian.stationary(sparse.BCOO.fromdense(-SWAP)), "none negative"),
        (lambda: brownian.k_step(SWAP, -1), "steps >= 0"),
        (lambda: brownian.propagate(SWAP, jnp.ones(3)), "distribution"),
        (lambda: brownian.eigenpairs(SWAP, 3), "count <= T"),
        (lambda: brownian.reversible_eigenpairs(SWAP, jnp.ones(3), 1), "law"),
        (lambda: brownian.detailed_balance_gap(SWAP, jnp.ones(3)), "law"),
        (lambda: brownian.entropy_rate(SWAP, jnp.ones(3)), "law"),
        (lambda: brownian.hitting_times(SWAP, jnp.array([0, 1])), "booleans"),
        (
            lambda: brownian.absorption_probabilities(SWAP, jnp.array([True])),
            "absorption.*booleans",
        ),
        (lambda: brownian.lazy(SWAP, 1.0), "stay < 1"),
        (lambda: brownian.mixing_time(SWAP, distance=1.5), "distance < 1"),
        (lambda: brownian.attention_operator(jnp.ones((2, 2)), rows=0), "rows > 0"),
    ],
)
def test_bad_input(call, words):
    with pytest.raises(ValueError, match=words):
        call()
