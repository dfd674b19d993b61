"""Encoder and decoder blocks and their sublayers, post-norm (as derived) or pre-norm."""

from collections.abc import Callable
from functools import partial
from typing import Any

from jax import Array

from moment_jax.layers.dense import Activation
from moment_jax.layers.params import (
    DecoderBlockParams,
    EncoderBlockParams,
    NormParams,
    S,
    check_moments,
)
from moment_jax.layers.rules import Carry
from moment_jax.layers.sublayers import (
    attention_with_carry,
    feed_forward_with_carry,
    layer_norm,
    norm_with_carry,
)
from moment_jax.xla import materialized_inputs

Branch = Callable[[Array, Any], tuple[Array, Any, Carry]]
"""A sublayer: (mean, cov) -> (mean, cov, carry), see `rules`."""


@materialized_inputs
def encoder_block(
    mean: Array, cov: S, params: EncoderBlockParams, *, num_heads: int, norm_first: bool = False,
    activation: Activation = "relu", mask: Array | None = None, epsilon: float = 1e-6,
) -> tuple[Array, S]:  # fmt: skip
    """Moments of one Transformer encoder block.

    With `norm_first=False`, as derived, z = norm1(x + attention(x)), y = norm2(z + feed_forward(z)).
    With `norm_first=True`, z = x + attention(norm1(x)), y = z + feed_forward(norm2(z)). The covariance
    between a residual stream and its branch is kept as far as the structure can. Assumes that x and the
    parameters of all sublayers are mutually independent. Source: Transformer derivation, section 4.

    Args (mean, cov, `num_heads`, `mask`, results and errors are those of `attention`):
      params: beliefs about the parameters.
      norm_first: False for post-norm, True for pre-norm.
      activation: "relu", "gelu", or a JAX function of a scalar, such as `jnp.tanh`.
      epsilon: added to the variance in the normalisations.
    """
    check_moments("encoder_block", mean, cov)
    cov = cov.seen_by(mask)
    attend = partial(attention_with_carry, params=params.attention, num_heads=num_heads, mask=mask)
    transform = partial(feed_forward_with_carry, params=params.feed_forward, activation=activation)
    mean, cov = sublayer(mean, cov, attend, params.norm1, norm_first, epsilon)
    return sublayer(mean, cov, transform, params.norm2, norm_first, epsilon)


@materialized_inputs
def decoder_block(
    mean: Array, cov: S, memory_mean: Array, memory_cov: S, params: DecoderBlockParams, *,
    num_heads: int, norm_first: bool = False, activation: Activation = "relu",
    mask: Array | None = None, memory_mask: Array | None = None, epsilon: float = 1e-6,
) -> tuple[Array, S]:  # fmt: skip
    """Moments of one Transformer decoder block: self-attention, cross-attention, feed-forward.

    Each sublayer has its residual and its normalisation, as in `encoder_block`. A causal decoder has the
    mask `jnp.tril(jnp.ones((T, T), bool))`, for self-attention; `memory_mask` is for cross-attention.
    Arguments, results and errors are those of `encoder_block` and `cross_attention`.

    Assumes that x, the memory and the parameters of all sublayers are mutually independent. From the
    second block on x depends on the memory, which is ignored. Source: Transformer derivation, 1.1.
    """
    check_moments("decoder_block", mean, cov)
    cov = cov.seen_by(mask)
    memory = memory_mean, memory_cov.seen_by(memory_mask, memory=True)
    heads = partial(attention_with_carry, num_heads=num_heads)
    attend = partial(heads, params=params.self_attention, mask=mask)
    look = partial(heads, params=params.cross_attention, mask=memory_mask, memory=memory)
    transform = partial(feed_forward_with_carry, params=params.feed_forward, activation=activation)
    mean, cov = sublayer(mean, cov, attend, params.norm1, norm_first, epsilon)
    mean, cov = sublayer(mean, cov, look, params.norm2, norm_first, epsilon)
    return sublayer(mean, cov, transform, params.norm3, norm_first, epsilon)


def sublayer(
    mean: Array, cov: S, branch: Branch, params: NormParams, norm_first: bool, epsilon: float
) -> tuple[Array, S]:
    """X + branch(norm(x)), or norm(x + branch(x)), with the covariance of x and its own branch."""
    if not norm_first:
        out, out_cov, carry = branch(mean, cov)
        mean, cov = mean + out, cov.add_branch(out_cov, carry(cov.with_itself()))
        return layer_norm(mean, cov, params, epsilon=epsilon)
    inner, inner_cov, normed = norm_with_carry(mean, cov, params, epsilon)
    out, out_cov, carry = branch(inner, inner_cov)
    return mean + out, cov.add_branch(out_cov, carry(normed(cov.with_itself())))
