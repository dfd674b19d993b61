"""In Optax chains, NNX optimisers, accumulation, checkpoints and on several devices."""

import functools
import os
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import moment_jax as mj
from tests.optim.networks import (
    Perceptron,
    bayesian_loss,
    bayesian_mlp,
    capture,
    compiled,
    dense_batch,
    losses_of,
    pure,
)

optim = mj.optim
CG_FAC = partial(optim.cg_fac, max_iterations=2, precondition=False)  # few operations
MAKERS = pytest.mark.parametrize("make", [CG_FAC, optim.kfac], ids=["cg_fac", "kfac"])
FIXED = {"damping": 1e-2, "kl_bound": 1e-3, "momentum": 0.5}
SIZES = (3, 3, 3)  # layers of one shape are one group, and half of the program


@functools.cache
def pieces():
    """Parameters, gradients and factors."""
    x, labels = dense_batch(size=3)
    model = Perceptron(sizes=SIZES)
    _, grads, factors = capture()(model, x.astype(jnp.float32), labels)
    return pure(model), pure(grads), factors


@functools.cache
def alone(make):
    """The update by the optimiser itself, and its state."""
    params, grads, factors = pieces()
    tx, update = compiled(make, 0.5, **FIXED)
    return update(grads, tx.init(params), params, factors=factors)


def step(tx):
    params, grads, factors = pieces()
    return jax.jit(tx.update)(grads, tx.init(params), params, factors=factors)[0]


def equal(left, right):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), left, right)


def nothing(tree):
    return not any(np.any(leaf) for leaf in jax.tree.leaves(tree))


def test_chain_and_weight_decay():
    chain = optax.chain(CG_FAC(0.5, **FIXED), optax.add_decayed_weights(-0.1))
    chained = step(optax.apply_if_finite(chain, 3))
    equal(chained, jax.tree.map(lambda u, p: u - 0.1 * p, alone(CG_FAC)[0], pieces()[0]))


@MAKERS
def test_injected_hyperparameters(make):
    params, grads, factors = pieces()
    injected = optax.inject_hyperparams(make)(learning_rate=0.5, **FIXED)
    update = jax.jit(injected.update)
    updates, state = update(grads, injected.init(params), params, factors=factors)
    equal(updates, alone(make)[0])
    state.hyperparams["learning_rate"] = jnp.zeros_like(state.hyperparams["learning_rate"])
    assert nothing(update(grads, state, params, factors=factors)[0])


def test_masks_of_whole_layers():
    def mask(tree):
        return jax.tree_util.tree_map_with_path(lambda path, _: "hidden" in str(path), tree)

    free = {**FIXED, "kl_bound": None}  # the bound is that of all layers together
    updates = step(optax.masked(CG_FAC(0.5, **free), mask))
    equal(updates["hidden"], step(CG_FAC(0.5, **free))["hidden"])
    equal(updates["out"], pieces()[1]["out"])


def test_gradient_accumulation():
    """Factors of the last small batch; gradients are the average of all."""
    params, grads, factors = pieces()
    multi = optax.MultiSteps(CG_FAC(0.5, **FIXED), every_k_schedule=2)
    state, update = multi.init(params), jax.jit(multi.update)
    first, state = update(grads, state, params, factors=factors)
    assert nothing(first)
    second, _ = update(grads, state, params, factors=factors)
    equal(second, alone(CG_FAC)[0])


@MAKERS
def test_nnx_optimizer_and_scan_of_steps(make):
    """The state keeps its structure, so steps can be scanned."""
    params, grads, factors = pieces()
    tx = make(0.5, **FIXED)

    @jax.jit
    def scanned():
        def one(carry, _):
            updates, state = tx.update(grads, carry[1], carry[0], factors=factors)
            return (optax.apply_updates(carry[0], updates), state), None

        return jax.lax.scan(one, (params, tx.init(params)), length=3)[0][0]

    model = Perceptron(sizes=SIZES)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    given = nnx.state(nnx.merge(nnx.graphdef(model), grads))
    update = nnx.jit(lambda optimizer, model: optimizer.update(model, given, factors=factors))
    for _ in range(3):
        update(optimizer, model)
    equal(scanned(), pure(model))


def test_one_call_for_a_bayesian_model():
    """Means by K-FAC, spreads and the learned prior by Adam; all of them move."""
    model = bayesian_mlp()
    kfac = partial(optim.kfac, 0.1, damping=1e-2, kl_bound=1e-2)
    tx = optim.for_model(model, kfac)
    before, update = jax.tree.map(np.asarray, pure(model)), jax.jit(tx.update)
    values = losses_of(model, capture(bayesian_loss), dense_batch(), tx, update, 15)
    assert values[-1] < values[0]
    moved = jax.tree.map(lambda a, b: np.any(a != np.asarray(b)), before, pure(model))
    assert all(jax.tree.leaves(moved))


def test_checkpoints_resume_exactly(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    params, grads, factors = pieces()
    tx, update = compiled(optim.kfac, 0.5, **FIXED)
    _, state = alone(optim.kfac)
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
        restored = manager.restore(0, args=ocp.args.StandardRestore(tx.init(params)))
    outcomes = [update(grads, s, params, factors=factors) for s in (state, restored)]
    jax.tree.map(np.testing.assert_array_equal, *outcomes)


DEVICES = """
import jax
jax.config.update("jax_num_cpu_devices", 4)
import jax.numpy as jnp, numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import moment_jax as mj
from tests.optim.networks import Perceptron, classify
mesh = Mesh(np.array(jax.devices()), ("data",))
x = jax.random.normal(jax.random.key(0), (8, 4)); y = jnp.arange(8) % 3
spread = [jax.device_put(a, NamedSharding(mesh, P("data"))) for a in (x, y)]
compute = nnx.jit(mj.optim.value_grad_and_factors(classify))
results = [compute(Perceptron(), *batch, key=jax.random.key(1))[2] for batch in ((x, y), spread)]
for a, b in zip(*map(jax.tree.leaves, results)):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    assert b.sharding.is_fully_replicated
"""


def test_data_parallel_factors_are_reduced_by_the_compiler():
    done = subprocess.run(
        [sys.executable, "-c", DEVICES],
        env={**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
