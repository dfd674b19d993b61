"""Capture: gradients to the bit, and the statistics of a network written out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moment_jax as mj
from tests.optim.networks import (
    CLASSES,
    Everything,
    N,
    Perceptron,
    bayesian_loss,
    bayesian_mlp,
    capture,
    classify,
    dense_batch,
    everything_batch,
)

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
    assert factors["layers/0"].inputs.shape == (1, 5, 5)


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


def test_means_of_bayesian_layers_are_what_plain_layers_have():
    """With certain weights the factors are those of the plain network."""
    bayesian, (x, labels) = bayesian_mlp(posterior=mj.posterior.Point), dense_batch()

    def loss(model, x, labels):
        return classify(lambda x: model(x[:, None, :])[0][:, 0], x, labels)

    x = x.astype(jnp.float32)
    left = capture(loss)(bayesian, x, labels, key=KEY)[2]
    for name, factor in capture()(bayesian.mean_network(), x, labels, key=KEY)[2].items():
        np.testing.assert_allclose(left[name].inputs, factor.inputs, rtol=1e-5)
        np.testing.assert_allclose(left[name].outputs, factor.outputs, rtol=1e-4, atol=1e-7)


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
