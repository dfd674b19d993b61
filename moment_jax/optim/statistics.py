"""Readings of the curvature: what the backward pass of a layer returns of its inputs and gradients."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

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
from moment_jax.optim.layer_blocks import Blocks, LayerBlock

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
Report = Callable[[Array, Array], Any]  # inputs (N, T, in) and output gradients (N, T, out)


@dataclasses.dataclass(frozen=True)
class Statistic:
    """What the backward pass of a layer returns, from inputs a (N, T, in) and gradients g (N, T, out).

    It is a factor of sums, and its weight the number of rows. Hashable, as static attributes are.
    """

    block: LayerBlock
    exact: bool  # whether F is that of the examples, which keeps rows
    dtype: jnp.dtype
    num_rows: int  # T, of the rows that are kept; else unused

    @property
    def kind(self) -> Any:
        """The type of the factor."""
        factor = self.block.factor
        return RowFactor if self.exact and factor is KroneckerFactor else factor

    def zeros(self) -> Factor:
        """The dummy argument whose cotangent is the statistic."""
        block = self.block
        shapes = *shapes_of(self.kind, block.rows, block.columns, (self.num_rows,)), ()
        return self.kind(*(jnp.zeros((*block.stack, *shape), self.dtype) for shape in shapes))

    def __call__(self, inputs: Array, grads: Array) -> Factor:
        """The statistic; the inputs are (N, T) symbols for a table, normalised for a normalisation."""
        kind, block, grads = self.kind, self.block, grads.astype(self.dtype)
        # Ones that depend on the gradients: under vmap, constant ones would count a single example.
        ones = ((grads[..., 0] == 0) | True).astype(grads.dtype)
        g, count = _flat(grads), jnp.sum(ones)
        if kind is EmbeddingFactor:
            seen = jnp.zeros((block.rows,), g.dtype).at[inputs.reshape(-1)].add(ones.reshape(-1))
            return EmbeddingFactor(seen, g.T @ g, count)
        inputs = inputs.astype(self.dtype)
        if kind is DiagonalFactor:
            by_leaf = {"scale": grads * inputs, "bias": grads}
            each = [by_leaf[leaf.removesuffix("/mean").rpartition("/")[2]] for leaf in block.leaves]
            if self.exact:
                each = [jnp.sum(gradient, axis=1, keepdims=True) for gradient in each]
            squares = [jnp.sum(gradient**2, axis=(0, 1)) for gradient in each]
            return DiagonalFactor(jnp.stack(squares), count)
        a, bias = _flat(inputs), len(block.leaves) == 2
        if kind is RowFactor:
            return RowFactor(jnp.pad(a, ((0, 0), (0, int(bias))), constant_values=1), g, count)
        gram = a.T @ a
        if bias:  # of rows with a one appended, which would copy them
            total, size = jnp.sum(a, axis=0)[:, None], jnp.full((1, 1), len(a), a.dtype)
            gram = jnp.block([[gram, total], [total.T, size]])
        return KroneckerFactor(gram, g.T @ g, count)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def observe(report: Report, output: Array, inputs: Array, dummies: Any) -> Array:
    """The output; its backward pass returns report(inputs, gradients) as the cotangent of the dummies.

    The output's cotangent passes unchanged and the inputs get none, so gradients stay the same. JAX
    treats the report like the gradient of any parameter: it is summed over vmap, scan, remat and
    devices.
    """
    del report, inputs, dummies
    return output


observe.defvjp(
    lambda _report, output, inputs, _dummies: (output, inputs),
    lambda report, inputs, grads: (grads, None, report(inputs, grads)),
)


def _flat(array: Array) -> Array:
    return array.reshape(-1, array.shape[-1])


def factors_of(blocks: Blocks, statistics: dict[str, Factor], correction: float) -> Factors:
    """Factors from the statistics of the layers by name, of a batch or of every example for itself.

    The latter have one more axis, the first; rows (N, *stack, T, features) keep it, the others are
    summed. The correction multiplies what is quadratic in the gradients: 1/N for gradients of each
    example's own loss, N for those of an average over N examples.
    """
    factors: Factors = {}
    for block in blocks:
        sums: Any = statistics[block.name]
        one = jnp.ones((), sums.weight.dtype)
        if isinstance(sums, RowFactor):
            a, g = (x.reshape(len(x), block.count, *x.shape[-2:]).swapaxes(0, 1) for x in sums[:2])
            factors[block.name] = RowFactor(a, g, one)
            continue
        if sums.weight.ndim > len(block.stack):
            sums = jax.tree.map(lambda x: jnp.sum(x, axis=0), sums)
        *arrays, count = (x.reshape(block.count, *x.shape[len(block.stack) :]) for x in sums)
        means = (
            jax.vmap(jnp.divide)(x, jnp.maximum(count, 1)) if name in OF_INPUTS else x * correction
            for name, x in zip(sums._fields, arrays, strict=False)
        )
        factors[block.name] = type(sums)(*means, one)
    return factors
