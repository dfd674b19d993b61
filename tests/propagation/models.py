"""Models as users of Flax write them, without a thought of this library."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx


class MyMLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(3, 32, rngs=rngs)
        self.second = nnx.Linear(32, 32, rngs=rngs)
        self.head = nnx.Linear(32, 2, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.first(x))
        x = self.dropout(x)
        x = nnx.silu(self.second(x))
        return self.head(x)


class MyBlock(nnx.Module):
    def __init__(self, width, heads, rngs):
        self.ln1 = nnx.LayerNorm(width, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.ln2 = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 2 * width, rngs=rngs)
        self.down = nnx.Linear(2 * width, width, rngs=rngs)

    def __call__(self, x, mask=None):
        x = x + self.attn(self.ln1(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.ln2(x))))


class MyViT(nnx.Module):
    """Convolutional patches, a class token, learned positions."""

    def __init__(self, rngs: nnx.Rngs, width=16, heads=2, depth=2, classes=3):
        self.patches = nnx.Conv(1, width, (4, 4), strides=(4, 4), padding="VALID", rngs=rngs)
        self.cls = nnx.Param(0.5 * jax.random.normal(rngs.params(), (1, 1, width)))
        self.positions = nnx.Param(0.5 * jax.random.normal(rngs.params(), (1, 5, width)))
        self.blocks = nnx.List([MyBlock(width, heads, rngs) for _ in range(depth)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, classes, rngs=rngs)

    def __call__(self, images):
        x = self.patches(images)
        b, h, w, c = x.shape
        x = x.reshape(b, h * w, c)
        x = jnp.concatenate([jnp.tile(self.cls[...], (b, 1, 1)), x], axis=1)
        x = x + self.positions[...]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


def rotate(x, theta=10_000.0):
    """Rotary position embedding of (B, T, H, K)."""
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half) / half)
    angle = jnp.arange(x.shape[1])[:, None] * frequency[None, :]
    angle = angle.astype(x.dtype)
    sin, cos = jnp.sin(angle)[None, :, None, :], jnp.cos(angle)[None, :, None, :]
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class MyDecoderBlock(nnx.Module):
    """RMSNorm, rotary positions, grouped queries, SwiGLU, no biases."""

    def __init__(self, width, heads, groups, rngs, rope=True):
        self.heads, self.groups, self.size, self.rope = heads, groups, width // heads, rope
        linear = lambda i, o: nnx.Linear(i, o, use_bias=False, rngs=rngs)  # noqa: E731
        self.norm1 = nnx.RMSNorm(width, rngs=rngs)
        self.q = linear(width, width)
        self.k = linear(width, groups * self.size)
        self.v = linear(width, groups * self.size)
        self.o = linear(width, width)
        self.norm2 = nnx.RMSNorm(width, rngs=rngs)
        self.gate, self.up = linear(width, 2 * width), linear(width, 2 * width)
        self.down = linear(2 * width, width)

    def __call__(self, x):
        b, t, _ = x.shape
        y = self.norm1(x)
        q = self.q(y).reshape(b, t, self.heads, self.size)
        k = self.k(y).reshape(b, t, self.groups, self.size)
        v = self.v(y).reshape(b, t, self.groups, self.size)
        if self.rope:
            q, k = rotate(q), rotate(k)
        x = x + self.o(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(b, t, -1))
        y = self.norm2(x)
        return x + self.down(nnx.silu(self.gate(y)) * self.up(y))


class MyLanguageModel(nnx.Module):
    def __init__(
        self, rngs: nnx.Rngs, vocabulary=11, width=16, heads=4, groups=2, depth=2, rope=True
    ):
        self.embed = nnx.Embed(vocabulary, width, rngs=rngs)
        self.blocks = nnx.List(
            [MyDecoderBlock(width, heads, groups, rngs, rope) for _ in range(depth)]
        )
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, vocabulary, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
