"""Language models, encoders and decoders."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from tests.propagation.zoo.parts import (
    APART,
    CAUSAL,
    IDS,
    NEAR,
    PLACE,
    VALID,
    WITH_FIRST,
    D,
    H,
    T,
    attend,
    attention,
    block,
    dense,
    glu,
    heads,
    mlp,
    network,
    norm,
    repeated,
    rms,
    rotated,
    weight,
)


@network(IDS, VALID)
def bert(ids, mask):
    """As Hugging Face writes it: the padding mask is a bias made from an input."""
    x = nn.Embed(11, D)(ids) + nn.Embed(T, D)(repeated(PLACE, len(ids)))
    x = norm(x + nn.Embed(2, D)(jnp.zeros_like(ids)))
    bias = jnp.where(mask[:, None, None, :] > 0, 0.0, jnp.finfo(jnp.float32).min)
    q, k, v = (heads(dense(D, x)) for _ in "qkv")
    y = nn.dot_product_attention(q, k, v, bias=bias.astype(jnp.float32))
    x = norm(x + dense(D, y.reshape(x.shape)))
    x = norm(x + mlp(x))
    return dense(3, jnp.tanh(dense(D, x[:, 0])))


@network(IDS)
def cross_encoder(ids):
    """Two texts of one sequence, told apart by segments."""
    x = norm(nn.Embed(11, D)(ids) + nn.Embed(2, D)(PLACE // 4) + weight(T, D))
    return dense(3, jnp.tanh(dense(D, block(x)[:, 0])))


@network()
def modern_bert(x):
    """GeGLU, rotary positions; attention to all, then to neighbours."""
    x = norm(dense(D, x))
    for mask in (None, NEAR):
        q, k, v = (heads(each) for each in jnp.split(dense(3 * D, norm(x)), 3, axis=-1))
        x = x + dense(D, attend(rotated(q), rotated(k), v, mask=mask))
        x = x + glu(norm(x), nn.gelu)
    return dense(3, x[:, 0])


@network()
def t5_block(x):
    """A random bias of the scores for each distance and head."""
    x = dense(D, x)
    bias = weight(H, 2 * T - 1)[:, APART + T - 1]
    x = x + attention(rms(x), bias=bias[None])
    return dense(3, (x + mlp(rms(x), nn.relu)).mean(1))


@network(IDS, VALID)
def t5_encoder(ids, mask):
    """Two layers share one table of biases, by buckets of distances; scores have no scale.

    Read at its mean; at every token sds are off by .08.
    """
    x = nn.Embed(11, D)(ids)
    bucket = jnp.where(APART < 0, 4, 0) + jnp.minimum(jnp.abs(APART), 3)
    bias = jnp.transpose(nn.Embed(8, H)(bucket), (2, 0, 1))[None]
    bias = bias + jnp.where(mask[:, None, None, :] > 0, 0.0, -1e9).astype(jnp.float32)
    for _ in range(2):
        q, k, v = (heads(dense(D, rms(x), use_bias=False)) for _ in "qkv")
        x = x + dense(D, attend(q, k, v, bias=bias, scale=0.5), use_bias=False)
        x = x + mlp(rms(x), nn.relu)
    return rms(x).mean(1)


@network()
def longformer(x):
    """Neighbours, and a global token that sees all and is seen by all."""
    x = dense(D, x)
    for _ in range(2):
        x = block(x, mask=NEAR | WITH_FIRST)
    return dense(3, x[:, 0])


@network(refused="`real`")
def fnet(x):
    """Random Fourier features; tokens are mixed by a Fourier transform."""
    frequencies = np.random.default_rng(3).normal(size=(6, 12)).astype(np.float32)
    x = dense(D, jnp.sin(x @ frequencies))
    x = norm(x + jnp.real(jnp.fft.fft2(x)))
    return dense(3, norm(x + mlp(x)).mean(1))


@network()
def alibi_decoder(x):
    """Scores fall with the distance, with a slope of each head."""
    slopes = np.array([0.5, 0.25], np.float32)[:, None, None]
    bias = -slopes * jnp.abs(APART)[None].astype(jnp.float32)
    return dense(3, attention(dense(D, x), mask=CAUSAL, bias=bias[None])[:, -1])


@network()
def qwen3(x):
    """Normalised queries and keys, two key heads for four, SwiGLU."""
    x = dense(D, x)
    y = rms(x)
    q, k, v = heads(dense(D, y), 4), heads(dense(8, y)), heads(dense(8, y))
    k, v = (jnp.repeat(each, 2, axis=2) for each in (rotated(rms(k)), v))
    x = x + dense(D, attend(rotated(rms(q)), k, v, mask=CAUSAL))
    return dense(3, rms(x + glu(rms(x), nn.silu))[:, -1])


@network(IDS)
def gpt_neox(ids):
    """Attention and network side by side; rotary positions of half of each head."""
    x = nn.Embed(11, D)(ids)
    q, k, v = jnp.split(heads(dense(3 * D, norm(x))), 3, axis=-1)
    q, k = (rotated(each, part=4) for each in (q, k))
    x = x + dense(D, attend(q, k, v, mask=CAUSAL)) + mlp(norm(x))
    return dense(11, norm(x), use_bias=False)


@network(IDS)
def gemma2(ids):
    """Caps of the scores and logits, norms before and after, the embedding is the head."""
    embed = nn.Embed(11, D)
    x = embed(ids)
    q, k, v = (heads(each) for each in jnp.split(dense(3 * D, rms(x)), 3, axis=-1))
    y = attend(rotated(q), rotated(k), v, mask=CAUSAL & NEAR, cap=5.0)
    x = x + rms(dense(D, y))
    x = rms(x + rms(glu(rms(x), nn.gelu)))
    return 30 * jnp.tanh(embed.attend(x[:, -1]) / 30)


@network(IDS)
def gemma3(ids):
    """Normalised queries and keys, one key head, a sliding window and then all."""
    x = nn.Embed(11, D)(ids) * D**0.5
    for mask, base in ((CAUSAL & NEAR, 100.0), (CAUSAL, 1000.0)):
        y = rms(x)
        q, k, v = heads(dense(D, y)), heads(dense(8, y), 1), heads(dense(8, y), 1)
        q, k = rotated(rms(q), base), rotated(rms(k), base)
        k, v = (jnp.repeat(each, 2, axis=2) for each in (k, v))
        x = x + rms(dense(D, attend(q, k, v, mask=mask)))
        x = x + rms(glu(rms(x), nn.gelu))
    return dense(3, rms(x)[:, -1])


@network(refused="both use the same weights")
def deepseek_mla(x):
    """Keys and values of one latent; a rotary key that the heads share."""
    x = dense(D, x)
    y = rms(x)
    latent = rms(dense(6, y))
    turned = jnp.repeat(rotated(dense(4, y)[:, :, None]), H, axis=2)
    k = jnp.concatenate([heads(dense(8, latent)), turned], axis=-1)
    still, turning = jnp.split(heads(dense(D, y)), 2, axis=-1)
    q = jnp.concatenate([still, rotated(turning)], axis=-1)
    x = x + dense(D, attend(q, k, heads(dense(D, latent)), mask=CAUSAL))
    return dense(3, x.mean(1))


@network(refused="both use the same weights")
def differential_attention(x):
    """The difference of two attentions to the same values."""
    x = dense(D, x)
    y = rms(x)
    v = heads(dense(D, y))
    one, two = (attend(heads(dense(D, y)), heads(dense(D, y)), v) for _ in range(2))
    return dense(3, (x + dense(D, one - 0.3 * two)).mean(1))


@network()
def reversible(x):
    """Each half is changed by a function of the other."""
    a, b = jnp.split(dense(2 * D, x), 2, axis=-1)
    a = a + block(b)
    b = b + mlp(a)
    return dense(3, jnp.concatenate([a, b], axis=-1).mean(1))
