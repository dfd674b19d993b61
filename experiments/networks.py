"""The vision Transformer that several experiments share, beliefs about weights, and their objective."""

from typing import Any

from flax import nnx
from jax import Array

import moment_jax as mj
from experiments import data

NUM_HEADS = 4
BELIEF: dict[str, Any] = {"relative_scale": 0.05, "prior_scale": 0.3}
"""How the beliefs about weights begin: see `mj.Bayesian`."""


def vision_transformer(seed: int | Array, **sizes: Any) -> mj.nn.VisionTransformer:
    """A plain vision Transformer for digits; `sizes` are further arguments of its class."""
    known = {"image_size": data.IMAGE_SIZE, "num_classes": data.NUM_CLASSES, "num_heads": NUM_HEADS}
    return mj.nn.VisionTransformer(rngs=nnx.Rngs(seed), **known | sizes)


def bayesian(network: nnx.Module, **settings: Any) -> mj.Bayesian:
    """A classifier with random weights; `settings` are further arguments of `mj.Bayesian`."""
    return mj.Bayesian(network, mj.Categorical(), **BELIEF | settings)


def negative_elbo(
    fits: Array, kl: Array, dataset_size: int, kl_weight: Array | float
) -> tuple[Array, dict[str, Array]]:
    """Minus the ELBO for each example of the data (nats), and its parts."""
    bound = mj.objectives.elbo(fits, kl, dataset_size=dataset_size, kl_weight=kl_weight)
    return -bound / dataset_size, {"fit": fits.mean(), "kl": kl}
