"""Pallas kernels with one program per head and block of rows, on trees of arrays."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from moment_jax.xla import inside_a_kernel

MEMORY = 110 * 2**20
"""Bytes of a TPU's vector memory (128 MiB) that a kernel may use by plan."""
_LIMIT = 120 * 2**20


@dataclass(frozen=True)
class Grid:
    """The programs of a kernel, which run one after another: each head's blocks of rows in turn."""

    heads: int
    blocks: int
    rows: int  # of a block
    interpret: bool = False  # by XLA, for tests

    def by_rows(self, tree: Any) -> Any:
        """Block specs that give a program its own rows of arrays (H, T, ...)."""

        def block(array: Any) -> pl.BlockSpec:
            return pl.BlockSpec((None, self.rows, array.shape[2]), lambda h, i: (h, i, 0))

        return jax.tree.map(block, tree)

    def by_heads(self, tree: Any) -> Any:
        """Block specs that give a program its head's part of (H, ...) arrays, or a whole (S, D) one."""

        def block(array: Any) -> pl.BlockSpec:
            # Large and seldom replaced, so no second buffer.
            once = pl.Buffered(1)
            if array.ndim == 2:
                return pl.BlockSpec(array.shape, lambda h, i: (0, 0), pipeline_mode=once)
            return pl.BlockSpec(
                (None, *array.shape[1:]), lambda h, i: (h, 0, 0), pipeline_mode=once
            )

        return jax.tree.map(block, tree)

    def own_rows(self) -> Any:
        """The slice of the program's rows in an array (T, ...)."""
        if self.blocks == 1:
            return slice(None)
        return pl.ds(pl.multiple_of(self.first_row(), self.rows), self.rows)

    def first_row(self) -> Any:
        """Index of the program's first row."""
        return pl.program_id(1) * self.rows

    def add(self, ref: Any, part: Array, of_all_heads: bool = False) -> None:
        """Accumulate over the programs of a head, or of all heads."""
        first = pl.program_id(1) == 0
        if of_all_heads:
            first &= pl.program_id(0) == 0

        @pl.when(first)
        def _() -> None:
            ref[...] = jnp.zeros_like(part)

        ref[...] += part

    def call(
        self,
        body: Callable[[Any, Any], None],
        ins: Any,
        in_blocks: Any,
        outs: Any,
        out_blocks: Any,
        flops: int,
    ) -> Any:
        """The arrays that `body` fills.

        Args:
          body: (input references, output references), trees like `ins` and `outs`.
          ins: a tree of arrays.
          in_blocks: their block specs, from `by_rows` or `by_heads`.
          outs: arrays with the shapes and types of the results.
          out_blocks: their block specs; blocks that several programs fill start uninitialised.
          flops: of all programs, for the compiler's schedule.
        """
        arrays, structure = jax.tree.flatten(ins)
        out_arrays, out_structure = jax.tree.flatten(outs)
        count = len(arrays)

        def kernel(*refs: Any) -> None:
            with inside_a_kernel():
                body(
                    jax.tree.unflatten(structure, refs[:count]),
                    jax.tree.unflatten(out_structure, refs[count:]),
                )

        moved = sum(x.size * x.dtype.itemsize for x in [*arrays, *out_arrays])
        result = pl.pallas_call(
            kernel,
            grid=(self.heads, self.blocks),
            in_specs=jax.tree.leaves(in_blocks),
            out_specs=jax.tree.leaves(out_blocks),
            out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in out_arrays],
            interpret=self.interpret,
            compiler_params=None
            if self.interpret
            else pltpu.CompilerParams(vmem_limit_bytes=_LIMIT),
            cost_estimate=pl.CostEstimate(flops=flops, transcendentals=0, bytes_accessed=moved),
        )(*arrays)
        return jax.tree.unflatten(out_structure, result)


def padded_size(rows: int, columns: int) -> int:
    """The size of an array on a TPU, in tiles of 8 x 128."""
    return -(-rows // 8) * 8 * -(-columns // 128) * 128


def lengthened(tree: Any, missing: int, axis: int) -> Any:
    """Append zeros along an axis."""

    def padded(array: Array) -> Array:
        return jnp.pad(array, [(0, missing * (i == axis)) for i in range(array.ndim)])

    return jax.tree.map(padded, tree) if missing else tree
