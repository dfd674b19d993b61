"""Small networks in float64, their losses, and programs that several tests share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import moment_jax as mj

N, CLASSES = 6, 3
DOUBLE = {"param_dtype": jnp.float64}


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
    prediction = mj.optim.CategoricalPrediction(model(x).mean)
    return -model.elbo(x, labels, dataset_size=100), prediction


def close(left, right, tolerance=1e-10):
    """Within a share of the largest entry."""
    scale = np.max(np.abs(right))
    np.testing.assert_allclose(left, right, rtol=tolerance, atol=tolerance * scale)


@functools.cache
def capture(loss=classify, **settings):
    """`value_grad_and_factors` of a loss, compiled once for all tests with these settings."""
    return nnx.jit(mj.optim.value_grad_and_factors(loss, **settings))


@functools.cache
def compiled(make, blocks):
    """An update, compiled once for all settings that may be arrays: (settings, *arguments)."""

    @jax.jit
    def update(settings, *args, **extra):
        return make(blocks=blocks, **settings).update(*args, **extra)

    return update


def pure(tree):
    """Nested dictionaries of arrays, without Flax's variables."""
    return nnx.as_pure(nnx.state(tree, nnx.Param) if isinstance(tree, nnx.Module) else tree)
