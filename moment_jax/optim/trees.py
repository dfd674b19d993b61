"""Parameter trees as flat dictionaries of arrays by path."""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array


def path_name(path: tuple[Any, ...]) -> str:
    """The path of a leaf, joined by "/", without the `value` of a variable."""
    keys = (key for key in path if key != jax.tree_util.GetAttrKey("value"))
    return jax.tree_util.keystr(tuple(keys), simple=True, separator="/")


def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """All arrays of a tree by path, without those that a mask hides."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf)
    return {path_name(path): leaf for path, leaf in leaves}


def unflatten(tree: Any, leaves: dict[str, Array]) -> Any:
    """A tree like `tree` with these arrays."""
    return jax.tree_util.tree_map_with_path(
        lambda path, old: leaves[path_name(path)].astype(old.dtype), tree
    )
