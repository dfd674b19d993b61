"""Layers as matrices of parameters with factors of their curvature; layers of one shape are stacked.

A factor holds averages over a batch, as an operator that can be averaged. L counts the layers of a stack
(1 for a single layer), N the examples; tokens are rows as examples are, so that a and g are (rows, in)
and (rows, out). `weight` is 1 for new factors and 0 where none were taken.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

Shape = tuple[int, ...]


class KroneckerFactor(NamedTuple):
    """F = inputs (x) outputs, of a dense layer: theta of Algorithm 1 over all pairs of rows."""

    inputs: Array  # (L, rows, rows): the average of a a^T, with a one appended to a for the bias
    outputs: Array  # (L, columns, columns): the sum of g g^T over all rows, divided by N
    weight: Array  # ()


class EmbeddingFactor(NamedTuple):
    """F = diag(frequencies) (x) outputs, of a table whose inputs are one-hot."""

    frequencies: Array  # (L, rows)
    outputs: Array  # (L, columns, columns)
    weight: Array  # ()


class DiagonalFactor(NamedTuple):
    """The diagonal of F, of a normalisation."""

    squares: Array  # (L, rows, columns)
    weight: Array  # ()


Factor = KroneckerFactor | EmbeddingFactor | DiagonalFactor
Factors = dict[str, Factor]


def apply_curvature(factor: Factor, matrix: Array) -> Array:
    """F V, (L, rows, columns), for every layer of a stack, without forming F.

    Source: Brownian document, Algorithm 1, function FV without its damping.
    """
    if isinstance(factor, KroneckerFactor):
        return jnp.matmul(jnp.matmul(factor.inputs, matrix), factor.outputs)
    if isinstance(factor, EmbeddingFactor):
        return factor.frequencies[:, :, None] * jnp.matmul(matrix, factor.outputs)
    return factor.squares * matrix


def quadratic_form(factor: Factor, matrix: Array) -> Array:
    """<V, F V>, summed over the layers of a stack."""
    if isinstance(factor, KroneckerFactor):
        # <A V, V G>: XLA for CPU would fuse the last product of A V G into the sum, six times as slow.
        return jnp.sum(jnp.matmul(factor.inputs, matrix) * jnp.matmul(matrix, factor.outputs))
    return jnp.sum(matrix * apply_curvature(factor, matrix))


def averaged(average: Factor, new: Factor, decay: Array, finite: Array) -> Factor:
    """The exponential average with one more factor; unchanged where the new one has no weight.

    It is bias-corrected: the average is divided by the sum of the weights so far, kept as its weight.
    Correcting at reading time instead would store every factor twice.
    """
    take = (new.weight > 0) & finite
    share = jnp.where(take, 1 - decay, 0).astype(average.weight.dtype)
    weight = average.weight + share * (1 - average.weight)
    step = share / jnp.where(weight > 0, weight, 1)

    def mix(old: Array, fresh: Array) -> Array:
        # `where`, because a factor that is not taken may hold NaN.
        return jnp.where(take, old + step.astype(old.dtype) * (fresh.astype(old.dtype) - old), old)

    mixed: Any = jax.tree.map(mix, average, new)
    return mixed._replace(weight=weight)


def path_name(path: tuple[Any, ...]) -> str:
    """The path of a leaf, joined by "/", without the `value` of a variable."""
    keys = (key for key in path if key != jax.tree_util.GetAttrKey("value"))
    return jax.tree_util.keystr(tuple(keys), simple=True, separator="/")


def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """All arrays of a tree by path, without those that a mask hides."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf)
    return {path_name(path): leaf for path, leaf in leaves}


@dataclasses.dataclass(frozen=True)
class LayerBlock:
    """The parameters of one layer as a (rows, columns) matrix, or a stack of such matrices.

    The rows of a dense layer are its kernel's, then its bias; of an embedding, one for each symbol; of a
    normalisation, its gains and its biases, either of which may be missing.
    """

    name: str  # path of the layer in the model, joined by "/"
    leaves: tuple[str, ...]  # paths of its parameters, in the order of their rows
    shapes: tuple[Shape, ...]  # of the parameters
    columns: int  # width of the matrix
    stack: Shape = ()  # leading axes of all parameters, over which equal layers are scanned
    factor: Any = KroneckerFactor  # the type of its curvature

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

    @property
    def factor_shapes(self) -> tuple[Shape, ...]:
        """The shapes of the arrays of one matrix's factor."""
        if self.factor is DiagonalFactor:
            return ((self.rows, self.columns),)
        inputs = (self.rows,) if self.factor is EmbeddingFactor else (self.rows, self.rows)
        return inputs, (self.columns, self.columns)

    def no_factor(self, dtype: jnp.dtype, *lead: int) -> Any:
        """A factor of zeros, of weight zero, with these leading axes."""
        arrays = (jnp.zeros((*lead, *shape), dtype) for shape in self.factor_shapes)
        return self.factor(*arrays, jnp.zeros((), dtype))

    def matrix(self, leaves: Mapping[str, Array]) -> Array:
        """The parameters as one array (count, rows, columns)."""
        parts = [leaves[leaf].reshape(self.count, -1, self.columns) for leaf in self.leaves]
        return jnp.concatenate(parts, axis=1)

    def split(self, matrix: Array) -> dict[str, Array]:
        """The inverse of `matrix`."""
        parts = jnp.split(matrix, list(itertools.accumulate(self.heights[:-1])), axis=1)
        each = zip(self.leaves, self.shapes, parts, strict=True)
        return {leaf: part.reshape(shape) for leaf, shape, part in each}


Blocks = tuple[LayerBlock, ...]
Groups = dict[str, Blocks]  # layers of one kind and shape, so that each operation runs once for all
Matrices = dict[str, Array]  # by group, (L, rows, columns)


def groups_of(tree: Any, blocks: Blocks) -> Groups:
    """The groups of parameters or gradients by kind and shape; a mask may hide whole blocks.

    Raises a ValueError if a parameter belongs to no block, or a block's parameter is missing or of
    another shape.
    """
    shapes = {path: tuple(jnp.shape(leaf)) for path, leaf in flatten(tree).items()}
    masked = flatten(tree, lambda node: isinstance(node, optax.MaskedNode)).keys() - shapes.keys()
    found = tuple(block for block in blocks if not masked >= set(block.leaves))
    if not found or not shapes:
        raise ValueError(
            "A second-order method needs a layer with curvature factors. Got parameters "
            f"{', '.join(shapes) or 'none'}. See mj.optim.find_blocks."
        )
    groups: Groups = {}
    for block in found:
        for leaf, shape in zip(block.leaves, block.shapes, strict=True):
            if leaf in masked:
                raise ValueError(
                    f"The curvature of layer {block.name!r} is that of all its parameters, "
                    f"{', '.join(block.leaves)}, and a mask hides {leaf!r}. Mask whole layers only."
                )
            if shapes.pop(leaf, None) != shape:
                raise ValueError(
                    f"Layer {block.name!r} needs its parameter {leaf!r} of shape {shape}. Give blocks="
                    "mj.optim.find_blocks(model) of the trained model."
                )
        kind = block.factor.__name__.removesuffix("Factor").lower()
        key = f"{kind}_{block.rows}x{block.columns}"
        groups[key] = (*groups.get(key, ()), block)
    for path in shapes:
        raise ValueError(
            f"Parameter {path!r} belongs to no layer with curvature factors. Leave it to another "
            "optimiser: mj.optim.for_model(model, ...) gives it to Adam, by optax.partition."
        )
    return groups


def stack(groups: Groups, tree: Any) -> Matrices:
    """The parameters of every group as one array (L, rows, columns)."""
    leaves = flatten(tree)
    parts = {key: [block.matrix(leaves) for block in blocks] for key, blocks in groups.items()}
    return {key: jnp.concatenate(each) for key, each in parts.items()}


def unstack(groups: Groups, matrices: Matrices, like: Any) -> Any:
    """The inverse of `stack`: a tree like the given one."""
    leaves: dict[str, Array] = {}
    for key, blocks in groups.items():
        ends = itertools.accumulate(block.count for block in blocks[:-1])
        for block, part in zip(blocks, jnp.split(matrices[key], list(ends)), strict=True):
            leaves |= block.split(part)
    return jax.tree_util.tree_map_with_path(
        lambda path, old: leaves[path_name(path)].astype(old.dtype), like
    )


def no_factors(groups: Groups, dtype: jnp.dtype) -> Factors:
    """Factors of zeros, of weight zero, of every group."""
    counts = {key: sum(block.count for block in blocks) for key, blocks in groups.items()}
    return {key: blocks[0].no_factor(dtype, counts[key]) for key, blocks in groups.items()}


def stack_factors(groups: Groups, factors: Any) -> tuple[Factors, Array]:
    """The factors of every group, stacked, and whether all are finite.

    Raises unless every layer has a factor that fits.
    """
    if not isinstance(factors, Mapping):
        raise TypeError(
            "A second-order method needs update(grads, state, params, factors=factors) at every step, "
            "with those of mj.optim.value_grad_and_factors. For steps without new curvature give it "
            f"when=mj.optim.curvature_due(state). Got {type(factors).__name__}."
        )
    stacked: Factors = {}
    finite = []
    for key, blocks in groups.items():
        each = [_checked(block, factors.get(block.name)) for block in blocks]
        # Asked before stacking, which avoids storing the stacked array.
        finite += [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(each)]
        weight = jnp.min(jnp.stack([factor.weight for factor in each]))
        arrays = map(jnp.concatenate, zip(*(factor[:-1] for factor in each), strict=True))
        stacked[key] = blocks[0].factor(*arrays, weight)
    return stacked, jnp.all(jnp.stack(finite))


def _checked(block: LayerBlock, factor: Any) -> Factor:
    """The factor, if it fits the layer; raises otherwise."""
    shapes = [(block.count, *shape) for shape in block.factor_shapes]
    if not isinstance(factor, block.factor) or [x.shape for x in factor[:-1]] != shapes:
        raise ValueError(
            f"Layer {block.name!r} ({', '.join(block.leaves)}) needs a {block.factor.__name__} of "
            f"arrays {shapes}. Got {jax.tree.map(jnp.shape, factor)}. Take the factors from "
            "mj.optim.value_grad_and_factors of the trained model and blocks=mj.optim.find_blocks of "
            "it, or leave its parameters to another optimiser: mj.optim.for_model, or optax.partition."
        )
    return factor
