"""A function of one head as a Pallas kernel that keeps the head's token-by-token arrays on chip.

One program per head. The backward kernel recomputes the function and applies `jax.vjp` on chip. For
TPUs only, see `diagonal_kernel`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.layers.attention.row_kernel import Grid
from moment_jax.xla import kernel_path, split_by_tokens

_NUMBERS = 2**16
"""Most entries of queries by keys: Mosaic unrolls every operation, register by register."""


class OfHeads(NamedTuple):
    """Trees of arrays with at most two axes beside H."""

    each: Any  # leading axis H; without it in a function of one head
    common: Any  # arguments shared by all heads; of results, what heads add to a sum, or the sum


class HeadKernel(NamedTuple):
    """A function of one head, and where it runs."""

    run: Callable[[OfHeads], OfHeads]  # closes over no array
    grid: Grid
    flops: int  # of all programs, for the compiler's schedule

    @classmethod
    def of(
        cls, run: Callable[[OfHeads], OfHeads], shape: tuple[int, int, int], dtype: Any, flops: int
    ) -> HeadKernel | None:
        """The kernel for heads of a shape (H, T, S); None to use plain JAX."""
        path, (num_heads, num_queries, num_keys) = kernel_path(), shape
        if path == "xla" or split_by_tokens() or num_queries * num_keys > _NUMBERS:
            return None
        if path == "tpu" and dtype != jnp.float32:
            return None
        return cls(run, Grid(num_heads, 1, num_queries, path == "interpret"), flops)

    def __call__(self, heads: OfHeads) -> OfHeads:
        """All heads' results. Only first-order reverse-mode derivatives."""
        # An array that occurs twice is passed once.
        arrays, structure = jax.tree.flatten(heads.common)
        once = list({id(array): array for array in arrays}.values())
        places = [[other is array for other in once].index(True) for array in arrays]

        def run(one: OfHeads) -> OfHeads:
            common = jax.tree.unflatten(structure, [one.common[place] for place in places])
            return self.run(one._replace(common=common))

        return _on_chip(self._replace(run=run), heads._replace(common=once))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _on_chip(kernel: HeadKernel, heads: OfHeads) -> OfHeads:
    each, common = jax.eval_shape(kernel.run, _one_head(heads))

    def of_all(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((kernel.grid.heads, *x.shape), x.dtype)

    return _call(kernel, kernel.run, heads, OfHeads(jax.tree.map(of_all, each), common))


def _forward(kernel: HeadKernel, heads: OfHeads) -> tuple[OfHeads, OfHeads]:
    return _on_chip(kernel, heads), heads


def _backward(kernel: HeadKernel, heads: OfHeads, slopes: OfHeads) -> tuple[OfHeads]:
    def run(given: OfHeads) -> OfHeads:
        one, slope = (OfHeads(*parts) for parts in zip(*given, strict=True))
        _, transposed = jax.vjp(lambda floats: kernel.run(_joined(floats, one)), _floats(one))
        by_one: OfHeads = transposed(slope)[0]
        return by_one

    given = OfHeads((heads.each, slopes.each), (heads.common, slopes.common))
    kernel = kernel._replace(flops=3 * kernel.flops)
    return (_call(kernel, run, given, _floats(heads)),)


_on_chip.defvjp(_forward, _backward)


def _call(
    kernel: HeadKernel, run: Callable[[OfHeads], OfHeads], given: OfHeads, like: OfHeads
) -> OfHeads:
    """The results of a function, of the shapes of `like`."""
    one = _one_head(given)

    def body(ins: OfHeads, outs: OfHeads) -> None:
        found = run(jax.tree.map(_read, ins, one))
        for ref, part in zip(*map(jax.tree.leaves, (outs.each, found.each)), strict=True):
            ref[...] = part.reshape(ref.shape)
        for ref, part in zip(*map(jax.tree.leaves, (outs.common, found.common)), strict=True):
            kernel.grid.add(ref, part.reshape(ref.shape), of_all_heads=True)

    ins, outs = jax.tree.map(_batch_first, _in_rows(given)), jax.eval_shape(_in_rows, like)
    blocks = kernel.grid.by_heads(ins), kernel.grid.by_heads(outs)
    found = kernel.grid.call(body, ins, blocks[0], outs, blocks[1], kernel.flops)
    return jax.tree.map(lambda array, like: array.reshape(like.shape), found, like)


def _one_head(heads: OfHeads) -> OfHeads:
    """The shapes that a program works on."""
    first = jax.eval_shape(lambda each: jax.tree.map(lambda x: x[0], each), heads.each)
    return OfHeads(first, jax.eval_shape(lambda common: common, heads.common))


def _in_rows(heads: OfHeads) -> OfHeads:
    """Arrays of two axes beside H: a vector is a row. Masks become integers."""

    def lifted(array: Array, lead: int) -> Array:
        own = (1, 1, *array.shape[lead:])[-2:]
        array = array.reshape(*array.shape[:lead], *own)
        return array.astype(jnp.int8) if array.dtype == bool else array

    return OfHeads(*(jax.tree.map(partial(lifted, lead=1 - n), heads[n]) for n in (0, 1)))


def _read(ref: Any, like: jax.ShapeDtypeStruct) -> Array:
    array = ref[...].reshape(like.shape)
    return array.astype(jnp.int32) != 0 if like.dtype == bool else array


def _floats(heads: OfHeads) -> OfHeads:
    """The tree without masks."""
    return jax.tree.map(lambda x: None if x.dtype == bool else x, heads)


def _joined(floats: OfHeads, heads: OfHeads) -> OfHeads:
    """The tree with its floats replaced."""
    known = iter(jax.tree.leaves(floats))
    joined: OfHeads = jax.tree.map(lambda x: x if x.dtype == bool else next(known), heads)
    return joined


@jax.custom_batching.custom_vmap
def _batch_first(array: Array) -> Array:
    """Identity. Under `vmap` the batch's axis comes first, since blocks cannot leave out a later one."""
    return array


@_batch_first.def_vmap
def _(_size: int, batched: list[bool], array: Array) -> tuple[Array, bool]:
    return _batch_first(array), batched[0]
