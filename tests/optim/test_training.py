"""Whole trainings of a perceptron: the loss falls, with settings and without any."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moment_jax as mj
from tests.optim.networks import (
    Perceptron,
    capture,
    classify,
    compiled,
    dense_batch,
    losses_of,
    of_double,
    regress,
)

optim = mj.optim
MAKERS = pytest.mark.parametrize("make", [optim.cg_fac, optim.kfac])
EXACT = {"damping": 1e-1, "kl_bound": 0.02, "decay": None}
FIXED = {"damping": 1e-2, "kl_bound": 0.05}


def falls(tx, update, steps, loss=classify, scale=1.0, due=False, **settings):
    """Whether the steps take the loss below 0.3 of where it started."""
    model, (x, labels) = of_double(Perceptron()), dense_batch(n=24)
    batch = (x, labels) if loss is classify else (x, scale**0.5 * jnp.sin(x[:, :3]))
    values = losses_of(model, capture(loss, **settings), batch, tx, update, steps, due)
    return values[-1] < 0.3 * values[0]


@pytest.mark.parametrize(
    ("make", "settings", "reading", "loss"),
    [
        (optim.cg_fac, FIXED, optim.KroneckerExpand(), classify),
        (optim.cg_fac, EXACT, optim.PerSample(), classify),
        (optim.kfac, FIXED, optim.KroneckerExpand(), regress),
    ],
    ids=["cg_fac", "cg_fac exact", "kfac"],
)
def test_a_loss_falls(make, settings, reading, loss):
    assert falls(*compiled(make, 0.5, **settings), 40, loss, reading=reading)


@MAKERS
def test_a_loss_falls_without_a_setting(make):
    """Whatever the loss is measured in; classification and regression have curvatures of their own."""
    tx, update = compiled(make)
    for loss, scale in ((classify, 1.0), (regress, 1e-3), (regress, 1e3)):
        assert falls(tx, update, 80, loss, scale, due=True), (loss, scale)


@MAKERS
@pytest.mark.parametrize("factor", [1 / 3, 3.0])
def test_defaults_hold_a_factor_of_three(make, factor):
    """All of what the two rules start from, a third or three times as large."""
    damping, region = (
        type(rule)(initial=factor * rule.initial, rate=factor * rule.rate)
        for rule in (optim.AdaptiveDamping(), optim.TrustRegion())
    )
    assert falls(*compiled(make, damping=damping, kl_bound=region), 80, due=True)


@MAKERS
def test_a_learning_rate_ten_times_too_high(make):
    model, (x, labels) = Perceptron(), dense_batch()
    tx, update = compiled(make, 10.0, damping=1e-4, kl_bound=1e-2)
    values = losses_of(model, capture(), (x.astype(jnp.float32), labels), tx, update, 40)
    assert np.all(np.isfinite(values))
    assert values[-1] < values[0]  # the bound, not the rate, sets the step


def test_a_batch_of_one():
    model, (x, labels) = Perceptron(), dense_batch(n=1)
    tx, update = compiled(optim.cg_fac, 0.1, damping=1e-6, decay=None, kl_bound=1e-3)
    batch = (x.astype(jnp.float32), labels)
    values = losses_of(model, capture(reading=optim.PerSample()), batch, tx, update, 2)
    assert np.all(np.isfinite(values))
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(nnx.state(model)))
