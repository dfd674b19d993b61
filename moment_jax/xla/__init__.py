"""What has to be said to the compiler; no maths."""

from moment_jax.xla.inputs import materialized_inputs
from moment_jax.xla.materialize import materialized
from moment_jax.xla.tokens import (
    SEQUENCE,
    by_tokens,
    product_of_transposed,
    product_with_transposed,
    rows_diagonal,
    rows_product,
)

__all__ = [
    "SEQUENCE",
    "by_tokens",
    "materialized",
    "materialized_inputs",
    "product_of_transposed",
    "product_with_transposed",
    "rows_diagonal",
    "rows_product",
]
