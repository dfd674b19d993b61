"""The vision Transformer that several experiments share, beliefs about weights, and their objective."""

from typing import Any

import jax.numpy as jnp
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


def bayesian(network: nnx.Module, *, random: Any = nnx.Param, **settings: Any) -> mj.Bayesian:
    """A classifier with random weights; `settings` are further arguments of `mj.Bayesian`.

    Those that the filter `random` does not select are certain.

    Standard deviations begin at relative_scale / sqrt(fan in), of a bias, gain or position / sqrt(D):
    they do not depend on how large a weight was trained.
    """
    options = BELIEF | settings
    scale = options.pop("relative_scale")
    weights = nnx.to_pure_dict(nnx.state(network, nnx.All(nnx.Param, random)))

    def belief(path: tuple[Any, ...], w: Array) -> mj.posterior.Factorized:
        name, layer = path[-1], path[-2] if len(path) > 1 else ""
        if name != "kernel":
            inputs = w.size if name in ("bias", "scale") else w.shape[-1]
        else:
            inputs = w.shape[0] if layer in ("query", "key", "value") else w.size // w.shape[-1]
        return mj.posterior.Factorized(w, jnp.full_like(w, scale**2 / inputs))

    flat = nnx.traversals.flatten_mapping(weights)
    tree = nnx.traversals.unflatten_mapping({path: belief(path, w) for path, w in flat.items()})
    # The pass stands in compiled trainings, and is set beside sampled networks there: no first call.
    return mj.Bayesian(network, mj.Categorical(), beliefs=tree, verify=False, **options)
