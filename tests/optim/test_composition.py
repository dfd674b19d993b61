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
    bayesian_vit,
    capture,
    compiled,
    dense_batch,
    losses_of,
    pure,
)

optim = mj.optim
CG_FAC = partial(optim.cg_fac, max_iterations=2, precondition=False)  # few operations
FIXED = {"damping": 1e-2, "kl_bound": 1e-3, "momentum": 0.5}
SIZES = (3, 3, 3)  # layers of one shape are one group, and half of the program


@functools.cache
def pieces():
    """Parameters, gradients and factors."""
    model = Perceptron(sizes=SIZES)
    _, grads, factors = capture()(model, *dense_batch(size=3))
    return pure(model), pure(grads), factors


@functools.cache
def alone(make=CG_FAC):
    """The update by the optimiser itself, and its state."""
    params, grads, factors = pieces()
    tx, update = compiled(make, 0.5, **FIXED)
    return update(grads, tx.init(params), params, factors=factors)


def steps(tx, count=1):
    params, grads, factors = pieces()
    state, update, taken = tx.init(params), jax.jit(tx.update), []
    for _ in range(count):
        updates, state = update(grads, state, params, factors=factors)
        taken.append(updates)
    return taken


def equal(left, right):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), left, right)


def nothing(tree):
    return not any(np.any(leaf) for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(
    ("make", "alias", "settings"),
    [
        (optim.scale_by_cg_fac, optim.cg_fac, {"precondition": False}),
        (optim.scale_by_kfac, optim.kfac, {}),
    ],
)
def test_the_alias_is_a_chain_of_optax(make, alias, settings):
    rest = optax.ema(0.7), optax.add_decayed_weights(0.1), optax.scale_by_learning_rate(0.3)
    chain = optax.chain(make(**settings), *rest)
    taken = [steps(tx, 3) for tx in (chain, alias(0.3, momentum=0.7, weight_decay=0.1, **settings))]
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-12), *taken)


def test_chains_and_gradient_accumulation():
    """Factors of the last small batch; gradients are the average of all."""
    chain = optax.chain(CG_FAC(0.5, **FIXED), optax.add_decayed_weights(-0.1))
    multi = optax.MultiSteps(optax.apply_if_finite(chain, 3), every_k_schedule=2)
    first, second = steps(multi, 2)
    assert nothing(first)
    equal(second, jax.tree.map(lambda u, p: u - 0.1 * p, alone()[0], pieces()[0]))


@pytest.mark.parametrize("make", [CG_FAC, optim.kfac], ids=["cg_fac", "kfac"])
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

    free = CG_FAC(0.5, damping=1e-2, kl_bound=None)  # the bound is that of all layers together
    updates = steps(optax.masked(free, mask))[0]
    equal(updates["hidden"], steps(free)[0]["hidden"])
    equal(updates["out"], pieces()[1]["out"])


def test_nnx_optimizer_and_scan_of_steps():
    """The state keeps its structure, so steps can be scanned."""
    params, grads, factors = pieces()
    tx = optim.kfac(0.5, **FIXED)

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


@pytest.mark.usefixtures("ranks_of_a_user")
@pytest.mark.parametrize("create", [bayesian_mlp, partial(bayesian_vit, num_blocks=1)])
def test_one_call_for_a_bayesian_model(create):
    """Means by K-FAC, positions, spreads and the learned prior by Adam; all of them move."""
    model, (x, labels) = create(), dense_batch()
    if model.name == "VisionTransformer":
        x = jnp.stack([x, 2 * x, -x, x**2], axis=-1)
    tx = optim.for_model(model, partial(optim.kfac, 0.1, damping=1e-2, kl_bound=1e-2))
    before, update = jax.tree.map(np.asarray, pure(model)), jax.jit(tx.update)
    batch = x.astype(jnp.float32), labels
    values = losses_of(model, capture(bayesian_loss), batch, tx, update, 15)
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


def test_the_state_may_be_donated():
    params, grads, factors = pieces()
    tx = optim.kfac()
    step = jax.jit(lambda state: tx.update(grads, state, params, factors=factors), donate_argnums=0)
    _, state = step(tx.init(params))
    step(state)


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
