"""The vision Transformer of the comparison: one set of beliefs, which every method trains its way."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

import moment_jax as mj
from experiments import draws
from experiments.classify.images import Task
from experiments.draws import Arrays, Draw

Array = jax.Array

NUM_CLASSES = 10
POSITION_SCALE = 1.0  # as large as the patches, so that attention can tell places apart
RELATIVE_SCALE = 0.05


class Params(NamedTuple):
    """Means and spreads of all beliefs, as Flax states."""

    means: Any
    spreads: Any


@dataclasses.dataclass(frozen=True)
class Network:
    """A vision Transformer without its parameters.

    Args:
      image_size: height and width of the images.
      patch_size: of the patches.
      num_blocks: of the encoder.
      structure: in which moments are propagated.
    """

    image_size: int
    patch_size: int
    num_blocks: int = 1
    structure: str = "Separable"

    @classmethod
    def of(cls, task: Task, num_blocks: int) -> Network:
        """The network for these images."""
        return cls(task.test.images.shape[1], task.patch_size, num_blocks)

    def start(self, key: Array) -> Params:
        """Parameters before the first update."""
        module = self._build(key)
        shape = module.position.mean.shape
        module.position.mean.set_value(POSITION_SCALE * jax.random.normal(key, shape))
        return Params(*nnx.split(module, mj.nn.VariationalMean, ...)[1:])

    def module(self, params: Params) -> mj.nn.VisionTransformer:
        """The Bayesian module with these parameters."""
        graph = nnx.split(nnx.eval_shape(lambda: self._build(jax.random.key(0))),
                          mj.nn.VariationalMean, ...)[0]  # fmt: skip
        return nnx.merge(graph, *params)

    def moments(self, params: Params, images: Array) -> tuple[Array, Array]:
        """Mean (N, C) and covariance (N, C, C) of the logits."""
        return self.module(params)(images)

    def mean_logits(self, params: Params, images: Array) -> Array:
        """Logits (N, C) of the network at the means."""
        module = self.module(params)
        return module.network(draws.means(module.params))(images)

    def drawn_logits(
        self, draw: Draw, params: Params, key: Array, images: Array, groups: int
    ) -> Array:
        """Logits (N, C), each of `groups` parts of the images by a network of its own."""
        return draws.outputs(self._plain(params), draw, key, images, groups)

    def many_logits(
        self, draw: Draw, params: Params, key: Array, images: Array, count: int
    ) -> Array:
        """Logits (count, N, C) of so many networks."""
        return draws.many(self._plain(params), draw, key, images, count)

    def _plain(self, params: Params) -> Any:
        module = self.module(params)

        def apply(arrays: Arrays, images: Array) -> Array:
            return jnp.asarray(module.network(arrays)(images))

        return apply

    def _build(self, key: Array) -> mj.nn.VisionTransformer:
        return mj.nn.VisionTransformer(
            image_size=self.image_size,
            patch_size=self.patch_size,
            num_classes=NUM_CLASSES,
            num_features=32,
            num_heads=4,
            num_blocks=self.num_blocks,
            hidden_features=64,
            structure=mj.STRUCTURES[self.structure],
            relative_scale=RELATIVE_SCALE,
            rngs=nnx.Rngs(key),
        )
