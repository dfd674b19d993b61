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
from experiments.schedules import clipped_adam

REFERENCE = "experiments.resilience.job:digits_job"
PATCH_SIZE = 4
NUM_FEATURES = 16
NUM_HEADS = 4
HIDDEN_FEATURES = 32
KL_WEIGHT = 0.1
CLIP = 10.0


BELIEF: dict[str, Any] = {"activation": "relu", "relative_scale": 0.05, "prior_scale": 0.3}


def vision_transformer(settings: dict[str, Any], seed: int) -> mj.nn.VisionTransformer:
    """Four tokens; moments of the logits come with their covariance."""
    return mj.nn.VisionTransformer(
        image_size=data.IMAGE_SIZE,
        patch_size=PATCH_SIZE,
        num_classes=data.NUM_CLASSES,
        num_features=NUM_FEATURES,
        num_heads=NUM_HEADS,
        num_blocks=settings["blocks"],
        hidden_features=HIDDEN_FEATURES,
        structure=mj.STRUCTURES[settings["structure"]],
        rngs=nnx.Rngs(seed),
        **BELIEF,
    )


class Perceptron(nnx.Module):
    """Dense layers on the pixels; it starts in a tenth of the time."""

    def __init__(self, settings: dict[str, Any], seed: int) -> None:
        widths = [data.IMAGE_SIZE**2, *[HIDDEN_FEATURES] * settings["blocks"], data.NUM_CLASSES]
        structure = mj.STRUCTURES[settings["structure"]]
        self.layers = mj.nn.MLP(widths, structure=structure, rngs=nnx.Rngs(seed), **BELIEF)

    def __call__(self, images: Array) -> tuple[Array, Array]:
        """(B, 8, 8) -> means and variances (B, C) of the logits."""
        mean, cov = self.layers(images.reshape(images.shape[0], 1, -1))
        return mean[:, 0], jax.vmap(lambda c: c.variance())(cov)[:, 0]

    def kl(self) -> Array:
        """Of all weights, in nats."""
        return self.layers.kl()


NETWORKS: dict[str, Callable[[dict[str, Any], int], nnx.Module]] = {
    "transformer": vision_transformer,
    "mlp": Perceptron,
}
"""The networks that the command line offers: (settings, seed) -> module."""


def digits_job(settings: dict[str, Any]) -> Job:
    """The job of these settings: network, structure, steps, and so on, as in the options."""
    digits = data.load()
    dataset_size = digits.train.labels.size
    fit_of = partial(mj.objectives.expected_log_likelihood, mj.objectives.Categorical())

    def loss(module: Any, batch: Batch, key: Array, step: Array) -> tuple[Array, Report]:
        images, labels = batch
        fits = jax.vmap(fit_of)(labels, *module(data.shifted(key, images, digits.background)))
        kl = module.kl()
        bound = mj.objectives.elbo(fits, kl, dataset_size=dataset_size, kl_weight=KL_WEIGHT)
        return -bound / dataset_size, {"fit": fits.mean(), "kl": kl}

    steps, rate = settings["steps"], settings["learning_rate"]
    return Job(
        name="resilience",
        create=partial(NETWORKS[settings["network"]], settings),
        loss=loss,
        optimizer=clipped_adam(rate, steps, norm=CLIP),
        arrays=(digits.train.images, digits.train.labels),
        batch_size=settings["batch_size"],
        num_steps=steps,
        accumulate=settings["accumulate"],
        seed=settings["seed"],
        settings={
            name: settings[name] for name in ("network", "structure", "blocks", "learning_rate")
        },
    )
