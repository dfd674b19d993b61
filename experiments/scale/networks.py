"""Networks whose training is compiled (ViT-B/16, and 1.3 billion weights), and their train steps.

Tokens of images or words, a pre-norm encoder, the mean over the tokens, a linear head. The blocks are
kept as they are used: one module whose arrays have a leading axis of blocks, over which the pass scans.
So one block is compiled, and the optimiser updates one array in place of one for each block.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array

import moment_jax as mj
from experiments.scale.layout import Layout

DATASET_SIZE = 1_281_167  # ImageNet's; it only weighs the KL
LEARNING_RATE = 1e-3
PLAIN = "plain"


@dataclasses.dataclass(frozen=True)
class Size:
    """A network, and the batch that it is trained with."""

    num_blocks: int  # L
    num_features: int  # D
    num_heads: int  # H
    hidden_features: int  # F, of the feed-forward layers
    num_tokens: int  # T, a square for images
    num_classes: int  # C
    per_row: int  # examples of a batch for each row of devices (the axis `data`)
    chunks: int = 1  # parts of the batch that go through a block in turn, to bound memory
    remat: bool = True  # recompute every block in the backward pass
    patch: int = 0  # height and width of a patch of an image of three channels; 0 for words
    vocabulary: int = 0  # number of words; 0 for images

    def batch(self, rows: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """Shapes of the inputs and labels for this many rows of devices."""
        count = self.per_row * rows
        labels = jax.ShapeDtypeStruct((count,), jnp.int32)
        if self.vocabulary:
            return jax.ShapeDtypeStruct((count, self.num_tokens), jnp.int32), labels
        side = self.patch * round(self.num_tokens**0.5)
        return jax.ShapeDtypeStruct((count, side, side, 3), jnp.float32), labels


SIZES = {
    # A part of a batch has two examples for each row, so that no activation has the shape of a weight.
    # T is 196: the mean over the tokens takes the place of a token for the class.
    "vit-b16": Size(12, 768, 12, 3072, 196, 1000, per_row=32, chunks=16, patch=16),
    "1.3b": Size(24, 2048, 16, 8192, 256, 1000, per_row=16, chunks=8, vocabulary=50304),
    "tiny": Size(2, 32, 4, 64, 4, 8, per_row=2, patch=4),
}


class Classifier(mj.nn.BayesianModule):
    """The Bayesian network; all its weights are random."""

    def __init__(self, size: Size, *, rngs: nnx.Rngs, **settings: Any) -> None:
        features = size.num_features
        self.chunks, self.remat = size.chunks, size.remat
        self.patches = mj.nn.Patches(size.patch, 3) if size.patch else None
        self.embed: Any
        if size.patch:
            self.embed = mj.nn.Dense(3 * size.patch**2, features, rngs=rngs, **settings)
        else:
            self.embed = mj.nn.Embedding(size.vocabulary, features, rngs=rngs, **settings)
        self.positions = mj.nn.LearnedPositions(size.num_tokens, features, rngs=rngs, **settings)
        self.blocks = _stack(size, rngs, lambda block: block, settings)
        self.norm = mj.nn.LayerNorm(features, **settings)
        self.head = mj.nn.Dense(features, size.num_classes, rngs=rngs, **settings)

    def __call__(self, inputs: Array, layout: Layout) -> tuple[Array, Array]:
        """Images or words of a batch -> means and variances (N, C) of the logits."""
        x = inputs if self.patches is None else self.patches(inputs)
        # Laid out before the positions are added, so that these need not be whole anywhere.
        start = layout.moments(*self.positions(*layout.moments(*self.embed(x))))
        mean, cov = _through_blocks(self, layout, start, lambda moments: layout.moments(*moments))
        pooled, pooled_cov = jax.vmap(mj.mean_pool)(*self.norm(mean, cov))
        logits, logit_cov = self.head(pooled, pooled_cov)
        return logits[:, 0], jax.vmap(lambda one: one.variance())(logit_cov)[:, 0]


class PlainClassifier(nnx.Module):
    """The plain network of Flax's layers, with one weight for each belief."""

    def __init__(self, size: Size, *, rngs: nnx.Rngs) -> None:
        other = Classifier(dataclasses.replace(size, num_blocks=1), rngs=rngs)
        self.chunks, self.remat, self.patches = size.chunks, size.remat, other.patches
        self.embed, self.positions, self.norm, self.head = (
            layer.mean_network() for layer in (other.embed, other.positions, other.norm, other.head)
        )
        self.blocks = _stack(size, rngs, lambda block: block.mean_network(), {})

    def __call__(self, inputs: Array, layout: Layout) -> Array:
        """Images or words of a batch -> logits (N, C)."""
        x = inputs if self.patches is None else self.patches(inputs)
        start = layout.activations(self.positions(layout.activations(self.embed(x))))
        (x,) = _through_blocks(self, layout, (start,), lambda x: (layout.activations(x),))
        return self.head(self.norm(x).mean(axis=-2))


def _through_blocks(network: Any, layout: Layout, start: Any, lay: Callable[[Any], Any]) -> Any:
    """What comes out of the last block; `lay` lays out what comes out of each."""
    graph, blocks = nnx.split(network.blocks)

    def one(weights: Any, part: Any) -> Any:
        return nnx.merge(graph, weights)(*part)

    def through(given: Any, block: Any) -> Any:
        return lay(layout.in_chunks(one, layout.for_rows(block), given, network.chunks)), None

    step = jax.checkpoint(through) if network.remat else through
    return jax.lax.scan(step, start, blocks)[0]


def _stack(size: Size, rngs: nnx.Rngs, form: Any, settings: dict[str, Any]) -> Any:
    """All blocks as one module, with a leading axis on every array."""

    @nnx.vmap
    def make(rngs: nnx.Rngs) -> Any:
        block = mj.nn.EncoderBlock(
            size.num_features, size.num_heads, hidden_features=size.hidden_features,
            norm_first=True, activation="gelu", rngs=rngs, **settings,
        )  # fmt: skip
        return form(block)

    return make(rngs.split(size.num_blocks))


def negative_elbo(network: Any, inputs: Array, labels: Array, layout: Layout) -> Array:
    """The negative ELBO for each example; the data term by its closed lower bound.

    With a thousand classes the points of a cubature would cost more than the network.
    """
    fits = jax.vmap(mj.objectives.expected_log_likelihood_bound)(labels, *network(inputs, layout))
    return -mj.objectives.elbo(fits, network.kl(), dataset_size=DATASET_SIZE) / DATASET_SIZE


def cross_entropy(network: Any, inputs: Array, labels: Array, layout: Layout) -> Array:
    """Of the plain network."""
    logits = network(inputs, layout)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def make_step(size: Size, structure: str, layout: Layout) -> tuple[Callable[..., Any], Any]:
    """A train step (state, inputs, labels) -> (state, loss), and the shapes of its state.

    It is that of moments in a structure, or of the plain network. No array is allocated, however large
    the network.
    """
    plain = structure == PLAIN
    loss = cross_entropy if plain else negative_elbo

    def make() -> Any:
        rngs = nnx.Rngs(0)
        if plain:
            return PlainClassifier(size, rngs=rngs)
        return Classifier(size, rngs=rngs, structure=mj.STRUCTURES[structure])

    graph, params = nnx.split(nnx.eval_shape(make))
    optimizer = optax.adam(LEARNING_RATE)

    def step(state: Any, inputs: Array, labels: Array) -> Any:
        params, moments = state

        def objective(params: Any) -> Array:
            return loss(nnx.merge(graph, params), inputs, labels, layout)

        value, gradient = jax.value_and_grad(objective)(params)
        updates, moments = optimizer.update(gradient, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return step, (params, jax.eval_shape(optimizer.init, params))
