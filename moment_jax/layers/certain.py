"""Layers whose input is `Certain`: the plain network, with parameters at their means."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.covariance import Certain
from moment_jax.layers.dense import dense
from moment_jax.layers.params import AttentionParams, FeedForwardParams
from moment_jax.layers.rules import Attending


def norm(
    mean: Array, cov: Certain, *, epsilon: Array | float, order: int, centres: bool
) -> tuple[Array, Certain, None]:
    """The rule of `layer_norm` and `rms_norm`."""
    if centres:
        mean = mean - jnp.mean(mean, axis=1, keepdims=True)
    return mean * jax.lax.rsqrt(jnp.mean(mean**2, axis=1, keepdims=True) + epsilon), cov, None


def attention(
    mean: Array,
    cov: Certain,
    cross: None,
    memory: tuple[Array, Certain] | None,
    params: AttentionParams,
    attending: Attending,
) -> tuple[Array, Certain, None]:
    """The rule of `attention` and `cross_attention`."""
    h, mask, _, turns = attending
    source, source_cov = (mean, cov) if memory is None else memory
    query = dense(mean, cov, params.query)[0]
    key, value = (dense(source, source_cov, p)[0] for p in (params.key, params.value))
    query, key, value = (y.reshape(len(y), h, -1) for y in (query, key, value))
    query, key = (
        y if turn is None else jnp.einsum("thj,tjk->thk", y, turn)
        for y, turn in zip((query, key), turns, strict=True)
    )
    mixed = jax.nn.dot_product_attention(query, key, value, mask=mask)
    if mask is not None:  # a query with no key left looks at nothing
        mixed = jnp.where(jnp.any(mask, axis=2).T[:, :, None], mixed, 0)
    return *dense(mixed.reshape(len(mean), -1), cov, params.output), None


def feed_forward(
    mean: Array, cov: Certain, cross: None, params: FeedForwardParams, activation: Any
) -> tuple[Array, Certain, None]:
    """The rule of `feed_forward`; here `activation` is the plain function."""
    hidden, hidden_cov = dense(mean, cov, params.hidden)
    return *dense(activation(hidden), hidden_cov, params.output), None
