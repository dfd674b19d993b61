"""Kernels of Pallas with a program for every head and every block of rows, on trees of arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from moment_jax.xla import inside_a_kernel

Array = jax.Array

MEMORY = 110 * 2**20
"""Bytes of a TPU's vector memory, of 128 MiB, that a kernel may be planned to take."""
_LIMIT = 120 * 2**20


@dataclass(frozen=True)
class Grid:
    """The programs of a kernel; they run one after another, a head's blocks of rows in turn."""

    heads: int
    blocks: int
    rows: int  # of a block
    interpret: bool = False  # by XLA, for tests

    def by_rows(self, tree: Any) -> Any:
        """A program gets its own rows of arrays (H, T, ...)."""

        def block(array: Any) -> pl.BlockSpec:
            return pl.BlockSpec((None, self.rows, array.shape[2]), lambda h, i: (h, i, 0))

        return jax.tree.map(block, tree)

    def by_heads(self, tree: Any) -> Any:
        """A program gets all of its head's part of arrays (H, ...), and all of an array (S, D)."""

        def block(array: Any) -> pl.BlockSpec:
            # Large, and seldom exchanged: no second buffer to load the next head's into.
            once = pl.Buffered(1)
            if array.ndim == 2:
                return pl.BlockSpec(array.shape, lambda h, i: (0, 0), pipeline_mode=once)
            return pl.BlockSpec(
                (None, *array.shape[1:]), lambda h, i: (h, 0, 0), pipeline_mode=once
            )

        return jax.tree.map(block, tree)

    def own_rows(self) -> Any:
        """Where the program's rows stand in an array (T, ...) of which it has all."""
        if self.blocks == 1:
            return slice(None)
        return pl.ds(pl.multiple_of(self.first_row(), self.rows), self.rows)

    def first_row(self) -> Any:
        """The place of the first of them."""
        return pl.program_id(1) * self.rows

    def add(self, ref: Any, part: Array, of_all_heads: bool = False) -> None:
        """To what the head's programs before this one have left there, or those of all heads."""
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
          body: (references to what comes, references to what it fills), trees as `ins` and `outs`.
          ins: a tree of arrays.
          in_blocks: what a program gets of them, by `by_rows` or `by_heads`.
          outs: arrays of the shapes and types of the results.
          out_blocks: what a program fills of them; of what several fill nothing is there at first.
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
    """Numbers of an array as a TPU keeps it: in tiles of 8 x 128."""
    return -(-rows // 8) * 8 * -(-columns // 128) * 128


def lengthened(tree: Any, missing: int, axis: int) -> Any:
    """With zeros at the end of an axis."""

    def padded(array: Array) -> Array:
        return jnp.pad(array, [(0, missing * (i == axis)) for i in range(array.ndim)])

    return jax.tree.map(padded, tree) if missing else tree
