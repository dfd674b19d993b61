"""The plain network and the pass of moments of a problem, as functions of arrays."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

import moment_jax as mj
from experiments.frontier.problem import EPSILON, Spec

Array = jax.Array
Head = tuple[Array, Array]


class Moments(NamedTuple):
    """Of the last block's output, (..., T, D), and of the logits, (..., C) and (..., C, C)."""

    mean: Array
    sd: Array
    logit_mean: Array
    logit_cov: Array


def encoder_of(spec: Spec, structure: type[mj.Covariance], seed: int = 0) -> mj.nn.Encoder:
    """The library's own encoder."""
    encoder = mj.nn.Encoder(
        spec.num_blocks,
        spec.num_features,
        spec.num_heads,
        hidden_features=spec.hidden_features,
        norm_first=True,
        activation="gelu",
        epsilon=EPSILON,
        rngs=nnx.Rngs(seed),
        structure=structure,
    )
    encoder.final_norm = None  # the case files' networks end with the last block
    return encoder


def classify(tokens: Array, head: Head) -> Array:
    """The head on the mean over tokens: (..., T, D) -> (..., C)."""
    return tokens.mean(axis=-2) @ head[0] + head[1]


def classified(mean: Array, cov: mj.Covariance, head: Head) -> Moments:
    """The moments of one sequence (T, D) and of its logits."""
    certain = mj.DenseParams(*(mj.posterior.Point(part) for part in head))
    pooled, pooled_cov = mj.mean_pool(mean, cov)
    # The head sees this image's own feature covariance, whatever the structure: see VisionTransformer.
    logits, logit_cov = mj.dense(pooled, mj.TokenBlock(pooled_cov.token_blocks()), certain)
    return Moments(mean, jnp.sqrt(cov.variance()), logits[0], logit_cov.token_blocks()[0])


def moments(encoder: mj.nn.Encoder, params: Any, head: Head, x: Array) -> Moments:
    """The moment pass of a batch (N, T, D) with beliefs in the form of `encoder.params`."""
    structure = encoder.settings.structure

    def one(x: Array) -> Moments:
        start = structure.zeros((x.shape[0], x.shape[1]), x.dtype)
        return classified(*encoder.moments(x, start, params, None), head)

    # `Full` takes one sequence at a time: its memory is T^4 and (T D)^2.
    return jax.lax.map(one, x) if structure is mj.Full else jax.vmap(one, axis_name="batch")(x)


def plain_tokens(spec: Spec, blocks: Any, x: Array) -> Array:
    """The output of the last block, (..., T, D), of Flax's own layers, scanned over stacked arrays."""
    gelu = mj.nn.find_activation("gelu").plain

    def step(x: Array, arrays: Any) -> tuple[Array, None]:
        block = mj.nn.PlainEncoderBlock(
            arrays, num_heads=spec.num_heads, norm_first=True, activation=gelu, epsilon=EPSILON
        )
        return block(x), None

    return jax.lax.scan(step, x, blocks)[0]
