"""Bayesian classifiers apart from their parameters, and the vision Transformer of the comparison."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

import moment_jax as mj
from experiments import draws
from experiments.classify.images import Task
from experiments.draws import Arrays, Draw
from experiments.networks import vision_transformer

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
    def build(self, key: Array) -> Any:
        """A new module: inputs (N, ...) -> mean (N, C) and covariance (N, C, C) of the logits."""

    def start(self, key: Array) -> Params:
        """Parameters before the first update."""
        return Params(*nnx.split(self.build(key), mj.nn.VariationalMean, ...)[1:])

    def module(self, params: Params) -> Any:
        """The Bayesian module with these parameters."""
        graph = nnx.split(nnx.eval_shape(lambda: self.build(jax.random.key(0))),
                          mj.nn.VariationalMean, ...)[0]  # fmt: skip
        return nnx.merge(graph, *params)

    def moments(self, params: Params, inputs: Array) -> tuple[Array, Array]:
        """Mean (N, C) and covariance (N, C, C) of the logits."""
        mean, cov = self.module(params)(inputs)
        return mean, cov

    def mean_logits(self, params: Params, inputs: Array) -> Array:
        """Logits (N, C) of the network at the means."""
        return self._plain(params)(draws.means(self.module(params).params), inputs)

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
        module = self.module(params)

        def apply(arrays: Arrays, inputs: Array) -> Array:
            return jnp.asarray(module.network(arrays)(inputs))

        return apply


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
