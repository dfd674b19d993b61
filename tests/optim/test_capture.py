"""Capture: what layers report, factors of a network written out by hand, and Bayesian networks."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import moment_jax as mj
from moment_jax.optim import taps
from moment_jax.optim.blocks import flatten, groups_of, stack, unstack
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
    pure,
)

optim = mj.optim
KEY = jax.random.key(5)
REPORTED = taps.reported
LOGITS = np.array([0.5, -1.0, 0.2])
OPTIONS = {"rngs": nnx.Rngs(0), **DOUBLE}
SEQUENCE, IMAGE = jax.random.normal(KEY, (2, 5, 4)), jax.random.normal(KEY, (2, 6, 5, 3))
SYMBOLS = jnp.array([[0, 3, 3], [1, 0, 3]])


class Positions(nnx.Module):
    """One for each token, of (N, T, D)."""

    def __init__(self):
        self.table = nnx.Param(jnp.ones((5, 4)))

    def __call__(self, x):
        return x + self.table[...]


LAYERS = {
    "positions": (Positions(), SEQUENCE),
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
    "padded": (nnx.Conv(3, 2, (2, 2), padding=((1, 0), (0, 1)), **OPTIONS), IMAGE),
    "batch_of_layers": (nnx.Einsum("htd,hdk->htk", (2, 4, 3), (2, 1, 3), **OPTIONS), SEQUENCE),
    "transposed": (nnx.Einsum("btd,khd->bhtk", (3, 2, 4), None, **OPTIONS), SEQUENCE),
}


@pytest.mark.usefixtures("ranks_of_a_user")
@pytest.mark.parametrize(("layer", "x"), LAYERS.values(), ids=LAYERS)
def test_rows_of_a_layer_make_its_gradient(layer, x, monkeypatch):
    """sum_t a g^T is the gradient, for each layer or part; the report sums squares over rows."""
    weights, given = jax.random.normal(KEY, jax.eval_shape(layer, x).shape), {}

    def loss(layer):
        return jnp.sum(weights * layer(x))

    def reported(block, like, a, g):
        given[block.name] = block, a, g, REPORTED(block, like, a, g)
        return given[block.name][-1]

    monkeypatch.setattr(taps, "reported", reported)
    grads, layers = flatten(nnx.grad(loss)(layer)), taps.Layers(loss, layer, nnx.Param)
    dummies = {
        block.name: block.no_factor(jnp.dtype("float64"), *block.lead, counts=block.stack)
        for block in layers.blocks
    }
    jax.grad(layers, argnums=1)({}, dummies)
    leaves = [leaf for block in layers.blocks for leaf in block.leaves]
    assert sorted(leaves) == sorted(grads)
    groups = groups_of(grads, layers.blocks)
    back = unstack(groups, stack(groups, grads), grads)
    jax.tree.map(np.testing.assert_array_equal, back, grads)
    assert len(given) == (2 if isinstance(layer, nnx.LayerNorm) and layer.use_scale else 1)
    for block, a, g, factor in given.values():
        expected = block.matrix(grads)
        np.testing.assert_array_equal(factor.weight, g.shape[1])
        if block.factor is optim.DiagonalFactor:
            close(factor.squares, jnp.sum(g**2, axis=1))
            close(jnp.sum(g, axis=1), expected[0])
            continue
        if block.factor is optim.EmbeddingFactor:
            symbols = np.ravel(x) if x is SYMBOLS else np.tile(np.arange(5), 2)
            np.testing.assert_array_equal(factor.frequencies, np.bincount(symbols, minlength=5))
            a = jax.nn.one_hot(a[..., 0], 5)
        if len(block.leaves) == 2:
            a = jnp.pad(a, ((0, 0), (0, 0), (0, 1)), constant_values=1)
        assert block.parts == {331: (5, 1), 330: (1, 5)}.get(max(block.rows, block.columns), (1, 1))
        a, g = (
            jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % n))).reshape(*x.shape[:2], n, -1)
            for x, n in zip((a, g), block.parts, strict=True)
        )
        close(jnp.einsum("brpi,brqj->bpqij", a, g).reshape(expected.shape), expected)
        for sums, rows in zip((factor[-2], factor[0]), (g, a), strict=True):
            if rows is g or block.factor is optim.KroneckerFactor:
                grams = jnp.einsum("brpi,brpj->bpij", rows, rows)
                grams = jnp.repeat(grams, np.prod(block.parts) // grams.shape[1], 1)
                close(sums, grams.reshape(sums.shape))


class Network(nnx.Module):
    """Layers of all kinds."""

    def __init__(self):
        self.embed = nnx.Embed(7, 6, **OPTIONS)
        self.conv = nnx.Conv(6, 6, (3,), strides=2, **OPTIONS)
        self.norm = nnx.LayerNorm(6, **OPTIONS)
        self.heads = nnx.LinearGeneral(6, (2, 3), **OPTIONS)
        self.out = nnx.LinearGeneral((2, 3), CLASSES, axis=(-2, -1), **OPTIONS)

    def __call__(self, ids):
        x = self.norm(self.conv(self.embed(ids)))
        return self.out(jnp.tanh(self.heads(x)).mean(axis=1))


class LinenNetwork(linen.Module):
    """The same in linen."""

    @linen.compact
    def __call__(self, ids):
        x = linen.Embed(7, 6, name="embed", **DOUBLE)(ids)
        x = linen.LayerNorm(name="norm", **DOUBLE)(linen.Conv(6, (3,), 2, name="conv", **DOUBLE)(x))
        x = jnp.tanh(linen.DenseGeneral((2, 3), name="heads", **DOUBLE)(x)).mean(axis=1)
        return linen.DenseGeneral(CLASSES, axis=(-2, -1), name="out", **DOUBLE)(x)


def written(params, ids):
    """The same without a module, of parameters that are cast and reshaped, under jit and remat."""
    x = params["embed"]["embedding"][ids].swapaxes(1, 2)
    kernel, gain = params["conv"]["kernel"].transpose(2, 1, 0), params["norm"]["scale"]
    x = jax.lax.conv_general_dilated(x, kernel, (2,), "SAME").swapaxes(1, 2)
    x = x + params["conv"]["bias"]
    x = x - x.mean(axis=-1, keepdims=True)
    x = gain * (x / jnp.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6)) + params["norm"]["bias"]

    @jax.checkpoint
    def heads(kernel, bias, x):
        return jnp.tanh(jnp.einsum("dhk,btd->bthk", kernel.astype(float), x) + bias)

    x = jax.jit(heads)(params["heads"]["kernel"], params["heads"]["bias"], x).mean(axis=1)
    return x.reshape(-1, 6) @ params["out"]["kernel"].reshape(6, -1) + params["out"]["bias"]


def of_linen(params):
    """The same in linen as a module of NNX."""
    model = nnx.bridge.ToNNX(LinenNetwork(), rngs=nnx.Rngs(0)).lazy_init(jnp.zeros((1, 5), int))
    nnx.update(model, jax.tree.map(nnx.Param, params))
    return model


FORMS = {
    "linen": (lambda params: params, lambda p, x: LinenNetwork().apply({"params": p}, x)),
    "linen_in_nnx": (of_linen, lambda model, x: model(x)),
    "written": (lambda params: params, written),
}


@pytest.mark.usefixtures("ranks_of_a_user")
@pytest.mark.parametrize(("create", "call"), FORMS.values(), ids=FORMS)
def test_a_network_is_what_it_computes(create, call):
    """Factors and a step are those of the same network of NNX layers, whatever it is written in."""
    ids = jax.random.randint(KEY, (N, 5), 0, 7)
    batch, network = (ids, jnp.arange(N) % CLASSES), Network()
    params = nnx.to_pure_dict(nnx.state(network, nnx.Param))

    def stepped(loss, model):
        tx = optim.for_model(loss, model, *batch)
        params = pure(model)
        compute = jax.jit(lambda m: optim.value_grad_and_factors(loss)(m, *batch, key=KEY))
        if isinstance(model, nnx.Module):
            compute = nnx.jit(lambda m: optim.value_grad_and_factors(loss)(m, *batch, key=KEY))
        value, grads, factors = compute(model)
        steps, _ = tx.update(pure(grads), tx.init(params), params, factors=factors, value=value)
        return factors, flatten(optax.apply_updates(params, steps))

    def loss(model, x, labels):
        return classify(partial(call, model), x, labels)

    (theirs, expected), (ours, after) = stepped(classify, network), stepped(loss, create(params))
    assert len(theirs) == 6
    for name, factor in theirs.items():
        for x, y in zip(ours[name], factor, strict=True):
            close(x, y, 1e-5)
    for path, x in after.items():
        close(x, expected[path], 1e-5)


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
    return {"hidden/kernel": (a, before), "out/kernel": (b, g)}, plain(model)


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
    first = compute(model, x, labels)[2]["out/kernel"].outputs  # by a key that is made of the loss
    np.testing.assert_array_equal(first, compute(model, x, labels)[2]["out/kernel"].outputs)
    assert np.any(first != compute(model, 2 * x, labels)[2]["out/kernel"].outputs)


def test_tables_are_divided_by_the_root_of_the_number_of_tokens():
    ids = jnp.arange(5 * N).reshape(N, 5) % 7
    table = capture()(Network(), ids, jnp.arange(N) % CLASSES)[2]["embed/embedding"]
    np.testing.assert_allclose(jnp.sum(table.frequencies), 5**-0.5)


def test_a_model_that_maps_over_its_batch_and_calls_a_layer_twice():
    """jax.vmap inside the model: the statistics of all examples and of both calls are summed."""

    def mapped(model, x, labels):
        def call(row):
            return model(row[None])[0] + model(2 * row[None])[0]

        return classify(lambda x: jax.vmap(call)(x), x, labels)

    x, labels = dense_batch()
    factor = capture(mapped)(Perceptron(), x, labels)[2]["hidden/kernel"]
    close(factor.inputs[0, :4, :4], (x.T @ x) * 5 / (2 * N), 1e-5)


def test_the_model_stays_and_its_statistics_move():
    rngs, (x, labels) = nnx.Rngs(0), dense_batch()
    model = nnx.Sequential(nnx.BatchNorm(4, rngs=rngs), nnx.Linear(4, CLASSES, rngs=rngs))
    capture()(model, x.astype(jnp.float32), labels)
    assert type(model.layers[1]) is nnx.Linear
    assert set(vars(model.layers[1])) == set(vars(nnx.Linear(4, CLASSES, rngs=rngs)))
    close(model.layers[0].mean[...], 0.01 * x.mean(axis=0), 1e-5)  # by one step, not by two


def test_layers_are_those_of_any_batch():
    model = nnx.Sequential(nnx.LayerNorm(4, **OPTIONS), nnx.Linear(4, CLASSES, **OPTIONS))
    one, more = (optim.find_blocks(classify, model, *dense_batch(n)) for n in (1, N))
    assert one == more
    assert len(one) == 3


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
    factor = capture()(deep, *batch, key=KEY)[2]["layers/kernel"]
    assert factor.inputs.shape == (3, 5, 5)
    graph, state = nnx.split(deep.layers)
    each = [nnx.merge(graph, jax.tree.map(lambda leaf, i=i: leaf[i], state)) for i in range(3)]
    loop = nnx.Sequential(*(part for layer in each for part in (layer, jnp.tanh)))
    alone = capture()(loop, *batch, key=KEY)[2]
    for i in range(3):
        one = alone[f"layers/{2 * i}/kernel"]
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
        jax.tree.map(partial(close, tolerance=1e-5), factors[f"weights/{name}/mean"], factor)


@pytest.mark.usefixtures("ranks_of_a_user")
@pytest.mark.parametrize(
    ("create", "shape"),
    [(create, (N, 4, 4)[: 2 + (name == "partly")]) for name, create in CREATE.items()],
)
def test_blocks_of_a_bayesian_are_of_its_own_variables(create, shape):
    """Of an abstract model too; every parameter of its layers is in one."""
    model, abstract, labels = create(), nnx.eval_shape(create), jnp.arange(N) % CLASSES
    blocks = optim.find_blocks(logits_of, abstract, jax.ShapeDtypeStruct(shape, "float32"), labels)
    assert blocks == optim.find_blocks(logits_of, model, jnp.zeros(shape, "float32"), labels)
    values = flatten(nnx.state(model, nnx.Param))
    for block in blocks:
        shapes = [steps[0][0] for steps in block.steps]
        assert [values[leaf].shape for leaf in block.leaves] == shapes
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


@pytest.mark.slow
def test_a_model_of_hugging_face_has_a_layer_for_each_kernel():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=20, num_hidden_layers=1, **sizes)
    net = transformers.FlaxBertForSequenceClassification(config)

    def loss(params, ids):
        logits = net(ids, params=params).logits
        return jnp.mean(logits), optim.CategoricalPrediction(logits)

    blocks = optim.find_blocks(loss, net.params, jnp.ones((4, 6), int))
    assert sum(block.name.endswith("kernel") for block in blocks) == 8
    assert {leaf for block in blocks for leaf in block.leaves} == set(flatten(net.params))
