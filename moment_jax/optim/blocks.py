"""Layers as matrices of parameters; those of one kind and shape are stacked."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from moment_jax.optim import curvature
from moment_jax.optim.curvature import DiagonalFactor, EmbeddingFactor, KroneckerFactor

Shape = tuple[int, ...]
Steps = tuple[tuple[Shape, Shape], ...]  # each the shape of a reshape, then a permutation

LEAST = 64  # a shorter side counts as one of this length
# Of sides, up to which a layer is whole: those of Transformers take 6 % more steps cut.
MOST_RATIO = 4.5


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

    Rows are those of a dense layer's kernel, then its bias; the symbols of an embedding; one for a gain
    or another vector. A dense layer with a side much longer than the other is cut into parts, about
    square and padded by zeros, which count as layers of their own: its factors would be many times as
    large as the layer.
    """

    name: str  # path of its first parameter
    leaves: tuple[str, ...]  # paths of its parameters, in the order of their rows
    steps: tuple[Steps, ...]  # of each, reshapes and permutations to (*stack, *rows, *columns)
    columns: int  # width of the matrix
    stack: Shape = ()  # leading axes, of equal layers in a scan or a batch of products
    factor: Any = KroneckerFactor  # the type of its curvature

    @property
    def rows(self) -> int:
        """Height of the matrix."""
        # Their first steps have the shapes of the parameters.
        size = sum(math.prod(steps[0][0]) for steps in self.steps)
        return size // (self.columns * math.prod(self.stack))

    @property
    def parts(self) -> tuple[int, int]:
        """How many parts stand below each other and side by side; one of them is 1."""

        def number(side: int, other: int) -> int:
            ratio = side / max(other, LEAST)
            return round(ratio) if ratio > MOST_RATIO and self.factor is KroneckerFactor else 1

        return number(self.rows, self.columns), number(self.columns, self.rows)

    @property
    def part(self) -> tuple[int, int]:
        """Height and width of a part."""
        return -(-self.rows // self.parts[0]), -(-self.columns // self.parts[1])

    @property
    def lead(self) -> Shape:
        """Leading axes of what is kept of all parts."""
        return (*self.stack, math.prod(self.parts)) if self.parts != (1, 1) else self.stack

    @property
    def count(self) -> int:
        """Number of parts in the stack."""
        return math.prod(self.lead)

    @property
    def factor_shapes(self) -> tuple[Shape, ...]:
        """The shapes of the arrays of one part's factor."""
        height, width = self.part
        if self.factor is DiagonalFactor:
            return ((height, width),)
        inputs = (height,) if self.factor is EmbeddingFactor else (height, height)
        return inputs, (width, width)

    def no_factor(self, dtype: jnp.dtype, *lead: int, counts: Shape = ()) -> Any:
        """A factor of zeros with these leading axes, and weights of zero."""
        arrays = (jnp.zeros((*lead, *shape), dtype) for shape in self.factor_shapes)
        return self.factor(*arrays, jnp.zeros(counts, dtype))

    def matrix(self, leaves: Mapping[str, Array]) -> Array:
        """The parameters as one array (count, *part)."""
        layers, (down, across), (height, width) = math.prod(self.stack), self.parts, self.part
        each = []
        for leaf, steps in zip(self.leaves, self.steps, strict=True):
            moved = leaves[leaf]
            for shape, order in steps:
                moved = moved.reshape(shape).transpose(order)
            each.append(moved.reshape(layers, -1, self.columns))
        more = (0, down * height - self.rows), (0, across * width - self.columns)
        whole = jnp.pad(jnp.concatenate(each, axis=1), ((0, 0), *more))
        return whole.reshape(-1, height, across, width).swapaxes(1, 2).reshape(-1, height, width)


Blocks = tuple[LayerBlock, ...]
Groups = dict[str, Blocks]
Matrices = dict[str, Array]  # by group, (L, rows, columns)


def groups_of(tree: Any, blocks: Blocks) -> Groups:
    """The groups of parameters or gradients by kind and shape; a mask may hide whole blocks.

    ValueError if a parameter belongs to no block, or a block's is missing or of another shape.
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
        for leaf, ((shape, _), *_) in zip(block.leaves, block.steps, strict=True):
            if leaf in masked:
                raise ValueError(
                    f"The curvature of layer {block.name!r} is that of all its parameters, "
                    f"{', '.join(block.leaves)}, and a mask hides {leaf!r}. Mask whole layers only."
                )
            if shapes.pop(leaf, None) != shape:
                raise ValueError(
                    f"Layer {block.name!r} needs its parameter {leaf!r} of shape {shape}. Give blocks="
                    "mj.optim.find_blocks(loss, model, *batch) of the trained model."
                )
        kind = block.factor.__name__.removesuffix("Factor").lower()
        key = f"{kind}_{block.part[0]}x{block.part[1]}"
        groups[key] = (*groups.get(key, ()), block)
    for path in shapes:
        raise ValueError(
            f"Parameter {path!r} belongs to no layer with curvature factors. Leave it to another "
            "optimiser: mj.optim.for_model gives it to Adam, by optax.partition."
        )
    return groups


def stack(groups: Groups, tree: Any) -> Matrices:
    """The parameters of every group as one array (L, rows, columns)."""
    leaves = flatten(tree)
    parts = {key: [block.matrix(leaves) for block in blocks] for key, blocks in groups.items()}
    return {key: jnp.concatenate(each) for key, each in parts.items()}


def unstack(groups: Groups, matrices: Matrices, like: Any) -> Any:
    """The inverse of `stack`, which is its transpose: a tree like the given one."""
    dtype = jnp.result_type(*matrices.values())
    wide = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), like)
    matrices = {key: x.astype(dtype) for key, x in matrices.items()}
    (tree,) = jax.linear_transpose(partial(stack, groups), wide)(matrices)
    return jax.tree.map(lambda new, old: new.astype(old.dtype), tree, like)


def stack_factors(groups: Groups, factors: Any) -> tuple[curvature.Factors, Array]:
    """The factors of every group, stacked, and whether all are finite; raises unless each fits."""
    if not isinstance(factors, Mapping):
        raise TypeError(
            "A second-order method needs update(grads, state, params, factors=factors) at every step, "
            "with those of mj.optim.value_grad_and_factors. For steps without new curvature give it "
            f"when=mj.optim.curvature_due(state). Got {type(factors).__name__}."
        )
    stacked: curvature.Factors = {}
    finite = []
    for key, blocks in groups.items():
        each: list[Any] = [factors.get(block.name) for block in blocks]
        for block, factor in zip(blocks, each, strict=True):
            shapes = [(block.count, *shape) for shape in block.factor_shapes]
            if not isinstance(factor, block.factor) or [x.shape for x in factor[:-1]] != shapes:
                raise ValueError(
                    f"Layer {block.name!r} ({', '.join(block.leaves)}) needs a "
                    f"{block.factor.__name__} of arrays {shapes}. Got {jax.tree.map(jnp.shape, factor)}."
                    " Take factors from mj.optim.value_grad_and_factors, blocks from "
                    "mj.optim.find_blocks; or leave the layer to another optimiser: optax.partition."
                )
        # Sums are faster than a question for each number; of arrays that need not be stored stacked.
        finite += [jnp.isfinite(jnp.sum(leaf)) for leaf in jax.tree.leaves(each)]
        weight = jnp.min(jnp.stack([factor.weight for factor in each]))
        arrays = map(jnp.concatenate, zip(*(factor[:-1] for factor in each), strict=True))
        stacked[key] = blocks[0].factor(*arrays, weight)
    return stacked, jnp.all(jnp.stack(finite))
