"""A plain network is taken over as it is, or refused: nothing is lost, invented or reshaped."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import moment_jax as mj
from tests.builders import assert_close, tiny_vision

D, HEADS = 4, 2
X = jax.random.normal(jax.random.key(0), (3, D), jnp.float32)
RNGS = nnx.Rngs(0)


pytestmark = pytest.mark.usefixtures("ranks_of_a_user")


def block(change=lambda plain: None, **options):
    """A plain encoder block with something changed."""
    options = {"hidden_features": 6, **options}
    plain = mj.nn.EncoderBlock(D, HEADS, rngs=nnx.Rngs(1), **options).sample(jax.random.key(2))
    change(plain)
    return plain


def encoder(change=lambda plain: None, **options):
    """A plain encoder of two blocks with something changed."""
    model = mj.nn.Encoder(2, D, HEADS, hidden_features=6, rngs=nnx.Rngs(1), **options)
    plain = model.sample(jax.random.key(2))
    change(plain)
    return plain


def vision(change=lambda plain: None, **options):
    model = tiny_vision(activation="gelu", rngs=nnx.Rngs(1), **options)
    plain = model.sample(jax.random.key(2))
    change(plain)
    return plain


def put(*path_and_value):
    """A change: the last argument in the place of what the attributes before lead to."""
    *path, name, value = path_and_value

    def change(plain):
        for step in path:
            plain = plain[step] if isinstance(step, int) else getattr(plain, step)
        setattr(plain, name, value)

    return change


def attention(**options):
    return nnx.MultiHeadAttention(HEADS, D, decode=False, rngs=nnx.Rngs(3), **options)


def mlp(use_bias=True, activation=jnp.tanh):
    layers = [nnx.Linear(*size, use_bias=use_bias, rngs=nnx.Rngs(4)) for size in ((D, 5), (5, 2))]
    return mj.nn.PlainMLP(layers, activation)


@pytest.mark.parametrize(
    ("kind", "plain"),
    [
        (mj.nn.Dense, nnx.Linear(D, 3, use_bias=False, rngs=RNGS)),
        (mj.nn.LayerNorm, nnx.LayerNorm(D, epsilon=0.1, rngs=RNGS)),
        (mj.nn.MultiHeadAttention, attention()),
        (mj.nn.MultiHeadAttention, attention(use_bias=False)),
        (mj.nn.MLP, mlp()),
        (mj.nn.MLP, mlp(use_bias=False, activation=jax.nn.silu)),
        (mj.nn.MLP, mlp(activation=lambda x: jax.nn.gelu(x, approximate=False))),
        (mj.nn.EncoderBlock, block(activation="gelu", epsilon=0.1)),
        (mj.nn.EncoderBlock, block(activation="silu", norm_first=True)),
        (mj.nn.Encoder, encoder(activation="tanh", epsilon=0.1, norm_first=True)),
    ],
)
def test_what_is_converted_computes_the_same(kind, plain):
    again = kind.from_deterministic(plain).mean_network()
    assert_close(again(X), plain(X), 1e-5)


def test_an_epsilon_of_a_vision_transformer_is_kept():
    plain, images = vision(epsilon=0.1, num_blocks=2), jnp.ones((1, 4, 4))
    again = mj.nn.VisionTransformer.from_deterministic(plain).mean_network()
    assert_close(again(images), plain(images), 1e-5)


LORA = nnx.LoRALinear(D, D, lora_rank=1, rngs=RNGS)
NORM = nnx.LayerNorm(D, rngs=RNGS)


@pytest.mark.parametrize(
    ("kind", "plain", "error", "words"),
    [
        (mj.nn.Dense, LORA, TypeError, "an nnx.Linear. Got LoRALinear"),
        (mj.nn.Dense, nnx.LinearGeneral(D, (2, 2), rngs=RNGS), TypeError, "Got LinearGeneral"),
        (mj.nn.LayerNorm, nnx.BatchNorm(D, rngs=RNGS), TypeError, "Got BatchNorm"),
        (mj.nn.LayerNorm, nnx.RMSNorm(D, rngs=RNGS), TypeError, "Got RMSNorm"),
        (mj.nn.LayerNorm, nnx.LayerNorm(D, use_bias=False, rngs=RNGS), ValueError, "of zeros"),
        (mj.nn.LayerNorm, nnx.LayerNorm(D, use_scale=False, rngs=RNGS), ValueError, "of ones"),
        (
            mj.nn.LayerNorm,
            nnx.LayerNorm(D, reduction_axes=(-2, -1), rngs=RNGS),
            ValueError,
            r"reduction_axes == -1. Got \(-2, -1\)",
        ),
        (
            mj.nn.MultiHeadAttention,
            attention(normalize_qk=True),
            ValueError,
            "normalize_qk == False",
        ),
        (
            mj.nn.MultiHeadAttention,
            attention(qkv_features=8),
            ValueError,
            "qkv_features == 4. Got 8",
        ),
        (
            mj.nn.MultiHeadAttention,
            attention(out_features=6),
            ValueError,
            "out_features == 4. Got 6",
        ),
        (mj.nn.MultiHeadAttention, attention(in_kv_features=6), ValueError, "in_kv_features == 4"),
        (mj.nn.MultiHeadAttention, attention(num_kv_heads=1), ValueError, "num_kv_heads == 2"),
        (
            mj.nn.MultiHeadAttention,
            attention(attention_fn=lambda q, *_, **__: q),
            ValueError,
            "attention_fn",
        ),
        (mj.nn.MLP, mlp(activation=jax.nn.gelu), ValueError, "approximate=False"),
        (mj.nn.MLP, mlp(activation=jax.nn.elu), ValueError, "one of relu, gelu, tanh, silu"),
        (mj.nn.MLP, mlp(activation=None), ValueError, "activation=.*one of relu"),
        (mj.nn.EncoderBlock, block(put("norm2", "epsilon", 0.1)), ValueError, "epsilon.*Got 0.1"),
        (mj.nn.EncoderBlock, block(put("norm1", nnx.BatchNorm(D, rngs=RNGS))), TypeError, "Batch"),
        (
            mj.nn.EncoderBlock,
            block(put("hidden", nnx.Linear(D, 6, use_bias=False, rngs=RNGS))),
            ValueError,
            "of zeros",
        ),
        (
            mj.nn.EncoderBlock,
            block(put("attention", attention(use_bias=False))),
            ValueError,
            "zeros",
        ),
        (mj.nn.EncoderBlock, block(put("gain", nnx.Param(X))), ValueError, "lost or invented"),
        (
            mj.nn.Encoder,
            encoder(put("blocks", 1, "activation", jnp.tanh)),
            ValueError,
            "activation 'relu'",
        ),
        (mj.nn.Encoder, encoder(put("blocks", 1, "norm_first", True)), ValueError, "norm_first"),
        (mj.nn.Encoder, encoder(put("final_norm", NORM)), ValueError, "final normalisation"),
        (
            mj.nn.VisionTransformer,
            vision(put("position", nnx.Param(jnp.ones((3, D))))),
            ValueError,
            r"\(4, 4\).*Got \(3, 4\)",
        ),
        (mj.nn.VisionTransformer, vision(put("patches", lambda x: x)), TypeError, "Patches"),
        (mj.nn.Embedding, nnx.Linear(D, 3, rngs=RNGS), TypeError, "nnx.Embed"),
    ],
)
def test_what_would_compute_something_else_is_refused(kind, plain, error, words):
    with pytest.raises(error, match=words):
        kind.from_deterministic(plain)


def test_the_activation_is_found_and_a_wrong_one_refused():
    assert mj.nn.EncoderBlock.from_deterministic(block(activation="gelu")).activation == "gelu"
    assert (
        mj.nn.VisionTransformer.from_deterministic(vision()).encoder.blocks[0].activation == "gelu"
    )
    with pytest.raises(ValueError, match="activation 'relu'"):
        mj.nn.EncoderBlock.from_deterministic(block(activation="gelu"), activation="relu")


def test_loading_does_not_reshape():
    with pytest.raises(ValueError, match=r"\(4, 3\).*Got \(3, 4\)"):
        mj.nn.Dense(4, 3, rngs=nnx.Rngs(0)).load(nnx.Linear(3, 4, rngs=RNGS))
    with pytest.raises(ValueError, match=r"num_heads == 4. Got 2"):
        mj.nn.MultiHeadAttention(D, 4, rngs=nnx.Rngs(0)).load(attention())
    plain = mj.nn.Encoder(1, D, HEADS, rngs=nnx.Rngs(0)).mean_network()
    with pytest.raises(ValueError, match=r"2 blocks. Got 1"):
        mj.nn.Encoder(2, D, HEADS, rngs=nnx.Rngs(0)).load(plain)
