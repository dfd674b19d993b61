"""Bayesian classifiers apart from their parameters, and the vision Transformer of the comparison."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

import jax
from flax import nnx
from jax import Array

import moment_jax as mj
from experiments.classify.images import Task
from experiments.networks import bayesian, vision_transformer

SIZES = {"num_features": 32, "hidden_features": 64, "num_blocks": 1}
POSITION_SCALE = 1.0  # as large as the patches, so that attention can tell places apart


@dataclasses.dataclass(frozen=True)
class BayesianNetwork(abc.ABC):
    """A classifier without its parameters; inputs have the axis of the examples first."""

    structure: str = dataclasses.field(default="Separable", kw_only=True)

    @abc.abstractmethod
    def build(self, key: Array) -> mj.Bayesian:
        """A new model: inputs (N, ...) -> moments of the logits (N, C)."""

    def start(self, key: Array) -> Any:
        """The state of a new model."""
        return nnx.state(self.build(key))

    def module(self, state: Any) -> mj.Bayesian:
        """The model of a state."""
        graph = nnx.graphdef(nnx.eval_shape(lambda: self.build(jax.random.key(0))))
        return nnx.merge(graph, state, copy=True)


@dataclasses.dataclass(frozen=True)
class Network(BayesianNetwork):
    """A vision Transformer without its parameters."""

    image_size: int
    patch_size: int

    @classmethod
    def of(cls, task: Task) -> Network:
        """The network for these images."""
        return cls(task.test.images.shape[-1], task.patch_size)

    def build(self, key: Array) -> mj.Bayesian:
        """A new model."""
        sizes = {"image_size": self.image_size, "patch_size": self.patch_size, **SIZES}
        network = vision_transformer(key, position_scale=POSITION_SCALE, **sizes)
        return bayesian(network, structure=mj.STRUCTURES[self.structure])
