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
