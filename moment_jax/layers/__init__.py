"""Moment transforms of layers: (mean, cov, params) -> (mean, cov) for one (T, D) sequence."""

from moment_jax.covariance import Diagonal, Full, Separable
from moment_jax.layers import diagonal, full, separable, separable_attention
from moment_jax.layers.blocks import decoder_block, encoder_block
from moment_jax.layers.dense import activation, dense, matmul
from moment_jax.layers.ends import embedding, softmax
from moment_jax.layers.params import (
    AttentionParams,
    DecoderBlockParams,
    DenseParams,
    EncoderBlockParams,
    FeedForwardParams,
    NormParams,
)
from moment_jax.layers.rules import RULES, Rules
from moment_jax.layers.sublayers import attention, cross_attention, feed_forward, layer_norm

RULES |= {
    Diagonal: Rules(diagonal.norm, diagonal.attention),
    Full: Rules(full.norm, full.attention),
    Separable: Rules(separable.norm, separable_attention.attention, separable.feed_forward),
}
