"""Capture: gradients to the bit, and the statistics of a network written out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import moment_jax as mj
from tests.conftest import OLDER_EMITTER
from tests.optim.networks import (
    CLASSES,
    Everything,
    N,
    Perceptron,
    bayesian_loss,
    bayesian_mlp,
    classify,
    dense_batch,
    everything_batch,
    of_double,
)

optim = mj.optim
READINGS = [
    optim.KroneckerExpand(),
    optim.KroneckerReduce(),
    optim.PerSample(),
    optim.PerToken(),
]
KEY = jax.random.key(5)
PLAIN = nnx.jit(nnx.value_and_grad(lambda model, *batch: classify(model, *batch)[0]))


def same(left, right):
    """To the bit; the older emitter rounds a sum by what is fused with it, so there to the last bits."""
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        last_bits = 16 * jnp.finfo(a.dtype).eps if OLDER_EMITTER else 0
        np.testing.assert_allclose(a, b, rtol=last_bits, atol=last_bits)


def close(left, right):
    np.testing.assert_allclose(left, right, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("fisher", [optim.SampledFisher(), optim.SampledFisher(2)], ids=str)
@pytest.mark.parametrize("reading", READINGS[::2], ids=str)
def test_gradients_to_the_bit(reading, fisher):
    model, batch = Everything(), everything_batch()
    compute = optim.value_grad_and_factors(classify, reading=reading, fisher=fisher)
    value, grads, _ = nnx.jit(compute)(model, *batch)
    same((value, grads), PLAIN(model, *batch))


def test_gradients_to_the_bit_without_jit():
    model, batch = Perceptron(), dense_batch()
    value, grads, _ = optim.value_grad_and_factors(classify)(model, *batch)
    plain = nnx.value_and_grad(lambda model, *batch: classify(model, *batch)[0])
    same((value, grads), plain(model, *batch))


def test_bayesian_gradients_to_the_bit():
    model, batch = bayesian_mlp(), dense_batch()
    value, grads, factors = nnx.jit(optim.value_grad_and_factors(bayesian_loss))(model, *batch)
    plain = nnx.jit(nnx.value_and_grad(lambda model, *batch: bayesian_loss(model, *batch)[0]))
    same((value, grads), plain(model, *batch))
    assert factors["layers/0"].inputs.shape == (1, 5, 5)


def by_hand(model, x, key):
    """Inputs and output gradients of both layers with sampled labels, every example for itself."""
    kernel1, bias1 = model.hidden.kernel[...], model.hidden.bias[...]
    kernel2, bias2 = model.out.kernel[...], model.out.bias[...]
    hidden = jnp.tanh(x @ kernel1 + bias1[None, :])
    logits = hidden @ kernel2 + bias2[None, :]
    labels = jax.random.categorical(key, logits)
    g2 = jax.nn.softmax(logits) - jax.nn.one_hot(labels, CLASSES)
    g1 = (g2 @ kernel2.T) * (1 - hidden**2)
    one = jnp.ones((x.shape[0], 1))
    return jnp.concatenate([x, one], 1), g1, jnp.concatenate([hidden, one], 1), g2


def test_kronecker_factors_of_a_network_by_hand():
    model, (x, labels) = of_double(Perceptron()), dense_batch()
    a1, g1, a2, g2 = by_hand(model, x, KEY)
    compute = optim.value_grad_and_factors(classify, dtype=jnp.float64)
    _, _, factors = compute(model, x, labels, key=KEY)
    for name, a, g in (("hidden", a1, g1), ("out", a2, g2)):
        close(factors[name].inputs[0], a.T @ a / N)
        close(factors[name].outputs[0], g.T @ g / N)


def test_rows_of_a_network_by_hand():
    """Every example has its own key, so each is compared with a batch of one."""
    model, (x, labels) = of_double(Perceptron()), dense_batch()
    compute = optim.value_grad_and_factors(classify, reading=optim.PerSample(), dtype=jnp.float64)
    _, _, factors = compute(model, x, labels, key=KEY)
    for n, key in enumerate(jax.random.split(KEY, N)):
        a1, g1, a2, g2 = by_hand(model, x[n : n + 1], key)
        close(factors["hidden"].inputs[0, n], a1)
        close(factors["hidden"].outputs[0, n], g1)
        close(factors["out"].inputs[0, n], a2)
        close(factors["out"].outputs[0, n], g2)


def test_empirical_rows_are_the_gradients():
    """With the targets of the data, sum_t a g^T of an example is its gradient, for any layer."""
    model, batch = Everything(), everything_batch()
    compute = optim.value_grad_and_factors(
        classify, reading=optim.PerSample(), fisher=optim.EmpiricalFisher(), dtype=jnp.float64
    )
    _, grads, factors = nnx.jit(compute)(model, *batch)
    for name, kernel, bias in (
        ("conv", grads.conv.kernel[...], grads.conv.bias[...]),
        ("attention/query", grads.attention.query.kernel[...], grads.attention.query.bias[...]),
        ("attention/out", grads.attention.out.kernel[...], grads.attention.out.bias[...]),
        ("out", grads.out.kernel[...], grads.out.bias[...]),
    ):
        a, g = factors[name].inputs[0], factors[name].outputs[0]
        mean = jnp.einsum("nta,nto->ao", a, g) / N
        columns = g.shape[-1]
        rows = [kernel.reshape(-1, columns), bias.reshape(1, columns)]
        close(mean, jnp.concatenate(rows))


def test_empirical_factors_do_not_depend_on_how_they_are_computed():
    """In the pass of the gradients, where the loss is a mean, and in a pass of their own."""
    model, batch = of_double(Perceptron()), dense_batch()
    fisher = optim.EmpiricalFisher()
    compute = optim.value_grad_and_factors(classify, fisher=fisher, dtype=jnp.float64)
    together = compute(model, *batch)[2]
    apart = compute(model, *batch, when=jnp.array(True))[2]
    jax.tree.map(close, together, apart)


def test_reduced_and_expanded_agree_without_tokens():
    model, batch = of_double(Perceptron()), dense_batch()
    results = [
        optim.value_grad_and_factors(classify, reading=reading)(model, *batch, key=KEY)[2]
        for reading in READINGS[:2]
    ]
    jax.tree.map(close, *results)


def test_diagonals_of_a_norm_and_counts_of_a_table():
    model, batch = Everything(), everything_batch()
    compute = optim.value_grad_and_factors(
        classify, reading=optim.KroneckerReduce(), fisher=optim.EmpiricalFisher(), dtype=jnp.float64
    )
    factors = nnx.jit(compute)(model, *batch)[2]
    counts = np.bincount(np.asarray(batch[0]).ravel(), minlength=7) / batch[0].size
    close(factors["table"].frequencies[0], counts)

    each = [PLAIN(model, s[None], y[None])[1].norm.scale[...] for s, y in zip(*batch, strict=True)]
    each = jnp.stack(each)
    close(factors["norm"].squares[0, 0], jnp.mean(each**2, axis=0))


def test_where_no_curvature_is_wanted():
    model, batch = Perceptron(), dense_batch()
    compute = nnx.jit(optim.value_grad_and_factors(classify))
    off = compute(model, *batch, when=jnp.array(False))[2]
    assert float(off["out"].weight) == 0
    assert not np.any(off["out"].inputs)
    on = compute(model, *batch, when=jnp.array(True))[2]
    assert float(on["out"].weight) == 1


def test_the_key_is_made_of_the_loss():
    model, (x, labels) = Perceptron(), dense_batch()
    compute = optim.value_grad_and_factors(classify)
    first = compute(model, x, labels)[2]["out"].outputs
    np.testing.assert_array_equal(first, compute(model, x, labels)[2]["out"].outputs)
    assert np.any(first != compute(model, 2 * x, labels)[2]["out"].outputs)


def test_the_model_stays_and_its_statistics_move():
    class Normed(nnx.Module):
        def __init__(self):
            self.norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
            self.out = nnx.Linear(4, CLASSES, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.out(self.norm(x))

    x, labels = dense_batch()
    model, batch = Normed(), (x.astype(jnp.float32), labels)
    before = nnx.state(model, nnx.BatchStat)
    before = jax.tree.map(jnp.copy, before)
    nnx.jit(optim.value_grad_and_factors(classify))(model, *batch)
    assert type(model.out) is nnx.Linear
    assert set(vars(model.out)) == set(vars(nnx.Linear(4, CLASSES, rngs=nnx.Rngs(0))))
    after = nnx.state(model, nnx.BatchStat)
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool(np.any(a != b)), before, after)))


class Deep(nnx.Module):
    """Layers of one kind in a loop, or stacked and scanned with rematerialisation."""

    def __init__(self, scanned, count=3):
        self.scanned = scanned
        keys = nnx.Rngs(0).split(count)

        @nnx.vmap
        def create(rngs):
            return nnx.Linear(4, 4, rngs=rngs)

        self.layers = create(keys)
        self.out = nnx.Linear(4, CLASSES, rngs=nnx.Rngs(1))

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def apply(x, layer):
            return jnp.tanh(layer(x))

        if self.scanned:
            return self.out(apply(x, self.layers))
        graph, state = nnx.split(self.layers)
        for i in range(3):
            x = jnp.tanh(nnx.merge(graph, jax.tree.map(lambda leaf, i=i: leaf[i], state))(x))
        return self.out(x)


def test_stacked_layers_under_scan_and_remat():
    """Each layer of the stack has the factors that it has by itself."""
    batch = dense_batch()
    scanned = optim.value_grad_and_factors(classify)(Deep(True), *batch, key=KEY)
    plain = nnx.value_and_grad(lambda model, *batch: classify(model, *batch)[0])
    same(scanned[0], plain(Deep(True), *batch)[0])
    factor = scanned[2]["layers"]
    assert factor.inputs.shape == (3, 5, 5)
    model = Deep(False)

    class Loop(nnx.Module):
        def __init__(self):
            graph, state = nnx.split(model.layers)
            self.layers = nnx.List(
                nnx.merge(graph, jax.tree.map(lambda leaf, i=i: leaf[i], state)) for i in range(3)
            )
            self.out = model.out

        def __call__(self, x):
            for layer in self.layers:
                x = jnp.tanh(layer(x))
            return self.out(x)

    alone = optim.value_grad_and_factors(classify)(Loop(), *batch, key=KEY)[2]
    for i in range(3):
        np.testing.assert_allclose(factor.inputs[i], alone[f"layers/{i}"].inputs[0], rtol=1e-5)
        np.testing.assert_allclose(
            factor.outputs[i], alone[f"layers/{i}"].outputs[0], rtol=1e-4, atol=1e-7
        )


def test_a_model_that_maps_over_its_batch():
    """jax.vmap inside the model: the statistics of all examples are summed."""

    def mapped(model, x, labels):
        logits = jax.vmap(lambda row: model(row[None])[0])(x)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), optim.CategoricalPrediction(logits)

    model, batch = of_double(Perceptron()), dense_batch()
    compute = [optim.value_grad_and_factors(f, dtype=jnp.float64) for f in (mapped, classify)]
    jax.tree.map(close, *(c(model, *batch, key=KEY)[2] for c in compute))


def test_means_of_bayesian_layers_are_what_plain_layers_have():
    """With certain weights the factors are those of the plain network."""
    bayesian = bayesian_mlp(posterior=mj.posterior.Point)
    plain, (x, labels) = bayesian.mean_network(), dense_batch()

    def loss(model, x, labels):
        mean, _ = model(x[:, None, :])
        return jnp.mean(mean), optim.CategoricalPrediction(mean[:, 0])

    def plain_loss(model, x, labels):
        return jnp.mean(model(x)), optim.CategoricalPrediction(model(x))

    x = x.astype(jnp.float32)
    left = nnx.jit(optim.value_grad_and_factors(loss))(bayesian, x, labels, key=KEY)[2]
    right = nnx.jit(optim.value_grad_and_factors(plain_loss))(plain, x, labels, key=KEY)[2]
    for name, factor in right.items():
        np.testing.assert_allclose(left[name].inputs, factor.inputs, rtol=1e-5)
        np.testing.assert_allclose(left[name].outputs, factor.outputs, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    "prediction",
    [
        lambda f: optim.CategoricalPrediction(f),
        lambda f: optim.BernoulliPrediction(f),
        lambda f: optim.NormalPrediction(f, 0.5),
        lambda f: optim.BayesianCategoricalPrediction(f, jnp.zeros((*f.shape, f.shape[-1]))),
    ],
    ids=["categorical", "bernoulli", "normal", "bayesian"],
)
def test_sampled_targets_give_the_fisher_matrix(prediction):
    """E[g g^T] over sampled targets is the Hessian of -log p, within four standard errors."""
    logits = jnp.array([[0.5, -1.0, 0.2]])
    keys = jax.random.split(jax.random.key(0), 4000)
    gradient = jax.vmap(jax.grad(lambda f, key: prediction(f).sampled_loss(key)), (None, 0))
    g = gradient(logits, keys)[:, 0]
    outer = g[:, :, None] * g[:, None, :]
    p = jax.nn.softmax(logits[0])
    q = jax.nn.sigmoid(logits[0])
    exact = {
        "Categ": jnp.diag(p) - jnp.outer(p, p),
        "Berno": jnp.diag(q * (1 - q)),
        "Norma": 4 * jnp.eye(3),
    }
    kind = type(prediction(logits)).__name__.removeprefix("Bayesian")[:5]
    error = outer.std(axis=0) / len(keys) ** 0.5
    assert np.all(np.abs(outer.mean(axis=0) - exact[kind]) < 4 * error + 1e-12)
