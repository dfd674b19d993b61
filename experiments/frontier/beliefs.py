"""Trees of an encoder block's weights: of beliefs, of their means, of their unconstrained spreads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import moment_jax as mj

Make = Callable[..., Any]


def tree_of(
    features: int, hidden: int, kernel: Make, bias: Make, gain: Make
) -> mj.EncoderBlockParams:
    """An encoder block's group with what these make of (in, out), of a bias' size, of a gain's size."""

    def dense(into: int, out: int) -> mj.DenseParams:
        return mj.DenseParams(kernel(into, out), bias(out))

    def norm() -> mj.NormParams:
        return mj.NormParams(gain(features), bias(features))

    square = features, features
    return mj.EncoderBlockParams(
        mj.AttentionParams(dense(*square), dense(*square), dense(*square), dense(*square)),
        norm(),
        mj.FeedForwardParams(dense(features, hidden), dense(hidden, features)),
        norm(),
    )


def factorized(mean: Any, sd: Any) -> mj.posterior.Factorized:
    """A belief in single precision."""
    return mj.posterior.Factorized(
        jnp.asarray(mean, jnp.float32), jnp.asarray(sd, jnp.float32) ** 2
    )


def from_unconstrained(means: Any, raws: Any) -> Any:
    """Beliefs with the means of one tree, and softplus of the other's leaves as sds."""
    return jax.tree.map(
        lambda mean, raw: mj.posterior.Factorized(mean, jax.nn.softplus(raw) ** 2), means, raws
    )
