"""Parameter trees as flat dictionaries of arrays by path."""

from typing import Any

import jax
import optax
from jax import Array


def path_name(path: tuple[Any, ...]) -> str:
    """The path of a leaf, joined by "/", without the `value` of a variable."""
    keys = (key for key in path if key != jax.tree_util.GetAttrKey("value"))
    return jax.tree_util.keystr(tuple(keys), simple=True, separator="/")


def flatten(tree: Any) -> dict[str, Array]:
    """All arrays of a tree by path, without those that a mask hides."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {path_name(path): leaf for path, leaf in leaves}


def unflatten(tree: Any, leaves: dict[str, Array]) -> Any:
    """A tree like `tree` with these arrays."""
    return jax.tree_util.tree_map_with_path(
        lambda path, old: leaves[path_name(path)].astype(old.dtype), tree
    )


def has_masks(tree: Any) -> bool:
    """Whether a mask hides a part of the tree, as `optax.masked` and `optax.partition` do."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, optax.MaskedNode))
    return any(isinstance(node, optax.MaskedNode) for node in nodes)
