"""Adaptive damping and bounds, steps that are taken back, and whole trainings of a perceptron."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import moment_jax as mj
from moment_jax.optim.damping import LastStep
from tests.optim.networks import (
    Perceptron,
    capture,
    classify,
    compiled,
    dense_batch,
    inside,
    losses_of,
)

optim = mj.optim
MAKERS = pytest.mark.parametrize("make", [optim.cg_fac, optim.kfac])
PARAMS = {"kernel": jnp.ones((4, 3), jnp.float64)}


def quadratic(seed=0):
    """A loss <v, F v> / 2 - <v, b> with a Kronecker F, as (loss, factor)."""
    rng = np.random.default_rng(seed)
    a, g, target = (rng.normal(size=size) for size in ((9, 4), (9, 3), (1, 4, 3)))
    sides = (jnp.asarray(rows.T @ rows / 9)[None] for rows in (a, g))
    factor = optim.KroneckerFactor(*sides, jnp.ones(()))

    def loss(v):
        return jnp.sum(v * (optim.apply_curvature(factor, v) / 2 - target))

    return loss, factor


FACTOR = quadratic()[1]
FACTORS = {"model": FACTOR}


def solved(factor, damping, vector):
    """(F + damping)^-1 vector."""
    fisher = jnp.kron(factor.inputs[0], factor.outputs[0]) + damping * jnp.eye(vector.size)
    return jnp.linalg.solve(fisher, vector.ravel()).reshape(vector.shape)


def test_the_slope_in_damping_is_the_derivative_of_the_next_loss():
    """Of a step of fixed length in F + damping; the next loss has another minimum and curvature."""
    (loss, factor), (next_loss, _) = quadratic(0), quadratic(1)
    length, damping = 0.3, 0.2

    @jax.jit
    def both():
        start = jnp.ones((1, 4, 3), jnp.float64)
        grad = jax.grad(loss)(start)

        def step(damping):
            x = solved(factor, damping, grad)
            return -length * x / jnp.sqrt(jnp.sum(x * grad))

        derivative = jax.grad(lambda log: next_loss(start + step(jnp.exp(log))))(jnp.log(damping))
        new = {"": jax.grad(next_loss)(start + step(damping))}
        x = {"": solved(factor, damping, new[""])}
        moved = LastStep.judged(
            {"": step(damping)}, new, {"": factor}, damping, jnp.float32(0), True
        )
        size = jnp.sum(x[""] * new[""])
        slope = moved.slope_in_damping(x, size, damping)
        return slope * length * jnp.sqrt(size), derivative

    np.testing.assert_allclose(*both(), rtol=1e-5)


def test_between_curvatures_the_last_ratio_stands_for_the_product():
    """Exact for a multiple of the step that it was measured on."""
    step, grads = np.random.default_rng(0).normal(size=(2, 1, 4, 3))

    @jax.jit
    def by(step, ratio, exact):
        return LastStep.judged({"": step}, {"": grads}, {"": FACTOR}, 0.2, ratio, exact)

    measured = by(step, jnp.float32(0), True)
    told = by(2 * step, measured.ratio, False)
    np.testing.assert_allclose(told.size, by(2 * step, jnp.float32(0), True).size, rtol=1e-5)


@MAKERS
def test_the_bound_follows_the_slope_after_the_step(make):
    """Steps that are too short or too long by the loss's own curvature."""
    loss, factor = quadratic()
    grad = jax.jit(jax.grad(lambda tree: loss(tree["kernel"][None])))
    region = optim.TrustRegion(initial=1e-2, aim=0.0)
    tx, update = compiled(make, 1.0, damping=1e-6, kl_bound=region, momentum=0.0)
    updates, state = update(grad(PARAMS), tx.init(PARAMS), PARAMS, factors=FACTORS)
    assert np.all(np.isfinite(updates["kernel"]))
    full = -solved(factor, 0.0, grad(PARAMS)["kernel"])
    for rate, grows in ((0.5, True), (1.9, False)):
        # in place of the step, and far beyond the bound
        params = {"kernel": PARAMS["kernel"] + rate * full}
        _, after = update(grad(params), state, params, factors=FACTORS)
        assert (float(inside(after).bound) > 1e-2) == grows


@MAKERS
def test_gradients_that_always_point_back_do_not_end_the_training(make):
    """As those of batches without replacement do once noise prevails: the bound falls as 1 / steps."""
    tx, update = compiled(make, momentum=0.0)
    params, state, grads, bounds, dampings = PARAMS, tx.init(PARAMS), PARAMS, [], []
    for _ in range(60):
        updates, state = update(grads, state, params, factors=FACTORS, value=1.0)
        params = optax.apply_updates(params, updates)
        grads = {"kernel": jnp.sign(updates["kernel"])}
        bounds.append(float(inside(state).bound))
        dampings.append(float(inside(state).damping))
    assert bounds[10] < bounds[0] / 10  # early bounds are no floor
    late = np.arange(20, 60)
    np.testing.assert_allclose(np.asarray(bounds)[late] * (late + 1), bounds[20] * 21, rtol=1e-5)
    assert dampings[20] == dampings[-1]  # nor are steps shortened by damping


@MAKERS
def test_a_step_that_raises_the_loss_is_taken_back(make):
    grads = jax.tree.map(jnp.cos, PARAMS)
    tx, update = compiled(make, momentum=0.0)
    good, params = tx.init(PARAMS), PARAMS
    for _ in range(4):
        updates, good = update(grads, good, params, factors=FACTORS, value=1.0)
        before, params = params, optax.apply_updates(params, updates)
    for bad in (1e3, jnp.inf, jnp.nan):
        broken = grads if np.isfinite(bad) else jax.tree.map(lambda x, bad=bad: x + bad, grads)
        updates, state = update(broken, good, params, factors=FACTORS, value=bad)
        jax.tree.map(np.testing.assert_allclose, optax.apply_updates(params, updates), before)
        assert int(state.taken_back) == 1
        np.testing.assert_allclose(inside(state).bound, inside(good).bound / 4, rtol=1e-6)
        np.testing.assert_allclose(inside(state).damping, 4 * inside(good).damping, rtol=1e-6)
        assert not any(np.any(leaf) for leaf in jax.tree.leaves(state.chain[1]))  # the momentum
        updates, state = update(grads, state, before, factors=FACTORS, value=1.0)
        assert int(state.taken_back) == 1
        assert np.any(updates["kernel"])
    _, state = update({"kernel": 1e6 * PARAMS["kernel"]}, good, params, factors=FACTORS)
    assert int(state.taken_back) == 0  # without a value


def test_when_curvature_is_due():
    """At each of the first few steps, then every few; and at every step until there is any."""
    plain = {"precondition": False, "damping": 0.1, "kl_bound": None}  # few operations
    tx, update = compiled(lambda: optax.chain(optim.cg_fac(curvature_every=3, **plain)))
    state, due = tx.init(PARAMS), []
    for _ in range(10):
        due.append(bool(optim.curvature_due(state)))
        _, state = update(PARAMS, state, PARAMS, factors=FACTORS)
    assert [i for i, wanted in enumerate(due) if wanted] == [0, 1, 2, 3, 6, 9]
    none = jax.tree.map(jnp.zeros_like, FACTORS)
    _, nothing = update(PARAMS, tx.init(PARAMS), PARAMS, factors=none)
    assert bool(optim.curvature_due(nothing))
    with pytest.raises(ValueError, match="kfac or cg_fac in it"):
        optim.curvature_due(optax.adam(0.1).init(PARAMS))


def regress(model, x, y):
    """Half the squared error and the prediction."""
    output = model(x)
    return jnp.sum((output - y) ** 2) / (2 * x.shape[0]), optim.NormalPrediction(output)


def falls(tx, update, steps, loss=classify, scale=1.0, due=True, **settings):
    """Whether the steps take the loss below 0.3 of where it started."""
    model, (x, labels) = Perceptron(), dense_batch(n=24)
    batch = (x, labels) if loss is classify else (x, scale**0.5 * jnp.sin(x[:, :3]))
    values = losses_of(model, capture(loss, **settings), batch, tx, update, steps, due)
    return values[-1] < 0.3 * values[0]


def test_a_loss_falls_by_exact_blocks_and_fixed_settings():
    tx, update = compiled(optim.cg_fac, 0.5, damping=1e-1, kl_bound=0.02, decay=None)
    assert falls(tx, update, 40, due=False, reading=optim.PerSample())


@MAKERS
def test_a_loss_falls_without_a_setting(make):
    """Whatever the loss is measured in; classification and regression have curvatures of their own."""
    tx, update = compiled(make)
    for loss, scale in ((classify, 1.0), (regress, 1e-3), (regress, 1e3)):
        assert falls(tx, update, 80, loss, scale), (loss, scale)


@MAKERS
@pytest.mark.parametrize("factor", [1 / 3, 3.0])
def test_defaults_hold_a_factor_of_three(make, factor):
    """All of what the two rules start from, a third or three times as large."""
    damping, region = (
        type(rule)(initial=factor * rule.initial, rate=factor * rule.rate)
        for rule in (optim.AdaptiveDamping(), optim.TrustRegion())
    )
    assert falls(*compiled(make, damping=damping, kl_bound=region), 80)


def test_a_batch_of_one():
    model = Perceptron()
    tx, update = compiled(optim.cg_fac, 0.1, damping=1e-6, decay=None, kl_bound=1e-3)
    rows = capture(reading=optim.PerSample())
    assert np.all(np.isfinite(losses_of(model, rows, dense_batch(n=1), tx, update, 2)))
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(nnx.state(model)))
