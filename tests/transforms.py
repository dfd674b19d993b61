"""Every layer of a sequence, under one signature."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

import moment_jax as mj


class Given(NamedTuple):
    """Arguments beside the sequence (T, D); attention has two heads."""

    block: mj.EncoderBlockParams
    other: tuple[Any, Any]  # moments of a matrix (D, N)
    memory: tuple[Any, Any]  # moments of a sequence (S, D)
    seen: Any = None  # which tokens (T,) `softmax` and `mean_pool` see
    mask: Any = None  # of queries and own keys
    memory_mask: Any = None  # of queries and keys of the memory
    order: int = 2


def _softmax(mean, cov, given):
    mask = None if given.seen is None else jnp.broadcast_to(given.seen[:, None], mean.shape)
    return mj.softmax(mean, cov, mask=mask, order=given.order)


LAYERS = {
    "dense": lambda m, c, given: mj.dense(m, c, given.block.feed_forward.hidden),
    "matmul": lambda m, c, given: mj.matmul(m, c, *given.other),
    "relu": lambda m, c, given: mj.relu(m, c),
    "gelu": lambda m, c, given: mj.gelu(m, c),
    "tanh": lambda m, c, given: mj.activation(m, c, jnp.tanh),
    "softmax": _softmax,
    "layer_norm": lambda m, c, given: mj.layer_norm(m, c, given.block.norm1, order=given.order),
    "mean_pool": lambda m, c, given: mj.mean_pool(m, c, given.seen),
    "feed_forward": lambda m, c, given: mj.feed_forward(
        m, c, given.block.feed_forward, activation="gelu"
    ),
    "attention": lambda m, c, given: mj.attention(
        m, c, given.block.attention, num_heads=2, order=given.order, mask=given.mask
    ),
    "cross_attention": lambda m, c, given: mj.cross_attention(
        m,
        c,
        *given.memory,
        given.block.attention,
        num_heads=2,
        order=given.order,
        mask=given.memory_mask,
    ),
}
"""Functions of mean (T, D), covariance and `Given`."""
