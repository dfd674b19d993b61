"""Capture: what layers report, factors of a network written out by hand, and Bayesian networks."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moment_jax as mj
from moment_jax.optim import capture as capturing
from moment_jax.optim.blocks import ARRANGE, flatten
from tests.optim.networks import (
    CLASSES,
    DOUBLE,
    N,
    Perceptron,
    bayesian_loss,
    bayesian_mlp,
    bayesian_vit,
    capture,
    classify,
    close,
    dense_batch,
)

optim = mj.optim
KEY = jax.random.key(5)
LOGITS = np.array([0.5, -1.0, 0.2])
OPTIONS = {"rngs": nnx.Rngs(0), **DOUBLE}
SEQUENCE, IMAGE = jax.random.normal(KEY, (2, 5, 4)), jax.random.normal(KEY, (2, 6, 5, 3))
SYMBOLS = jnp.array([[0, 3, 3], [1, 0, 3]])
LAYERS = {
    "linear": (nnx.Linear(4, 3, **OPTIONS), SEQUENCE),
    "linear_of_a_vector": (nnx.Linear(4, 3, use_bias=False, **OPTIONS), SEQUENCE[0, 0]),
    "tall": (nnx.Linear(330, 2, **OPTIONS), jax.random.normal(KEY, (2, 5, 330))),
    "wide": (nnx.Linear(4, 330, **OPTIONS), SEQUENCE),
    "heads": (nnx.LinearGeneral(4, (2, 3), **OPTIONS), SEQUENCE),
    "from_heads": (nnx.LinearGeneral((5, 4), 3, axis=(-2, -1), **OPTIONS), SEQUENCE),
    "embed": (nnx.Embed(5, 3, **OPTIONS), SYMBOLS),
    "layer_norm": (nnx.LayerNorm(4, **OPTIONS), 3 * SEQUENCE + 1),
    "biases_alone": (nnx.LayerNorm(4, use_scale=False, **OPTIONS), SEQUENCE),
    "rms_norm": (nnx.RMSNorm(4, **OPTIONS), SEQUENCE),
    "conv": (nnx.Conv(3, 2, (3, 2), strides=(2, 1), **OPTIONS), IMAGE),
    "dilated": (nnx.Conv(3, 2, (2, 2), kernel_dilation=2, padding="VALID", **OPTIONS), IMAGE),
    "one_image": (nnx.Conv(3, 2, (2, 2), padding=((1, 0), (0, 1)), **OPTIONS), IMAGE[0]),
}


@pytest.mark.usefixtures("ranks_of_a_user")
@pytest.mark.parametrize(("layer", "x"), LAYERS.values(), ids=LAYERS)
def test_rows_of_a_layer_make_its_gradient(layer, x):
    """sum_t a g^T is the gradient, for each layer or part; the report sums squares over rows."""
    (block,), called = optim.find_blocks(layer), set()
    weights = jax.random.normal(KEY, jax.eval_shape(layer, x).shape)
    grads = nnx.grad(lambda layer: jnp.sum(weights * layer(x)))(layer)
    expected = block.matrix(flatten(grads))
    jax.tree.map(np.testing.assert_array_equal, block.split(expected), flatten(grads))
    a, g = ARRANGE[type(layer)](layer, x, weights)
    factor = capturing._report(block, jnp.dtype("float64"), called, a, g)
    assert called == {block.name}
    assert factor.weight == a.shape[0] * a.shape[1]
    a, g = a.reshape(factor.weight.astype(int), -1), g.reshape(factor.weight.astype(int), -1)
    if block.factor is optim.EmbeddingFactor:
        np.testing.assert_array_equal(factor.frequencies, np.bincount(np.ravel(x), minlength=5))
        a = jax.nn.one_hot(a[:, 0], 5)
    if block.factor is optim.DiagonalFactor:
        rows = {"scale": a * g, "bias": g}
        rows = jnp.stack([rows[leaf.rpartition("/")[2]] for leaf in block.leaves])
        close(factor.squares, jnp.sum(rows**2, axis=1))
        close(jnp.sum(rows, axis=1), expected[0])
        return
    if len(block.leaves) == 2:
        a = jnp.pad(a, ((0, 0), (0, 1)), constant_values=1)
    assert block.parts == {331: (5, 1), 330: (1, 5)}.get(max(block.rows, block.columns), (1, 1))
    a, g = (
        jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % parts))).reshape(len(rows), parts, -1)
        for rows, parts in zip((a, g), block.parts, strict=True)
    )
    close(jnp.einsum("npi,nqj->pqij", a, g).reshape(expected.shape), expected)
    for sums, rows in zip((factor[-2], factor[0]), (g, a), strict=True):
        if rows is g or block.factor is optim.KroneckerFactor:
            grams = jnp.einsum("npi,npj->pij", rows, rows)
            close(sums, jnp.squeeze(jnp.repeat(grams, block.count // len(grams), 0)))


@nnx.jit
def by_hand(model, x, key):
    """Inputs and output gradients of both layers with sampled labels, every example for itself."""
    hidden = jnp.tanh(model.hidden(x))
    logits = model.out(hidden)
    labels = jax.random.categorical(key, logits)
    g = jax.nn.softmax(logits) - jax.nn.one_hot(labels, CLASSES)
    before = (g @ model.out.kernel[...].T) * (1 - hidden**2)
    a, b = (jnp.pad(rows, ((0, 0), (0, 1)), constant_values=1) for rows in (x, hidden))
    plain = nnx.value_and_grad(
        lambda model: jnp.mean(classify(model, x, jnp.arange(N) % CLASSES)[0])
    )
    return {"hidden": (a, before), "out": (b, g)}, plain(model)


def test_factors_of_a_network_by_hand():
    """And gradients to the bit, with `when` and without."""
    model, (x, labels) = Perceptron(), dense_batch()
    compute = capture(dtype=jnp.float64)
    value, grads, factors = compute(model, x, labels, key=KEY)
    rows, plain = by_hand(model, x, KEY)
    jax.tree.map(np.testing.assert_array_equal, (value, grads), plain)
    for name, (a, g) in rows.items():
        close(factors[name].inputs[0], a.T @ a / N)
        close(factors[name].outputs[0], g.T @ g / N)
    off, on = (compute(model, x, labels, key=KEY, when=jnp.array(w))[2] for w in (False, True))
    jax.tree.map(close, on, factors)
    assert jax.tree.structure(on) == jax.tree.structure(off)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(off))
    first = compute(model, x, labels)[2]["out"].outputs  # by a key that is made of the loss
    np.testing.assert_array_equal(first, compute(model, x, labels)[2]["out"].outputs)
    assert np.any(first != compute(model, 2 * x, labels)[2]["out"].outputs)


def test_a_model_that_maps_over_its_batch_and_calls_a_layer_twice():
    """jax.vmap inside the model: the statistics of all examples and of both calls are summed."""

    def mapped(model, x, labels):
        def call(row):
            return model(row[None])[0] + model(2 * row[None])[0]

        return classify(lambda x: jax.vmap(call)(x), x, labels)

    x, labels = dense_batch()
    factor = capture(mapped)(Perceptron(), x, labels)[2]["hidden"]
    close(factor.inputs[0, :4, :4], (x.T @ x) * 5 / (2 * N), 1e-5)


def test_the_model_stays_and_its_statistics_move():
    rngs, (x, labels) = nnx.Rngs(0), dense_batch()
    model = nnx.Sequential(nnx.BatchNorm(4, rngs=rngs), nnx.Linear(4, CLASSES, rngs=rngs))
    capture()(model, x.astype(jnp.float32), labels)
    assert type(model.layers[1]) is nnx.Linear
    assert set(vars(model.layers[1])) == set(vars(nnx.Linear(4, CLASSES, rngs=rngs)))
    close(model.layers[0].mean[...], 0.01 * x.mean(axis=0), 1e-5)  # by one step, not by two


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
    factor = capture()(deep, *batch, key=KEY)[2]["layers"]
    assert factor.inputs.shape == (3, 5, 5)
    graph, state = nnx.split(deep.layers)
    each = [nnx.merge(graph, jax.tree.map(lambda leaf, i=i: leaf[i], state)) for i in range(3)]
    loop = nnx.Sequential(*(part for layer in each for part in (layer, jnp.tanh)))
    alone = capture()(loop, *batch, key=KEY)[2]
    for i in range(3):
        one = alone[f"layers/{2 * i}"]
        np.testing.assert_allclose(factor.inputs[i], one.inputs[0], rtol=1e-5)
        np.testing.assert_allclose(factor.outputs[i], one.outputs[0], rtol=1e-4, atol=1e-7)


class Codes(nnx.Module):
    """A plain layer before a Bayesian network."""

    def __init__(self):
        self.embed = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        self.network = bayesian_mlp(family=mj.posterior.KroneckerEigen, structure=mj.Diagonal)

    def __call__(self, x):
        return self.network(self.embed(x))

    def plain(self):
        return nnx.Sequential(self.embed, self.network.at_means())


CREATE = {
    "in_a_module": Codes,
    "partly": partial(
        bayesian_vit, {"random": nnx.PathContains("encoder")}, scan=True, remat=True, num_blocks=2
    ),
}


def factors_of(loss, model, *batch):
    """The compiler leaves out value and gradients."""
    compute = optim.value_grad_and_factors(loss)
    return nnx.jit(lambda model, *batch: compute(model, *batch, key=KEY)[2])(model, *batch)


def logits_of(model, x, labels):
    output = model(x)
    return classify(lambda _: output.mean if isinstance(output, mj.Moments) else output, x, labels)


@pytest.mark.usefixtures("ranks_of_a_user")
def test_factors_of_a_bayesian_are_those_of_its_network_at_the_means():
    model, labels = Codes(), jnp.arange(N) % CLASSES
    x = jax.random.normal(jax.random.key(1), (N, 4), jnp.float32)
    left, right = (factors_of(logits_of, each, x, labels) for each in (model, model.plain()))
    for ours, theirs in zip(left.values(), right.values(), strict=True):
        jax.tree.map(partial(close, tolerance=1e-5), ours, theirs)


def test_factors_from_the_elbo_of_a_bayesian():
    """Its prediction has no covariance in the pass of the factors, which are finite."""
    model, (x, labels) = bayesian_mlp(structure=mj.Diagonal), dense_batch()
    factors = factors_of(bayesian_loss, model, x, labels)
    plain = factors_of(classify, model.at_means(), x, labels)
    for name, factor in plain.items():
        jax.tree.map(partial(close, tolerance=1e-5), factors[f"weights/{name}"], factor)


@pytest.mark.parametrize("create", [*CREATE.values(), bayesian_mlp])
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


@pytest.mark.parametrize(
    ("prediction", "exact"),
    [
        (optim.CategoricalPrediction, np.diag(P) - np.outer(P, P)),
        (lambda f: optim.CategoricalPrediction(jnp.stack([0 * f, f], axis=-1)), np.diag(Q - Q**2)),
        (lambda f: optim.NormalPrediction(f, 0.5), 4 * np.eye(3)),
    ],
    ids=["categorical", "bernoulli", "normal"],
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
