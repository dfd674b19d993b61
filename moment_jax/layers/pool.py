"""Pooling over tokens."""

import jax.numpy as jnp
from jax import Array

from moment_jax.layers.checks import check_moments, check_row_mask
from moment_jax.layers.params import S
from moment_jax.xla import materialized_inputs


@materialized_inputs
def mean_pool(mean: Array, cov: S, mask: Array | None = None) -> tuple[Array, S]:
    """Moments of the mean over the tokens of a sequence.

    Exact, given what the structure holds of the tokens' covariance.

    Args:
      mean: E[x], (T, D).
      cov: covariance of x, a structure of shape (T, D).
      mask: (T,) boolean, True for the tokens to average; None for all.

    Returns:
      Mean (1, D) and covariance of shape (1, D): a sequence of one token.

    Raises:
      ValueError: if shapes do not fit.
    """
    check_moments("mean_pool", mean, cov)
    num_tokens = mean.shape[0]
    if mask is None:
        weights = jnp.full((1, num_tokens), 1 / num_tokens, mean.dtype)
    else:
        check_row_mask("mean_pool", mask, (num_tokens,))
        weights = jnp.where(mask, 1, 0).astype(mean.dtype)[None, :]
        weights = weights / jnp.maximum(jnp.sum(weights), 1)
    return weights @ mean, cov.map_tokens(weights)
