"""Networks that several experiments share, of images and of texts, and their objective."""

from functools import partial
from typing import Any

import jax
from flax import nnx
from jax import Array

import moment_jax as mj
from experiments import data

NUM_FEATURES = 64
NUM_HEADS = 4
HIDDEN_FEATURES = 128
BELIEF: dict[str, Any] = {"relative_scale": 0.05, "prior_scale": 0.3}
"""How the beliefs about weights begin: see `mj.nn.Settings`."""


def vision_transformer(seed: int | Array, **settings: Any) -> mj.nn.VisionTransformer:
    """A Bayesian vision Transformer for digits; `settings` are further arguments of its class."""
    sizes = {"image_size": data.IMAGE_SIZE, "num_classes": data.NUM_CLASSES, "num_heads": NUM_HEADS}
    return mj.nn.VisionTransformer(rngs=nnx.Rngs(seed), **sizes | BELIEF | settings)


class PlainTextTransformer(nnx.Module):
    """The deterministic network of one draw of the weights, of Flax's own layers."""

    def __init__(
        self, embed: nnx.Embed, positions: Any, encoder: mj.nn.PlainEncoder, head: nnx.Linear
    ) -> None:
        self.embed = embed
        self.positions = positions
        self.encoder = encoder
        self.head = head


class TextTransformer(mj.nn.Composite):
    """Embedding, learned positions, pre-norm encoder and linear head: all weights random.

    Subclasses name the `plain_type` of a draw, and say by `__call__` what the head sees.
    """

    parts = ("embed", "positions", "encoder", "head")

    def __init__(
        self, num_ids: int, length: int, num_outputs: int, num_blocks: int, *, rngs: nnx.Rngs,
        **settings: Any,
    ) -> None:  # fmt: skip
        self.embed = mj.nn.Embedding(num_ids, NUM_FEATURES, rngs=rngs, **settings)
        self.positions = mj.nn.LearnedPositions(length, NUM_FEATURES, rngs=rngs, **settings)
        blocks = {"hidden_features": HIDDEN_FEATURES, "norm_first": True, "activation": "gelu"}
        self.encoder = mj.nn.Encoder(
            num_blocks, NUM_FEATURES, NUM_HEADS, rngs=rngs, **settings | blocks
        )
        self.head = mj.nn.Dense(NUM_FEATURES, num_outputs, rngs=rngs, **settings)


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
