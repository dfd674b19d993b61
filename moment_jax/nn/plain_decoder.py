"""Plain Flax networks with a decoder: what Monte Carlo samples, as in `plain`."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from flax import nnx

from moment_jax.nn.plain import (
    Arrays,
    PlainEncoder,
    ScalarFunction,
    plain_attention,
    plain_linear,
    plain_norm,
)

Array = jax.Array


class PlainDecoderBlock(nnx.Module):
    """A Transformer decoder block of Flax layers, post-norm or pre-norm."""

    def __init__(
        self,
        params: Arrays,
        *,
        num_heads: int,
        norm_first: bool,
        activation: ScalarFunction,
        epsilon: float,
    ) -> None:
        features = params.self_attention.query.kernel.shape[0]
        self.self_attention = plain_attention(params.self_attention, num_heads)
        self.norm1 = plain_norm(params.norm1, features, epsilon)
        self.cross_attention = plain_attention(params.cross_attention, num_heads)
        self.norm2 = plain_norm(params.norm2, features, epsilon)
        self.hidden = plain_linear(params.feed_forward.hidden)
        self.output = plain_linear(params.feed_forward.output)
        self.norm3 = plain_norm(params.norm3, features, epsilon)
        self.norm_first = norm_first
        self.activation = activation

    @property
    def num_heads(self) -> int:
        """Heads of its attention, to itself and to the memory."""
        return self.self_attention.num_heads

    def __call__(
        self,
        x: Array,
        memory: Array,
        mask: Array | None = None,
        memory_mask: Array | None = None,
    ) -> Array:
        """(..., T, D) and a memory (..., S, D) -> (..., T, D)."""

        def attend(y: Array) -> Array:
            return self.self_attention(y, mask=mask)

        def look(y: Array) -> Array:
            return self.cross_attention(y, memory, memory, mask=memory_mask)

        def transform(y: Array) -> Array:
            return self.output(self.activation(self.hidden(y)))

        branches = ((self.norm1, attend), (self.norm2, look), (self.norm3, transform))
        for norm, branch in branches:
            x = x + branch(norm(x)) if self.norm_first else norm(x + branch(x))
        return x


class PlainDecoder(nnx.Module):
    """A stack of decoder blocks, with a final normalisation where there is one."""

    def __init__(
        self, blocks: Sequence[PlainDecoderBlock], final_norm: nnx.LayerNorm | None
    ) -> None:
        self.blocks = nnx.List(blocks)
        self.final_norm = nnx.data(final_norm)

    def __call__(
        self,
        x: Array,
        memory: Array,
        mask: Array | None = None,
        memory_mask: Array | None = None,
    ) -> Array:
        """(..., T, D) and a memory (..., S, D) -> (..., T, D)."""
        for block in self.blocks:
            x = block(x, memory, mask, memory_mask)
        return x if self.final_norm is None else self.final_norm(x)


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
