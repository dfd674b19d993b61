"""The job of the resilience experiment: a small Bayesian network on digits."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from flax import nnx
from jax import Array

import moment_jax as mj
from experiments import data
from experiments.loop import Job
from experiments.loop.job import Batch, Report
from experiments.networks import BELIEF, class_fits, negative_elbo, vision_transformer
from experiments.schedules import clipped_adam

REFERENCE = "experiments.resilience.job:digits_job"
SIZES = {"patch_size": 4, "num_features": 16, "hidden_features": 32}
KL_WEIGHT = 0.1


def _transformer(settings: dict[str, Any], seed: int) -> mj.nn.VisionTransformer:
    """Four tokens; moments of the logits come with their covariance."""
    own = {"num_blocks": settings["blocks"], "structure": mj.STRUCTURES[settings["structure"]]}
    return vision_transformer(seed, activation="relu", **SIZES, **own)


class Perceptron(nnx.Module):
    """Dense layers on the pixels; it starts in a tenth of the time."""

    def __init__(self, settings: dict[str, Any], seed: int) -> None:
        hidden = [SIZES["hidden_features"]] * settings["blocks"]
        widths = [data.IMAGE_SIZE**2, *hidden, data.NUM_CLASSES]
        own: dict[str, Any] = {"structure": mj.STRUCTURES[settings["structure"]], **BELIEF}
        self.layers = mj.nn.MLP(widths, activation="relu", rngs=nnx.Rngs(seed), **own)

    def __call__(self, images: Array) -> tuple[Array, Array]:
        """(B, 8, 8) -> means and variances (B, C) of the logits."""
        mean, cov = self.layers(images.reshape(images.shape[0], 1, -1))
        return mean[:, 0], jax.vmap(lambda c: c.variance())(cov)[:, 0]

    def kl(self) -> Array:
        """Of all weights, in nats."""
        return self.layers.kl()


NETWORKS: dict[str, Callable[[dict[str, Any], int], nnx.Module]] = {
    "transformer": _transformer,
    "mlp": Perceptron,
}
"""The networks that the command line offers: (settings, seed) -> module."""


def digits_job(settings: dict[str, Any]) -> Job:
    """The job of these settings: network, structure, steps, and so on, as in the options."""
    digits = data.load()

    def loss(module: Any, batch: Batch, key: Array, step: Array) -> tuple[Array, Report]:
        images, labels = batch
        fits = class_fits(labels, *module(data.shifted(key, images, digits.background)))
        return negative_elbo(fits, module.kl(), digits.train.labels.size, KL_WEIGHT)

    names = ("network", "structure", "blocks", "learning_rate")
    return Job(
        name="resilience",
        create=partial(NETWORKS[settings["network"]], settings),
        loss=loss,
        optimizer=clipped_adam(settings["learning_rate"], settings["steps"]),
        arrays=(digits.train.images, digits.train.labels),
        batch_size=settings["batch_size"],
        num_steps=settings["steps"],
        accumulate=settings["accumulate"],
        seed=settings["seed"],
        settings={name: settings[name] for name in names},
    )
