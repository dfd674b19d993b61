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
from moment_jax.optim.blocks import flatten
from tests.optim.networks import (
    CLASSES,
    N,
    Perceptron,
    bayesian_loss,
    bayesian_mlp,
    bayesian_vit,
    capture,
    classify,
    dense_batch,
    pure,
)
from tests.optim.test_capture import Deep

optim = mj.optim
SIZES = (3, 3, 3)  # layers of one shape are one group, and half of the program
BLOCKS = optim.find_blocks(classify, Perceptron(sizes=SIZES), *dense_batch(size=3))
FEW = {"max_iterations": 2, "precondition": False, "blocks": BLOCKS}  # operations
CG_FAC = partial(optim.cg_fac, **FEW)
FIXED = {"damping": 1e-2, "kl_bound": 1e-3, "momentum": 0.5}


@functools.cache
def pieces():
    """Parameters, gradients and factors."""
    model = Perceptron(sizes=SIZES)
    _, grads, factors = capture()(model, *dense_batch(size=3))
    return pure(model), pure(grads), factors


def steps(tx, count=1):
    params, grads, factors = pieces()
    state, update, taken = tx.init(params), jax.jit(tx.update), []
    for _ in range(count):
        updates, state = update(grads, state, params, factors=factors)
        taken.append(updates)
    return taken


@functools.cache
def alone():
    """A step by the optimiser itself."""
    return steps(CG_FAC(0.5, **FIXED))[0]


def equal(left, right):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), left, right)


def nothing(tree):
    return not any(np.any(leaf) for leaf in jax.tree.leaves(tree))


def test_the_alias_is_a_chain_of_optax():
    """Of the parts, and of what Optax has."""
    direction = optim.scale_by_cg_fac(max_iterations=2, precondition=False, blocks=BLOCKS)
    rest = optax.ema(0.7), optax.add_decayed_weights(0.1), optax.scale_by_learning_rate(0.3)
    chain = optax.chain(optim.adapt_damping(optim.trust_region(direction)), *rest)
    alias = CG_FAC(0.3, momentum=0.7, weight_decay=0.1)
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-12),
        *(steps(tx, 3) for tx in (optim.undo_bad_steps(chain), alias)),
    )


def test_chains_and_gradient_accumulation():
    """Factors of the last small batch; gradients are the average of all."""
    chain = optax.chain(CG_FAC(0.5, **FIXED), optax.add_decayed_weights(-0.1))
    multi = optax.MultiSteps(optax.apply_if_finite(chain, 3), every_k_schedule=2)
    first, second = steps(multi, 2)
    assert nothing(first)
    equal(second, jax.tree.map(lambda u, p: u - 0.1 * p, alone(), pieces()[0]))


def test_a_schedule_on_top_is_one_of_the_rate():
    free = partial(CG_FAC, **FIXED | {"kl_bound": jnp.inf})
    rates = optax.warmup_cosine_decay_schedule(0.1, 1.0, 1, 3)
    on_top = optax.chain(free(1.0), optax.scale_by_schedule(rates))
    equal(steps(on_top, 4), steps(free(rates), 4))


def test_clipped_gradients_take_no_shorter_step():
    """Where a bound is reached, it sets the length."""
    bounded = CG_FAC(0.5, **FIXED | {"kl_bound": 1e-7})
    half = optax.clip_by_global_norm(optax.tree.norm(pieces()[1]) / 2)
    equal(*(steps(tx) for tx in (optax.chain(half, bounded), bounded)))


def test_injected_hyperparameters():
    params, grads, factors = pieces()
    injected = optax.inject_hyperparams(optim.cg_fac)(
        learning_rate=0.5, blocks=BLOCKS, max_iterations=2, precondition=False, **FIXED
    )
    update = jax.jit(injected.update)
    updates, state = update(grads, injected.init(params), params, factors=factors)
    equal(updates, alone())
    state.hyperparams["learning_rate"] = jnp.zeros_like(state.hyperparams["learning_rate"])
    assert nothing(update(grads, state, params, factors=factors)[0])


def test_steps_are_as_narrow_as_parameters():
    """Also where a setting is an array, and a step may be left out."""
    params, _, factors = pieces()
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    tx = CG_FAC(jnp.float32(0.5), **FIXED)
    step = jax.eval_shape(
        lambda state: tx.update(params, state, params, factors=factors), tx.init(params)
    )[0]
    assert {leaf.dtype for leaf in jax.tree.leaves(step)} == {jnp.dtype(jnp.bfloat16)}


def test_masks_of_whole_layers():
    def mask(tree):
        return jax.tree_util.tree_map_with_path(lambda path, _: "hidden" in str(path), tree)

    free = CG_FAC(0.5, damping=1e-2, kl_bound=jnp.inf)  # a bound is that of all layers together
    updates = steps(optax.masked(free, mask))[0]
    equal(updates["hidden"], steps(free)[0]["hidden"])
    equal(updates["out"], pieces()[1]["out"])


def test_nnx_optimizer_and_scan_of_steps():
    """The state keeps its structure, so steps can be scanned."""
    params, grads, factors = pieces()
    tx = optim.kfac(0.5, blocks=BLOCKS, **FIXED)

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
        assert optim.curvature_due(optimizer.opt_state)
        update(optimizer, model)
    equal(scanned(), pure(model))


def test_one_call_for_a_bayesian_model():
    """Means by K-FAC, spreads and the learned prior by Adam; all of them move."""
    model, (x, labels) = bayesian_mlp(structure=mj.Diagonal), dense_batch()
    before = jax.tree.map(np.asarray, pure(model))
    method = partial(optim.kfac, 0.1, damping=1e-2, kl_bound=1e-2)
    tx = optim.for_model(bayesian_loss, model, x, labels, method=method)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        due = optim.curvature_due(optimizer.opt_state)
        compute = optim.value_grad_and_factors(bayesian_loss)
        value, grads, factors = compute(model, x.astype(jnp.float32), labels, when=due)
        optimizer.update(model, grads, factors=factors, value=value)
        return value

    values = [float(step(model, optimizer)) for _ in range(15)]
    assert values[-1] < values[0]
    moved = jax.tree.map(lambda a, b: np.any(a != np.asarray(b)), before, pure(model))
    assert all(jax.tree.leaves(moved))


@pytest.mark.usefixtures("ranks_of_a_user")
def test_adam_has_the_spreads_alone():
    """Of a Bayesian Transformer: positions are a table."""
    model = nnx.eval_shape(partial(bayesian_vit, num_blocks=1))
    params = nnx.as_pure(nnx.state(model, nnx.Param))
    x, labels = jax.ShapeDtypeStruct((N, 4, 4), jnp.float32), jnp.arange(N) % CLASSES
    tx = optim.for_model(bayesian_loss, model, x, labels)
    state = jax.eval_shape(tx.init, params)
    by_adam = set(flatten(optax.tree.get(state, "mu")))
    assert by_adam == {path for path in flatten(params) if "raw" in path}


def test_checkpoints_resume_exactly_and_the_state_may_be_donated(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    params, grads, factors = pieces()
    tx = optim.kfac(blocks=BLOCKS)
    update = jax.jit(
        lambda state: tx.update(grads, state, params, factors=factors), donate_argnums=0
    )
    _, state = update(tx.init(params))
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
        restored = manager.restore(0, args=ocp.args.StandardRestore(tx.init(params)))
    jax.tree.map(np.testing.assert_array_equal, update(state), update(restored))


class Tied(nnx.Module):
    """Tokens that are looked up and told apart by one table, computed in bfloat16."""

    def __init__(self):
        options = {"rngs": nnx.Rngs(0), "dtype": jnp.bfloat16, "param_dtype": jnp.float32}
        self.table, self.layer = nnx.Embed(8000, 4, **options), nnx.Linear(4, 4, **options)

    def __call__(self, ids):
        return self.table.attend(jnp.tanh(self.layer(self.table(ids))))


class Adapted(nnx.Module):
    """A layer with a product of low rank beside it, and an offset that belongs to no layer."""

    def __init__(self):
        self.layer = Perceptron()
        self.low_rank = Perceptron(sizes=(4, 2, CLASSES))
        self.offset = nnx.Param(jnp.zeros((1, CLASSES)))

    def __call__(self, x):
        return self.layer(x) + self.low_rank(x) + self.offset[...]


def training(model, batch, wrt=nnx.Param):
    """A step (*batch) -> loss by `for_model`, and its optimiser."""
    tx = optim.for_model(classify, model, *batch, wrt=wrt)
    optimizer = nnx.Optimizer(model, tx, wrt=wrt)

    @nnx.jit
    def step(model, optimizer, *batch):
        due = optim.curvature_due(optimizer.opt_state)
        compute = optim.value_grad_and_factors(classify, wrt=wrt)
        value, grads, factors = compute(model, *batch, when=due)
        optimizer.update(model, grads, factors=factors, value=value)
        return value

    return partial(step, model, optimizer), optimizer


def sizes(tree):
    return {leaf.size for leaf in jax.tree.leaves(tree) if hasattr(leaf, "size")}


CASES = {
    "tied": (Tied, nnx.Param, (jnp.array([[5, 7999, 40]]), jnp.array([[7, 5, 6000]]))),
    "low_rank": (Adapted, nnx.PathContains("low_rank"), dense_batch(24)),
    "scanned": (Deep, nnx.Param, dense_batch()),
    "one_example": (Perceptron, nnx.Param, dense_batch(1)),
}


@pytest.mark.parametrize(("create", "wrt", "batch"), CASES.values(), ids=CASES)
def test_networks_that_people_have(create, wrt, batch):
    """The loss falls by what the filter lets move, and a table of 8,000 rows has no matrix of them."""
    model = create()
    before = {path: np.asarray(x) for path, x in flatten(pure(model)).items()}
    step, optimizer = training(model, batch, wrt)
    values = [float(step(*batch)) for _ in range(20)]
    assert values[-1] < 0.9 * values[0]
    moved = {path for path, x in flatten(pure(model)).items() if np.any(x != before[path])}
    assert moved == set(flatten(nnx.as_pure(nnx.state(model, wrt))))
    assert max(sizes(nnx.state(optimizer))) <= 8000 * 4


def test_a_batch_with_nan_is_left_out():
    """And counted, the first one apart, before which there is no step to take back."""
    model, (x, labels) = Adapted(), dense_batch(24)
    step, optimizer = training(model, (x, labels))
    values = [float(step(jnp.where(i in (0, 4), jnp.nan, x), labels)) for i in range(16)]
    assert np.flatnonzero(np.isnan(values)).tolist() == [0, 4]
    assert values[-1] < 0.9 * values[1]
    assert [optax.tree.get(optimizer.opt_state, k) for k in ("total_notfinite", "taken_back")] == [
        1,
        1,
    ]


DEVICES = """
import jax
jax.config.update("jax_num_cpu_devices", 8)
import jax.numpy as jnp, numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import moment_jax as mj
from moment_jax.optim.blocks import flatten
from tests.optim.networks import Perceptron, classify
mesh = Mesh(np.array(jax.devices()), ("data",))
x = jax.random.normal(jax.random.key(0), (8, 4)); y = jnp.arange(8) % 3
spread = [jax.device_put(a, NamedSharding(mesh, P("data"))) for a in (x, y)]
def run(*batch):
    model = Perceptron()
    optimizer = nnx.Optimizer(model, mj.optim.for_model(classify, model, *batch), wrt=nnx.Param)
    @nnx.jit
    def step(model, optimizer):
        compute = mj.optim.value_grad_and_factors(classify)
        value, grads, factors = compute(model, *batch, key=jax.random.key(1))
        optimizer.update(model, grads, factors=factors, value=value)
        return factors
    return [step(model, optimizer) for _ in range(3)], nnx.state(model)
for a, b in zip(*map(jax.tree.leaves, (run(x, y), run(*spread)))):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    assert b.sharding.is_fully_replicated
"""


def test_steps_on_eight_devices_are_those_on_one():
    done = subprocess.run(
        [sys.executable, "-c", DEVICES],
        env={**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
