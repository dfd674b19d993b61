"""Sharding of a scanned network: the rules of `mj.parallel`, below an axis of blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import moment_jax as mj

S = TypeVar("S", bound=mj.Covariance)

STACKED = "blocks"  # the name of the module whose arrays have a leading axis
constrained = jax.lax.with_sharding_constraint
map_with_path = jax.tree_util.tree_map_with_path


class Layout:
    """Shardings on one mesh."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    @classmethod
    def one_device(cls) -> Layout:
        """All on the first device."""
        return cls(mj.parallel.make_mesh(1, 1, devices=jax.devices()[:1]))

    @property
    def rows(self) -> int:
        """Rows of devices, along which batches are split."""
        return int(self.mesh.shape["data"])

    def sharding(self, *axes: Any) -> NamedSharding:
        """A sharding on the mesh."""
        return NamedSharding(self.mesh, PartitionSpec(*axes))

    def axes(self, path: Any, shape: tuple[int, ...], *, fsdp: bool = True) -> tuple[Any, ...]:
        """Mesh axes of one parameter; `path` is that of a pytree."""
        key = jax.tree_util
        names = [
            part.key if isinstance(part, key.DictKey) else part.idx
            for part in path
            if isinstance(part, key.DictKey | key.SequenceKey)  # no fields of Python objects
        ]
        lead, sizes = (None,) * (STACKED in names), dict(self.mesh.shape)
        return *lead, *mj.parallel.partition_spec(names, shape[len(lead) :], sizes, fsdp=fsdp)

    def shapes(self, state: Any) -> Any:
        """A state of shapes, with the sharding of every one."""

        def placed(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
            place = self.sharding(*self.axes(path, leaf.shape))
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

        return map_with_path(placed, state)

    def for_rows(self, block: Any) -> Any:
        """One block's parameters as every row of devices uses them, (rows, ...).

        FSDP's gather of one layer, written as a copy for each row. So the gradient has one part for each
        row too: rows add up their examples by themselves, and one reduce-scatter joins the sums.
        """

        def copies(path: Any, leaf: Array) -> Array:
            # So the gradient is sharded as the parameter is.
            leaf = constrained(leaf, self.sharding(*self.axes(path, leaf.shape)))
            whole = jnp.broadcast_to(leaf[None], (self.rows, *leaf.shape))
            place = self.sharding("data", *self.axes(path, leaf.shape, fsdp=False))
            return constrained(whole, place)

        return map_with_path(copies, block)

    def in_chunks(self, fn: Callable[..., Any], weights: Any, batch: Any, count: int) -> Any:
        """`fn` of one row's weights and of its examples, by `count` parts of a batch in turn.

        `weights` are from `for_rows`, `batch` is a pytree of arrays (N, ...), split by rows; N is a
        multiple of rows times parts. The parts are recomputed in the backward pass.
        """

        def split(leaf: Array) -> Array:
            return leaf.reshape(self.rows, count, -1, *leaf.shape[1:]).swapaxes(0, 1)

        def join(leaf: Array) -> Array:
            return leaf.swapaxes(0, 1).reshape(-1, *leaf.shape[3:])

        def part(examples: Any) -> Any:
            return jax.vmap(fn)(weights, examples)

        part = jax.checkpoint(part) if count > 1 else part
        return jax.tree.map(join, jax.lax.map(part, jax.tree.map(split, batch)))

    def moments(self, mean: Array, cov: S) -> tuple[Array, S]:
        """Moments between blocks."""
        return mj.parallel.constrain(mean, cov, self.mesh)

    def activations(self, x: Array) -> Array:
        """A plain network's activations between blocks, (N, T, D), as the means lie."""
        return constrained(x, self.sharding("data", None, "model"))
