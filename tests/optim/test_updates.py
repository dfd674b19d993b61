"""Steps of both methods: against dense solutions, within the bound, and with damping that adapts."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import moment_jax as mj
from tests.optim.networks import Perceptron, classify, dense_batch, inside, of_double, regress

optim = mj.optim
SOLVED = {"kl_bound": None, "momentum": 0.0}  # the solution itself, neither bounded nor averaged


def close(left, right, tolerance=1e-10):
    scale = np.max(np.abs(right))
    np.testing.assert_allclose(left, right, rtol=tolerance, atol=tolerance * scale)


def spd(seed, n, count=1):
    x = jax.random.normal(jax.random.key(seed), (count, 3 * n, n), jnp.float64)
    return jnp.einsum("lna,lnb->lab", x, x) / (3 * n)


def one_layer(rows=5, columns=3):
    """Parameters, gradients and factors of one dense layer with a bias."""
    params = {
        "layer": {
            "kernel": jax.random.normal(jax.random.key(0), (rows - 1, columns), jnp.float64),
            "bias": jax.random.normal(jax.random.key(1), (columns,), jnp.float64),
        }
    }
    grads = jax.tree.map(lambda x: jnp.sin(3 * x), params)
    factor = optim.KroneckerFactor(spd(2, rows), spd(3, columns), jnp.ones(()))
    return params, grads, {"layer": factor}


def matrix(tree):
    return jnp.concatenate([tree["layer"]["kernel"], tree["layer"]["bias"][None]])


def dense_step(grads, factors, damping):
    factor = factors["layer"]
    fisher = jnp.kron(factor.inputs[0], factor.outputs[0])
    v = matrix(grads).ravel()
    return -jnp.linalg.solve(fisher + damping * jnp.eye(v.size), v).reshape(matrix(grads).shape)


def step(tx, params, grads, factors, **extra):
    return jax.jit(tx.update)(grads, tx.init(params), params, factors=factors, **extra)


@pytest.mark.parametrize(
    "tx",
    [
        optim.cg_fac(1.0, damping=0.3, max_iterations=40, tolerance=1e-13, **SOLVED),
        optim.cg_fac(
            1.0, damping=0.3, max_iterations=40, tolerance=1e-13, **SOLVED, precondition=None
        ),
        optim.cg_fac(
            1.0,
            damping=0.3,
            max_iterations=40,
            tolerance=1e-13,
            **SOLVED,
            precondition=optim.Jacobi(),
        ),
        optim.kfac(1.0, damping=0.3, inversion=optim.Eigh(), **SOLVED),
    ],
    ids=["cg_fac", "cg_fac printed", "cg_fac jacobi", "kfac"],
)
def test_one_step_is_the_dense_natural_gradient(tx):
    params, grads, factors = one_layer()
    updates, state = step(tx, params, grads, factors)
    # Damping is a float32 in the state.
    close(matrix(updates), dense_step(grads, factors, float(inside(state).damping)), 1e-9)


@pytest.mark.parametrize("inversion", [optim.Cholesky(), optim.NewtonSchulz(40)], ids=str)
def test_factored_damping(inversion):
    params, grads, factors = one_layer()
    updates, state = step(
        optim.kfac(1.0, damping=0.3, inversion=inversion, **SOLVED), params, grads, factors
    )
    a, g = factors["layer"].inputs[0], factors["layer"].outputs[0]
    pi = jnp.sqrt((jnp.trace(a) / 5) / (jnp.trace(g) / 3))
    root = jnp.sqrt(inside(state).damping.astype(jnp.float64))
    left = jnp.linalg.solve(a + pi * root * jnp.eye(5), matrix(grads))
    expected = -jnp.linalg.solve(g + root / pi * jnp.eye(3), left.T).T
    close(matrix(updates), expected, 1e-6)


def test_kfac_is_exact_for_a_gaussian_linear_layer():
    """Inputs Gaussian, gradients independent of them: F = E[a a^T] (x) E[g g^T], within noise."""
    keys = jax.random.split(jax.random.key(0), 2)
    n = 20_000
    a = jax.random.normal(keys[0], (n, 3), jnp.float64) @ jnp.array(
        [[1.0, 0.5, 0], [0, 1, 0.3], [0, 0, 2]]
    )
    g = jax.random.normal(keys[1], (n, 2), jnp.float64) * jnp.array([[1.0, 0.2]])
    each = jnp.einsum("na,no->nao", a, g).reshape(n, -1)
    outer = each[:, :, None] * each[:, None, :]
    kronecker = jnp.kron(a.T @ a / n, g.T @ g / n)
    error = outer.std(axis=0) / n**0.5
    assert np.all(np.abs(outer.mean(axis=0) - kronecker) < 5 * error)


@pytest.mark.parametrize("make", [optim.cg_fac, optim.kfac])
def test_the_step_is_within_the_bound(make):
    params, grads, factors = one_layer()
    bound = 1e-4
    updates, state = step(make(1.0, damping=1e-3, kl_bound=bound), params, grads, factors)
    v = matrix(updates)[None]
    divergence = jnp.sum(v * optim.apply_curvature(factors["layer"], v)) / 2
    assert 0 < float(divergence) <= bound * 1.001
    assert float(inside(state).clip) < 1
    free, state = step(make(1.0, damping=1e-3, **SOLVED), params, grads, factors)
    assert float(inside(state).clip) == 1
    np.testing.assert_allclose(
        matrix(free) * (matrix(updates)[0, 0] / matrix(free)[0, 0]), matrix(updates), rtol=1e-5
    )


def test_momentum_solves_for_the_average_gradient():
    params, grads, factors = one_layer()
    other = jax.tree.map(jnp.cos, grads)
    tx = optim.kfac(
        1.0, damping=0.3, momentum=0.8, decay=0.0, inversion=optim.Eigh(), kl_bound=None
    )
    _, state = step(tx, params, grads, factors)
    updates, state = tx.update(other, state, params, factors=factors)
    mean = jax.tree.map(lambda old, new: (0.8 * old + new) / 1.8, grads, other)
    close(matrix(updates), dense_step(mean, factors, float(inside(state).damping)), 1e-6)


def test_factors_are_averaged_and_pauses_leave_them():
    params, grads, factors = one_layer()
    tx = optim.kfac(1.0, decay=0.9)
    _, state = step(tx, params, grads, factors)
    first = factors["layer"].inputs
    twice = {"layer": factors["layer"]._replace(inputs=3 * first)}
    _, state = tx.update(grads, state, params, factors=twice)
    average = inside(state).curvature["dense_5x3"]
    expected = (0.1 * 0.9 + 0.1 * 3) * first / 0.19
    close(average.inputs, expected, 1e-6)
    nothing = jax.tree.map(jnp.zeros_like, factors)
    _, paused = tx.update(grads, state, params, factors=nothing)
    _, left_out = tx.update(grads, state, params)
    for other in (paused, left_out):
        jax.tree.map(
            np.testing.assert_array_equal, inside(other).curvature, inside(state).curvature
        )


def test_inverses_are_refreshed_when_it_is_time():
    """After 1, 2 steps and then every 3; a refresh that is due waits for new curvature."""
    params, grads, factors = one_layer()
    tx = optim.kfac(1.0, refresh_every=3, decay=0.0)
    state, inverses = tx.init(params), []
    for i in range(11):
        scaled = {"layer": factors["layer"]._replace(inputs=(1.0 + i) * factors["layer"].inputs)}
        _, state = tx.update(grads, state, params, factors=None if i in (6, 7) else scaled)
        inverses.append(np.asarray(inside(state).solver.inverses["dense_5x3"].inputs))
    fresh = [i + 1 for i, (a, b) in enumerate(itertools.pairwise(inverses)) if np.any(a != b)]
    assert fresh == [1, 3, 8]


def test_damping_adapts_to_the_reduction_ratio():
    """With the right F the model is exact for least squares; with F too small it promises too much."""
    params, _, factors = one_layer()
    factor = factors["layer"]

    def loss(tree):
        v = matrix(tree)[None]
        return jnp.sum(v * optim.apply_curvature(factor, v)) / 2

    rule = optim.LevenbergMarquardt(initial=0.1, factor=2.0)
    for scale, direction in ((1.0, -1), (0.05, 1)):
        scaled = {"layer": factor._replace(inputs=scale * factor.inputs)}
        tx = optim.cg_fac(1.0, damping=rule, max_iterations=30, tolerance=1e-9, **SOLVED)
        updates, state = step(tx, params, jax.grad(loss)(params), scaled)
        moved = optax.apply_updates(params, updates)
        change = loss(moved) - loss(params)
        _, state = tx.update(jax.grad(loss)(moved), state, moved, factors=scaled, change=change)
        np.testing.assert_allclose(inside(state).damping, 0.1 * 2.0**direction, rtol=1e-6)
        if scale == 1.0:
            close(inside(state).predicted, change, 1e-6)
        _, after = tx.update(jax.grad(loss)(moved), state, moved, factors=scaled, change=jnp.nan)
        assert float(inside(after).damping) == float(inside(state).damping)


def test_schedules_are_followed():
    params, grads, factors = one_layer()
    schedule = optax.linear_schedule(1.0, 0.0, 2)
    tx = optim.kfac(schedule, damping=optax.linear_schedule(0.5, 0.1, 2), **SOLVED)
    first, state = step(tx, params, grads, factors)
    assert float(inside(state).damping) == 0.5
    _, state = tx.update(grads, state, params, factors=factors)
    last, state = tx.update(grads, state, params, factors=factors)
    np.testing.assert_allclose(inside(state).damping, 0.1, rtol=1e-6)
    assert not np.any(matrix(last))
    assert np.any(matrix(first))


def test_a_warm_start_saves_iterations_where_the_system_stays():
    """The same averaged curvature and gradient: nothing is left to do."""
    params, grads, factors = one_layer()
    options = {"damping": 1e-2, "max_iterations": 30, "tolerance": 1e-6, "precondition": None}
    counts = []
    for warm_start in (True, False):
        tx = optim.cg_fac(1.0, warm_start=warm_start, **SOLVED, **options)
        _, state = step(tx, params, grads, factors)
        _, state = tx.update(grads, state, params, factors=factors)
        counts.append(int(inside(state).solver.iterations["dense_5x3"][0]))
    assert counts[0] == 0
    assert counts[1] > 2


@pytest.mark.parametrize("make", [optim.cg_fac, optim.kfac])
@pytest.mark.parametrize("kind", ["table", "norm"])
def test_tables_and_norms_by_their_own_blocks(make, kind):
    if kind == "table":
        params = {"table": {"embedding": jnp.ones((4, 3))}}
        frequencies = jnp.array([[0.5, 0.25, 0.25, 0.0]])
        factors = {"table": optim.EmbeddingFactor(frequencies, spd(0, 3), jnp.ones(()))}
        fisher = jnp.kron(jnp.diag(frequencies[0]), factors["table"].outputs[0])
    else:
        params = {"norm": {"scale": jnp.ones(4), "bias": jnp.zeros(4)}}
        squares = jnp.arange(8.0).reshape(1, 2, 4)
        factors = {"norm": optim.DiagonalFactor(squares, jnp.ones(()))}
        fisher = jnp.diag(squares.ravel())
    grads = jax.tree.map(
        lambda x: jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), params
    )
    options = {"max_iterations": 50, "tolerance": 1e-7} if make is optim.cg_fac else {}
    updates, _ = step(make(1.0, damping=0.2, **SOLVED, **options), params, grads, factors)
    names = ["embedding"] if kind == "table" else ["scale", "bias"]
    ravel = lambda tree: jnp.concatenate([tree[kind][n].ravel() for n in names])  # noqa: E731
    expected = -jnp.linalg.solve(fisher + 0.2 * jnp.eye(fisher.shape[0]), ravel(grads))
    np.testing.assert_allclose(ravel(updates), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("tx", "reading"),
    [
        (optim.cg_fac(0.5, damping=1e-2, kl_bound=0.05), optim.KroneckerExpand()),
        (optim.cg_fac(0.5, damping=1e-1, kl_bound=0.02, decay=None), optim.PerSample()),
        (optim.kfac(0.5, damping=1e-2, kl_bound=0.05), optim.KroneckerReduce()),
    ],
    ids=["cg_fac", "cg_fac exact", "kfac"],
)
@pytest.mark.parametrize("loss", [classify, regress])
def test_a_loss_falls(tx, reading, loss):
    model, (x, labels) = of_double(Perceptron()), dense_batch(n=24)
    batch = (x, labels) if loss is classify else (x, jnp.sin(x[:, :3]))
    compute = optim.value_grad_and_factors(loss, reading=reading)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        value, grads, factors = compute(model, *batch)
        optimizer.update(model, grads, factors=factors)
        return value

    values = [float(step(model, optimizer)) for _ in range(40)]
    assert values[-1] < 0.3 * values[0]


@pytest.mark.parametrize("optimizer", [optim.kfac, optim.cg_fac])
def test_the_state_may_be_donated(optimizer):
    params, grads, factors = one_layer()
    tx = optimizer()
    step = jax.jit(lambda state: tx.update(grads, state, params, factors=factors), donate_argnums=0)
    _, state = step(tx.init(params))
    step(state)
