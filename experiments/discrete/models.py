"""The autoencoders that are compared, and their objectives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import moment_jax as mj
from experiments.discrete.images import ImageSet
from experiments.schedules import clipped_adam
from experiments.training import Report, Task

Array = jax.Array

NUM_HEADS = 4
KL_WARM_UP = 0.4  # share of the updates in which the weight of the codes' KL rises to 1
VALIDATION_DRAWS = 4


@dataclasses.dataclass(frozen=True)
class Size:
    """The size of a Transformer autoencoder: its patches and codes, and its features."""

    patch_size: int
    num_codes: int
    num_features: int
    hidden_features: int
    num_blocks: int


@dataclasses.dataclass(frozen=True)
class Training:
    """How a plain autoencoder is trained: both kinds have one of their own, chosen on validation."""

    num_steps: int
    batch_size: int
    learning_rate: float
    weight_decay: float
    temperature: float
    floor: float


class DenseTokens(nnx.Module):
    """Dense layers from all tokens at once to all tokens at once, with gelu between them."""

    def __init__(self, widths: list[int], num_tokens: int, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List(nnx.Linear(a, b, rngs=rngs) for a, b in pairwise(widths))
        self.num_tokens = num_tokens

    def __call__(self, x: Array) -> Array:
        """(..., T, in) -> (..., T, out)."""
        batch = x.shape[:-2]
        x = x.reshape(*batch, -1)
        for layer in self.layers[:-1]:
            x = jax.nn.gelu(layer(x))
        return self.layers[-1](x).reshape(*batch, self.num_tokens, -1)


def bayesian_autoencoder(
    images: ImageSet, size: Size, likelihood: Any, structure: str, seed: int
) -> mj.nn.DiscreteAutoencoder:
    """A Bayesian Transformer autoencoder, its prior scales learned."""
    return mj.nn.DiscreteAutoencoder(
        image_size=images.image_size,
        patch_size=size.patch_size,
        num_codes=size.num_codes,
        num_features=size.num_features,
        num_heads=NUM_HEADS,
        num_encoder_blocks=size.num_blocks,
        num_decoder_blocks=size.num_blocks,
        hidden_features=size.hidden_features,
        activation="relu",
        likelihood=likelihood,
        rngs=nnx.Rngs(seed),
        structure=mj.STRUCTURES[structure],
        relative_scale=0.05,
        prior_scale=0.3,
        learn_prior=True,
    )


def dense_autoencoder(
    image_size: int, patch_size: int, num_codes: int, likelihood: Any, num_weights: int, seed: int
) -> mj.nn.PlainDiscreteAutoencoder:
    """A categorical VAE of dense layers, as near to so many weights as can be.

    Encoder: pixels, two hidden layers, logits of all codes, one for each patch; the decoder is its
    mirror.
    """
    pixels, tokens = image_size**2, (image_size // patch_size) ** 2
    codes = tokens * num_codes

    def widths(hidden: tuple[int, int]) -> tuple[list[int], list[int]]:
        return [pixels, *hidden, codes], [codes, *hidden[::-1], pixels]

    def count(hidden: tuple[int, int]) -> int:
        return sum((a + 1) * b for half in widths(hidden) for a, b in pairwise(half))

    def beside(first: int) -> tuple[int, int]:
        """With this first width, the second one that comes nearest; the count is linear in it."""
        none = count((first, 0))
        return first, max(1, round((num_weights - none) / (count((first, 1)) - none)))

    def distance(hidden: tuple[int, int]) -> tuple[float, int]:
        """Within half a per cent no count is better than another, but equal widths are."""
        error = abs(count(hidden) - num_weights)
        return max(error, 0.005 * num_weights), abs(hidden[0] - hidden[1])

    hidden = min((beside(h) for h in range(1, num_weights // pixels + 2)), key=distance)
    rngs = nnx.Rngs(seed)
    encoder, decoder = (DenseTokens(half, tokens, rngs) for half in widths(hidden))
    return mj.nn.PlainDiscreteAutoencoder(
        encoder,
        decoder,
        patches=mj.nn.Patches(patch_size),
        image_size=image_size,
        num_codes=num_codes,
        likelihood=likelihood,
    )


def number_of_parameters(module: nnx.Module, kind: Any = nnx.Param) -> int:
    """How many numbers of a kind of variables the module has."""
    return sum(int(np.size(leaf)) for leaf in jax.tree.leaves(nnx.state(module, kind)))


def _batch(images: np.ndarray, size: int, key: Array, step: Array) -> Array:
    """The images of an update: each epoch is a new order of all of them."""
    per_epoch = len(images) // size
    order = jax.random.permutation(jax.random.fold_in(key, step // per_epoch), len(images))
    chosen = jax.lax.dynamic_slice(order, ((step % per_epoch) * size,), (size,))
    return jnp.asarray(images)[chosen]


def validation_bound(graph: Any, images: np.ndarray, **options: Any) -> Callable[[Any], Array]:
    """A network's negative ELBO given its weights, by a few draws of hard codes, always the same.

    `options` are further arguments of its `negative_elbo`.
    """
    repeated = jnp.tile(jnp.asarray(images), (VALIDATION_DRAWS, 1, 1))

    def score(params: Any) -> Array:
        bound = nnx.merge(graph, params).negative_elbo(
            repeated, jax.random.key(0), 1.0, straight_through=True, **options
        )
        return jnp.mean(bound.reconstruction + bound.code_kl)

    return score


def plain_task(name: str, graph: Any, images: ImageSet, training: Training) -> Task:
    """The negative ELBO with relaxed codes, stopped where the validation's with hard codes is best."""
    cooling = max(1, int(0.7 * training.num_steps))
    temperature = mj.discrete.exponential_annealing(training.temperature, training.floor, cooling)

    def loss(params: Any, key: Array, step: Array) -> tuple[Array, Report]:
        order_key, draw_key = jax.random.split(key)
        batch = _batch(images.train, training.batch_size, order_key, step)
        draw_key = jax.random.fold_in(draw_key, step)
        bound = nnx.merge(graph, params).negative_elbo(batch, draw_key, temperature(step))
        weight = mj.objectives.kl_warmup(step, int(KL_WARM_UP * training.num_steps))
        fit, codes = bound.reconstruction.mean(), bound.code_kl.mean()
        return fit + weight * codes, {"fit": fit, "codes": codes}

    optimizer = clipped_adam(
        training.learning_rate,
        training.num_steps,
        norm=10.0,
        weight_decay=training.weight_decay,
    )
    validate = validation_bound(graph, images.validation)
    return Task(name, loss, optimizer, training.num_steps, validate)


def bayesian_task(
    graph: Any,
    images: ImageSet,
    *,
    num_steps: int,
    batch_size: int,
    learning_rate: float,
    kl_weight: float,
    temperature: float,
    straight_through: bool,
) -> Task:
    """The analytic negative ELBO for each training image, stopped where the validation's is best."""

    def loss(params: Any, key: Array, step: Array) -> tuple[Array, Report]:
        order_key, draw_key = jax.random.split(key)
        batch = _batch(images.train, batch_size, order_key, step)
        bound = nnx.merge(graph, params).negative_elbo(
            batch,
            jax.random.fold_in(draw_key, step),
            temperature,
            dataset_size=len(images.train),
            kl_weight=kl_weight,
            straight_through=straight_through,
        )
        parts = {"fit": bound.reconstruction.mean(), "codes": bound.code_kl.mean()}
        return bound.total.mean(), {**parts, "weights": bound.weight_kl}

    optimizer = clipped_adam(learning_rate, num_steps, norm=100.0)
    validate = validation_bound(graph, images.validation, dataset_size=len(images.train))
    return Task("Bayesian Transformer", loss, optimizer, num_steps, validate)
