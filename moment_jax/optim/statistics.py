"""Readings of the curvature: what the backward pass of a layer returns of its inputs and gradients."""

import dataclasses
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.optim.factors import (
    DiagonalFactor,
    EmbeddingFactor,
    Factor,
    Factors,
    KroneckerFactor,
    RowFactor,
    shapes_of,
)
from moment_jax.optim.layer_blocks import Blocks, DenseBlock, LayerBlock

OF_INPUTS = ("inputs", "frequencies")  # averages over rows; the others are sums over them


@dataclasses.dataclass(frozen=True)
class KroneckerExpand:
    """F = A (x) G with every token a row: A = avg a a^T over rows, G = 1/N sum g g^T over rows.

    g are the gradients of each example's own -log p. This reads theta = g^T v a^T of Algorithm 1 over
    all pairs of rows; with one token per sample it is (a^T a) V (g^T g) / N^2.
    """


@dataclasses.dataclass(frozen=True)
class PerSample:
    """The exact Fisher block of the batch's examples, F V = 1/N sum_n J_n <J_n, V>, J_n = sum_t a g^T.

    This reads theta of Algorithm 1 over equal rows alone. Normalisations keep its diagonal, embedding
    tables a Kronecker product.
    """


Reading = KroneckerExpand | PerSample


@dataclasses.dataclass(frozen=True)
class Statistic:
    """What the backward pass of a layer returns, from inputs a (N, T, in) and gradients g (N, T, out).

    It is a factor of sums, and its weight the number of rows. Hashable, so that it can be a static
    attribute of a module.
    """

    block: LayerBlock
    exact: bool  # whether F is that of the examples, which keeps rows
    dtype: jnp.dtype
    num_rows: int  # T, of the rows that are kept; else unused

    @property
    def kind(self) -> Any:
        """The type of the factor."""
        return RowFactor if self.exact and isinstance(self.block, DenseBlock) else self.block.factor

    def zeros(self) -> Factor:
        """The dummy argument whose cotangent is the statistic."""
        block = self.block
        shapes = *shapes_of(self.kind, block.rows, block.columns, (self.num_rows,)), ()
        return self.kind(*(jnp.zeros((*block.stack, *shape), self.dtype) for shape in shapes))

    def __call__(self, inputs: Array, grads: Array) -> Factor:
        """The statistic, of the shapes of `zeros` without the stack.

        The inputs are (N, T) symbols for a table, normalised for a normalisation.
        """
        ones, kind, block = _ones(grads), self.kind, self.block
        count, g = jnp.sum(ones), _flat(grads)
        if kind is EmbeddingFactor:
            seen = jnp.zeros((block.rows,), g.dtype).at[inputs.reshape(-1)].add(ones.reshape(-1))
            return EmbeddingFactor(seen, g.T @ g, count)
        if kind is DiagonalFactor:
            by_leaf = {"scale": grads * inputs, "bias": grads}
            each = [by_leaf[leaf.removesuffix("/mean").rpartition("/")[2]] for leaf in block.leaves]
            if self.exact:
                each = [jnp.sum(gradient, axis=1, keepdims=True) for gradient in each]
            squares = [jnp.sum(gradient**2, axis=(0, 1)) for gradient in each]
            return DiagonalFactor(jnp.stack(squares), count)
        bias = len(block.leaves) == 2
        if kind is KroneckerFactor:
            return KroneckerFactor(_input_gram(_flat(inputs), bias), g.T @ g, count)
        a = jnp.pad(_flat(inputs), ((0, 0), (0, int(bias))), constant_values=1)
        return RowFactor(a, g, count)


@dataclasses.dataclass(frozen=True, eq=False)
class RowCounter:
    """A statistic that records how many rows a layer sees at each call, in `counts` by name.

    Compared by identity: a cached trace of an equal counter would record nothing.
    """

    block: LayerBlock
    counts: dict[str, list[int]]
    dtype: ClassVar[jnp.dtype] = jnp.dtype("float32")

    def zeros(self) -> Array:
        """A dummy argument, so that there is a backward pass."""
        return jnp.zeros(self.block.stack, self.dtype)

    def __call__(self, inputs: Array, grads: Array) -> Array:
        """Record the number of rows."""
        del inputs
        self.counts.setdefault(self.block.name, []).append(grads.shape[0] * grads.shape[1])
        return jnp.zeros((), self.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def observe(statistic: Statistic | RowCounter, output: Array, inputs: Array, dummies: Any) -> Array:
    """The output; its backward pass returns the statistic as the cotangent of the dummies.

    The output's cotangent passes unchanged and the inputs get none, so gradients stay the same. JAX
    treats the statistic like the gradient of any parameter: it is summed over vmap, scan, remat and
    devices.
    """
    del statistic, inputs, dummies
    return output


def _observe_forward(
    statistic: Statistic, output: Array, inputs: Array, dummies: Any
) -> tuple[Array, Array]:
    del statistic, dummies
    return output, inputs


def _observe_backward(statistic: Statistic, inputs: Array, grads: Array) -> Any:
    if jnp.issubdtype(inputs.dtype, jnp.floating):
        inputs = inputs.astype(statistic.dtype)
    return grads, None, statistic(inputs, grads.astype(statistic.dtype))


observe.defvjp(_observe_forward, _observe_backward)


def _flat(array: Array) -> Array:
    return array.reshape(-1, array.shape[-1])


def _input_gram(rows: Array, bias: bool) -> Array:
    """The Gram matrix of the rows, each with a one appended if there is a bias.

    Assembled from blocks, because appending to the rows would copy them.
    """
    inner = rows.T @ rows
    if not bias:
        return inner
    total = jnp.sum(rows, axis=0)[:, None]
    count = jnp.full((1, 1), rows.shape[0], rows.dtype)
    return jnp.block([[inner, total], [total.T, count]])


def _ones(grads: Array) -> Array:
    """A one for each row, (N, T), as an array that depends on the gradients.

    Under vmap, cotangents of a shared argument are summed over the mapped axis only if they depend on
    it: constant ones would count a single example.
    """
    first = grads[..., 0]
    return ((first == 0) | True).astype(grads.dtype)


def factors_of(blocks: Blocks, statistics: dict[str, Factor], correction: float) -> Factors:
    """Factors from the statistics of the layers by name, summed over a batch.

    The correction multiplies what is quadratic in the gradients: 1/N for gradients of each example's own
    loss, N for those of an average over N examples.
    """
    factors: Factors = {}
    for block in blocks:
        sums: Any = statistics[block.name]
        *arrays, rows = (x.reshape(block.count, *x.shape[len(block.stack) :]) for x in sums)
        rows = jnp.maximum(rows, 1)
        means = (
            jax.vmap(jnp.divide)(x, rows) if name in OF_INPUTS else x * correction
            for name, x in zip(sums._fields, arrays, strict=False)
        )
        factors[block.name] = type(sums)(*means, jnp.ones((), rows.dtype))
    return factors


def row_factors_of(blocks: Blocks, statistics: dict[str, Factor]) -> Factors:
    """Factors from the statistics of every example: rows (N, *stack, T, features), and sums."""
    factors: Factors = {}
    for block in blocks:
        each = statistics[block.name]
        n = each.weight.shape[0]
        if isinstance(each, RowFactor):
            tokens = each.inputs.shape[-2]
            a, g = (x.reshape(n, block.count, tokens, -1).swapaxes(0, 1) for x in each[:2])
            factors[block.name] = RowFactor(a, g, jnp.ones((), a.dtype))
        else:
            summed = jax.tree.map(lambda x: jnp.sum(x, axis=0), each)
            factors |= factors_of((block,), {block.name: summed}, 1 / n)
    return factors
