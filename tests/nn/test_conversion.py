"""A plain network is converted exactly, or refused: nothing is lost, invented or reshaped."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moment_jax as mj
from tests.builders import assert_close, tiny_vision

D, HEADS = 4, 2
X = jax.random.normal(jax.random.key(0), (3, D), jnp.float32)


pytestmark = pytest.mark.usefixtures("ranks_of_a_user")


def scattered(plain):
    """The network with random weights and biases."""
    rng = np.random.default_rng(0)
    state = nnx.state(plain, nnx.Param)
    nnx.update(plain, jax.tree.map(lambda x: rng.normal(size=x.shape).astype(x.dtype), state))
    return plain


def made(module, change):
    plain = scattered(module.mean_network())
    change(plain)
    return plain


def nothing(plain):
    """No change."""


def block(change=nothing, **options):
    """A plain encoder block with something changed."""
    options = {"hidden_features": 6, **options}
    return made(mj.nn.EncoderBlock(D, HEADS, rngs=nnx.Rngs(1), **options), change)


def encoder(change=nothing, **options):
    """A plain encoder of two blocks with something changed."""
    return made(mj.nn.Encoder(2, D, HEADS, hidden_features=6, rngs=nnx.Rngs(1), **options), change)


def decoder(**options):
    return mj.nn.Decoder(1, D, HEADS, hidden_features=6, rngs=nnx.Rngs(1), **options).mean_network()


def vision(change=nothing, **options):
    return made(tiny_vision(activation="gelu", rngs=nnx.Rngs(1), **options), change)


def put(*path_and_value):
    """A change: set the attribute at a path to the last argument."""
    *path, name, value = path_and_value

    def change(plain):
        for step in path:
            plain = plain[step] if isinstance(step, int) else getattr(plain, step)
        setattr(plain, name, value)

    return change


def linear(out=3, **options):
    return nnx.Linear(D, out, rngs=nnx.Rngs(0), **options)


def norm(kind=nnx.LayerNorm, **options):
    return kind(D, rngs=nnx.Rngs(0), **options)


def attention(**options):
    return nnx.MultiHeadAttention(HEADS, D, decode=False, rngs=nnx.Rngs(3), **options)


def mlp(use_bias=True, activation=jnp.tanh):
    layers = [nnx.Linear(*size, use_bias=use_bias, rngs=nnx.Rngs(4)) for size in ((D, 5), (5, 2))]
    return mj.nn.PlainMLP(layers, activation)


def lora():
    return nnx.LoRALinear(D, D, lora_rank=1, rngs=nnx.Rngs(0))


def general():
    return nnx.LinearGeneral(D, (2, 2), rngs=nnx.Rngs(0))


ATTENTION, BLOCK, STACK = mj.nn.MultiHeadAttention, mj.nn.EncoderBlock, mj.nn.Encoder
VISION = mj.nn.VisionTransformer
AXES, SHAPES = r"reduction_axes == -1. Got \(-2, -1\)", r"\(4, 4\).*Got \(3, 4\)"
KNOWN = "one of relu, gelu, tanh, silu"


# Functions, so that networks are built when a test runs, not when it is collected.
@pytest.mark.parametrize(
    ("kind", "make"),
    [
        (mj.nn.Dense, lambda: linear(use_bias=False)),
        (mj.nn.LayerNorm, lambda: norm(epsilon=0.1)),
        (ATTENTION, lambda: attention(use_bias=False)),
        (mj.nn.MLP, lambda: mlp(use_bias=False, activation=jax.nn.silu)),
        (BLOCK, lambda: block(activation="gelu", epsilon=0.1)),
        (STACK, lambda: encoder(activation="tanh", epsilon=0.1, norm_first=True)),
        (mj.nn.Decoder, lambda: decoder(norm_first=True)),
        (VISION, lambda: vision(epsilon=0.1, num_blocks=2)),
    ],
)
def test_what_is_converted_computes_the_same(kind, make):
    plain = scattered(make())
    given = {VISION: (jnp.ones((1, 4, 4)),), mj.nn.Decoder: (X, X)}.get(kind, (X,))
    call = nnx.jit(lambda network: network(*given))
    assert_close(call(kind.from_deterministic(plain).mean_network()), call(plain), 1e-5)


@pytest.mark.parametrize(
    ("kind", "make", "error", "words"),
    [
        (mj.nn.Dense, lora, TypeError, "an nnx.Linear. Got LoRALinear"),
        (mj.nn.Dense, general, TypeError, "Got LinearGeneral"),
        (mj.nn.LayerNorm, lambda: norm(nnx.BatchNorm), TypeError, "Got BatchNorm"),
        (mj.nn.LayerNorm, lambda: norm(nnx.RMSNorm), TypeError, "Got RMSNorm"),
        (mj.nn.LayerNorm, lambda: norm(use_bias=False), ValueError, "of zeros"),
        (mj.nn.LayerNorm, lambda: norm(use_scale=False), ValueError, "of ones"),
        (mj.nn.LayerNorm, lambda: norm(reduction_axes=(-2, -1)), ValueError, AXES),
        (ATTENTION, lambda: attention(normalize_qk=True), ValueError, "normalize_qk == False"),
        (ATTENTION, lambda: attention(qkv_features=8), ValueError, "qkv_features == 4. Got 8"),
        (ATTENTION, lambda: attention(out_features=6), ValueError, "out_features == 4. Got 6"),
        (ATTENTION, lambda: attention(in_kv_features=6), ValueError, "in_kv_features == 4"),
        (ATTENTION, lambda: attention(num_kv_heads=1), ValueError, "num_kv_heads == 2"),
        (ATTENTION, lambda: attention(attention_fn=lambda *_, **__: 0), ValueError, "attention_fn"),
        (mj.nn.MLP, lambda: mlp(activation=jax.nn.gelu), ValueError, "approximate=False"),
        (mj.nn.MLP, lambda: mlp(activation=jax.nn.elu), ValueError, KNOWN),
        (mj.nn.MLP, lambda: mlp(activation=None), ValueError, "activation=.*one of relu"),
        (BLOCK, lambda: block(put("norm2", "epsilon", 0.1)), ValueError, "epsilon.*Got 0.1"),
        (BLOCK, lambda: block(put("norm1", norm(nnx.BatchNorm))), TypeError, "Batch"),
        (BLOCK, lambda: block(put("hidden", linear(6, use_bias=False))), ValueError, "of zeros"),
        (BLOCK, lambda: block(put("attention", attention(use_bias=False))), ValueError, "zeros"),
        (BLOCK, lambda: block(put("gain", nnx.Param(X))), ValueError, "lost or invented"),
        (STACK, lambda: encoder(put("blocks", 1, "activation", jnp.tanh)), ValueError, "'relu'"),
        (STACK, lambda: encoder(put("blocks", 1, "norm_first", True)), ValueError, "norm_first"),
        (STACK, lambda: encoder(put("final_norm", norm())), ValueError, "has a final_norm"),
        (VISION, lambda: vision(put("position", nnx.Param(X))), ValueError, SHAPES),
        (VISION, lambda: vision(put("patches", lambda x: x)), TypeError, "Patches"),
        (mj.nn.Embedding, linear, TypeError, "nnx.Embed"),
    ],
)
def test_what_would_compute_something_else_is_refused(kind, make, error, words):
    with pytest.raises(error, match=words):
        kind.from_deterministic(make())


def test_the_activation_is_found_and_a_wrong_one_refused():
    assert BLOCK.from_deterministic(block(activation="gelu")).activation == "gelu"
    assert VISION.from_deterministic(vision()).encoder.blocks[0].activation == "gelu"
    with pytest.raises(ValueError, match="activation 'relu'"):
        BLOCK.from_deterministic(block(activation="gelu"), activation="relu")


def test_loading_does_not_reshape():
    with pytest.raises(ValueError, match=r"\(4, 3\).*Got \(3, 4\)"):
        mj.nn.Dense(4, 3, rngs=nnx.Rngs(0)).load(nnx.Linear(3, 4, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"num_heads == 4. Got 2"):
        mj.nn.MultiHeadAttention(D, 4, rngs=nnx.Rngs(0)).load(attention())
    plain = mj.nn.Encoder(1, D, HEADS, rngs=nnx.Rngs(0)).mean_network()
    with pytest.raises(ValueError, match=r"2 blocks. Got 1"):
        mj.nn.Encoder(2, D, HEADS, rngs=nnx.Rngs(0)).load(plain)
