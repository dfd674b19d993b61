"""Ordinary Flax networks: Transformers and a multilayer perceptron. `model(x)` is an array.

They know nothing of moments: `mj.Bayesian(network)` makes any of them random, as it does your own. All
arrays may have leading batch axes. An activation is "relu", "gelu" (the exact one), "tanh", "silu", or
any scalar function; `rngs` are Flax's random streams, for the initial weights.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from moment_jax.covariance.fields import need
from moment_jax.nn.modules import Module

Activation = str | Callable[[Array], Array]
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": jax.nn.relu, "gelu": partial(jax.nn.gelu, approximate=False), "tanh": jnp.tanh,
    "silu": jax.nn.silu,
}  # fmt: skip


def find_activation(activation: Activation) -> Callable[[Array], Array]:
    """The function itself, or the one of this name."""
    if callable(activation):
        return activation
    rule = f"an activation, a function or one of {', '.join(ACTIVATIONS)}"
    need("mj.nn", activation in ACTIVATIONS, rule, repr(activation))
    return ACTIVATIONS[activation]


class MLP(Module):
    """Linear layers with an activation between them: (..., in) -> (..., out).

    Args:
      features: widths, from the input's to the output's, such as [8, 50, 1].

    >>> model = MLP([3, 8, 2], rngs=nnx.Rngs(0))
    >>> model(jnp.ones((5, 3))).shape
    (5, 2)
    """

    def __init__(
        self, features: Sequence[int], *, activation: Activation = "relu", rngs: nnx.Rngs
    ) -> None:
        rule = "the widths of its input and its output at least, such as [8, 50, 1]"
        need("MLP", len(features) >= 2, rule, list(features))
        self.layers = nnx.List(nnx.Linear(a, b, rngs=rngs) for a, b in pairwise(features))
        self.activation = find_activation(activation)

    def __call__(self, x: Array) -> Array:
        """(..., in) -> (..., out)."""
        for layer in self.layers[:-1]:
            x = self.activation(layer(x))
        return self.layers[-1](x)


class _Block(Module):
    """Attentions, then the feed-forward layer, each with a residual and a normalisation of its own."""

    attentions: ClassVar[tuple[str, ...]]
    norm1: nnx.LayerNorm
    norm2: nnx.LayerNorm

    def __init__(
        self, num_features: int, num_heads: int, *, hidden_features: int | None = None,
        norm_first: bool = False, activation: Activation = "relu", epsilon: float = 1e-6,
        rngs: nnx.Rngs,
    ) -> None:  # fmt: skip
        right = num_heads >= 1 and num_features % num_heads == 0
        came = f"{num_heads} and {num_features}"
        need(type(self).__name__, right, "num_heads to divide num_features", came)
        hidden = 4 * num_features if hidden_features is None else hidden_features
        norm = partial(nnx.LayerNorm, num_features, epsilon=epsilon, use_fast_variance=False)
        for i, name in enumerate(self.attentions, 1):
            attend = nnx.MultiHeadAttention(num_heads, num_features, decode=False, rngs=rngs)
            setattr(self, name, attend)
            setattr(self, f"norm{i}", norm(rngs=rngs))
        self.hidden = nnx.Linear(num_features, hidden, rngs=rngs)
        self.output = nnx.Linear(hidden, num_features, rngs=rngs)
        setattr(self, f"norm{len(self.attentions) + 1}", norm(rngs=rngs))
        self.norm_first, self.activation = norm_first, find_activation(activation)

    def sublayer(self, x: Array, norm: nnx.LayerNorm, branch: Callable[[Array], Array]) -> Array:
        """A branch with its residual and its normalisation."""
        return x + branch(norm(x)) if self.norm_first else norm(x + branch(x))

    def transform(self, x: Array) -> Array:
        """The feed-forward layer alone."""
        return self.output(self.activation(self.hidden(x)))


class EncoderBlock(_Block):
    """A Transformer encoder block: self-attention and a feed-forward layer.

    Args:
      num_features: D.
      num_heads: H, a divisor of D, or a ValueError is raised.
      hidden_features: width of the feed-forward layer; 4 D where None.
      norm_first: pre-norm if True, post-norm (the original's) if False.
      activation: of the feed-forward layer.
      epsilon: added to the variance in the normalisations.
    """

    attentions = ("attention",)
    attention: nnx.MultiHeadAttention

    def __call__(self, x: Array, mask: Array | None = None) -> Array:
        """(..., T, D) -> (..., T, D).

        `mask` is True where a query may look at a key, of a shape that broadcasts to (..., H, T, T): for
        padding, valid[..., None, None, :]; for a causal block, jnp.tril(jnp.ones((T, T), bool)).
        """
        x = self.sublayer(x, self.norm1, partial(self.attention, mask=mask))
        return self.sublayer(x, self.norm2, self.transform)


class DecoderBlock(_Block):
    """A Transformer decoder block: self-attention, attention to a memory, and a feed-forward layer.

    Arguments are those of `EncoderBlock`; the memory has D features too.
    """

    attentions = ("self_attention", "cross_attention")
    self_attention: nnx.MultiHeadAttention
    cross_attention: nnx.MultiHeadAttention
    norm3: nnx.LayerNorm

    def __call__(
        self, x: Array, memory: Array, mask: Array | None = None, memory_mask: Array | None = None
    ) -> Array:
        """(..., T, D) and a memory (..., S, D) -> (..., T, D); masks as for `EncoderBlock`."""
        look = partial(self.cross_attention, inputs_k=memory, inputs_v=memory, mask=memory_mask)
        x = self.sublayer(x, self.norm1, partial(self.self_attention, mask=mask))
        return self.sublayer(self.sublayer(x, self.norm2, look), self.norm3, self.transform)


class _Stack(Module):
    """Blocks one after another; with pre-norm a final normalisation follows."""

    block_type: ClassVar[Any]

    def __init__(
        self, num_blocks: int, num_features: int, num_heads: int, *, norm_first: bool = False,
        epsilon: float = 1e-6, scan: bool = False, remat: bool = False, rngs: nnx.Rngs,
        **options: Any,
    ) -> None:  # fmt: skip
        need(type(self).__name__, num_blocks >= 1, "num_blocks >= 1", num_blocks)
        options |= {"norm_first": norm_first, "epsilon": epsilon}

        def block(rngs: nnx.Rngs) -> Any:
            return self.block_type(num_features, num_heads, rngs=rngs, **options)

        if scan:
            self.blocks: Any = nnx.split_rngs(splits=num_blocks)(nnx.vmap(block))(rngs)
        else:
            self.blocks = nnx.List(block(rngs) for _ in range(num_blocks))
        norm = partial(nnx.LayerNorm, num_features, epsilon=epsilon, use_fast_variance=False)
        self.final_norm = nnx.data(norm(rngs=rngs) if norm_first else None)
        self.scan, self.remat = scan, remat

    def _through(self, x: Array, *given: Any) -> Array:
        """All blocks, each with x and the other arguments: a memory, masks."""

        def one(graph: Any, state: Any, x: Array) -> Array:
            return nnx.merge(graph, state)(x, *given)

        # Split and merged by hand: Flax's own transformations refuse a model that is closed over.
        one = jax.checkpoint(one, static_argnums=0) if self.remat else one
        if self.scan:
            graph, stacked = nnx.split(self.blocks)
            x, _ = jax.lax.scan(lambda x, state: (one(graph, state, x), None), x, stacked)
        else:
            for block in self.blocks:
                x = one(*nnx.split(block), x) if self.remat else block(x, *given)
        return x if self.final_norm is None else self.final_norm(x)


class Encoder(_Stack):
    """A stack of encoder blocks; with pre-norm, a final normalisation follows.

    Args (the others are those of `EncoderBlock`):
      num_blocks: L, at least one.
      scan: one compiled loop over the blocks also in the plain network, whose weights are stacked.
        Beliefs about stacks are `Factorized`.
      remat: recompute each block in the backward pass instead of storing what it needs.
    """

    block_type = EncoderBlock

    def __call__(self, x: Array, mask: Array | None = None) -> Array:
        """(..., T, D) -> (..., T, D); the mask as for `EncoderBlock`."""
        return self._through(x, mask)


class Decoder(_Stack):
    """A stack of decoder blocks with one memory; arguments are those of `Encoder`."""

    block_type = DecoderBlock

    def __call__(
        self, x: Array, memory: Array, mask: Array | None = None, memory_mask: Array | None = None
    ) -> Array:
        """(..., T, D) and a memory (..., S, D) -> (..., T, D); masks as for `EncoderBlock`."""
        return self._through(x, memory, mask, memory_mask)


class Transformer(Module):
    """An encoder of the source and a decoder of the target, between your own embeddings and head.

    Args (the others are those of `Encoder`, and the same for the decoder):
      num_blocks: of the encoder, and of the decoder.

    >>> model = Transformer(4, 2, 1, hidden_features=4, rngs=nnx.Rngs(0))
    >>> model(jnp.ones((2, 5, 4)), jnp.ones((2, 3, 4)), mask=jnp.tril(jnp.ones((3, 3), bool))).shape
    (2, 3, 4)
    """

    def __init__(
        self, num_features: int, num_heads: int, num_blocks: int, *, rngs: nnx.Rngs, **options: Any
    ) -> None:
        self.encoder = Encoder(num_blocks, num_features, num_heads, rngs=rngs, **options)
        self.decoder = Decoder(num_blocks, num_features, num_heads, rngs=rngs, **options)

    def __call__(
        self, source: Array, target: Array, source_mask: Array | None = None,
        mask: Array | None = None, memory_mask: Array | None = None,
    ) -> Array:  # fmt: skip
        """(..., S, D) and (..., T, D) -> (..., T, D).

        Masks as for `EncoderBlock`: of the encoder, of the decoder's self-attention, and of its
        attention to the memory, (..., H, T, S). A causal decoder needs a `mask`.
        """
        return self.decoder(target, self.encoder(source, source_mask), mask, memory_mask)


class LearnedPositions(Module):
    """Adds a vector of its own to every position of a sequence.

    Args:
      max_length: the longest sequence.
      num_features: D.
      scale: standard deviation of the initial vectors.
    """

    def __init__(
        self, max_length: int, num_features: int, *, scale: float = 0.02, rngs: nnx.Rngs
    ) -> None:
        start = nnx.initializers.normal(scale)
        self.table = nnx.Embed(max_length, num_features, embedding_init=start, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        """(..., T, D) -> (..., T, D); ValueError if the sequence ends beyond the last position."""
        length, places = x.shape[-2], self.table.num_embeddings
        rule = f"a sequence within its {places} places"
        need("LearnedPositions", length <= places, rule, f"{length} tokens")
        return x + self.table(jnp.arange(length))


class TokenTransformer(Module):
    """Linear embedding + learned positions -> encoder -> linear head at every token.

    For one-hot inputs the embedding's kernel is a table of rows. Positions begin as large as tokens:
    with Flax's customary 0.02 a small network is slow to tell positions apart.

    Args (the others are those of `Encoder`):
      num_tokens: T, of the longest sequence.
      in_features: numbers at every token of the input.
      out_features: numbers at every token of the output.
    """

    def __init__(
        self, num_tokens: int, in_features: int, out_features: int, *, num_blocks: int = 1,
        num_features: int = 32, num_heads: int = 4, norm_first: bool = True, rngs: nnx.Rngs,
        **options: Any,
    ) -> None:  # fmt: skip
        self.embed = nnx.Linear(in_features, num_features, rngs=rngs)
        self.positions = LearnedPositions(num_tokens, num_features, scale=1.0, rngs=rngs)
        size = num_blocks, num_features, num_heads
        self.encoder = Encoder(*size, norm_first=norm_first, rngs=rngs, **options)
        self.head = nnx.Linear(num_features, out_features, rngs=rngs)

    def __call__(self, x: Array, mask: Array | None = None) -> Array:
        """(..., T, in) -> (..., T, out); the mask as for `EncoderBlock`."""
        return self.head(self.encoder(self.positions(self.embed(x)), mask))


@dataclasses.dataclass(frozen=True)
class Patches:
    """Cuts images into the tokens of a sequence, patch by patch in rows.

    Integers become float32 without scaling: divide uint8 by 255 for numbers up to one.

    Args:
      size: height and width of a patch.
      channels: number of channels; images of one channel may omit the axis.
    """

    size: int
    channels: int = 1

    def __call__(self, images: Array) -> Array:
        """(..., height, width[, channels]) -> (..., tokens, size * size * channels)."""
        rule = "images as an array (..., height, width[, channels])"
        mend = "Use jnp.asarray(images)."
        need("Patches", getattr(images, "ndim", 0) >= 2, rule, jnp.shape(images), mend)
        if not jnp.issubdtype(images.dtype, jnp.floating):
            images = images.astype(jnp.float32)
        if self.channels == 1 and (images.ndim < 3 or images.shape[-1] != 1):
            images = images[..., None]
        *batch, height, width, channels = images.shape
        right = height % self.size == width % self.size == 0 and channels == self.channels
        sides = f"with sides divisible by {self.size}"
        rule = f"images (..., height, width, {self.channels}) {sides}"
        need("Patches", right, rule, tuple(images.shape))
        rows, columns = height // self.size, width // self.size
        cut = images.reshape(*batch, rows, self.size, columns, self.size, channels)
        return jnp.moveaxis(cut, -4, -3).reshape(*batch, rows * columns, self.size**2 * channels)


class VisionTransformer(Module):
    """Patches -> linear embedding + learned positions -> encoder -> mean over tokens -> linear head.

    Args (the others are those of `Encoder`):
      image_size: height and width of the images.
      patch_size: height and width of a patch, a divisor of image_size, or a ValueError is raised.
      num_classes: C.
      channels: channels of the images.
      position_scale: standard deviation of the initial positions.

    >>> model = VisionTransformer(image_size=8, patch_size=2, num_classes=10, rngs=nnx.Rngs(0))
    >>> model(jnp.ones((5, 8, 8))).shape
    (5, 10)
    """

    def __init__(
        self, *, image_size: int, patch_size: int, num_classes: int, channels: int = 1,
        num_features: int = 64, num_heads: int = 4, num_blocks: int = 2, norm_first: bool = True,
        activation: Activation = "gelu", position_scale: float = 0.02, rngs: nnx.Rngs,
        **options: Any,
    ) -> None:  # fmt: skip
        right = patch_size >= 1 and image_size >= 1 and image_size % patch_size == 0
        rule, came = "patch_size to divide image_size", f"{patch_size} and {image_size}"
        need("VisionTransformer", right, rule, came)
        self.patches, num_tokens = Patches(patch_size, channels), (image_size // patch_size) ** 2
        self.embed = nnx.Linear(patch_size**2 * channels, num_features, rngs=rngs)
        start = position_scale * jax.random.normal(rngs.params(), (num_tokens, num_features))
        self.position = nnx.Param(start)
        options |= {"norm_first": norm_first, "activation": activation}
        self.encoder = Encoder(num_blocks, num_features, num_heads, rngs=rngs, **options)
        self.head = nnx.Linear(num_features, num_classes, rngs=rngs)

    def __call__(self, images: Array) -> Array:
        """Images (..., height, width[, channels]) -> logits (..., C)."""
        tokens, count = self.patches(images), self.position.shape[0]
        size = self.patches.size * math.isqrt(count)
        rule, mend = f"images of {size} x {size} pixels", "Give image_size, or resize them."
        need("VisionTransformer", tokens.shape[-2] == count, rule, tuple(images.shape), mend)
        x = self.embed(tokens) + self.position[...]
        return self.head(self.encoder(x).mean(axis=-2))
