"""Attention for `Diagonal` as a Pallas kernel that keeps all token-by-token arrays on chip.

A program handles a block of one head's queries with all of the head's keys and values. It runs
`diagonal_rows` on these rows; the backward kernel recomputes that and applies `jax.vjp` on chip.
Programs run one after another, so derivatives to which all rows contribute (by keys and values, by the
input's variance) accumulate on chip.

For TPUs only. A GPU has too little on-chip memory for a head's keys beside the rows' arrays, and runs
its programs in parallel (nor can Pallas lower this body for one, jax 0.10.2).
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.layers.attention.diagonal_heads import Heads, mix_by_compiler
from moment_jax.layers.attention.diagonal_rows import Part, Rows, Shared, shared_mean
from moment_jax.layers.attention.mix import mix
from moment_jax.layers.attention.row_kernel import MEMORY, Grid, lengthened, padded_size
from moment_jax.layers.attention.squared_products import products_of_row
from moment_jax.xla import kernel_path, split_by_tokens

_BLOCKS = (256, 128, 64, 32)
"""Rows per program, largest first: every program recomputes the products of keys with keys."""
_NUMBERS = 2**17
"""Most entries of rows by keys: Mosaic unrolls every operation, register by register."""


class Plan(NamedTuple):
    """Static settings of a kernel."""

    order: int
    own: bool  # whether query a comes from token a of the source
    num_keys: int  # later keys are padding, and masked
    grid: Grid
    backward: bool = True  # whether derivatives use a kernel too, else plain JAX


class _Whole(NamedTuple):
    """A head's data, given to each of its programs."""

    key: Part
    value: Part
    shared: Shared | None  # with order 2


class _Query(NamedTuple):
    """A program's rows."""

    part: Part
    noise: Array | None  # in self-attention, (R, 1)
    mask: Array | None  # (R, S)


class _Out(NamedTuple):
    mean: Array  # (H, T, K)
    variance: Array  # (H, T, K)
    own: Any  # weights of the queries' own tokens, (H, 1, S), or None


def find_plan(heads: Heads, order: int) -> Plan | None:
    """The kernel's settings for these heads; None to use plain JAX."""
    path, array = kernel_path(), heads.query.mean
    if path == "xla" or split_by_tokens() or (path == "tpu" and array.dtype != jnp.float32):
        return None
    (h, num_queries, _), num_keys = array.shape, heads.key.mean.shape[1]
    for passes in (2, 1):
        for most in _BLOCKS:
            rows = min(most, num_queries)
            written_out = rows * num_keys <= _NUMBERS or most == _BLOCKS[-1]
            if written_out and _bytes_on_chip(heads, rows, passes) <= MEMORY:
                grid = Grid(h, -(-num_queries // rows), rows, path == "interpret")
                return Plan(order, heads.noise is not None, num_keys, grid, passes == 2)
    return None


def _bytes_on_chip(heads: Heads, rows: int, passes: int) -> int:
    """On-chip bytes of a program, forward (1 pass) or backward (2), fitted to what Mosaic reserves."""
    num_keys, width = heads.key.mean.shape[1:]
    numbers = 50 * padded_size(rows, num_keys) + 20 * padded_size(num_keys, width)
    return passes * numbers * heads.key.mean.dtype.itemsize


def mix_by_kernel(plan: Plan, heads: Heads) -> tuple[Array, Array, Array | None]:
    """Mean and variance (H, T, K), and own weights (H, T) or None, by a kernel.

    Only first-order reverse-mode derivatives; `kernels("xla")` has the others.
    """
    if plan.backward:
        return _padded(plan, heads)
    found: tuple[Array, Array, Array | None] = _forward_alone(plan, heads)
    return found


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _forward_alone(plan: Plan, heads: Heads) -> tuple[Array, Array, Array | None]:
    return _padded(plan, heads)


def _by_compiler(plan: Plan, heads: Heads, slopes: Any) -> tuple[Heads]:
    _, transposed = jax.vjp(lambda heads: mix_by_compiler(heads, None, plan.order), heads)
    by_heads: tuple[Heads] = transposed(slopes)
    return by_heads


_forward_alone.defvjp(lambda plan, heads: (_padded(plan, heads), heads), _by_compiler)


def _padded(plan: Plan, heads: Heads) -> tuple[Array, Array, Array | None]:
    """Run whole blocks: pad with zero rows, which are cut off, and with masked keys."""
    num_queries = heads.query.mean.shape[1]
    missing = plan.grid.blocks * plan.grid.rows - num_queries
    mask = None if heads.mask is None else heads.mask.astype(jnp.int8)
    query = lengthened(_Query(heads.query, heads.noise, mask), missing, 1)
    key, value, shared = heads.key, heads.value, heads.shared
    if plan.own:  # own weights are written by blocks
        query = query._replace(mask=lengthened(query.mask, missing, 2))
        key, value = lengthened((key, value), missing, 1)
        shared = shared._replace(energy=lengthened(shared.energy, missing, 1))
    out = _attend(plan, query, _Whole(key, value, shared if plan.order == 2 else None))
    own_weights = None if out.own is None else out.own[:, 0, :num_queries]
    return out.mean[:, :num_queries], out.variance[:, :num_queries], own_weights


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: Plan, query: _Query, whole: _Whole) -> _Out:
    grid = plan.grid

    def body(ins: tuple[_Query, _Whole], outs: _Out) -> None:
        found = _moments(plan, *_read(ins))
        outs.mean[...], outs.variance[...] = found.mean, found.variance
        if found.own is not None:
            grid.add(outs.own, found.own)

    out = _Out(*query.part, None)
    blocks = grid.by_rows(out)
    if plan.own:
        h, s, _ = whole.key.mean.shape
        own = jax.ShapeDtypeStruct((h, 1, s), whole.key.mean.dtype)
        out, blocks = out._replace(own=own), blocks._replace(own=grid.by_heads(own))
    ins = query, whole
    found: _Out = grid.call(body, ins, _blocks(grid, ins), out, blocks, _flops(plan, query, whole))
    return found


def _forward(plan: Plan, *arrays: Any) -> tuple[_Out, tuple[Any, ...]]:
    return _attend(plan, *arrays), arrays


def _backward(plan: Plan, saved: tuple[_Query, _Whole], slopes: _Out) -> tuple[_Query, _Whole]:
    grid, (query, whole) = plan.grid, saved

    def body(ins: Any, outs: tuple[_Query, _Whole]) -> None:
        (query, whole), slopes = ins
        by_query, by_whole = outs
        mask, rows = _read(query.mask), _read(query._replace(mask=None))
        _, transposed = jax.vjp(
            lambda rows, whole: _moments(plan, rows._replace(mask=mask), whole), rows, _read(whole)
        )
        from_query, from_whole = transposed(_read(slopes))
        for ref, slope in zip(jax.tree.leaves(by_query), jax.tree.leaves(from_query), strict=True):
            ref[...] = slope
        energy = None if by_whole.shared is None else by_whole.shared.energy
        for ref, slope in zip(jax.tree.leaves(by_whole), jax.tree.leaves(from_whole), strict=True):
            grid.add(ref, slope, of_all_heads=ref is energy)

    rows = grid.by_rows(_Out(slopes.mean, slopes.variance, None))
    blocks = _blocks(grid, saved), rows._replace(own=grid.by_heads(slopes.own))
    outs = query._replace(mask=None), whole
    by_query, by_whole = grid.call(
        body, (saved, slopes), blocks, outs, _blocks(grid, outs), 3 * _flops(plan, query, whole)
    )
    return by_query, by_whole


_attend.defvjp(_forward, _backward)


def _blocks(grid: Grid, arrays: tuple[_Query, _Whole]) -> Any:
    query, whole = arrays
    return grid.by_rows(query), grid.by_heads(whole)


def _moments(plan: Plan, query: _Query, whole: _Whole) -> _Out:
    """One program's rows; the function to differentiate."""
    part, noise, mask = query
    shape = part.mean.shape[0], whole.key.mean.shape[0]
    key = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    row = plan.grid.first_row() + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    allowed = None if mask is None else mask.astype(jnp.int32) != 0
    if plan.num_keys < shape[1]:
        exists = key < plan.num_keys
        allowed = exists if allowed is None else allowed & exists
    own, by_own = None, None if noise is None else jnp.where(row == key, noise, 0)
    mean, variance, mixing = mix(Rows(part, whole.key, whole.value, by_own), allowed, plan.order)
    if plan.own:
        own = jnp.sum(jnp.where(row == key, mixing.weights, 0), axis=0, keepdims=True)
    if whole.shared is not None:
        assert mixing.gain is not None
        mean = mean + mixing.gain * shared_mean(part, mixing.weights, whole.shared)
    return _Out(mean, variance, own)


def _read(tree: Any) -> Any:
    return jax.tree.map(lambda ref: ref[...], tree)


def _flops(plan: Plan, query: _Query, whole: _Whole) -> int:
    """Forward operations of all programs' matrix products."""
    (h, t, k), s = query.part.mean.shape, whole.key.mean.shape[1]
    return 2 * h * t * s * (14 * k + products_of_row(plan.grid.rows, s, k))
