"""Steps of both methods: dense solutions, bounds, pauses; nothing but numbers comes out."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import moment_jax as mj
from moment_jax.optim.blocks import LayerBlock
from moment_jax.optim.curvature import quadratic_form, unpacked
from tests.optim.networks import close, compiled

optim = mj.optim
MAKERS = pytest.mark.parametrize("make", [optim.cg_fac, optim.kfac])
VECTORS = 2 * ((((4,), (0,)),),)
AS_THEY_ARE = (((4, 3), (0, 1)),), (((3,), (0,)),)
BLOCKS = (LayerBlock("layer", ("layer/kernel", "layer/bias"), AS_THEY_ARE, 3),)
SOLVED = {"learning_rate": 1.0, "momentum": 0.0, "kl_bound": jnp.inf}  # the solution itself
FIXED = {"learning_rate": 0.1, "kl_bound": 1e-3}
EVERY = {"decay": 0.9, "curvature_every": 3}


def spd(seed, n, condition=10.0, rank=None):
    """A matrix of a given condition number or rank."""
    basis = np.linalg.qr(np.random.default_rng(seed).normal(size=(n, n)))[0]
    values = np.logspace(0, -np.log10(condition), n)
    values = values * (np.arange(n) < (n if rank is None else rank))
    return ((basis * values) @ basis.T)[None]


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
    return {"layer": factors["layer"]._replace(inputs=scale * factors["layer"].inputs)}


def nothing(tree):
    return not any(np.any(leaf) for leaf in jax.tree.leaves(tree))


def finite(tree):
    return all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(tree))


class Steps:
    """Steps of one layer with settings, most of which may change without compilation."""

    def __init__(self, make, params, blocks=BLOCKS, **settings):
        self.make, self.blocks, self.params, self.settings = make, blocks, params, settings
        self.state = make(blocks=blocks, **settings).init(params)

    def __call__(self, grads, factors, **extra):
        update = compiled(self.make, self.blocks)
        settings = {key: jnp.asarray(value) for key, value in self.settings.items()}
        args = settings, grads, self.state, self.params
        steps, self.state = update(*args, factors=factors, **extra)
        return steps

    def get(self, key):
        return optax.tree.get(self.state, key)


def plain_cg_fac(**settings):
    return optim.cg_fac(precondition=False, **settings)


@pytest.mark.parametrize("make", [optim.cg_fac, plain_cg_fac])
def test_a_step_of_cg_fac_is_the_dense_natural_gradient(make):
    params, grads, factors = one_layer()
    step = Steps(make, params, damping=0.25, max_iterations=40, tolerance=1e-13, **SOLVED)
    fisher = np.kron(factors["layer"].inputs[0], factors["layer"].outputs[0])
    expected = -np.linalg.solve(fisher + 0.25 * np.eye(15), matrix(grads).ravel())
    close(matrix(step(grads, factors)).ravel(), expected, 1e-9)


def test_a_step_of_kfac_has_factored_damping():
    params, grads, factors = one_layer()
    a, g = (np.asarray(x[0]) for x in factors["layer"][:2])
    pi = np.sqrt((np.trace(a) / 5) / (np.trace(g) / 3))
    left = np.linalg.solve(a + pi * 0.5 * np.eye(5), matrix(grads))
    expected = -np.linalg.solve(g + 0.5 / pi * np.eye(3), left.T).T
    close(matrix(Steps(optim.kfac, params, damping=0.25, **SOLVED)(grads, factors)), expected, 1e-6)


@MAKERS
def test_the_step_is_within_the_bound(make):
    """The bound, not the rate, sets the length of the step."""
    params, grads, factors = one_layer()
    settings = {"damping": 1e-3, "learning_rate": 10.0, "momentum": 0.0}
    step = Steps(make, params, kl_bound=1e-4, **settings)
    v = matrix(step(grads, factors))
    assert 0 < float(quadratic_form(factors["layer"], v[None])) / 2 <= 1e-4 * 1.001
    free = matrix(Steps(make, params, kl_bound=jnp.inf, **settings)(grads, factors))
    np.testing.assert_allclose(v[0, 0] / free[0, 0] * free, v, rtol=1e-5)
    np.testing.assert_allclose(step.get("clip"), v[0, 0] / free[0, 0], rtol=1e-5)


def test_factors_are_averaged_and_pauses_leave_them():
    """The decay is that of a step, also of a pause."""
    params, grads, factors = one_layer()
    step = Steps(optim.kfac, params, damping=1e-3, **SOLVED, **EVERY | {"decay": 0.5})

    def is_times(scale):
        got = unpacked(step.get("factors"), step.get("inverses"))[0]["kronecker_5x3"].inputs
        close(got, scale * factors["layer"].inputs, 1e-6)

    step(grads, factors)
    step(grads, scaled_inputs(factors, 3))
    is_times((0.25 + 0.5 * 3) / 0.75)
    average = step.get("factors")
    step(grads, jax.tree.map(jnp.zeros_like, factors))
    jax.tree.map(np.testing.assert_array_equal, step.get("factors"), average)
    step(grads, scaled_inputs(factors, 5))
    is_times((0.25 * (0.25 + 0.5 * 3) + 0.75 * 5) / (1 - 0.25**2))


def test_curvature_and_inverses_are_due_when_it_is_time():
    """Curvature at each of the first few steps and then every few, and at every step until there is any;
    inverses with it."""
    params, grads, factors = one_layer()
    step, inverses, due = Steps(optim.kfac, params, damping=1e-3, **SOLVED, **EVERY), [], []
    none = jax.tree.map(jnp.zeros_like, factors)
    assert nothing(step(grads, none))
    for i in range(11):
        due.append(bool(optim.curvature_due(step.state)))
        step(grads, scaled_inputs(factors, 1.0 + i) if due[-1] and i != 6 else none)
        inverses.append(np.asarray(step.get("inverses")["kronecker_5x3"].inputs))
    assert [i for i, wanted in enumerate(due) if wanted] == [0, 1, 2, 3, 6, 9]
    fresh = [i + 1 for i, (a, b) in enumerate(itertools.pairwise(inverses)) if np.any(a != b)]
    assert fresh == [1, 2, 3, 9]
    with pytest.raises(ValueError, match="kfac or cg_fac in it"):
        optim.curvature_due(optax.adam(0.1).init(params))


def test_schedules_are_followed():
    """The bound is that of the step, whatever the learning rate."""
    params, grads, factors = one_layer()
    settings = {"damping": optax.linear_schedule(0.5, 0.1, 2), "momentum": 0.0, "decay": 0.0}
    rates = optax.piecewise_interpolate_schedule("linear", 1.0, {1: 0.5, 2: 0.0})
    bound = optax.linear_schedule(1e-2, 1e-4, 1)
    tx = optim.kfac(rates, blocks=BLOCKS, kl_bound=bound, **settings)
    state, update, sizes = tx.init(params), jax.jit(tx.update), []
    for damping in (0.5, 0.3, 0.1):
        updates, state = update(grads, state, params, factors=factors)
        v = matrix(updates)[None]
        sizes.append(float(quadratic_form(factors["layer"], v) + damping * np.sum(v**2)) / 2)
    assert sizes[2] == 0
    negative = optim.kfac(lambda step: 1.0 - step, blocks=BLOCKS)
    state = negative.init(params)
    for _ in range(3):
        updates, state = jax.jit(negative.update)(grads, state, params, factors=factors)
    assert nothing(updates)
    assert 3e-3 < sizes[0] <= 1.2e-2  # of factored damping, so not exactly
    np.testing.assert_allclose(sizes[1] / sizes[0], 1e-2, rtol=0.1)


@MAKERS
def test_tables_and_norms_by_their_own_blocks(make):
    params = {"table": {"embedding": jnp.ones((4, 3))}}
    params["norm"] = {"scale": jnp.ones(4), "bias": jnp.zeros(4)}
    blocks = (
        LayerBlock("table", ("table/embedding",), AS_THEY_ARE[:1], 3, (), optim.EmbeddingFactor),
        LayerBlock("norm", ("norm/scale", "norm/bias"), VECTORS, 4, (), optim.DiagonalFactor),
    )
    frequencies, outputs = np.array([[0.5, 0.25, 0.25, 0.0]]), jnp.asarray(spd(0, 3))
    squares = np.arange(8.0).reshape(1, 2, 4)
    factors = {
        "table": optim.EmbeddingFactor(frequencies, outputs, np.ones(())),
        "norm": optim.DiagonalFactor(squares, np.ones(())),
    }
    grads = jax.tree.map(lambda x: np.cos(np.arange(1.0 * x.size)).reshape(x.shape), params)
    exact = make is optim.cg_fac
    options = {"max_iterations": 50, "tolerance": 1e-7} if exact else {}
    updates = Steps(make, params, blocks, damping=0.25, **SOLVED, **options)(grads, factors)
    table = np.kron(np.diag(frequencies[0]), outputs[0]) + 0.25 * np.eye(12)
    if not exact:  # damped as a row of mean frequency
        m = np.mean(frequencies[0])
        table = np.kron(np.diag(np.maximum(frequencies[0], m)), outputs[0] + 0.25 / m * np.eye(3))
    expected = -np.linalg.solve(table, np.ravel(grads["table"]["embedding"]))
    np.testing.assert_allclose(
        np.ravel(updates["table"]["embedding"]), expected, rtol=1e-4, atol=1e-5
    )
    for name, row in zip(("scale", "bias"), squares[0], strict=True):
        close(updates["norm"][name], -grads["norm"][name] / (row + 0.25), 1e-6)


@pytest.mark.parametrize("damping", [0.0, 1e-3])
@pytest.mark.parametrize("case", [{"condition": 1e12}, {"rank": 1}, {"rank": 0}], ids=str)
@MAKERS
def test_degenerate_curvature(make, case, damping):
    """Nothing but finite numbers comes out."""
    params, grads, factors = one_layer(jnp.float32, **case)
    step = Steps(make, params, damping=damping, **FIXED)
    for _ in range(3):
        assert finite((step(grads, factors), step.state))


@pytest.mark.parametrize("settings", [{}, {"damping": 1e-3, **FIXED}], ids=["adaptive", "fixed"])
@MAKERS
def test_what_is_not_finite_is_left_out(make, settings):
    """A bad gradient is a step left out; bad factors do not enter the average; zeros take no step."""
    params, grads, factors = one_layer(jnp.float32)
    step = Steps(make, params, **settings)
    assert nothing(step(jax.tree.map(jnp.zeros_like, grads), factors))
    for _ in range(2):
        assert finite((step(grads, factors), step.state))
    average = step.get("factors")
    assert finite(step(grads, scaled_inputs(factors, jnp.nan)))
    jax.tree.map(np.testing.assert_array_equal, step.get("factors"), average)
    before = step.state.inner_state.inner_state
    for i, bad in enumerate((jnp.nan, jnp.inf)):
        broken = {"layer": {**grads["layer"], "bias": grads["layer"]["bias"].at[0].set(bad)}}
        assert nothing(step(broken, factors))
        assert step.get("total_notfinite") == i + 1
        jax.tree.map(np.testing.assert_array_equal, step.state.inner_state.inner_state, before)
    assert not nothing(step(grads, factors))


def test_a_step_back_shortens_the_next_ones():
    """The bound is a quarter, the damping fourfold, and the momentum gone."""
    params, grads, factors = one_layer(jnp.float32)
    step = Steps(optim.kfac, params)
    for value in (1.0, 1.1, 0.9):
        step(grads, factors, value=jnp.float32(value))
    before = step.state
    step(grads, factors, value=jnp.float32(1e3))
    assert step.get("taken_back") == 1
    for key, factor in (("bound", 0.25), ("damping", 4.0)):
        got, old = (optax.tree.get(state, key) for state in (step.state, before))
        np.testing.assert_allclose(got, factor * old, rtol=1e-6)
    assert nothing(step.get("ema"))
