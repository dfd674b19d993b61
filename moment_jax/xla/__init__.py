"""Workarounds and hints for the XLA compiler; no mathematics."""

from moment_jax.xla.lowering import (
    default_precision,
    inside_a_kernel,
    kernel_path,
    kernels,
    materialized,
    materialized_inputs,
    on_chip,
)
from moment_jax.xla.matrices import (
    SEQUENCE,
    by_tokens,
    diagonal_matrix,
    diagonal_of,
    on_diagonal,
    product_of_transposed,
    product_with_transposed,
    rows_diagonal,
    rows_product,
    split_by_tokens,
)

__all__ = [
    "SEQUENCE",
    "by_tokens",
    "default_precision",
    "diagonal_matrix",
    "diagonal_of",
    "inside_a_kernel",
    "kernel_path",
    "kernels",
    "materialized",
    "materialized_inputs",
    "on_chip",
    "on_diagonal",
    "product_of_transposed",
    "product_with_transposed",
    "rows_diagonal",
    "rows_product",
    "split_by_tokens",
]
