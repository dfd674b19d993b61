"""The tasks of the comparison: networks of Flax, losses, images, and target losses."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array

import moment_jax as mj
from experiments import data
from experiments.networks import vision_transformer

Batch = tuple[Array, ...]

WIDTHS = (64, 128, 64, 12, 64, 128, 64)
NUM_EVALUATED = 512
NUM_HEADS = 4
BATCH_SIZE = 64


class OptimizerTask(NamedTuple):
    """One comparison."""

    name: str  # shown in tables
    create: Callable[[int], nnx.Module]  # seed -> an untrained model
    loss: Callable[..., tuple[Array, Any]]  # (model, *batch) -> (loss, prediction)
    arrays: tuple[np.ndarray, ...]  # the training data, with one leading axis of examples
    target: float  # the loss to be reached
    num_steps: int  # updates
    num_second_order_steps: int  # the same of second-order methods

    def batch(self, key: Array, step: Array) -> Batch:
        """The examples of an update: each epoch is a new order of all of them."""
        chosen = data.batch_indices(key, step, self.arrays[0].shape[0], BATCH_SIZE)
        return tuple(jnp.asarray(array)[chosen] for array in self.arrays)

    @property
    def evaluated(self) -> Batch:
        """The examples on which the loss is followed: the first ones of the training data."""
        return tuple(jnp.asarray(array[:NUM_EVALUATED]) for array in self.arrays)


class Autoencoder(nnx.Module):
    """Dense layers with tanh between them, and none of it at the narrow layer and at the end."""

    def __init__(self, seed: int) -> None:
        rngs = nnx.Rngs(seed)
        self.layers = nnx.List(nnx.Linear(a, b, rngs=rngs) for a, b in pairwise(WIDTHS))
        self.linear_after = (WIDTHS.index(min(WIDTHS)) - 1, len(WIDTHS) - 2)

    def __call__(self, x: Array) -> Array:
        """(N, D) -> (N, D)."""
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i not in self.linear_after:
                x = jnp.tanh(x)
        return x


def autoencoder() -> OptimizerTask:
    """Digits through 12 numbers; half the squared error of an image, pixels in [0, 1]."""

    def loss(model: Any, pixels: Array) -> tuple[Array, Any]:
        output = model(pixels)
        losses = jnp.sum((output - pixels) ** 2, axis=-1) / 2
        return losses.mean(), mj.optim.NormalPrediction(output)

    pixels = data.pixels().reshape(-1, WIDTHS[0])
    return OptimizerTask("autoencoder", Autoencoder, loss, (pixels,), 0.25, 2500, 400)


class AttentionBlock(nnx.Module):
    """A block of Flax's own layers, normalised first."""

    def __init__(self, num_features: int, rngs: nnx.Rngs) -> None:
        self.norm1 = nnx.LayerNorm(num_features, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(NUM_HEADS, num_features, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(num_features, rngs=rngs)
        self.hidden = nnx.Linear(num_features, 4 * num_features, rngs=rngs)
        self.output = nnx.Linear(4 * num_features, num_features, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        """(N, T, D) -> (N, T, D)."""
        x = x + self.attention(self.norm1(x))
        return x + self.output(nnx.gelu(self.hidden(self.norm2(x))))


class AttentionNetwork(nnx.Module):
    """Patches of 2 x 2 pixels through two blocks, and their mean to the classes."""

    def __init__(self, seed: int, num_features: int = 32) -> None:
        rngs = nnx.Rngs(seed)
        self.patches = nnx.Conv(1, num_features, (2, 2), strides=2, rngs=rngs)
        tokens = (data.IMAGE_SIZE // 2) ** 2
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (tokens, num_features)))
        self.blocks = nnx.List(AttentionBlock(num_features, rngs) for _ in range(2))
        self.norm = nnx.LayerNorm(num_features, rngs=rngs)
        self.output = nnx.Linear(num_features, data.NUM_CLASSES, rngs=rngs)

    def __call__(self, images: Array) -> Array:
        """(N, size, size) -> (N, classes)."""
        x = self.patches(images[..., None])
        x = x.reshape(x.shape[0], -1, x.shape[-1]) + self.positions[...]
        for block in self.blocks:
            x = block(x)
        return self.output(self.norm(x).mean(axis=1))


class ConvolutionNetwork(nnx.Module):
    """Two convolutions with strides, and a dense layer."""

    def __init__(self, seed: int) -> None:
        rngs = nnx.Rngs(seed)
        self.first = nnx.Conv(1, 8, (3, 3), strides=2, rngs=rngs)
        self.second = nnx.Conv(8, 16, (3, 3), strides=2, rngs=rngs)
        self.output = nnx.Linear(data.IMAGE_SIZE**2, data.NUM_CLASSES, rngs=rngs)

    def __call__(self, images: Array) -> Array:
        """(N, size, size) -> (N, classes)."""
        x = nnx.relu(self.second(nnx.relu(self.first(images[..., None]))))
        return self.output(x.reshape(x.shape[0], -1))


def classification(name: str, create: Callable[[int], nnx.Module]) -> OptimizerTask:
    """Digits by a network; cross-entropy."""

    def loss(model: Any, images: Array, labels: Array) -> tuple[Array, Any]:
        logits = model(images)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), mj.optim.CategoricalPrediction(logits)

    return OptimizerTask(name, create, loss, tuple(data.load().train), 0.02, 300, 200)


SIZES = {"patch_size": 2, "num_blocks": 2, "num_features": 64, "hidden_features": 256}
NETWORKS: dict[str, Callable[[int], nnx.Module]] = {
    "attention": AttentionNetwork,
    "transformer": partial(vision_transformer, **SIZES),
    "convolution": ConvolutionNetwork,
}
TASKS: dict[str, Callable[[], OptimizerTask]] = {
    "autoencoder": autoencoder,
    **{name: partial(classification, name, create) for name, create in NETWORKS.items()},
}
"""Every task by name."""
