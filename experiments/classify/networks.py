"""The vision Transformer of the comparison."""

from typing import Any

from jax import Array

import moment_jax as mj
from experiments.networks import bayesian, vision_transformer

SIZES: dict[str, Any] = {"num_features": 32, "hidden_features": 64, "num_blocks": 1}
# As large as the patches, so that attention can tell places apart.
SIZES |= {"position_scale": 1.0}
STRUCTURE: type[mj.Covariance] = mj.Separable


def classifier(image_size: int, patch_size: int, key: Array) -> mj.Bayesian:
    """A new model of square images."""
    network = vision_transformer(key, image_size=image_size, patch_size=patch_size, **SIZES)
    return bayesian(network, structure=STRUCTURE)
