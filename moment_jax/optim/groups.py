"""Groups of layers of one kind and shape, stacked so that each operation runs once for all."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array

from moment_jax.optim.factors import Factor, Factors, RowFactor, shapes_of
from moment_jax.optim.layer_blocks import Blocks, LayerBlock, infer_blocks
from moment_jax.optim.trees import flatten, has_masks

Groups = dict[str, Blocks]
Matrices = dict[str, Array]


def group(blocks: Blocks) -> Groups:
    """Blocks by kind and shape, which make up the key."""
    groups: dict[str, list[LayerBlock]] = {}
    for block in blocks:
        kind = type(block).__name__.removesuffix("Block").lower()
        groups.setdefault(f"{kind}_{block.rows}x{block.columns}", []).append(block)
    return {key: tuple(members) for key, members in groups.items()}


def groups_of(tree: Any, blocks: Blocks | None) -> Groups:
    """The groups of parameters or gradients, of which a mask may hide whole blocks.

    Without `blocks` they are inferred from the names in the tree. Raises a ValueError if a parameter
    belongs to no block, or a block's parameter is missing or of another shape.
    """
    shapes = {path: tuple(jnp.shape(leaf)) for path, leaf in flatten(tree).items()}
    found = infer_blocks(shapes) if blocks is None else blocks
    if has_masks(tree):
        found = tuple(block for block in found if not shapes.keys().isdisjoint(block.leaves))
    for block in found:
        for leaf, shape in zip(block.leaves, block.shapes, strict=True):
            if shapes.get(leaf) != shape:
                raise ValueError(
                    f"Layer {block.name!r} needs its parameter {leaf!r} of shape {shape}. Got "
                    f"{shapes.get(leaf, 'none')}. Give blocks=mj.optim.find_blocks(model) of the "
                    "trained model, and mask whole layers only."
                )
    covered = {leaf for block in found for leaf in block.leaves}
    for path in shapes:
        if path not in covered:
            raise ValueError(
                f"Parameter {path!r} belongs to no layer with curvature factors. Leave it to another "
                "optimiser: mj.optim.for_model(model, ...) gives it to Adam, by optax.partition."
            )
    return group(found)


def stack(groups: Groups, tree: Any) -> Matrices:
    """The parameters of every group as one array (L, rows, columns)."""
    leaves = flatten(tree)
    return {
        key: _concatenated([block.matrix(leaves) for block in blocks])
        for key, blocks in groups.items()
    }


def unstack(groups: Groups, matrices: Matrices) -> dict[str, Array]:
    """The inverse of `stack`, by path."""
    leaves: dict[str, Array] = {}
    for key, blocks in groups.items():
        start = 0
        for block in blocks:
            part = matrices[key][start : start + block.count]
            start += block.count
            leaves |= block.split(part)
    return leaves


def stack_factors(groups: Groups, factors: Mapping[str, Factor]) -> Factors:
    """The factors of every group, stacked; raises unless every layer has a factor that fits."""
    if not isinstance(factors, Mapping):
        raise TypeError(
            "`update(..., factors=factors)` needs the factors that mj.optim.value_grad_and_factors "
            f"returns. Got {type(factors).__name__}."
        )
    return {
        key: _stacked(blocks, [_checked(block, factors.get(block.name)) for block in blocks])
        for key, blocks in groups.items()
    }


def _stacked(blocks: Blocks, factors: list[Factor]) -> Factor:
    kinds = {type(factor) for factor in factors}
    if len(kinds) > 1:
        raise ValueError(
            f"Layers {', '.join(block.name for block in blocks)} need factors of one kind. Got "
            f"{', '.join(kind.__name__ for kind in kinds)}."
        )
    lengths = {factor.inputs.shape[1:3] for factor in factors if isinstance(factor, RowFactor)}
    if len(lengths) > 1:
        raise ValueError(
            f"Layers {', '.join(block.name for block in blocks)} are of one shape but see different "
            f"numbers of rows, {sorted(lengths)}. Take Kronecker factors, or mask one of them."
        )
    weight = jnp.min(jnp.stack([factor.weight for factor in factors]))
    arrays = [_concatenated(list(parts)) for parts in zip(*(f[:-1] for f in factors), strict=True)]
    kind: Any = type(factors[0])
    return kind(*arrays, weight)


def _concatenated(parts: list[Array]) -> Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=0)


def _checked(block: LayerBlock, factor: Factor | None) -> Factor:
    """The factor, if it fits the layer; raises otherwise."""
    fix = "Take them from mj.optim.value_grad_and_factors of the trained model"
    if factor is None:
        raise ValueError(
            f"The factors of layer {block.name!r} ({', '.join(block.leaves)}) are missing. {fix}, or "
            "mask its parameters."
        )
    if not isinstance(factor, Factor):
        raise TypeError(
            f"Layer {block.name!r} needs a factor of mj.optim. Got {type(factor).__name__}."
        )
    if isinstance(factor, RowFactor):
        examples = factor.inputs.shape[1:3]
        shapes = {"inputs": (*examples, block.rows), "outputs": (*examples, block.columns)}
    else:
        shapes = shapes_of(type(factor), block)
    for name, one in shapes.items():
        shape, got = (block.count, *one), tuple(getattr(factor, name).shape)
        if got != shape:
            raise ValueError(
                f"The factor {name!r} of layer {block.name!r} needs the shape {shape}. Got {got}. "
                f"{fix}; for layers with names unlike Flax's, pass blocks=mj.optim.find_blocks(model)."
            )
    return factor
