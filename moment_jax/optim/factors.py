"""Curvature factors of layers: from sums over a batch, as linear operators, running averages.

A factor holds averages over a batch. L counts the layers of a stack (1 for a single layer), N the
examples, T the tokens. `weight` is 1 for new statistics and 0 where none were taken.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.optim.layer_blocks import Blocks, DenseBlock, EmbeddingBlock, LayerBlock, Shape
from moment_jax.optim.trees import flatten
from moment_jax.xla import diagonal_of


class KroneckerFactor(NamedTuple):
    """F = inputs (x) outputs, of a dense layer."""

    inputs: Array  # (L, rows, rows): the average of a a^T, with a one appended to a for the bias
    outputs: Array  # (L, columns, columns): the sum of g g^T over all rows, divided by N
    weight: Array  # ()


class EmbeddingFactor(NamedTuple):
    """F = diag(frequencies) (x) outputs, of a table whose inputs are one-hot."""

    frequencies: Array  # (L, rows)
    outputs: Array  # (L, columns, columns)
    weight: Array  # ()


class DiagonalFactor(NamedTuple):
    """The diagonal of F, of a normalisation."""

    squares: Array  # (L, rows, columns)
    weight: Array  # ()


class RowFactor(NamedTuple):
    """The exact F of the examples: 1/N sum_n J_n <J_n, V>, J_n = sum_t a_nt g_nt^T."""

    inputs: Array  # (L, N, T, rows)
    outputs: Array  # (L, N, T, columns)
    weight: Array  # ()


Factor = KroneckerFactor | EmbeddingFactor | DiagonalFactor | RowFactor
Factors = dict[str, Factor]


def kind_of(block: LayerBlock) -> type[KroneckerFactor | EmbeddingFactor | DiagonalFactor]:
    """The kind of a layer's factor, unless it is a `RowFactor`."""
    if isinstance(block, DenseBlock):
        return KroneckerFactor
    return EmbeddingFactor if isinstance(block, EmbeddingBlock) else DiagonalFactor


def shapes_of(kind: type, block: LayerBlock) -> dict[str, Shape]:
    """The shapes of a layer's arrays by name, without the stack, in a factor that keeps no rows."""
    rows, columns = block.rows, block.columns
    if kind is KroneckerFactor:
        return {"inputs": (rows, rows), "outputs": (columns, columns)}
    if kind is EmbeddingFactor:
        return {"frequencies": (rows,), "outputs": (columns, columns)}
    return {"squares": (rows, columns)}


def empty_average(blocks: Blocks, dtype: jnp.dtype) -> Factor:
    """The first average of a group's factors: zeros of weight zero."""
    kind: Any = kind_of(blocks[0])
    count = sum(block.count for block in blocks)
    arrays = (jnp.zeros((count, *s), dtype) for s in shapes_of(kind, blocks[0]).values())
    return kind(*arrays, jnp.zeros((), dtype))


def apply_curvature(factor: Factor, matrix: Array) -> Array:
    """F V, (L, rows, columns), for every layer of a stack, without forming F.

    Source: Brownian document, Algorithm 1, function FV without its damping.
    """
    if isinstance(factor, KroneckerFactor):
        return jnp.matmul(jnp.matmul(factor.inputs, matrix), factor.outputs)
    if isinstance(factor, EmbeddingFactor):
        return factor.frequencies[:, :, None] * jnp.matmul(matrix, factor.outputs)
    if isinstance(factor, DiagonalFactor):
        return factor.squares * matrix
    inner = jnp.einsum("lnta,lao,lnto->ln", factor.inputs, matrix, factor.outputs)
    inner = inner / factor.inputs.shape[1]
    return jnp.einsum("ln,lnta,lnto->lao", inner, factor.inputs, factor.outputs)


def quadratic_form(factor: Factor, matrix: Array) -> Array:
    """<V, F V>, summed over the layers of a stack."""
    if isinstance(factor, KroneckerFactor):
        # <A V, V G>: XLA for CPU would fuse the last product of A V G into the sum, six times as slow.
        return jnp.sum(jnp.matmul(factor.inputs, matrix) * jnp.matmul(matrix, factor.outputs))
    return jnp.sum(matrix * apply_curvature(factor, matrix))


def curvature_diagonal(factor: Factor) -> Array:
    """The diagonal of F as matrices (L, rows, columns)."""
    if isinstance(factor, DiagonalFactor):
        return factor.squares
    if isinstance(factor, RowFactor):
        gradients = jnp.einsum("lnta,lnto->lnao", factor.inputs, factor.outputs)
        return jnp.mean(gradients**2, axis=1)
    outputs = diagonal_of(factor.outputs)
    if isinstance(factor, EmbeddingFactor):
        return factor.frequencies[:, :, None] * outputs[:, None, :]
    return diagonal_of(factor.inputs)[:, :, None] * outputs[:, None, :]


def averaged(average: Factor, new: Factor, decay: Array, finite: Array) -> Factor:
    """The exponential average with one more factor; unchanged where the new one has no weight.

    It is bias-corrected: the average is divided by the sum of the weights so far, kept as its weight.
    Correcting at reading time instead would store every factor twice.
    """
    take = (new.weight > 0) & finite
    share = jnp.where(take, 1 - decay, 0).astype(average.weight.dtype)
    weight = average.weight + share * (1 - average.weight)
    step = share / jnp.where(weight > 0, weight, 1)

    def mix(old: Array, fresh: Array) -> Array:
        # `where`, because a factor that is not taken may hold NaN.
        return jnp.where(take, old + step.astype(old.dtype) * (fresh.astype(old.dtype) - old), old)

    arrays = [mix(old, fresh) for old, fresh in zip(average[:-1], new[:-1], strict=True)]
    kind: Any = type(average)
    return kind(*arrays, weight)


def as_factors(blocks: Blocks, stats: Any, correction: float) -> Factors:
    """Factors from the cotangents of the dummy arguments, sums over a batch.

    The correction multiplies what is quadratic in the gradients: 1/N for gradients of each example's own
    loss, N for those of an average over N examples.
    """
    factors: dict[str, Factor] = {}
    for block in blocks:
        get = _of_block(block, stats)
        rows = jnp.maximum(get["rows"], 1)
        one = jnp.ones((), rows.dtype)
        if isinstance(block, DenseBlock):
            inputs = get["inputs"] / rows[:, None, None]
            factors[block.name] = KroneckerFactor(inputs, get["outputs"] * correction, one)
        elif isinstance(block, EmbeddingBlock):
            frequencies = get["frequencies"] / rows[:, None]
            factors[block.name] = EmbeddingFactor(frequencies, get["outputs"] * correction, one)
        else:
            factors[block.name] = DiagonalFactor(get["squares"] * correction, one)
    return factors


def as_row_factors(blocks: Blocks, stats: Any, size: int, every_token: bool) -> Factors:
    """Rows of the dense layers, with a leading axis of `size` examples; averages for the others."""
    summed = jax.tree.map(lambda x: jnp.sum(x, axis=0), stats)
    others = tuple(block for block in blocks if not isinstance(block, DenseBlock))
    factors = as_factors(others, summed, 1 / size)
    for block in blocks:
        if isinstance(block, DenseBlock):
            get = _of_block(block, stats, lead=1)
            a, g = (jnp.swapaxes(get[name], 0, 1) for name in ("a", "g"))
            if every_token:  # F divides by N T rows; g makes up for the T
                g = g * g.shape[2] ** 0.5
                a, g = (x.reshape(x.shape[0], -1, 1, x.shape[-1]) for x in (a, g))
            factors[block.name] = RowFactor(a, g, jnp.ones((), a.dtype))
    return {block.name: factors[block.name] for block in blocks}


def check_called(
    blocks: Blocks, stats: Any, loss: Callable[..., Any], taps: Any, params: Any
) -> None:
    """Raise unless the loss calls every layer, that is, depends on its dummy arguments."""
    leaves = flatten(stats)
    rows = {_owner(name): count for name, count in leaves.items() if name.endswith("tap_rows")}
    traced = any(isinstance(count, jax.core.Tracer) for count in rows.values())
    used = _used(loss, taps, params) if traced else {n for n, c in rows.items() if jnp.any(c > 0)}
    for block in blocks:
        if block.name not in used:
            raise ValueError(
                f"The loss does not call layer {block.name!r}, so it has no curvature. Leave its "
                f"parameters ({', '.join(block.leaves)}) out of `wrt`, or call it."
            )


def _used(loss: Callable[..., Any], taps: Any, params: Any) -> set[str]:
    """Names of the layers whose dummy arguments the loss depends on."""
    closed = jax.make_jaxpr(loss)(taps, params)
    names = list(flatten(taps))
    seen = {id(var) for equation in closed.jaxpr.eqns for var in equation.invars}
    inputs = closed.jaxpr.invars[: len(names)]
    return {_owner(name) for name, var in zip(names, inputs, strict=True) if id(var) in seen}


def _owner(path: str) -> str:
    """The layer that a dummy argument belongs to."""
    return path.rpartition("/")[0] or "model"


def _of_block(block: LayerBlock, stats: Any, lead: int = 0) -> dict[str, Array]:
    """The statistics of one layer by name, (*lead axes, L, ...)."""
    found = {}
    for path, value in flatten(stats).items():
        if _owner(path) == block.name:
            name = path.rpartition("/")[2].removeprefix("tap_")
            shape = (*value.shape[:lead], block.count, *value.shape[lead + len(block.stack) :])
            found[name] = value.reshape(shape)
    return found
