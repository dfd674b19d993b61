"""Readings of the curvature: the statistic of inputs and output gradients that a backward pass returns.

Algorithm 1's product has two readings, and tokens can be counted in two ways:

|                          | tokens count as samples | a sample's tokens together |
|--------------------------|-------------------------|----------------------------|
| all pairs of rows        | `KroneckerExpand`       | `KroneckerReduce`          |
| equal rows only (exact)  | `PerToken`              | `PerSample`                |
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.optim.factors import kind_of, shapes_of
from moment_jax.optim.layer_blocks import DenseBlock, EmbeddingBlock, LayerBlock, Shape

Arrays = dict[str, Array]


@dataclasses.dataclass(frozen=True)
class KroneckerExpand:
    """F = A (x) G with every token a row: A = avg a a^T over rows, G = 1/N sum g g^T over rows.

    g are the gradients of each example's own -log p. With one token per sample this is the product over
    all pairs of rows, (a^T a) V (g^T g) / N^2, of Algorithm 1.
    """


@dataclasses.dataclass(frozen=True)
class KroneckerReduce:
    """F = A (x) G with a row for each example: the average of its tokens' a, the sum of their g.

    The first axis that a layer sees counts examples; the axes between it and the features count tokens.
    """


@dataclasses.dataclass(frozen=True)
class PerSample:
    """The exact Fisher block of the batch's examples, F V = 1/N sum_n J_n <J_n, V>.

    Normalisations keep its diagonal, embedding tables a Kronecker product.
    """


@dataclasses.dataclass(frozen=True)
class PerToken:
    """As `PerSample`, with every token's gradient on its own: F V = 1/N sum_nt a (a^T V g) g^T."""


Reading = KroneckerExpand | KroneckerReduce | PerSample | PerToken


@dataclasses.dataclass(frozen=True)
class Statistic:
    """What the backward pass of a layer returns, from inputs a (N, T, in) and gradients g (N, T, out).

    Hashable, so that it can be a static attribute of a module.
    """

    block: LayerBlock
    reading: Reading
    num_rows: int = 0  # T, for readings that keep rows; else unused

    def zeros(self, dtype: jnp.dtype | type = jnp.float32) -> Arrays:
        """The dummy arguments whose cotangents are the statistics."""
        block = self.block
        if isinstance(block, DenseBlock) and isinstance(self.reading, PerSample | PerToken):
            size = self.num_rows
            shapes: dict[str, Shape] = {"a": (size, block.rows), "g": (size, block.columns)}
        else:
            shapes = shapes_of(kind_of(block), block)
        named = {**shapes, "rows": ()}
        return {name: jnp.zeros((*block.stack, *shape), dtype) for name, shape in named.items()}

    def __call__(self, inputs: Array, grads: Array) -> Arrays:
        """The statistics, of the shapes of `zeros` without the stack.

        The inputs are (N, T) symbols for a table, normalised for a normalisation.
        """
        ones = _ones(grads)
        count = jnp.sum(ones)
        reduced = isinstance(self.reading, KroneckerReduce | PerSample)
        if isinstance(self.block, EmbeddingBlock):
            g, seen = _flat(grads), jnp.zeros((self.block.rows,), grads.dtype)
            seen = seen.at[inputs.reshape(-1)].add(ones.reshape(-1))
            return {"frequencies": seen, "outputs": g.T @ g, "rows": count}
        if not isinstance(self.block, DenseBlock):
            return {"squares": _squares(self.block, inputs, grads, reduced), "rows": count}
        if isinstance(self.reading, PerSample | PerToken):
            a, g = _flat(inputs), _flat(grads)
            if self.block.has_bias:
                a = jnp.concatenate([a, jnp.ones((*a.shape[:-1], 1), a.dtype)], axis=-1)
            return {"a": a, "g": g, "rows": count}
        if reduced:
            inputs = jnp.mean(inputs, axis=1, keepdims=True)
            grads = jnp.sum(grads, axis=1, keepdims=True)
            count = jnp.sum(_ones(grads))
        a, g = _flat(inputs), _flat(grads)
        return {"inputs": _input_gram(a, self.block.has_bias), "outputs": g.T @ g, "rows": count}


@dataclasses.dataclass(frozen=True, eq=False)
class RowCounter(Statistic):
    """A statistic that records how many rows a layer sees at each call, in `counts` by name."""

    counts: dict[str, list[int]] = dataclasses.field(default_factory=dict)

    # By identity: a cached trace of an equal counter would record nothing.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def zeros(self, dtype: jnp.dtype | type = jnp.float32) -> Arrays:
        """A dummy argument for the row count only."""
        return {"rows": jnp.zeros(self.block.stack, dtype)}

    def __call__(self, inputs: Array, grads: Array) -> Arrays:
        """Record the number of rows."""
        self.counts.setdefault(self.block.name, []).append(grads.shape[0] * grads.shape[1])
        return {"rows": jnp.zeros((), grads.dtype)}


def observe(statistic: Callable[[Array, Array], Arrays], dtype: jnp.dtype) -> Callable[..., Array]:
    """An identity (output, inputs, dummies) -> output whose backward pass returns the statistics.

    The cotangent of `dummies` is statistic(inputs, cotangent of output). The output's cotangent passes
    unchanged and the inputs get none, so gradients stay the same. JAX treats the statistic like the
    gradient of any parameter: it is summed over vmap, scan, remat and devices.
    """

    @jax.custom_vjp
    def identity(output: Array, inputs: Array, dummies: Arrays) -> Array:
        del inputs, dummies
        return output

    def forward(output: Array, inputs: Array, dummies: Arrays) -> tuple[Array, Array]:
        del dummies
        return output, inputs

    def backward(inputs: Array, grads: Array) -> tuple[Array, None, Arrays]:
        if jnp.issubdtype(inputs.dtype, jnp.floating):
            inputs = inputs.astype(dtype)
        return grads, None, statistic(inputs, grads.astype(dtype))

    identity.defvjp(forward, backward)
    return identity


def _flat(array: Array) -> Array:
    return array.reshape(-1, array.shape[-1])


def _input_gram(rows: Array, has_bias: bool) -> Array:
    """The Gram matrix of the rows, each with a one appended if there is a bias.

    Assembled from blocks, because appending to the rows would copy them.
    """
    inner = rows.T @ rows
    if not has_bias:
        return inner
    total = jnp.sum(rows, axis=0)
    count = jnp.full((1,), rows.shape[0], rows.dtype)
    last = jnp.concatenate([total, count])[None, :]
    return jnp.concatenate([jnp.concatenate([inner, total[:, None]], axis=1), last], axis=0)


def _ones(grads: Array) -> Array:
    """A one for each row, (N, T), as an array that depends on the gradients.

    Under vmap, cotangents of a shared argument are summed over the mapped axis only if they depend on
    it: constant ones would count a single example.
    """
    first = grads[..., 0]
    return ((first == 0) | True).astype(grads.dtype)


def _squares(block: LayerBlock, normal: Array, grads: Array, reduced: bool) -> Array:
    """Squared gradients of gain and bias, summed over examples; `reduced` sums tokens first."""
    by_leaf = {"scale": grads * normal, "bias": grads}
    rows = []
    for leaf in block.leaves:
        gradient = by_leaf[leaf.removesuffix("/mean").rpartition("/")[2]]
        if reduced:
            gradient = jnp.sum(gradient, axis=1, keepdims=True)
        rows.append(jnp.sum(gradient**2, axis=(0, 1)))
    return jnp.stack(rows)
