"""The Transformer encoder block, with normalisation after (the derivation's) or before (pre-norm)."""

from __future__ import annotations

from typing import TypeVar

import jax

from moment_jax.covariance import Covariance
from moment_jax.layers.activation import relu
from moment_jax.layers.attention.multi_head import attention_and_tangent
from moment_jax.layers.checks import check_moments
from moment_jax.layers.feed_forward import Activation, feed_forward_and_tangent
from moment_jax.layers.norm import layer_norm, layer_norm_and_tangent
from moment_jax.layers.params import EncoderBlockParams
from moment_jax.layers.residual import residual

Array = jax.Array
S = TypeVar("S", bound=Covariance)


def encoder_block(
    mean: Array,
    cov: S,
    params: EncoderBlockParams,
    *,
    num_heads: int,
    norm_first: bool = False,
    activation: Activation = relu,
    mask: Array | None = None,
    epsilon: float = 1e-6,
    order: int = 2,
) -> tuple[Array, S]:
    """Moments of one Transformer encoder block.

    With `norm_first=False` z = norm1(x + attention(x)), y = norm2(z + feed_forward(z)), as in the
    derivation; with `norm_first=True` z = x + attention(norm1(x)), y = z + feed_forward(norm2(z)).
    The covariance between a residual stream and its branch is kept as far as the structure can.

    Assumes that x and the parameters of all sublayers are independent of each other.

    Args:
      mean: E[x], (T, D).
      cov: covariance of x, a structure of shape (T, D).
      params: beliefs about the parameters.
      num_heads: number of attention heads.
      norm_first: False for post-norm, True for pre-norm.
      activation: an elementwise transform such as `mj.relu` or `mj.gelu`.
      mask: (T, T) or (H, T, T) boolean, True where a query may look at a key.
      epsilon: added to the variance in the normalisations.
      order: 1 (Taylor at the mean, as derived) or 2.

    Returns:
      Mean (T, D) and covariance of the output, in the structure of `cov`.

    Raises:
      ValueError: if shapes do not fit or the heads do not divide the width.

    Source: Transformer derivation, section 4.
    """
    check_moments("encoder_block", mean, cov)
    norm = None
    branch_mean, branch_cov = mean, cov
    if norm_first:
        branch_mean, branch_cov, norm = layer_norm_and_tangent(
            mean, cov, params.norm1, epsilon, order
        )
    branch_mean, branch_cov, mixing = attention_and_tangent(
        branch_mean, branch_cov, params.attention, num_heads=num_heads, mask=mask, order=order
    )
    mean, cov = residual(mean, cov, branch_mean, branch_cov, mixing, norm)
    if not norm_first:
        mean, cov = layer_norm(mean, cov, params.norm1, epsilon=epsilon, order=order)

    branch_mean, branch_cov = mean, cov
    if norm_first:
        branch_mean, branch_cov, norm = layer_norm_and_tangent(
            mean, cov, params.norm2, epsilon, order
        )
    branch_mean, branch_cov, forward = feed_forward_and_tangent(
        branch_mean, branch_cov, params.feed_forward, activation
    )
    mean, cov = residual(mean, cov, branch_mean, branch_cov, forward, norm)
    if not norm_first:
        mean, cov = layer_norm(mean, cov, params.norm2, epsilon=epsilon, order=order)
    return mean, cov
