"""Attention for `Diagonal` as a Pallas kernel that keeps all token-by-token arrays on chip.

A program handles a block of one head's queries with all of the head's keys and values. It runs
`diagonal_rows` on these rows; the backward kernel recomputes that and applies `jax.vjp` on chip.
Programs run one after another, so derivatives to which all rows contribute (by keys and values, by the
input's variance) accumulate on chip.

For TPUs only. A GPU has too little on-chip memory for a head's keys beside the rows' arrays, and runs
its programs in parallel (nor can Pallas lower this body for one, jax 0.10.2).
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moment_jax.layers.attention.diagonal_heads import Heads, mix_by_compiler
from moment_jax.layers.attention.diagonal_rows import Own, Part, Rows, Shared, shared_mean
from moment_jax.layers.attention.mix import mix
from moment_jax.layers.attention.row_kernel import MEMORY, Grid, lengthened, padded_size
from moment_jax.layers.attention.squared_products import products_of_row
from moment_jax.xla import kernel_path, split_by_tokens

Array = jax.Array

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
    query_kernel: Array | None  # with order 2, in self-attention


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
                own = heads.query_kernel is not None
                return Plan(order, own, num_keys, grid, passes == 2)
    return None


def _bytes_on_chip(heads: Heads, rows: int, passes: int) -> int:
    """On-chip bytes of a program, forward (1 pass) or backward (2), fitted to what Mosaic reserves."""
    (num_keys, width), features = heads.key.mean.shape[1:], heads.shared.variance.shape[1]
    numbers = (
        50 * padded_size(rows, num_keys)
        + 20 * padded_size(num_keys, width)
        + 2 * padded_size(num_keys, features)
        + 3 * padded_size(features, width)
    )
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
    query = lengthened(heads.query, missing, 1)
    mask = None if heads.mask is None else heads.mask.astype(jnp.int8)
    mask = lengthened(mask, missing, 1)
    key, value, shared = heads.key, heads.value, heads.shared
    if plan.own:  # keys are read by blocks too
        mask = lengthened(mask, missing, 2)
        key, value = lengthened((key, value), missing, 1)
        shared = shared._replace(variance=lengthened(shared.variance, missing, 0))
    second = plan.order == 2
    whole = _Whole(key, value, shared if second else None, heads.query_kernel if second else None)
    out = _attend(plan, query, whole, mask)
    own_weights = None if out.own is None else out.own[:, 0, :num_queries]
    return out.mean[:, :num_queries], out.variance[:, :num_queries], own_weights


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: Plan, query: Part, whole: _Whole, mask: Array | None) -> _Out:
    grid = plan.grid

    def body(ins: tuple[Part, _Whole, Any], outs: _Out) -> None:
        query, whole, mask = ins
        found = _moments(plan, _read(mask), _own_tokens(plan, whole), _read(query), _read(whole))
        outs.mean[...], outs.variance[...] = found.mean, found.variance
        if found.own is not None:
            grid.add(outs.own, found.own)

    out = _Out(query.mean, query.variance, None)
    blocks = grid.by_rows(out)
    if plan.own:
        h, s, _ = whole.key.mean.shape
        own = jax.ShapeDtypeStruct((h, 1, s), query.mean.dtype)
        out, blocks = out._replace(own=own), blocks._replace(own=grid.by_heads(own))
    ins = query, whole, mask
    found: _Out = grid.call(body, ins, _blocks(grid, ins), out, blocks, _flops(plan, query, whole))
    return found


def _forward(plan: Plan, *arrays: Any) -> tuple[_Out, tuple[Any, ...]]:
    return _attend(plan, *arrays), arrays


def _backward(plan: Plan, saved: tuple[Any, ...], slopes: _Out) -> tuple[Any, Any, None]:
    grid, (query, whole, _) = plan.grid, saved

    def body(ins: Any, outs: tuple[Part, _Whole]) -> None:
        (query, whole, mask), slopes = ins
        by_query, by_whole = outs
        moments = partial(_moments, plan, _read(mask))
        _, transposed = jax.vjp(moments, _own_tokens(plan, whole), _read(query), _read(whole))
        from_own, from_query, from_whole = transposed(_read(slopes))
        by_query.mean[...], by_query.variance[...] = from_query
        for ref, slope in zip(jax.tree.leaves(by_whole), jax.tree.leaves(from_whole), strict=True):
            grid.add(ref, slope, of_all_heads=ref is _variance_of(by_whole))
        if from_own is not None:
            by_whole.key.mean[grid.own_rows(), :] += from_own[0]
            _variance_of(by_whole)[grid.own_rows(), :] += from_own[1]

    rows = grid.by_rows(_Out(slopes.mean, slopes.variance, None))
    blocks = _blocks(grid, saved), rows._replace(own=grid.by_heads(slopes.own))
    flops = 3 * _flops(plan, query, whole)
    outs = query, whole
    by_query, by_whole = grid.call(body, (saved, slopes), blocks, outs, blocks[0][:2], flops)
    return by_query, by_whole, None


_attend.defvjp(_forward, _backward)


def _blocks(grid: Grid, arrays: Any) -> Any:
    query, whole, mask = arrays
    return grid.by_rows(query), grid.by_heads(whole), grid.by_rows(mask)


def _variance_of(whole: _Whole) -> Any:
    return None if whole.shared is None else whole.shared.variance


def _own_tokens(plan: Plan, whole: _Whole) -> tuple[Array, Array] | None:
    """Keys' mean (R, K) and input variance (R, D) of the program's own tokens."""
    if whole.query_kernel is None:
        return None
    rows = plan.grid.own_rows()
    return whole.key.mean[rows, :], _variance_of(whole)[rows, :]


def _moments(
    plan: Plan, mask: Any, own: tuple[Array, Array] | None, query: Part, whole: _Whole
) -> _Out:
    """One program's rows; the function to differentiate."""
    shape = query.mean.shape[0], whole.key.mean.shape[0]
    key = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    row = plan.grid.first_row() + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    allowed = None if mask is None else mask.astype(jnp.int32) != 0
    if plan.num_keys < shape[1]:
        exists = key < plan.num_keys
        allowed = exists if allowed is None else allowed & exists
    noise = tokens = own_weights = own_row = None
    if own is not None and whole.shared is not None and whole.query_kernel is not None:
        tokens = Own(own[0], own[1], whole.query_kernel)
        covariance = own[1] @ (whole.query_kernel * whole.shared.key_kernel)
        noise = jnp.where(row == key, jnp.sum(covariance, axis=1, keepdims=True), 0)
    rows = Rows(query, whole.key, whole.value, noise)
    mean, variance, mixing = mix(rows, allowed, plan.order)
    if plan.own:
        at_own = jnp.where(row == key, mixing.weights, 0)
        own_weights = jnp.sum(at_own, axis=1, keepdims=True)
        own_row = jnp.sum(at_own, axis=0, keepdims=True)
    if whole.shared is not None:
        assert mixing.gain is not None
        shift = shared_mean(query, whole.key, whole.shared, mixing.weights, tokens, own_weights)
        mean = mean + mixing.gain * shift
    return _Out(mean, variance, own_row)


def _read(tree: Any) -> Any:
    return jax.tree.map(lambda ref: ref[...], tree)


def _flops(plan: Plan, query: Part, whole: _Whole) -> int:
    """Forward operations of all programs' matrix products."""
    (h, t, k), s = query.mean.shape, whole.key.mean.shape[1]
    features = 0 if whole.shared is None else whole.shared.variance.shape[1]
    numbers = 16 * k + features + products_of_row(plan.grid.rows, s, k)
    return 2 * h * t * s * numbers
