"""The parameters of a layer's curvature block, and how they form one matrix."""

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from moment_jax.optim.factors import DiagonalFactor, EmbeddingFactor, KroneckerFactor, Shape


@dataclasses.dataclass(frozen=True)
class LayerBlock:
    """The parameters of one layer as a (rows, columns) matrix, or a stack of such matrices."""

    name: str  # path of the layer in the model, joined by "/"
    leaves: tuple[str, ...]  # paths of its parameters, in the order of their rows
    shapes: tuple[Shape, ...]  # of the parameters
    columns: int  # width of the matrix
    stack: Shape = ()  # leading axes of all parameters, over which equal layers are scanned

    factor: ClassVar[Any]  # the type of its curvature, unless it is a `RowFactor`

    @property
    def heights(self) -> tuple[int, ...]:
        """Number of rows that each parameter fills."""
        return tuple(math.prod(shape) // (self.columns * self.count) for shape in self.shapes)

    @property
    def rows(self) -> int:
        """Height of the matrix."""
        return sum(self.heights)

    @property
    def count(self) -> int:
        """Number of matrices in the stack."""
        return math.prod(self.stack)

    def matrix(self, leaves: Mapping[str, Array]) -> Array:
        """The parameters as one array (count, rows, columns)."""
        parts = [leaves[leaf].reshape(self.count, -1, self.columns) for leaf in self.leaves]
        return jnp.concatenate(parts, axis=1)

    def split(self, matrix: Array) -> dict[str, Array]:
        """The inverse of `matrix`."""
        parts = jnp.split(matrix, list(itertools.accumulate(self.heights[:-1])), axis=1)
        each = zip(self.leaves, self.shapes, parts, strict=True)
        return {leaf: part.reshape(shape) for leaf, shape, part in each}


class DenseBlock(LayerBlock):
    """Inputs times kernel plus bias: the kernel's rows, then the bias as one more row."""

    factor = KroneckerFactor


class EmbeddingBlock(LayerBlock):
    """An embedding table, one row for each symbol."""

    factor = EmbeddingFactor


class NormBlock(LayerBlock):
    """A row of gains and a row of biases; either may be missing."""

    factor = DiagonalFactor


Blocks = tuple[LayerBlock, ...]
KINDS: dict[str, type[LayerBlock]] = {
    "kernel": DenseBlock,
    "embedding": EmbeddingBlock,
    "scale": NormBlock,
}


def infer_blocks(shapes: Mapping[str, Shape]) -> Blocks:
    """The blocks of a parameter tree by Flax's names, without a model.

    A leaf `kernel` (or `kernel/mean`, of a belief) is a dense layer whose last axis is the output; in a
    layer called query, key or value it has one input axis, as in `nnx.MultiHeadAttention`. `embedding`
    is a table, `scale` a normalisation. Names do not show stacked layers: use `find_blocks` for them.
    """
    blocks: list[LayerBlock] = []
    for path, shape in shapes.items():
        found = re.fullmatch(r"(?:(.*)/)?(kernel|embedding|scale)(/mean)?", path)
        if found is None:
            continue
        layer, leaf, mean = found.groups(default="")
        name = layer.rpartition("/")[2]
        least, most = {"kernel": (2, math.inf), "embedding": (2, 2), "scale": (1, 1)}[leaf]
        if name == "raw" or not least <= len(shape) <= most:
            continue
        bias = path.removesuffix(leaf + mean) + "bias" + mean
        leaves = (path, bias) if bias in shapes and leaf != "embedding" else (path,)
        projects = leaf == "kernel" and name in ("query", "key", "value")
        columns = math.prod(shape[1:]) if projects else shape[-1]
        sizes = tuple(shapes[each] for each in leaves)
        blocks.append(KINDS[leaf](layer or "model", leaves, sizes, columns))
    return tuple(blocks)
