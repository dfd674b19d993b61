"""Softmax over the features of each token of a random sequence (Prop. 3)."""

import jax
from jax import Array

from moment_jax.expectations import masked_softmax, softmax_expansion
from moment_jax.layers.checks import check_moments, check_order, check_row_mask
from moment_jax.layers.params import S
from moment_jax.xla import diagonal_matrix, diagonal_of, materialized_inputs


@materialized_inputs
def softmax(mean: Array, cov: S, *, order: int = 2, mask: Array | None = None) -> tuple[Array, S]:
    """Moments of the softmax over the last axis, row by row.

    With order 1 the mean is w = softmax(E[x]), and covariances, including those between rows, pass
    through the Jacobians diag(w_t) - w_t w_t^T. With order 2 mean and variances are those of
    `expectations.softmax_moments`, and covariances pass through the smaller expected Jacobians. The
    errors are stated there; for 8 independent logits the total variance is 0.99, 1.02, 1.08 and 1.27 of
    the sampled one at a logit sd of 1, 2, 3 and 10. The cost is that of (C, C) matrices per token.

    Assumes that x is Gaussian (order 2).

    Args:
      mean: E[x], (T, C).
      cov: covariance of x, a structure of shape (T, C).
      order: 1 or 2.
      mask: (T, C) boolean, True where a weight may be positive; None for no mask. Masked weights are
        exactly zero, and so is a fully masked row.

    Returns:
      Mean (T, C), nonnegative rows that sum to one, and covariance in the structure of `cov`.

    Raises:
      ValueError: if shapes do not fit, or order is neither 1 nor 2.

    Source: Transformer derivation, Prop. 3 and Eq. 10, 11; Brownian motion in the Transformer, Eq. 7
    (the second-order term).
    """
    check_moments("softmax", mean, cov)
    check_order("softmax", order)
    if mask is not None:
        check_row_mask("softmax", mask, mean.shape)
    if order == 1:
        weights = masked_softmax(mean, mask)
        jacobian = diagonal_matrix(weights) - weights[:, :, None] * weights[:, None, :]
        return weights, cov.map_each(jacobian)
    rows = jax.vmap(softmax_expansion)(mean, cov.token_blocks(), mask)
    passed = cov.map_each(rows.jacobian)
    return rows.mean, passed.add(type(cov).independent(diagonal_of(rows.rest)))
