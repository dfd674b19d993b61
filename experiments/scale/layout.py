"""Where the arrays of a scanned network lie: the rules of `mj.parallel`, below a leading axis of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import moment_jax as mj

Array = jax.Array
S = TypeVar("S", bound=mj.Covariance)

STACKED = "blocks"  # the name of the module whose arrays have a leading axis


class Layout:
    """Layouts on one mesh; without a mesh nothing is said of any array.

    Args:
      mesh: from `mj.parallel.make_mesh`, or one of devices that are not here.
    """

    def __init__(self, mesh: Mesh | None) -> None:
        self.mesh = mesh

    def place(self, path: Sequence[Any], shape: tuple[int, ...], fsdp: bool = True) -> Any:
        """The sharding of one parameter."""
        assert self.mesh is not None
        sizes = dict(self.mesh.shape)
        if STACKED in path:
            spec = mj.parallel.partition_spec(path, shape[1:], sizes, fsdp=fsdp)
            return NamedSharding(self.mesh, PartitionSpec(None, *spec))
        return NamedSharding(
            self.mesh, mj.parallel.partition_spec(path, shape, sizes, fsdp=fsdp)
        )

    def shapes(self, state: Any) -> Any:
        """A state of shapes, with the sharding of every one."""

        def placed(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=self.place(_names(path), leaf.shape)
            )

        return jax.tree_util.tree_map_with_path(placed, state)

    def gathered(self, block: Any) -> Any:
        """One block's parameters, no longer split over `data`: FSDP's gather, where they are used."""
        if self.mesh is None:
            return block

        def whole(path: Any, leaf: Array) -> Array:
            place = self.place(_names(path), leaf.shape, fsdp=False)
            return jax.lax.with_sharding_constraint(leaf, place)

        return jax.tree_util.tree_map_with_path(whole, block)

    def moments(self, mean: Array, cov: S) -> tuple[Array, S]:
        """Moments between blocks."""
        if self.mesh is None:
            return mean, cov
        return mj.parallel.constrain(mean, cov, self.mesh)

    def activations(self, x: Array) -> Array:
        """A plain network's activations between blocks, (N, T, D), as the means lie."""
        if self.mesh is None:
            return x
        place = NamedSharding(self.mesh, PartitionSpec("data", None, "model"))
        return jax.lax.with_sharding_constraint(x, place)


def _names(path: Any) -> list[Any]:
    """Names and indices on the way to a leaf of a state."""
    return [getattr(key, "key", getattr(key, "idx", getattr(key, "name", None))) for key in path]
