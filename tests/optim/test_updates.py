"""Steps of both methods: dense solutions, bounds, pauses; nothing but numbers comes out."""

import functools
import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import moment_jax as mj
from tests.optim.networks import close, compiled, inside

optim = mj.optim
MAKERS = pytest.mark.parametrize("make", [optim.cg_fac, optim.kfac])
SOLVED = {"kl_bound": None, "momentum": 0.0}  # the solution itself, neither bounded nor averaged


def spd(seed, n, condition=10.0, rank=None):
    """A matrix of a given condition number or rank."""
    basis = np.linalg.qr(np.random.default_rng(seed).normal(size=(n, n)))[0]
    values = np.logspace(0, -np.log10(condition), n)
    return ((basis * np.where(np.arange(n) < (n if rank is None else rank), values, 0)) @ basis.T)[
        None
    ]


def one_layer(dtype=jnp.float64, **case):
    """Parameters, gradients and factors of one dense layer with a bias."""
    rng = np.random.default_rng(0)
    params = {"layer": {"kernel": rng.normal(size=(4, 3)), "bias": rng.normal(size=3)}}
    grads = jax.tree.map(lambda x: np.sin(3 * x), params)
    factors = {"layer": optim.KroneckerFactor(spd(2, 5, **case), spd(3, 3, **case), np.ones(()))}
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), (params, grads, factors))


def matrix(tree):
    return np.concatenate([tree["layer"]["kernel"], tree["layer"]["bias"][None]])


def scaled_inputs(factors, scale):
    factor = factors["layer"]
    return {"layer": factor._replace(inputs=scale * factor.inputs)}


def start(make, params, *args, **settings):
    tx, update = compiled(make, *args, **settings)
    return update, tx.init(params)


@pytest.mark.parametrize("precondition", [True, False])
def test_a_step_of_cg_fac_is_the_dense_natural_gradient(precondition):
    params, grads, factors = one_layer()
    settings = {"damping": 0.3, "max_iterations": 40, "tolerance": 1e-13}
    update, state = start(optim.cg_fac, params, precondition=precondition, **SOLVED, **settings)
    updates, state = update(grads, state, params, factors=factors)
    fisher = np.kron(factors["layer"].inputs[0], factors["layer"].outputs[0])
    damped = fisher + float(inside(state).damping) * np.eye(15)  # a float32 in the state
    expected = -np.linalg.solve(damped, matrix(grads).ravel())
    close(matrix(updates).ravel(), expected, 1e-9)


def test_a_step_of_kfac_has_factored_damping():
    params, grads, factors = one_layer()
    update, state = start(optim.kfac, params, damping=0.3, **SOLVED)
    updates, state = update(grads, state, params, factors=factors)
    a, g = (np.asarray(x[0]) for x in factors["layer"][:2])
    pi = np.sqrt((np.trace(a) / 5) / (np.trace(g) / 3))
    root = np.sqrt(float(inside(state).damping))
    left = np.linalg.solve(a + pi * root * np.eye(5), matrix(grads))
    expected = -np.linalg.solve(g + root / pi * np.eye(3), left.T).T
    close(matrix(updates), expected, 1e-6)


@MAKERS
def test_the_step_is_within_the_bound(make):
    """The bound, not the rate, sets the length of the step."""
    params, grads, factors = one_layer()
    bound, rate = 1e-4, 10.0
    update, state = start(make, params, rate, damping=1e-3, kl_bound=bound)
    updates, state = update(grads, state, params, factors=factors)
    v = matrix(updates)[None]
    divergence = np.sum(v * optim.apply_curvature(factors["layer"], v)) / 2
    assert 0 < float(divergence) <= bound * 1.001
    assert float(inside(state).clip) < 1
    update, state = start(make, params, rate, damping=1e-3, **SOLVED)
    free, state = update(grads, state, params, factors=factors)
    assert float(inside(state).clip) == 1
    ratio = matrix(updates)[0, 0] / matrix(free)[0, 0]
    np.testing.assert_allclose(ratio * matrix(free), matrix(updates), rtol=1e-5)


def test_factors_are_averaged_and_pauses_leave_them():
    params, grads, factors = one_layer()
    update, state = start(optim.kfac, params, 1.0, decay=0.9, refresh_every=3)
    _, state = update(grads, state, params, factors=factors)
    _, state = update(grads, state, params, factors=scaled_inputs(factors, 3))
    average = inside(state).curvature["kronecker_5x3"]
    expected = (0.1 * 0.9 + 0.1 * 3) * factors["layer"].inputs / 0.19
    close(average.inputs, expected, 1e-6)
    nothing = jax.tree.map(jnp.zeros_like, factors)
    _, other = update(grads, state, params, factors=nothing)
    jax.tree.map(np.testing.assert_array_equal, inside(other).curvature, inside(state).curvature)


def test_inverses_are_refreshed_when_it_is_time():
    """After 1, 2 steps and then every 3; a refresh that is due waits for new curvature."""
    params, grads, factors = one_layer()
    update, state = start(optim.kfac, params, 1.0, decay=0.9, refresh_every=3)
    inverses = []
    for i in range(11):
        given = scaled_inputs(factors, 1.0 + i)
        given = jax.tree.map(jnp.zeros_like, given) if i in (6, 7) else given
        _, state = update(grads, state, params, factors=given)
        inverses.append(np.asarray(inside(state).solver.inverses["kronecker_5x3"].inputs))
    fresh = [i + 1 for i, (a, b) in enumerate(itertools.pairwise(inverses)) if np.any(a != b)]
    assert fresh == [1, 3, 8]


def test_schedules_are_followed():
    params, grads, factors = one_layer()
    schedule = optax.linear_schedule(1.0, 0.0, 2)
    damping = optax.linear_schedule(0.5, 0.1, 2)
    update, state = start(optim.kfac, params, schedule, damping=damping, **SOLVED)
    steps, dampings = [], []
    for _ in range(3):
        updates, state = update(grads, state, params, factors=factors)
        steps.append(matrix(updates))
        dampings.append(float(inside(state).damping))
    assert dampings[0] == 0.5
    np.testing.assert_allclose(dampings[-1], 0.1, rtol=1e-6)
    assert not np.any(steps[-1])
    assert np.any(steps[0])


@MAKERS
def test_tables_and_norms_by_their_own_blocks(make):
    params = {"table": {"embedding": jnp.ones((4, 3))}}
    params["norm"] = {"scale": jnp.ones(4), "bias": jnp.zeros(4)}
    frequencies, outputs = np.array([[0.5, 0.25, 0.25, 0.0]]), jnp.asarray(spd(0, 3))
    squares = np.arange(8.0).reshape(1, 2, 4)
    factors = {
        "table": optim.EmbeddingFactor(frequencies, outputs, np.ones(())),
        "norm": optim.DiagonalFactor(squares, np.ones(())),
    }
    fishers = {
        "table": np.kron(np.diag(frequencies[0]), outputs[0]),
        "norm": np.diag(squares.ravel()),
    }
    grads = jax.tree.map(lambda x: np.cos(np.arange(1.0 * x.size)).reshape(x.shape), params)
    options = {"max_iterations": 50, "tolerance": 1e-7} if make is optim.cg_fac else {}
    update, state = start(make, params, 1.0, damping=0.2, **SOLVED, **options)
    updates, _ = update(grads, state, params, factors=factors)
    for layer, leaves in (("table", ["embedding"]), ("norm", ["scale", "bias"])):
        got, grad = (
            np.concatenate([np.ravel(t[layer][n]) for n in leaves]) for t in (updates, grads)
        )
        expected = -np.linalg.solve(fishers[layer] + 0.2 * np.eye(len(grad)), grad)
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def finite(tree):
    return all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(tree))


@functools.cache
def fixed(make):
    """A step with fixed damping, given as an argument, and a fixed bound."""

    def update(damping, grads, state, params, factors):
        tx = make(0.1, damping=damping, kl_bound=1e-3)
        return tx.update(grads, state, params, factors=factors)

    return make(0.1, damping=1.0, kl_bound=1e-3), jax.jit(update)


def steps(make, params, grads, factors, damping=None):
    """Three steps of finite numbers, and the update; without `damping`, it and the bound adapt."""
    if damping is None:
        tx, update = compiled(make, 0.1, momentum=0.5)
    else:
        tx, update = fixed(make)[0], partial(fixed(make)[1], damping)
    state = tx.init(params)
    for _ in range(3):
        updates, state = update(grads, state, params, factors=factors)
        assert finite((updates, state))
    return updates, state, update


@pytest.mark.parametrize("damping", [0.0, 1e-3])
@pytest.mark.parametrize("case", [{"condition": 1e12}, {"rank": 1}, {"rank": 0}], ids=str)
@MAKERS
def test_degenerate_curvature(make, case, damping):
    """Nothing but finite numbers comes out."""
    steps(make, *one_layer(jnp.float32, **case), damping=damping)


@pytest.mark.parametrize("damping", [None, 1e-3])
@MAKERS
def test_zero_gradients_take_no_step(make, damping):
    params, grads, factors = one_layer(jnp.float32)
    updates = steps(make, params, jax.tree.map(jnp.zeros_like, grads), factors, damping)[0]
    assert not np.any(matrix(updates))


@MAKERS
def test_what_is_not_finite_is_left_out(make):
    """A bad gradient is a step left out; bad factors do not enter the average."""
    params, grads, factors = one_layer(jnp.float32)
    _, state, update = steps(make, params, grads, factors)
    for bad in (jnp.nan, jnp.inf):
        broken = {"layer": {**grads["layer"], "bias": grads["layer"]["bias"].at[0].set(bad)}}
        updates, after = update(broken, state, params, factors=factors)
        assert not np.any(matrix(updates))
        assert finite(after)
        assert int(after.skipped) == 1
        assert np.any(matrix(update(grads, after, params, factors=factors)[0]))
    updates, after = update(grads, state, params, factors=scaled_inputs(factors, jnp.nan))
    assert finite((updates, after))
    jax.tree.map(np.testing.assert_array_equal, inside(after).curvature, inside(state).curvature)


def test_no_curvature_yet_is_no_step():
    params, grads, factors = one_layer(jnp.float32)
    update, state = start(optim.kfac, params, 0.1)
    none = jax.tree.map(jnp.zeros_like, factors)
    updates, state = update(grads, state, params, factors=none)
    assert not np.any(matrix(updates))
    assert int(state.skipped) == 1
