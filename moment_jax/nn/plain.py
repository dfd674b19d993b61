"""Plain networks of one draw of the weights, made of Flax's own layers.

They are the deterministic networks that Monte Carlo samples, so they share no code with the moment
transforms. Builders take the parameter groups of the transforms (`DenseParams`, `NormParams`,
`AttentionParams`, `EncoderBlockParams`), with arrays in place of beliefs.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jax import Array

ScalarFunction = Callable[[Array], Array]
Arrays = Any  # a parameter group with arrays in place of its beliefs


def plain_linear(params: Arrays) -> nnx.Linear:
    """`nnx.Linear` with this (in, out) kernel and this bias."""
    kernel, bias = params.kernel, params.bias
    return nnx.Linear(
        *kernel.shape,
        use_bias=bias is not None,
        param_dtype=kernel.dtype,
        kernel_init=lambda *_: kernel,
        bias_init=lambda *_: bias,
        rngs=nnx.Rngs(0),
    )


def plain_embed(table: Array) -> nnx.Embed:
    """`nnx.Embed` with this (V, D) table."""
    return nnx.Embed(
        *table.shape, param_dtype=table.dtype, embedding_init=lambda *_: table, rngs=nnx.Rngs(0)
    )


def plain_norm(params: Arrays, num_features: int, epsilon: float) -> nnx.LayerNorm:
    """`nnx.LayerNorm` with this gain and bias."""
    return nnx.LayerNorm(
        num_features,
        epsilon=epsilon,
        use_scale=params.scale is not None,
        use_bias=params.bias is not None,
        scale_init=lambda *_: params.scale,
        bias_init=lambda *_: params.bias,
        use_fast_variance=False,
        rngs=nnx.Rngs(0),
    )


def plain_attention(params: Arrays, num_heads: int) -> nnx.MultiHeadAttention:
    """`nnx.MultiHeadAttention` with these kernels, heads outermost in (D, H K) and (H K, D)."""
    features, width = params.query.kernel.shape
    layer = nnx.MultiHeadAttention(
        num_heads,
        features,
        qkv_features=width,
        out_features=params.output.kernel.shape[1],
        use_bias=params.query.bias is not None,
        param_dtype=params.query.kernel.dtype,
        kernel_init=nnx.initializers.zeros,
        decode=False,
        rngs=nnx.Rngs(0),
    )
    for name in ("query", "key", "value", "out"):
        dense: Arrays = params.output if name == "out" else getattr(params, name)
        target = getattr(layer, name)
        target.kernel.set_value(dense.kernel.reshape(target.kernel.shape))
        if dense.bias is not None:
            target.bias.set_value(dense.bias.reshape(target.bias.shape))
    return layer


@dataclasses.dataclass(eq=False, repr=False)
class PlainPositions(nnx.Module):
    """Adds the row of its position in a table to every token."""

    table: nnx.Embed

    def __call__(self, x: Array) -> Array:
        """(..., T, D) -> (..., T, D)."""
        return x + self.table(jnp.arange(x.shape[-2]))


class PlainMLP(nnx.Module):
    """Linear layers with an activation between them."""

    def __init__(self, layers: Sequence[nnx.Linear], activation: ScalarFunction) -> None:
        self.layers = nnx.List(layers)
        self.activation = activation

    def __call__(self, x: Array) -> Array:
        """(..., in) -> (..., out)."""
        for layer in self.layers[:-1]:
            x = self.activation(layer(x))
        return self.layers[-1](x)


class PlainBlock(nnx.Module):
    """Base of encoder and decoder blocks: normalisations and the feed-forward layer.

    Subclasses name their attentions and normalisations. The feed-forward layer comes last; every
    sublayer has its own normalisation, after it (post-norm) or before it (pre-norm).
    """

    attentions: ClassVar[tuple[str, ...]]
    norms: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        params: Arrays,
        *,
        num_heads: int,
        norm_first: bool,
        activation: ScalarFunction,
        epsilon: float,
    ) -> None:
        for name in self.attentions:
            setattr(self, name, plain_attention(getattr(params, name), num_heads))
        self.hidden = plain_linear(params.feed_forward.hidden)
        self.output = plain_linear(params.feed_forward.output)
        for name in self.norms:
            norm = plain_norm(getattr(params, name), self.hidden.in_features, epsilon)
            setattr(self, name, norm)
        self.norm_first = norm_first
        self.activation = activation

    @property
    def num_heads(self) -> int:
        """Number of attention heads."""
        return getattr(self, self.attentions[0]).num_heads

    def sublayer(self, x: Array, norm: nnx.LayerNorm, branch: ScalarFunction) -> Array:
        """A branch with its residual and its normalisation."""
        return x + branch(norm(x)) if self.norm_first else norm(x + branch(x))

    def transform(self, x: Array) -> Array:
        """The feed-forward layer alone."""
        return self.output(self.activation(self.hidden(x)))


class PlainEncoderBlock(PlainBlock):
    """A Transformer encoder block of Flax layers, post-norm or pre-norm."""

    attentions = ("attention",)
    norms = ("norm1", "norm2")
    attention: nnx.MultiHeadAttention
    norm1: nnx.LayerNorm
    norm2: nnx.LayerNorm

    def attend(self, x: Array, mask: Array | None = None) -> Array:
        """The first half: attention with its residual and its normalisation."""
        return self.sublayer(x, self.norm1, lambda y: self.attention(y, mask=mask))

    def feed_forward(self, x: Array) -> Array:
        """The second half: the feed-forward layer with its residual and its normalisation."""
        return self.sublayer(x, self.norm2, self.transform)

    def __call__(self, x: Array, mask: Array | None = None) -> Array:
        """(..., T, D) -> (..., T, D)."""
        return self.feed_forward(self.attend(x, mask))


class PlainDecoderBlock(PlainBlock):
    """A Transformer decoder block of Flax layers, post-norm or pre-norm."""

    attentions = ("self_attention", "cross_attention")
    norms = ("norm1", "norm2", "norm3")
    self_attention: nnx.MultiHeadAttention
    cross_attention: nnx.MultiHeadAttention
    norm1: nnx.LayerNorm
    norm2: nnx.LayerNorm
    norm3: nnx.LayerNorm

    def __call__(
        self, x: Array, memory: Array, mask: Array | None = None, memory_mask: Array | None = None
    ) -> Array:
        """(..., T, D) and a memory (..., S, D) -> (..., T, D)."""

        def look(y: Array) -> Array:
            return self.cross_attention(y, memory, memory, mask=memory_mask)

        x = self.sublayer(x, self.norm1, lambda y: self.self_attention(y, mask=mask))
        return self.sublayer(self.sublayer(x, self.norm2, look), self.norm3, self.transform)


class PlainStack(nnx.Module):
    """Blocks one after another, with a final normalisation if there is one."""

    def __init__(self, blocks: Sequence[PlainBlock], final_norm: nnx.LayerNorm | None) -> None:
        self.blocks: nnx.List[Any] = nnx.List(blocks)
        self.final_norm = nnx.data(final_norm)

    def __call__(self, x: Array, *given: Any, **options: Any) -> Array:
        """(..., T, D) -> (..., T, D), with the other arguments of each block: a memory, masks."""
        for block in self.blocks:
            x = block(x, *given, **options)
        return x if self.final_norm is None else self.final_norm(x)


class PlainEncoder(PlainStack):
    """A stack of encoder blocks: (x, mask)."""


class PlainDecoder(PlainStack):
    """A stack of decoder blocks: (x, memory, mask, memory_mask)."""


@dataclasses.dataclass(eq=False, repr=False)
class PlainTransformer(nnx.Module):
    """Encoder and decoder."""

    encoder: PlainEncoder
    decoder: PlainDecoder

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


@dataclasses.dataclass(eq=False, repr=False)
class PlainTokenTransformer(nnx.Module):
    """Embedding, positions, encoder, and a linear head at every token."""

    embed: nnx.Linear
    positions: PlainPositions
    encoder: PlainEncoder
    head: nnx.Linear

    def __call__(self, x: Array) -> Array:
        """(..., T, in) -> (..., T, out)."""
        return self.head(self.encoder(self.positions(self.embed(x))))


class PlainVisionTransformer(nnx.Module):
    """Patches, positions, encoder, mean over tokens, linear head."""

    def __init__(
        self,
        embed: nnx.Linear,
        position: Array,
        encoder: PlainEncoder,
        head: nnx.Linear,
        patches: ScalarFunction,
    ) -> None:
        self.embed, self.encoder, self.head = embed, encoder, head
        self.position, self.patches = nnx.Param(position), patches

    def __call__(self, images: Array) -> Array:
        """(..., height, width[, channels]) -> logits (..., classes)."""
        x = self.embed(self.patches(images)) + self.position[...]
        return self.head(self.encoder(x).mean(axis=-2))
