"""Whole trainings of a perceptron: the loss falls, with settings and without any."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moment_jax as mj
from tests.optim.networks import Perceptron, capture, classify, compiled, dense_batch, losses_of

optim = mj.optim
MAKERS = pytest.mark.parametrize("make", [optim.cg_fac, optim.kfac])


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
