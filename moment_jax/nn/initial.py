"""The first beliefs of a `mj.Bayesian`: about arrays of a network, or from posteriors."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from moment_jax.nn.belief import FAMILIES, Belief, matrix_shape
from moment_jax.posterior import Factorized, FullNormal, Point, Posterior

Path = tuple[Any, ...]
Family = type[Posterior] | Callable[[Path], type[Posterior]]


def begun(
    arrays: dict[Path, Array], family: Family, relative_scale: float, prior: dict[str, Any]
) -> dict[Path, Belief]:
    """The first belief about each array, its mean; `Factorized` of vectors."""
    if not 0 < relative_scale < np.inf:
        raise ValueError(f"`mj.Bayesian` needs relative_scale > 0. Got {relative_scale}.")
    found = {}
    for path, value in arrays.items():
        kind: Any = family if isinstance(family, type) else family(path)
        if kind not in FAMILIES:
            Belief(value, family=kind)  # raises
        shape = tuple(value.shape)
        matrix: tuple[int, ...] = matrix_shape(str(path[-1]), shape)
        if kind in (Factorized, Point, FullNormal):
            matrix = shape
        elif matrix[1] == 1:
            if not isinstance(family, type):
                raise ValueError(
                    f"`family` needs to fit every array. Got {kind.__name__}, a family of "
                    f"matrices, for the vector {joined(path)}. Return Factorized for it."
                )
            kind, matrix = Factorized, shape
        scale = relative_scale * jnp.maximum(jnp.sqrt(jnp.mean(jnp.square(value))), 0.1)
        found[path] = Belief(value.reshape(matrix), family=kind, scale=scale, shape=shape, **prior)
    return found


def placed(beliefs: Any, known: dict[Path, Any], prior: dict[str, Any]) -> dict[Path, Any]:
    """Beliefs and arrays by path, of a tree of posteriors in the places and shapes of parameters."""
    tree = nnx.to_pure_dict(beliefs) if isinstance(beliefs, nnx.State) else beliefs
    found = nnx.traversals.flatten_mapping(tree) if isinstance(tree, dict) else {(): tree}
    found = {path: x for path, x in found.items() if x is not None}
    for path, x in found.items():
        mean = x.mean if isinstance(x, Posterior) else x
        wanted = tuple(known[path][...].shape) if path in known else None
        if wanted is None or getattr(mean, "shape", None) != wanted:
            places = ", ".join(f"{joined(p)} {tuple(v[...].shape)}" for p, v in known.items())
            raise ValueError(
                "`mj.Bayesian` needs beliefs in the places and shapes of the network's parameters: "
                f"{places}. Got {type(x).__name__} of shape {getattr(mean, 'shape', None)} at "
                f"'{joined(path)}'. Start from nnx.to_pure_dict(nnx.state(network, nnx.Param))."
            )
    if not any(isinstance(x, Posterior) for x in found.values()):
        raise ValueError("`mj.Bayesian` needs a belief about one array at least. Got none.")
    for path, x in found.items():
        try:
            of_x = Belief.of(x, **prior) if isinstance(x, Posterior) else jnp.asarray(x)
        except ValueError as error:
            raise ValueError(f"`mj.Bayesian`: {error} It is at {joined(path)}.") from error
        found[path] = of_x
    return found


def joined(path: Path) -> str:
    """For messages."""
    return "/".join(map(str, path))
