"""IVON: its belief on a quadratic is the known one; steps are clipped; trees, modules and jit agree."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import moment_jax as mj
from moment_jax import optim

ESS, DECAY = 50.0, 0.5
CURVATURE = jnp.array([0.0, 1.0, 4.0])
TARGET = jnp.array([1.0, 1.0, -2.0])


def loss(params):
    """Copies of a quadratic whose Hessian is known."""
    return 0.5 * jnp.sum(CURVATURE[:, None] * (params - TARGET[:, None]) ** 2)


def run(tx, params, num_steps):
    def step(carry, key):
        params, state = carry
        drawn = optim.ivon_draw(state, params, key)
        updates, state = tx.update(jax.grad(loss)(drawn), state, params, drawn=drawn)
        return (optax.apply_updates(params, updates), state), None

    keys = jax.random.split(jax.random.key(0), num_steps)
    (params, state), _ = jax.lax.scan(step, (params, tx.init(params)), keys)
    return optim.ivon_beliefs(state, params)


def test_the_belief_about_a_quadratic_is_the_known_one():
    """Where the loss says nothing (curvature 0), the prior's: mean 0, variance 1 / (ess decay)."""
    tx = optim.ivon(0.1, ESS, beta2=0.99, weight_decay=DECAY, rescale_lr=False)
    belief = run(tx, jnp.ones((3, 1000)), 1500)
    precision = CURVATURE + DECAY
    np.testing.assert_allclose(belief.mean.mean(1), CURVATURE * TARGET / precision, atol=0.01)
    np.testing.assert_allclose(belief.variance.mean(1), 1 / (ESS * precision), rtol=0.04)


def test_one_step_is_that_of_the_algorithm():
    tx = optim.scale_by_ivon(ESS, hess_init=2.0, beta2=0.9, weight_decay=DECAY)
    params, grads, drawn = map(jnp.array, ([1.0, -1.0], [3.0, 0.5], [1.1, -1.2]))
    step, state = tx.update(grads, tx.init(params), params, drawn=drawn)
    estimate = grads * (drawn - params) * ESS * 2.5
    hessian = 0.9 * 2 + 0.1 * estimate + 0.5 * 0.1**2 * (2 - estimate) ** 2 / 2.5
    np.testing.assert_allclose(state.hessian, hessian, rtol=1e-12)
    np.testing.assert_allclose(step, (grads + DECAY * params) / (hessian + DECAY), rtol=1e-12)
    assert (state.hessian + DECAY > 0).all()
    clipped = optim.scale_by_ivon(
        ESS, hess_init=2.0, beta2=0.9, weight_decay=DECAY, clip_radius=0.01
    )
    short, _ = clipped.update(grads, clipped.init(params), params, drawn=drawn)
    np.testing.assert_allclose(short, 0.01 * jnp.sign(step))


def test_a_module_compiled_is_its_tree_and_its_belief_a_model():
    model, x = nnx.Linear(3, 2, param_dtype=float, rngs=nnx.Rngs(0)), jnp.ones((4, 3))
    tx = optax.chain(optax.clip_by_global_norm(1.0), optim.ivon(0.1, ESS))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    tree = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    state = tx.init(tree)

    def loss(model):
        return jnp.mean((model(x) - 1) ** 2)

    @nnx.jit
    def step(model, optimizer, key):
        drawn = optim.ivon_draw(optimizer.opt_state, nnx.state(model, nnx.Param), key)
        own = nnx.clone(model)
        nnx.update(own, drawn)
        optimizer.update(model, nnx.grad(loss)(own), drawn=drawn)

    for key in jax.random.split(jax.random.key(0), 3):
        step(model, optimizer, key)
        drawn = optim.ivon_draw(state, tree, key)
        grads = jax.grad(lambda p: jnp.mean((x @ p["kernel"] + p["bias"][None] - 1) ** 2))(drawn)
        updates, state = tx.update(grads, state, tree, drawn=drawn)
        tree = optax.apply_updates(tree, updates)
    for name, array in tree.items():
        np.testing.assert_allclose(getattr(model, name)[...], array, rtol=1e-12)
    weights = nnx.state(model, nnx.Param)
    beliefs = optim.ivon_beliefs(optimizer.opt_state, weights)
    bayesian = mj.Bayesian(model, mj.Categorical(), beliefs=beliefs, structure=mj.Diagonal)
    known = optim.ivon_beliefs(state, tree)["kernel"].variance
    np.testing.assert_allclose(bayesian.beliefs["kernel"].variance, known, rtol=1e-9)
    assert bayesian(x).sd.shape == (4, 2)


def test_variances_below_the_rounding_of_half_precision_are_right():
    params = jnp.ones((3, 1000), jnp.bfloat16) * TARGET[:, None].astype(jnp.bfloat16)
    tx = optim.ivon(0.1, 1e6, beta2=0.99, weight_decay=0.0, hess_init=2.0)
    drawn = optim.ivon_draw(tx.init(params), params, jax.random.key(0))
    updates, state = tx.update(drawn, tx.init(params), params, drawn=drawn)
    assert drawn.dtype == state[0].hessian.dtype == state[0].momentum.dtype == jnp.float32
    assert updates.dtype == jnp.bfloat16
    found = run(tx, params, 1500).variance.astype(float).mean(1)
    np.testing.assert_allclose(found[1:], 1e-6 / CURVATURE[1:], rtol=0.04)


def test_errors():
    params = jnp.ones(2)
    tx = optim.ivon(0.1, ESS)
    with pytest.raises(ValueError, match=r"Got no drawn. Draw them by mj.optim.ivon_draw"):
        tx.update(params, tx.init(params), params)
    several = optax.MultiSteps(tx, 2).init(params)
    with pytest.raises(ValueError, match=r"at one draw.*Got .*MultiSteps.*call update once"):
        optim.ivon_draw(several, params, jax.random.key(0))
    with pytest.raises(ValueError, match="needs positive ess"):
        optim.ivon(0.1, 0)
    with pytest.raises(ValueError, match=r"a state with one `ivon` in it. Got 0"):
        optim.ivon_beliefs(optax.adam(0.1).init(params), params)
