"""The vision Transformer of the comparison."""

from __future__ import annotations

import dataclasses

import jax
from jax import Array

import moment_jax as mj
from experiments.bayesian_network import BayesianNetwork
from experiments.classify.images import Task
from experiments.networks import vision_transformer

SIZES = {"num_features": 32, "hidden_features": 64, "num_blocks": 1}
POSITION_SCALE = 1.0  # as large as the patches, so that attention can tell places apart


@dataclasses.dataclass(frozen=True)
class Network(BayesianNetwork):
    """A vision Transformer without its parameters."""

    image_size: int
    patch_size: int

    @classmethod
    def of(cls, task: Task) -> Network:
        """The network for these images."""
        return cls(task.test.images.shape[-1], task.patch_size)

    def build(self, key: Array) -> mj.nn.VisionTransformer:
        """A new module."""
        sizes = {"image_size": self.image_size, "patch_size": self.patch_size, **SIZES}
        module = vision_transformer(key, structure=mj.STRUCTURES[self.structure], **sizes)
        shape = module.position.mean.shape
        module.position.mean.set_value(POSITION_SCALE * jax.random.normal(key, shape))
        return module
