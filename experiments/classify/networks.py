"""Bayesian classifiers apart from their parameters, and the vision Transformer of the comparison."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax import Array

import moment_jax as mj
from experiments import draws
from experiments.classify.images import Task
from experiments.draws import Draw
from experiments.networks import bayesian, vision_transformer

SIZES = {"num_features": 32, "hidden_features": 64, "num_blocks": 1}
POSITION_SCALE = 1.0  # as large as the patches, so that attention can tell places apart


class Params(NamedTuple):
    """Means and spreads of all beliefs: Flax states."""

    means: Any
    spreads: Any


@dataclasses.dataclass(frozen=True)
class BayesianNetwork(abc.ABC):
    """A classifier without its parameters; inputs have the axis of the examples first."""

    structure: str = dataclasses.field(default="Separable", kw_only=True)

    @abc.abstractmethod
    def build(self, key: Array) -> mj.Bayesian:
        """A new model: inputs (N, ...) -> moments of the logits (N, C)."""

    def start(self, key: Array) -> Params:
        """Parameters before the first update."""
        return Params(*nnx.split(self.build(key), mj.nn.VariationalMean, ...)[1:])

    def module(self, params: Params) -> mj.Bayesian:
        """The model with these parameters."""
        graph = nnx.split(nnx.eval_shape(lambda: self.build(jax.random.key(0))),
                          mj.nn.VariationalMean, ...)[0]  # fmt: skip
        return nnx.merge(graph, *params)

    def moments(self, params: Params, inputs: Array) -> tuple[Array, Array]:
        """Mean (N, C) and covariance (N, C, C) of the logits."""
        logits = self.module(params)(inputs)
        return logits.mean, logits.features

    def mean_logits(self, params: Params, inputs: Array) -> Array:
        """Logits (N, C) of the network at the means."""
        logits: Array = self.module(params).at_means()(inputs)
        return logits

    def drawn_logits(
        self, draw: Draw, params: Params, key: Array, inputs: Array, groups: int
    ) -> Array:
        """Logits (N, C); each of `groups` parts of the inputs uses its own drawn network."""
        return draws.outputs(self._plain(params), draw, key, inputs, groups)

    def many_logits(
        self, draw: Draw, params: Params, key: Array, inputs: Array, count: int
    ) -> Array:
        """Logits (count, N, C) of `count` drawn networks."""
        return draws.many(self._plain(params), draw, key, inputs, count)

    def _plain(self, params: Params) -> Any:
        return draws.function_of(self.module(params).at_means())


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
