"""Small networks in float64, their losses, and programs that several tests share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import moment_jax as mj

N, SYMBOLS, TOKENS, FEATURES, CLASSES = 6, 7, 5, 8, 3
DOUBLE = {"param_dtype": jnp.float64}


def exact_attention(query, key, value, **options):
    """Softmax attention in the precision of its arguments; JAX's own takes the softmax in float32."""
    del options
    scores = jnp.einsum("nqhk,nshk->nhqs", query, key) / query.shape[-1] ** 0.5
    return jnp.einsum("nhqs,nshk->nqhk", jax.nn.softmax(scores), value)


class Everything(nnx.Module):
    """One layer of every kind that is observed."""

    def __init__(self):
        options = {"rngs": nnx.Rngs(0), **DOUBLE}
        self.table = nnx.Embed(SYMBOLS, FEATURES, **options)
        self.conv = nnx.Conv(FEATURES, FEATURES, (3,), strides=(1,), **options)
        self.norm = nnx.LayerNorm(FEATURES, **options)
        self.attention = nnx.MultiHeadAttention(
            2, FEATURES, decode=False, attention_fn=exact_attention, **options
        )
        self.general = nnx.LinearGeneral((FEATURES,), (2, 4), use_bias=False, **options)
        self.out = nnx.Linear(FEATURES, CLASSES, **options)

    def __call__(self, symbols):
        x = self.table(symbols)
        x = x + self.conv(x)
        x = x + self.attention(self.norm(x))
        x = jnp.tanh(self.general(x)).reshape(x.shape)
        return self.out(x.mean(axis=1))


def everything_batch():
    symbols = jax.random.randint(jax.random.key(0), (N, TOKENS), 0, SYMBOLS)
    return symbols, jnp.arange(N) % CLASSES


class Perceptron(nnx.Module):
    """Two dense layers."""

    def __init__(self, sizes=(4, 5, CLASSES)):
        rngs = nnx.Rngs(0)
        self.hidden = nnx.Linear(sizes[0], sizes[1], rngs=rngs, **DOUBLE)
        self.out = nnx.Linear(sizes[1], sizes[2], rngs=rngs, **DOUBLE)

    def __call__(self, x):
        return self.out(jnp.tanh(self.hidden(x)))


def dense_batch(n=N, size=4):
    return jax.random.normal(jax.random.key(1), (n, size)), jnp.arange(n) % CLASSES


def classify(model, x, labels):
    """Cross-entropy and the prediction."""
    logits = model(x)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean(), mj.optim.CategoricalPrediction(logits)


def bayesian_mlp(**options):
    network = mj.nn.MLP([4, 5, CLASSES], rngs=nnx.Rngs(0))
    return mj.Bayesian(network, mj.Categorical(), **{"learn_prior": True, **options})


def bayesian_vit(options=None, **sizes):
    sizes = {"image_size": 4, "patch_size": 2, "num_features": 8, "num_heads": 2, **sizes}
    network = mj.nn.VisionTransformer(**sizes, num_classes=CLASSES, rngs=nnx.Rngs(0))
    return mj.Bayesian(network, mj.Categorical(), **options or {})


def bayesian_loss(model, x, labels):
    """Minus the ELBO for each example, and the prediction."""
    moments = model(x)
    prediction = mj.optim.BayesianCategoricalPrediction(moments.mean, moments.features)
    return -model.elbo(x, labels, dataset_size=100), prediction


def close(left, right, tolerance=1e-10):
    """Within a share of the largest entry."""
    scale = np.max(np.abs(right))
    np.testing.assert_allclose(left, right, rtol=tolerance, atol=tolerance * scale)


def inside(state):
    """The `SecondOrderState` in the chain of `kfac` or `cg_fac`."""
    return state.chain[0]


@functools.cache
def capture(loss=classify, **settings):
    """`value_grad_and_factors` of a loss, compiled once for all tests with these settings."""
    return nnx.jit(mj.optim.value_grad_and_factors(loss, **settings))


@functools.cache
def compiled(make, *args, **settings):
    """An optimiser and its compiled update, one for all tests with these settings."""
    tx = make(*args, **settings)
    return tx, jax.jit(tx.update)


def pure(tree):
    """Nested dictionaries of arrays, without Flax's variables."""
    return nnx.as_pure(nnx.state(tree, nnx.Param) if isinstance(tree, nnx.Module) else tree)


def losses_of(model, compute, batch, tx, update, steps, due=False):
    """The loss before each of `steps` steps; with `due`, curvature and loss as for the defaults."""
    params = pure(model)
    state, values = tx.init(params), []
    for _ in range(steps):
        nnx.update(model, params)
        when = {"when": mj.optim.curvature_due(state)} if due else {}
        value, grads, factors = compute(model, *batch, **when)
        told = {"value": value} if due else {}
        updates, state = update(pure(grads), state, params, factors=factors, **told)
        params = optax.apply_updates(params, updates)
        values.append(float(value))
    return values
