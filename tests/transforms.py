"""Every layer of a sequence, under one signature."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

import moment_jax as mj
from moment_jax import expectations
from moment_jax.layers.rules import ScoreNoise
from moment_jax.layers.sublayers import attention_with_carry
from moment_jax.xla import materialized_inputs


class Given(NamedTuple):
    """Arguments beside the sequence (T, D); attention has two heads."""

    block: mj.EncoderBlockParams
    other: tuple[Any, Any]  # moments of a matrix (D, N)
    memory: tuple[Any, Any]  # moments of a sequence (S, D)
    mask: Any = None  # of queries and own keys
    memory_mask: Any = None  # of queries and keys of the memory


@materialized_inputs  # as by the public transforms that call it
def _bent_scores(mean, cov, given):
    """Attention with a scale, a bias, a random table and a cap of its scores."""
    t, dtype = len(mean), mean.dtype
    distance = np.broadcast_to(np.arange(t)[:, None] - np.arange(t), (2, t, t))
    entries = ScoreNoise(jnp.full(2 * t, 0.1, dtype), distance + t - 1, jnp.ones((1, 1, 1), dtype))
    mean, cov, _ = attention_with_carry(
        mean, cov.seen_by(given.mask), given.block.attention, 2, given.mask,
        scale=jnp.asarray(1.0 + 0.1 * distance, dtype), bias=jnp.asarray(-0.3 * np.abs(distance), dtype),
        noise=(entries,), cap=expectations.of(_cap),
    )  # fmt: skip
    return mean, cov


def _cap(score):
    return 2 * jnp.tanh(score / 2)


LAYERS = {
    "dense": lambda m, c, given: mj.dense(m, c, given.block.feed_forward.hidden),
    "matmul": lambda m, c, given: mj.matmul(m, c, *given.other),
    "relu": lambda m, c, given: mj.activation(m, c, "relu"),
    "gelu": lambda m, c, given: mj.activation(m, c, "gelu"),
    "tanh": lambda m, c, given: mj.activation(m, c, jnp.tanh),
    "softmax": lambda m, c, given: mj.softmax(m, c),
    "layer_norm": lambda m, c, given: mj.layer_norm(m, c, given.block.norm1),
    "feed_forward": lambda m, c, given: mj.feed_forward(
        m, c, given.block.feed_forward, activation="gelu"
    ),
    "attention": lambda m, c, given: mj.attention(
        m, c, given.block.attention, num_heads=2, mask=given.mask
    ),
    "attention, bent": _bent_scores,
    "cross_attention": lambda m, c, given: mj.cross_attention(
        m, c, *given.memory, given.block.attention, num_heads=2, mask=given.memory_mask
    ),
}
"""Functions of mean (T, D), covariance and `Given`."""
