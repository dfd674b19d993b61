"""Defaults: what the last step says, steps that are taken back, and no setting that has to be found."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import moment_jax as mj
from moment_jax.optim.last_step import Directions, Moved
from tests.optim.networks import (
    Perceptron,
    classify,
    dense_batch,
    inside,
    of_double,
    regress,
)

optim = mj.optim
MAKERS = pytest.mark.parametrize("make", [optim.cg_fac, optim.kfac])


def quadratic(seed=0, rows=4, columns=3):
    """A loss <v, F v> / 2 - <v, b> with a Kronecker F, as (loss, factor)."""
    keys = jax.random.split(jax.random.key(seed), 3)
    a, g, b = (
        jax.random.normal(k, (1, 9, n), jnp.float64)
        for k, n in zip(keys, (rows, columns, rows), strict=True)
    )
    factor = optim.KroneckerFactor(
        jnp.einsum("lna,lnb->lab", a, a) / 9, jnp.einsum("lna,lnb->lab", g, g) / 9, jnp.ones(())
    )
    target = b[:, :columns].swapaxes(1, 2)

    def loss(v):
        return jnp.sum(v * (optim.apply_curvature(factor, v) / 2 - target))

    return loss, factor


def solved(factor, damping, vector):
    """(F + damping)^-1 vector."""
    fisher = jnp.kron(factor.inputs[0], factor.outputs[0]) + damping * jnp.eye(vector.size)
    return jnp.linalg.solve(fisher, vector.ravel()).reshape(vector.shape)


def test_the_slope_in_damping_is_the_derivative_of_the_next_loss():
    """Of a step of fixed length in F + damping; the next loss has another minimum and curvature."""
    (loss, factor), (next_loss, _) = quadratic(0), quadratic(1)
    start, length, damping = jnp.ones((1, 4, 3), jnp.float64), 0.3, 0.2
    grad = jax.grad(loss)(start)

    def step(damping):
        x = solved(factor, damping, grad)
        return -length * x / jnp.sqrt(jnp.sum(x * grad))

    derivative = jax.jit(jax.grad(lambda log: next_loss(start + step(jnp.exp(log)))))(
        jnp.log(damping)
    )
    new = {"": jax.grad(next_loss)(start + step(damping))}
    x = {"": solved(factor, damping, new[""])}
    moved = Moved.by(
        {"": step(damping)}, new, {"": factor}, damping, jnp.ones(()), jnp.float32(0), True
    )
    size = jnp.sum(x[""] * new[""])
    slope = moved.slope_in_damping(Directions(x, size, None), damping)
    np.testing.assert_allclose(slope * length * jnp.sqrt(size), derivative, rtol=1e-5)


def test_between_curvatures_the_last_ratio_stands_for_the_product():
    """Exact for a multiple of the step that it was measured on."""
    _, factor = quadratic()
    grads, step = ({"": jax.random.normal(jax.random.key(k), (1, 4, 3))} for k in (0, 1))
    rest = (grads, {"": factor}, 0.2, jnp.ones(()))
    measured = Moved.by(step, *rest, jnp.float32(0), True)
    twice = {"": 2 * step[""]}
    told = Moved.by(twice, *rest, measured.ratio, False)
    np.testing.assert_allclose(
        told.size, Moved.by(twice, *rest, jnp.float32(0), True).size, rtol=1e-5
    )


@MAKERS
@pytest.mark.parametrize(("rate", "grows"), [(0.5, True), (1.9, False)])
def test_the_bound_follows_the_slope_after_the_step(make, rate, grows):
    """Steps that are too short or too long by the loss's own curvature."""
    loss, factor = quadratic()
    params = {"kernel": jnp.ones((4, 3), jnp.float64)}
    grad = jax.grad(lambda tree: loss(tree["kernel"][None]))
    region = optim.TrustRegion(initial=1e-2, aim=0.0)
    tx = make(1.0, damping=1e-6, kl_bound=region, momentum=0.0)
    update, state = jax.jit(tx.update), tx.init(params)
    updates, state = update(grad(params), state, params, factors={"model": factor})
    full = -solved(factor, 0.0, grad(params)["kernel"])
    params = {
        "kernel": params["kernel"] + rate * full
    }  # in place of the step, and far beyond the bound
    _, state = update(grad(params), state, params, factors={"model": factor})
    assert np.all(np.isfinite(updates["kernel"]))
    assert (float(inside(state).bound) > 1e-2) == grows


@MAKERS
def test_gradients_that_always_point_back_do_not_end_the_training(make):
    """As those of batches without replacement do once noise prevails: the bound falls as 1 / steps."""
    params, (_, factor) = {"kernel": jnp.ones((4, 3), jnp.float64)}, quadratic()
    tx = make(momentum=0.0)
    update, state, grads, bounds, dampings = jax.jit(tx.update), tx.init(params), params, [], []
    for _ in range(60):
        updates, state = update(grads, state, params, factors={"model": factor})
        params, grads = (
            optax.apply_updates(params, updates),
            {"kernel": jnp.sign(updates["kernel"])},
        )
        bounds.append(float(inside(state).bound))
        dampings.append(float(inside(state).damping))
    assert bounds[10] < bounds[0] / 10  # an early bound is of no account
    late = np.arange(20, 60)
    np.testing.assert_allclose(np.asarray(bounds)[late] * (late + 1), bounds[20] * 21, rtol=1e-5)
    assert dampings[20] == dampings[-1]  # nor are steps shortened by damping


@MAKERS
@pytest.mark.parametrize("bad", [1e3, jnp.inf, jnp.nan])
def test_a_step_that_raises_the_loss_is_taken_back(make, bad):
    params = {"kernel": jnp.ones((4, 3), jnp.float64)}
    grads, (_, factor) = jax.tree.map(jnp.cos, params), quadratic()
    tx = make()
    update = jax.jit(tx.update)
    state = tx.init(params)
    for _ in range(4):
        updates, state = update(grads, state, params, factors={"model": factor}, value=1.0)
        before, params = params, optax.apply_updates(params, updates)
    bound, damping = inside(state).bound, inside(state).damping
    broken = grads if np.isfinite(bad) else jax.tree.map(lambda x: x + bad, grads)
    updates, state = update(broken, state, params, factors={"model": factor}, value=bad)
    jax.tree.map(np.testing.assert_allclose, optax.apply_updates(params, updates), before)
    assert int(state.taken_back) == 1
    np.testing.assert_allclose(inside(state).bound, bound / 4, rtol=1e-6)
    np.testing.assert_allclose(inside(state).damping, 4 * damping, rtol=1e-6)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(state.chain[1]))  # the momentum
    updates, state = update(grads, state, before, factors={"model": factor}, value=1.0)
    assert int(state.taken_back) == 1
    assert np.any(updates["kernel"])


@MAKERS
def test_without_a_value_nothing_is_taken_back(make):
    params = {"kernel": jnp.ones((4, 3), jnp.float64)}
    _, factor = quadratic()
    tx = make()
    update, state = jax.jit(tx.update), tx.init(params)
    for scale in (1.0, 1e6):
        _, state = update(
            jax.tree.map(lambda x, s=scale: s * x, params), state, params, factors={"model": factor}
        )
    assert int(state.taken_back) == 0


def test_when_curvature_is_due():
    """At each of the first so many steps, then at every so many; and for ever until there is any."""
    params = {"kernel": jnp.ones((4, 3), jnp.float64)}
    _, factor = quadratic()
    tx = optax.chain(optim.kfac(curvature_every=3))
    update, state, due = jax.jit(tx.update), tx.init(params), []
    for _ in range(10):
        due.append(bool(optim.curvature_due(state)))
        _, state = update(params, state, params, factors={"model": factor})
    assert [i for i, wanted in enumerate(due) if wanted] == [0, 1, 2, 3, 6, 9]
    _, nothing = update(params, tx.init(params), params)
    assert bool(optim.curvature_due(nothing))
    with pytest.raises(ValueError, match="kfac or cg_fac in it"):
        optim.curvature_due(optax.adam(0.1).init(params))


def test_what_adapts_needs_parameters():
    params = {"kernel": jnp.ones((4, 3), jnp.float64)}
    tx = optim.scale_by_kfac()
    with pytest.raises(ValueError, match=r"update\(grads, state, params, factors=factors\)"):
        tx.update(params, tx.init(params), factors={"model": quadratic()[1]})


@pytest.mark.parametrize(
    ("make", "alias"), [(optim.scale_by_cg_fac, optim.cg_fac), (optim.scale_by_kfac, optim.kfac)]
)
def test_the_alias_is_a_chain_of_optax(make, alias):
    params = {"kernel": jnp.ones((4, 3), jnp.float64)}
    grads, (_, factor) = jax.tree.map(jnp.cos, params), quadratic()
    chain = optax.chain(
        make(), optax.ema(0.7), optax.add_decayed_weights(0.1), optax.scale_by_learning_rate(0.3)
    )
    outcomes = []
    for tx in (chain, alias(0.3, momentum=0.7, weight_decay=0.1)):
        now, state, update = params, tx.init(params), jax.jit(tx.update)
        for _ in range(3):
            updates, state = update(grads, state, now, factors={"model": factor})
            now = optax.apply_updates(now, updates)
        outcomes.append(now["kernel"])
    np.testing.assert_allclose(*outcomes, rtol=1e-12)


@pytest.mark.parametrize(
    ("loss", "scale"), [(classify, 1.0), (regress, 1e-3), (regress, 1.0), (regress, 1e3)]
)
@MAKERS
def test_a_loss_falls_without_a_setting(make, loss, scale):
    """Whatever the loss is measured in; classification and regression have curvatures of their own."""
    model, (x, labels) = of_double(Perceptron()), dense_batch(n=24)
    batch = (x, labels) if loss is classify else (x, scale**0.5 * jnp.sin(x[:, :3]))
    compute = optim.value_grad_and_factors(loss)
    optimizer = nnx.Optimizer(model, optim.for_model(model, make), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        when = optim.curvature_due(optimizer.opt_state)
        value, grads, factors = compute(model, *batch, when=when)
        optimizer.update(model, grads, factors=factors, value=value)
        return value

    values = [float(step(model, optimizer)) for _ in range(80)]
    assert values[-1] < 0.3 * values[0]


@MAKERS
@pytest.mark.parametrize("factor", [1 / 3, 3.0])
def test_defaults_hold_a_factor_of_three(make, factor):
    """All of what the two rules start from, a third or three times as large."""
    damping, region = optim.AdaptiveDamping(), optim.TrustRegion()
    damping = optim.AdaptiveDamping(initial=factor * damping.initial, rate=factor * damping.rate)
    region = optim.TrustRegion(initial=factor * region.initial, rate=factor * region.rate)
    make = partial(make, damping=damping, kl_bound=region)
    test_a_loss_falls_without_a_setting(make, classify, 1.0)
