"""Vision transformers, convolutions, diffusion, two towers."""

from __future__ import annotations

import jax.numpy as jnp
from flax import linen as nn

from tests.propagation.zoo.parts import (
    IMAGE,
    D,
    H,
    T,
    attention,
    block,
    dense,
    mlp,
    network,
    norm,
    real,
    repeated,
    weight,
)


@network(IMAGE, output=lambda out: out[0])
def big_vision(image):
    """A ViT that returns its logits and a dictionary, and pools by attention of a probe."""
    x = nn.Conv(D, (4, 4), (4, 4), padding="VALID")(image).reshape(-1, 4, D) + weight(4, D)
    y = norm(x)
    x = x + nn.MultiHeadDotProductAttention(H)(y, y)
    x = encoded = norm(x + mlp(norm(x)))
    x = nn.MultiHeadDotProductAttention(H)(repeated(weight(1, D), len(image)), x)
    x = (x + mlp(norm(x)))[:, 0]
    return dense(3, x), {"encoded": encoded, "pre_logits": x}


@network()
def deit(x):
    """A class token and a distillation token, each with its head."""
    x = jnp.concatenate([repeated(weight(2, D), len(x)), dense(D, x)], axis=1) + weight(T + 2, D)
    x = norm(block(x))
    return (dense(3, x[:, 0]) + dense(3, x[:, 1])) / 2


def in_windows(x, shift, **options):
    """Attention within windows of two by two tokens of (B, 4, 4, D), moved by `shift`."""
    y = jnp.roll(norm(x), (-shift, -shift), (1, 2)).reshape(-1, 2, 2, 2, 2, D)
    y = jnp.swapaxes(y, 2, 3).reshape(-1, 4, D)
    y = attention(y, **options).reshape(-1, 2, 2, 2, 2, D)
    return jnp.roll(jnp.swapaxes(y, 2, 3).reshape(x.shape), (shift, shift), (1, 2))


@network(IMAGE)
def swin(image):
    """Windows of an image with a table of relative biases; a mask of -100 where they are moved."""
    x = nn.Conv(D, (2, 2), (2, 2), padding="VALID")(image)
    row, column = jnp.arange(4) // 2, jnp.arange(4) % 2
    place = 3 * (row[:, None] - row[None] + 1) + column[:, None] - column[None] + 1
    region = jnp.kron(jnp.arange(4).reshape(2, 2), jnp.ones((2, 2), int))
    window = jnp.swapaxes(jnp.roll(region, (-1, -1), (0, 1)).reshape(2, 2, 2, 2), 1, 2).reshape(
        4, 4
    )
    hidden = jnp.where(window[:, :, None] == window[:, None], 0.0, -100.0).astype(jnp.float32)
    for shift in (0, 1):
        bias = jnp.moveaxis(weight(9, H)[place], -1, 0)[None]
        if shift:
            bias = bias + jnp.tile(hidden, (len(image), 1, 1))[:, None]
        x = x + in_windows(x, shift, bias=bias)
        x = x + mlp(norm(x))
    return dense(3, x.mean((1, 2)))


@network(IMAGE)
def convnext_of_patches(image):
    """Patches, mixing of features, a scale of each."""
    x = nn.Conv(D, (4, 4), (4, 4), padding="VALID")(image).reshape(-1, 4, D)
    return dense(3, (x + weight(D) * mlp(norm(x))).mean(1))


@network(IMAGE, refused="conv_general_dilated")
def convnext(image):
    """Depthwise convolutions that overlap."""
    x = norm(nn.Conv(D, (2, 2), (2, 2), padding="VALID")(image))
    y = nn.Conv(D, (3, 3), feature_group_count=D)(x)
    x = x + weight(D) * mlp(norm(y))
    return dense(3, norm(x.mean((1, 2))))


@network(real(T, 6), jnp.array([0.1, 0.7], jnp.float32), jnp.array([1, 3], jnp.int32))
def dit(x, time, label):
    """Diffusion: time and label move, scale and gate every sublayer (adaLN-zero)."""
    angle = time[:, None] * jnp.array([1.0, 3.0, 9.0], jnp.float32)[None]
    condition = mlp(dense(D, jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], -1)), nn.silu)
    condition = nn.silu(condition + nn.Embed(5, D)(label))

    def modulated(x, shift, scale):
        return norm(x, use_bias=False, use_scale=False) * (1 + scale) + shift

    x = dense(D, x) + weight(T, D)
    parts = jnp.split(dense(6 * D, condition)[:, None], 6, axis=-1)
    x = x + parts[2] * attention(modulated(x, *parts[:2]))
    x = x + parts[5] * mlp(modulated(x, *parts[3:5]))
    return dense(3, modulated(x, *jnp.split(dense(2 * D, condition)[:, None], 2, axis=-1)))


@network()
def clip(x):
    """Two towers and the cosine of their outputs."""
    a, b = (dense(8, block(dense(D, part)).mean(1)) for part in jnp.split(x, 2, axis=-1))
    a, b = (part / jnp.linalg.norm(part, axis=-1, keepdims=True) for part in (a, b))
    return jnp.exp(weight()) * (a * b).sum(-1, keepdims=True)
