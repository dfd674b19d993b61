"""Capture: gradients to the bit, and the statistics of a network written out by hand."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moment_jax as mj
from moment_jax.optim.layer_blocks import flatten
from tests.optim.networks import (
    CLASSES,
    Everything,
    N,
    Perceptron,
    bayesian_loss,
    bayesian_mlp,
    bayesian_vit,
    capture,
    classify,
    dense_batch,
    everything_batch,
)
from tests.optim.networks import close as nearly

optim = mj.optim
KEY = jax.random.key(5)
EMPIRICAL = optim.EmpiricalFisher()
LOGITS = np.array([0.5, -1.0, 0.2])
PLAIN = nnx.jit(nnx.value_and_grad(lambda model, *batch: classify(model, *batch)[0]))


def same(left, right):
    """To the bit."""
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_array_equal(a, b)


def close(left, right):
    np.testing.assert_allclose(left, right, rtol=1e-10, atol=1e-12)


@pytest.fixture(scope="module")
def exact():
    """The network of every layer: exact rows of the data's own targets, and plain gradients."""
    model, batch = Everything(), everything_batch()
    compute = capture(reading=optim.PerSample(), fisher=EMPIRICAL, dtype=jnp.float64)
    gradient = nnx.grad(lambda model, s, y: classify(model, s[None], y[None])[0])
    each = nnx.jit(nnx.vmap(gradient, in_axes=(None, 0, 0)))
    return compute(model, *batch), PLAIN(model, *batch), each(model, *batch), batch


def test_gradients_to_the_bit(exact):
    """By one pass of everything, by rows, and without jit."""
    same(capture()(Everything(), *exact[3])[:2], exact[1])
    same(exact[0][:2], exact[1])
    model, batch = nnx.Linear(4, CLASSES, rngs=nnx.Rngs(0)), dense_batch()
    plain = nnx.value_and_grad(lambda model, *batch: classify(model, *batch)[0])
    same(optim.value_grad_and_factors(classify)(model, *batch)[:2], plain(model, *batch))


def test_bayesian_gradients_to_the_bit():
    model, batch = bayesian_mlp(), dense_batch()
    value, grads, factors = capture(bayesian_loss)(model, *batch)
    plain = nnx.jit(nnx.value_and_grad(lambda model, *batch: bayesian_loss(model, *batch)[0]))
    same((value, grads), plain(model, *batch))
    assert factors["weights/layers/0"].inputs.shape == (1, 5, 5)


@nnx.jit
def by_hand(model, x, key):
    """Inputs and output gradients of both layers with sampled labels, every example for itself."""
    hidden = jnp.tanh(model.hidden(x))
    logits = model.out(hidden)
    labels = jax.random.categorical(key, logits)
    g = jax.nn.softmax(logits) - jax.nn.one_hot(labels, CLASSES)
    before = (g @ model.out.kernel[...].T) * (1 - hidden**2)
    a, b = (jnp.pad(rows, ((0, 0), (0, 1)), constant_values=1) for rows in (x, hidden))
    return {"hidden": (a, before), "out": (b, g)}


def test_factors_of_a_network_by_hand():
    """Of rows, every example has its own key, so each is compared with a batch of one."""
    model, (x, labels) = Perceptron(), dense_batch()
    *others, factors = capture(dtype=jnp.float64)(model, x, labels, key=KEY)
    same(tuple(others), PLAIN(model, x, labels))
    for name, (a, g) in by_hand(model, x, KEY).items():
        close(factors[name].inputs[0], a.T @ a / N)
        close(factors[name].outputs[0], g.T @ g / N)
    rows = capture(reading=optim.PerSample(), dtype=jnp.float64)(model, x, labels, key=KEY)[2]
    for n, key in enumerate(jax.random.split(KEY, N)):
        for name, (a, g) in by_hand(model, x[n : n + 1], key).items():
            close(rows[name].inputs[0, n], a)
            close(rows[name].outputs[0, n], g)


def test_empirical_rows_are_the_gradients_of_the_examples(exact):
    """sum_t a g^T is an example's gradient, for every kind of layer."""
    (_, _, factors), _, each, _ = exact
    for name in ("conv", "attention/query", "attention/key", "attention/out", "general", "out"):
        factor, grads = factors[name], each
        for part in name.split("/"):
            grads = grads[part]
        columns = factor.outputs.shape[-1]
        leaves = [grads[leaf][...] for leaf in ("kernel", "bias") if leaf in grads]
        gradients = np.concatenate([np.reshape(leaf, (N, -1, columns)) for leaf in leaves], axis=1)
        close(np.einsum("nta,nto->nao", factor.inputs[0], factor.outputs[0]), gradients)


def test_diagonals_of_a_norm_and_counts_of_a_table(exact):
    (_, _, factors), _, each, batch = exact
    counts = np.bincount(np.asarray(batch[0]).ravel(), minlength=7) / batch[0].size
    close(factors["table"].frequencies[0], counts)
    close(factors["norm"].squares[0, 0], np.mean(np.square(each.norm.scale[...]), axis=0))


def test_curvature_is_computed_where_it_is_wanted():
    """In the pass of the gradients, where the loss is a mean, or in a pass of its own under `when`."""
    model, batch = Perceptron(), dense_batch()
    compute = capture(fisher=EMPIRICAL, dtype=jnp.float64)
    together = compute(model, *batch)[2]
    off, on = (compute(model, *batch, when=jnp.array(when))[2] for when in (False, True))
    jax.tree.map(close, together, on)
    assert float(on["out"].weight) == 1
    assert float(off["out"].weight) == 0
    assert not np.any(off["out"].inputs)


def test_the_key_is_made_of_the_loss():
    model, (x, labels) = Perceptron(), dense_batch()
    compute = capture(dtype=jnp.float64)
    first = compute(model, x, labels)[2]["out"].outputs
    np.testing.assert_array_equal(first, compute(model, x, labels)[2]["out"].outputs)
    assert np.any(first != compute(model, 2 * x, labels)[2]["out"].outputs)


@pytest.mark.parametrize("when", [None, False])
def test_the_model_stays_and_its_statistics_move(when):
    """As by the loss alone, in both kinds of passes."""
    models = []
    for compute in (capture(), PLAIN):
        rngs, (x, labels) = nnx.Rngs(0), dense_batch()
        model = nnx.Sequential(nnx.BatchNorm(4, rngs=rngs), nnx.Linear(4, CLASSES, rngs=rngs))
        before = jax.tree.map(jnp.copy, nnx.state(model, nnx.BatchStat))
        settings = {} if compute is PLAIN else {"when": when}
        compute(model, x.astype(jnp.float32), labels, **settings)
        assert set(vars(model.layers[1])) == set(vars(nnx.Linear(4, CLASSES, rngs=rngs)))
        models.append(model)
    assert type(models[0].layers[1]) is nnx.Linear
    same(*map(nnx.state, models))
    moved = jax.tree.map(lambda a, b: bool(np.any(a != b)), before, nnx.state(model, nnx.BatchStat))
    assert all(jax.tree.leaves(moved))


class Deep(nnx.Module):
    """Layers of one kind, stacked and scanned with rematerialisation."""

    def __init__(self):
        make = nnx.vmap(lambda rngs: nnx.Linear(4, 4, rngs=rngs))
        self.layers = make(nnx.Rngs(0).split(3))

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def apply(x, layer):
            return jnp.tanh(layer(x))

        return apply(x, self.layers)


def test_stacked_layers_under_scan_and_remat():
    """Each layer of the stack has the factors that it has by itself."""
    batch, deep = dense_batch(), Deep()
    (value, _), (got, _, factors) = PLAIN(deep, *batch), capture()(deep, *batch, key=KEY)
    same(got, value)
    factor = factors["layers"]
    assert factor.inputs.shape == (3, 5, 5)
    graph, state = nnx.split(deep.layers)
    each = [nnx.merge(graph, jax.tree.map(lambda leaf, i=i: leaf[i], state)) for i in range(3)]
    loop = nnx.Sequential(*(part for layer in each for part in (layer, jnp.tanh)))
    alone = capture()(loop, *batch, key=KEY)[2]
    for i in range(3):
        one = alone[f"layers/{2 * i}"]
        np.testing.assert_allclose(factor.inputs[i], one.inputs[0], rtol=1e-5)
        np.testing.assert_allclose(factor.outputs[i], one.outputs[0], rtol=1e-4, atol=1e-7)


def test_a_model_that_maps_over_its_batch():
    """jax.vmap inside the model: the statistics of all examples are summed."""

    def mapped(model, x, labels):
        return classify(lambda x: jax.vmap(lambda row: model(row[None])[0])(x), x, labels)

    model, batch = Perceptron(), dense_batch()
    factors = [capture(f, dtype=jnp.float64)(model, *batch, key=KEY)[2] for f in (mapped, classify)]
    jax.tree.map(close, *factors)


class Codes(nnx.Module):
    """A plain layer before a Bayesian network."""

    def __init__(self):
        self.embed = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        self.network = bayesian_mlp()

    def __call__(self, x):
        return self.network(self.embed(x))

    def plain(self):
        return nnx.Sequential(self.embed, self.network.at_means())


def random_linear():
    return mj.Bayesian(
        nnx.Linear(4, CLASSES, rngs=nnx.Rngs(0)), mj.Categorical(), structure=mj.Full
    )


CREATE = [
    random_linear,
    partial(bayesian_mlp, linearised=True, structure=mj.Diagonal),
    partial(bayesian_vit, {"random": nnx.PathContains("encoder")}, scan=True, remat=True),
    partial(bayesian_vit, {"family": mj.posterior.KroneckerEigen}, num_blocks=1),
    Codes,
]


def logits_of(model, x, labels):
    output = model(x)
    return classify(lambda _: output.mean if isinstance(output, mj.Moments) else output, x, labels)


@pytest.mark.usefixtures("ranks_of_a_user")
@pytest.mark.parametrize("create", CREATE)
def test_factors_of_a_bayesian_are_those_of_its_network_at_the_means(create):
    """Also of a network in a module."""
    model, labels = create(), jnp.arange(N) % CLASSES
    bayesian = getattr(model, "network", model)
    x = jax.random.normal(jax.random.key(1), (N, 4), jnp.float32)
    if bayesian.name == "VisionTransformer":
        x = jnp.stack([x, 2 * x, -x, x**2], axis=-1)
    plain = model.plain() if model is not bayesian else model.at_means()
    left, right = (capture(logits_of)(network, x, labels, key=KEY)[2] for network in (model, plain))
    for ours, theirs in zip(left.values(), right.values(), strict=True):
        jax.tree.map(partial(nearly, tolerance=1e-5), ours, theirs)


@pytest.mark.parametrize("reading", [optim.KroneckerExpand(), optim.PerSample()])
def test_factors_from_the_elbo_of_a_bayesian(reading):
    """Its prediction has no covariance in the pass of the factors, which are finite."""
    model, (x, labels) = bayesian_mlp(), dense_batch()
    settings = {"reading": reading, "fisher": EMPIRICAL}
    left = capture(bayesian_loss, **settings)(model, x, labels, when=jnp.array(True))[2]
    right = capture(**settings)(model.at_means(), x, labels)[2]
    for name, factor in right.items():
        jax.tree.map(partial(nearly, tolerance=1e-5), left[f"weights/{name}"], factor)
    sampled = capture(bayesian_loss, reading=reading)(model, x, labels)[2]
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(sampled))


@pytest.mark.parametrize("create", CREATE)
def test_blocks_of_a_bayesian_are_of_its_own_variables(create):
    """Of an abstract model too; every parameter of its layers is in one."""
    model, abstract = create(), nnx.eval_shape(create)
    blocks = optim.find_blocks(abstract)
    assert blocks == optim.find_blocks(model)
    values = flatten(nnx.state(model, nnx.Param))
    for block in blocks:
        assert [values[leaf].shape for leaf in block.leaves] == list(block.shapes)
        parts = block.split(block.matrix(values))
        jax.tree.map(np.testing.assert_array_equal, parts, {k: values[k] for k in block.leaves})
    layers = {leaf for block in blocks for leaf in block.leaves}
    means = {p for p in values if p.endswith(("kernel", "kernel/mean", "bias", "bias/mean"))}
    assert means <= layers


P, Q = jax.nn.softmax(LOGITS), jax.nn.sigmoid(LOGITS)


CLASSIFIED = np.diag(P) - np.outer(P, P)


@pytest.mark.parametrize(
    ("prediction", "exact"),
    [
        (optim.CategoricalPrediction, CLASSIFIED),
        (optim.BernoulliPrediction, np.diag(Q * (1 - Q))),
        (lambda f: optim.NormalPrediction(f, 0.5), 4 * np.eye(3)),
        (lambda f: optim.BayesianCategoricalPrediction(f, jnp.zeros((1, 3, 3))), CLASSIFIED),
    ],
    ids=["categorical", "bernoulli", "normal", "bayesian"],
)
def test_sampled_targets_give_the_fisher_matrix(prediction, exact):
    """E[g g^T] over sampled targets is the Hessian of -log p, within four standard errors."""

    @jax.jit
    def gradients():
        keys = jax.random.split(jax.random.key(0), 4000)
        gradient = jax.grad(lambda f, key: prediction(f).sampled_loss(key))
        return jax.vmap(gradient, (None, 0))(jnp.asarray(LOGITS)[None], keys)[:, 0]

    g = np.asarray(gradients())
    outer = g[:, :, None] * g[:, None, :]
    error = outer.std(axis=0) / len(g) ** 0.5
    assert np.all(np.abs(outer.mean(axis=0) - exact) < 4 * error + 1e-12)
