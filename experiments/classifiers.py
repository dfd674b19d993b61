"""The plain and the Bayesian network for the digits, and their training tasks."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import moment_jax as mj
from experiments import data
from experiments.data import Digits
from experiments.schedules import clipped_adam
from experiments.training import Report, Task

Array = jax.Array

PATCH_SIZE = 2
NUM_FEATURES = 32
NUM_HEADS = 4
NUM_BLOCKS = 2
HIDDEN_FEATURES = 64
POSITION_SCALE = (
    1.0  # as large as the patches; Flax's customary 0.02 leaves attention blind to place
)

POSTERIORS = {
    "factorized": mj.posterior.Factorized,
    "output_shared": mj.posterior.OutputShared,
    "matrix_normal": mj.posterior.MatrixNormal,
    "full_normal": mj.posterior.FullNormal,
}
"""The families of beliefs about weights, by the names that the command line takes."""


@dataclasses.dataclass(frozen=True)
class Belief:
    """How the Bayesian network begins: see `mj.nn.Settings`."""

    structure: str = "Separable"
    posterior: str = "factorized"
    relative_scale: float = 0.05
    prior_scale: float = 0.3


def bayesian_network(belief: Belief, seed: int) -> mj.nn.VisionTransformer:
    """A Bayesian vision Transformer, its prior scales learned."""
    return mj.nn.VisionTransformer(
        image_size=data.IMAGE_SIZE,
        patch_size=PATCH_SIZE,
        num_classes=data.NUM_CLASSES,
        num_features=NUM_FEATURES,
        num_heads=NUM_HEADS,
        num_blocks=NUM_BLOCKS,
        hidden_features=HIDDEN_FEATURES,
        rngs=nnx.Rngs(seed),
        structure=mj.STRUCTURES[belief.structure],
        posterior=POSTERIORS[belief.posterior],
        relative_scale=belief.relative_scale,
        prior_scale=belief.prior_scale,
        learn_prior=True,
    )


def plain_network(seed: int) -> mj.nn.PlainVisionTransformer:
    """The same network in Flax's own layers, untrained."""
    network = bayesian_network(Belief(), seed).mean_network()
    assert isinstance(network, mj.nn.PlainVisionTransformer)
    shape = network.position[...].shape
    start = POSITION_SCALE * jax.random.normal(jax.random.key(seed), shape)
    network.position.set_value(start)
    return network


def plain_task(
    graph: Any,
    digits: Digits,
    *,
    num_steps: int,
    batch_size: int,
    learning_rate: float,
    weight_decay: float,
) -> Task:
    """Cross-entropy with weight decay, stopped where the validation NLL is best."""

    def logits(params: Any, images: Array) -> Array:
        return nnx.merge(graph, params)(images)

    def loss(params: Any, key: Array, step: Array) -> tuple[Array, Report]:
        images, labels = data.mini_batch(key, step, digits.train, batch_size)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits(params, images), labels)
        return losses.mean(), {}

    def validate(params: Any) -> Array:
        images, labels = (jnp.asarray(part) for part in digits.validation)
        probabilities = jax.nn.softmax(logits(params, images))
        return mj.objectives.negative_log_likelihood(probabilities, labels)

    optimizer = clipped_adam(learning_rate, num_steps, norm=1.0, weight_decay=weight_decay)
    return Task("plain network", loss, optimizer, num_steps, validate)


def bayesian_task(
    graph: Any,
    digits: Digits,
    *,
    num_steps: int,
    batch_size: int,
    learning_rate: float,
    kl_weight: float,
    warm_up_steps: int,
) -> Task:
    """The negative analytic ELBO for each training image, by one pass of moments a step."""
    dataset_size = digits.train.labels.size
    fit_of = partial(mj.objectives.expected_log_likelihood, mj.objectives.Categorical())

    def loss(params: Any, key: Array, step: Array) -> tuple[Array, Report]:
        images, labels = data.mini_batch(key, step, digits.train, batch_size)
        network = nnx.merge(graph, params)
        fits = jax.vmap(fit_of)(labels, *network(images))
        kl = network.kl()
        weight = mj.objectives.kl_warmup(step, warm_up_steps, kl_weight)
        bound = mj.objectives.elbo(fits, kl, dataset_size=dataset_size, kl_weight=weight)
        return -bound / dataset_size, {"fit": fits.mean(), "kl": kl}

    return Task("Bayesian network", loss, clipped_adam(learning_rate, num_steps), num_steps)


def predicting(network: mj.nn.VisionTransformer) -> mj.nn.VisionTransformer:
    """The network for prediction: images must not share statistics, as batches do in training."""
    shared = network.settings.structure is mj.BatchSeparable
    return mj.nn.with_structure(network, mj.Separable) if shared else network
