"""The vision Transformer that several experiments share, and their objective."""

from functools import partial
from typing import Any

import jax
from flax import nnx
from jax import Array

import moment_jax as mj
from experiments import data

NUM_HEADS = 4
BELIEF: dict[str, Any] = {"relative_scale": 0.05, "prior_scale": 0.3}
"""How the beliefs about weights begin: see `mj.nn.Settings`."""


def vision_transformer(seed: int | Array, **settings: Any) -> mj.nn.VisionTransformer:
    """A Bayesian vision Transformer for digits; `settings` are further arguments of its class."""
    sizes = {"image_size": data.IMAGE_SIZE, "num_classes": data.NUM_CLASSES, "num_heads": NUM_HEADS}
    return mj.nn.VisionTransformer(rngs=nnx.Rngs(seed), **sizes | BELIEF | settings)


def negative_elbo(
    fits: Array, kl: Array, dataset_size: int, kl_weight: Array | float
) -> tuple[Array, dict[str, Array]]:
    """Minus the ELBO for each example of the data (nats), and its parts."""
    bound = mj.objectives.elbo(fits, kl, dataset_size=dataset_size, kl_weight=kl_weight)
    return -bound / dataset_size, {"fit": fits.mean(), "kl": kl}


def class_fits(labels: Array, mean: Array, cov: Array) -> Array:
    """E[log p(label)] (N,) of logits with these moments, (N, C) and (N, C, C)."""
    fit_of = partial(mj.objectives.expected_log_likelihood, mj.objectives.Categorical())
    return jax.vmap(fit_of)(labels, mean, cov)
