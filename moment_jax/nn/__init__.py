"""Ordinary Flax networks, and beliefs about the weights of any: see `mj.Bayesian`."""

from moment_jax.nn.bayesian import Mixture
from moment_jax.nn.belief import Belief, PriorScale, VariationalMean, VariationalScale
from moment_jax.nn.check import Check
from moment_jax.nn.networks import (
    MLP,
    Decoder,
    DecoderBlock,
    Encoder,
    EncoderBlock,
    LearnedPositions,
    Patches,
    TokenTransformer,
    Transformer,
    VisionTransformer,
)

__all__ = [
    "MLP", "Belief", "Check", "Decoder", "DecoderBlock", "Encoder", "EncoderBlock",
    "LearnedPositions", "Mixture", "Patches", "PriorScale", "TokenTransformer", "Transformer",
    "VariationalMean", "VariationalScale", "VisionTransformer",
]  # fmt: skip
