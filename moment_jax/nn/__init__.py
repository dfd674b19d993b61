"""Flax NNX modules that own variational parameters and call the moment transforms."""

from moment_jax.nn.activations import ACTIVATIONS, Activation, find_activation
from moment_jax.nn.any_model import bayesian
from moment_jax.nn.base import BayesianModule, Composite
from moment_jax.nn.belief import Belief, PriorScale, VariationalMean, VariationalScale, total_kl
from moment_jax.nn.decoder import Decoder, DecoderBlock
from moment_jax.nn.discrete_autoencoder import (
    DiscreteAutoencoder,
    NegativeElbo,
    PlainDiscreteAutoencoder,
)
from moment_jax.nn.embedding import Embedding, LearnedPositions
from moment_jax.nn.encoder import Encoder, EncoderBlock
from moment_jax.nn.exchange import beliefs, set_beliefs
from moment_jax.nn.layers import Dense, LayerNorm, MultiHeadAttention
from moment_jax.nn.mlp import MLP
from moment_jax.nn.plain import (
    PlainDecoder,
    PlainDecoderBlock,
    PlainEncoder,
    PlainEncoderBlock,
    PlainMLP,
    PlainPositions,
    PlainTokenTransformer,
    PlainTransformer,
    PlainVisionTransformer,
    plain_attention,
    plain_embed,
    plain_linear,
    plain_norm,
)
from moment_jax.nn.settings import DEFAULT_STRUCTURE, Settings, with_structure
from moment_jax.nn.transformer import TokenTransformer, Transformer
from moment_jax.nn.vision import Patches, VisionTransformer, VisionTransformerParams

__all__ = [
    "ACTIVATIONS",
    "DEFAULT_STRUCTURE",
    "MLP",
    "Activation",
    "BayesianModule",
    "Belief",
    "Composite",
    "Decoder",
    "DecoderBlock",
    "Dense",
    "DiscreteAutoencoder",
    "Embedding",
    "Encoder",
    "EncoderBlock",
    "LayerNorm",
    "LearnedPositions",
    "MultiHeadAttention",
    "NegativeElbo",
    "Patches",
    "PlainDecoder",
    "PlainDecoderBlock",
    "PlainDiscreteAutoencoder",
    "PlainEncoder",
    "PlainEncoderBlock",
    "PlainMLP",
    "PlainPositions",
    "PlainTokenTransformer",
    "PlainTransformer",
    "PlainVisionTransformer",
    "PriorScale",
    "Settings",
    "TokenTransformer",
    "Transformer",
    "VariationalMean",
    "VariationalScale",
    "VisionTransformer",
    "VisionTransformerParams",
    "bayesian",
    "beliefs",
    "find_activation",
    "plain_attention",
    "plain_embed",
    "plain_linear",
    "plain_norm",
    "set_beliefs",
    "total_kl",
    "with_structure",
]
