"""What a layer's curvature is made of: the statistics of its inputs and its output gradients.

All are sums over a batch, already divided by what they are averages of. L counts the layers of a stack
(1 for a layer by itself), N the examples, T the tokens. `weight` is 1 for new statistics and 0 where
none were taken, so that averages can leave them out.
"""

from __future__ import annotations

from typing import NamedTuple

import jax

Array = jax.Array


class KroneckerFactor(NamedTuple):
    """F = inputs (x) outputs: the product over all pairs of rows, by its two Gram matrices."""

    inputs: Array  # (L, rows, rows): the average of a a^T, a with a one appended for the bias
    outputs: Array  # (L, columns, columns): the sum of g g^T over the examples' rows, over N
    weight: Array  # ()


class EmbeddingFactor(NamedTuple):
    """The same for a table, whose inputs are one-hot: inputs is diagonal."""

    frequencies: Array  # (L, rows)
    outputs: Array  # (L, columns, columns)
    weight: Array  # ()


class DiagonalFactor(NamedTuple):
    """The diagonal of F."""

    squares: Array  # (L, rows, columns)
    weight: Array  # ()


class RowFactor(NamedTuple):
    """The exact F of the examples: 1/N sum_n J_n <J_n, V>, J_n = sum_t a_nt g_nt^T."""

    inputs: Array  # (L, N, T, rows)
    outputs: Array  # (L, N, T, columns)
    weight: Array  # ()


Factor = KroneckerFactor | EmbeddingFactor | DiagonalFactor | RowFactor
Factors = dict[str, Factor]
