"""In Optax chains, NNX optimisers, accumulation, checkpoints and on several devices."""

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
    classify,
    dense_batch,
)

optim = mj.optim
METHODS = [partial(optim.cg_fac, max_iterations=3), optim.kfac]
IDS = ["cg_fac", "kfac"]
COMPUTE = nnx.jit(optim.value_grad_and_factors(classify))


def pieces(make, **options):
    model = Perceptron()
    x, labels = dense_batch()
    _, grads, factors = COMPUTE(model, x.astype(jnp.float32), labels)
    params, grads = nnx.as_pure(nnx.state(model, nnx.Param)), nnx.as_pure(grads)
    options = {"damping": 1e-2, "kl_bound": None, "momentum": 0.0} | options
    return params, grads, factors, make(0.5, **options)


def step(tx, params, grads, factors):
    return jax.jit(tx.update)(grads, tx.init(params), params, factors=factors)


def equal(left, right):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), left, right)


@pytest.mark.parametrize("make", METHODS, ids=IDS)
def test_chain_and_weight_decay(make):
    params, grads, factors, tx = pieces(make)
    alone, _ = step(tx, params, grads, factors)
    chained, _ = step(optax.chain(tx, optax.add_decayed_weights(-0.1)), params, grads, factors)
    equal(chained, jax.tree.map(lambda u, p: u - 0.1 * p, alone, params))


@pytest.mark.parametrize("make", METHODS, ids=IDS)
def test_injected_hyperparameters(make):
    params, grads, factors, tx = pieces(make, kl_bound=1e-3)
    alone, _ = step(tx, params, grads, factors)
    injected = optax.inject_hyperparams(make)(
        learning_rate=0.5, damping=1e-2, kl_bound=1e-3, momentum=0.0
    )
    state = injected.init(params)
    updates, state = jax.jit(injected.update)(grads, state, params, factors=factors)
    equal(updates, alone)
    state.hyperparams["learning_rate"] = jnp.zeros(())
    still, _ = injected.update(grads, state, params, factors=factors)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(still))


@pytest.mark.parametrize("make", METHODS, ids=IDS)
def test_apply_if_finite(make):
    params, grads, factors, tx = pieces(make)
    guarded = optax.apply_if_finite(tx, 3)
    alone, _ = step(tx, params, grads, factors)
    updates, _ = step(guarded, params, grads, factors)
    equal(updates, alone)


@pytest.mark.parametrize("make", METHODS, ids=IDS)
def test_masks_of_whole_layers(make):
    params, grads, factors, tx = pieces(make)

    def mask(tree):
        return jax.tree_util.tree_map_with_path(lambda path, _: "hidden" in str(path), tree)

    masked = optax.masked(tx, mask)
    updates, _ = step(masked, params, grads, factors)
    alone, _ = step(tx, params, grads, factors)
    equal(updates["hidden"], alone["hidden"])
    equal(updates["out"], grads["out"])


def test_gradient_accumulation():
    """Factors of the last small batch; gradients are the average of all."""
    params, grads, factors, tx = pieces(optim.kfac)
    multi = optax.MultiSteps(tx, every_k_schedule=2)
    state = multi.init(params)
    first, state = multi.update(grads, state, params, factors=factors)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(first))
    second, _ = multi.update(grads, state, params, factors=factors)
    equal(second, step(tx, params, grads, factors)[0])


@pytest.mark.parametrize("make", METHODS, ids=IDS)
def test_nnx_optimizer_and_scan_of_steps(make):
    """The state keeps its structure, so steps can be scanned."""
    params, grads, factors, tx = pieces(make)

    def one(carry, _):
        updates, state = tx.update(grads, carry[1], carry[0], factors=factors)
        return (optax.apply_updates(carry[0], updates), state), None

    scanned = jax.lax.scan(one, (params, tx.init(params)), length=3)[0]
    carry = (params, tx.init(params))
    for _ in range(3):
        carry, _ = one(carry, None)
    equal(scanned[0], carry[0])
    model = Perceptron()
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    for _ in range(3):
        optimizer.update(model, nnx.state(nnx.merge(nnx.graphdef(model), grads)), factors=factors)
    equal(nnx.as_pure(nnx.state(model, nnx.Param)), carry[0])


def test_one_call_for_a_bayesian_model():
    """Means by K-FAC, spreads by the natural gradient, the learned prior by Adam; all of them move."""
    model = bayesian_mlp(learn_prior=True)
    tx = optim.for_model(
        model,
        partial(optim.kfac, 0.1, damping=1e-2, kl_bound=1e-2),
        scale_learning_rate=0.05,
        dataset_size=100,
    )
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    compute = optim.value_grad_and_factors(bayesian_loss)
    x, labels = dense_batch()
    x = x.astype(jnp.float32)
    before = jax.tree.map(jnp.copy, nnx.as_pure(nnx.state(model, nnx.Param)))

    @nnx.jit
    def update(model, optimizer):
        value, grads, factors = compute(model, x, labels)
        optimizer.update(model, grads, factors=factors)
        return value

    values = [float(update(model, optimizer)) for _ in range(15)]
    assert values[-1] < values[0]
    after = nnx.as_pure(nnx.state(model, nnx.Param))
    assert all(
        np.any(a != b) for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    )


def test_checkpoints_resume_exactly(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    params, grads, factors, tx = pieces(optim.kfac, momentum=0.5)
    _, state = step(tx, params, grads, factors)
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
        restored = manager.restore(0, args=ocp.args.StandardRestore(tx.init(params)))
    outcomes = [tx.update(grads, s, params, factors=factors) for s in (state, restored)]
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
        [sys.executable, "-c", DEVICES], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
