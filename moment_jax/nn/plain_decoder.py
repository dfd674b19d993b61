"""Plain Flax networks with a decoder: what Monte Carlo samples, as in `plain`."""

from __future__ import annotations

import jax
from flax import nnx

from moment_jax.nn.plain import PlainBlock, PlainEncoder, PlainStack

Array = jax.Array


class PlainDecoderBlock(PlainBlock):
    """A Transformer decoder block of Flax layers, post-norm or pre-norm."""

    attentions = ("self_attention", "cross_attention")
    self_attention: nnx.MultiHeadAttention
    cross_attention: nnx.MultiHeadAttention
    norm1: nnx.LayerNorm
    norm2: nnx.LayerNorm
    norm3: nnx.LayerNorm

    def __call__(
        self,
        x: Array,
        memory: Array,
        mask: Array | None = None,
        memory_mask: Array | None = None,
    ) -> Array:
        """(..., T, D) and a memory (..., S, D) -> (..., T, D)."""

        def look(y: Array) -> Array:
            return self.cross_attention(y, memory, memory, mask=memory_mask)

        x = self.sublayer(x, self.norm1, lambda y: self.self_attention(y, mask=mask))
        return self.sublayer(self.sublayer(x, self.norm2, look), self.norm3, self.transform)


class PlainDecoder(PlainStack):
    """A stack of decoder blocks: (x, memory, mask, memory_mask)."""


class PlainTransformer(nnx.Module):
    """Encoder and decoder."""

    def __init__(self, encoder: PlainEncoder, decoder: PlainDecoder) -> None:
        self.encoder = encoder
        self.decoder = decoder

    def __call__(
        self,
        source: Array,
        target: Array,
        source_mask: Array | None = None,
        mask: Array | None = None,
        memory_mask: Array | None = None,
    ) -> Array:
        """(..., S, D) and (..., T, D) -> (..., T, D)."""
        return self.decoder(target, self.encoder(source, source_mask), mask, memory_mask)
