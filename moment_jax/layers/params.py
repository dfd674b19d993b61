"""Parameters of layers: beliefs about weights."""

import dataclasses
from typing import TypeVar

import jax.numpy as jnp
from jax import Array

from moment_jax.covariance import Covariance
from moment_jax.covariance.fields import register_fields
from moment_jax.posterior import Point, Posterior

S = TypeVar("S", bound=Covariance)


def bias_cov(bias: Posterior | None, size: int, dtype: jnp.dtype) -> Array:
    """Covariance of a bias: (D,) variances, or (D, D)."""
    return jnp.zeros(size, dtype) if bias is None else bias.vector_cov()


def with_bias(cov: S, bias: Posterior | None) -> S:
    """Covariance of x plus a random bias that all tokens share."""
    if bias is None or isinstance(bias, Point):
        return cov
    return cov.add(cov.bias_noise(bias.vector_cov()))


@register_fields
@dataclasses.dataclass(frozen=True)
class DenseParams:
    """Belief about a dense layer.

    Args:
      kernel: belief about the (in, out) kernel.
      bias: belief about the (out,) bias, independent of the kernel; None for no bias.
    """

    kernel: Posterior
    bias: Posterior | None = None

    def mean_output(self, mean: Array) -> Array:
        """E[x] @ E[kernel] + E[bias], (T, out)."""
        output = mean @ self.kernel.mean
        return output if self.bias is None else output + self.bias.mean[None, :]


@register_fields
@dataclasses.dataclass(frozen=True)
class NormParams:
    """Belief about the gain and bias of a layer normalisation.

    Args:
      scale: belief about the (D,) gain; None for a gain of one.
      bias: belief about the (D,) bias, independent of the gain; None for no bias.
    """

    scale: Posterior | None = None
    bias: Posterior | None = None

    def mean_output(self, normal: Array) -> Array:
        """E[gain] * normal + E[bias], (T, D)."""
        output = normal if self.scale is None else normal * self.scale.mean[None, :]
        return output if self.bias is None else output + self.bias.mean[None, :]


@register_fields
@dataclasses.dataclass(frozen=True)
class AttentionParams:
    """Belief about multi-head attention; the four matrices are mutually independent.

    Args:
      query: kernel (D, H K), heads outermost.
      key: kernel (D, H K).
      value: kernel (D, H K).
      output: kernel (H K, D).
    """

    query: DenseParams
    key: DenseParams
    value: DenseParams
    output: DenseParams


@register_fields
@dataclasses.dataclass(frozen=True)
class FeedForwardParams:
    """Belief about a feed-forward layer: hidden (D, F) and output (F, D)."""

    hidden: DenseParams
    output: DenseParams


@register_fields
@dataclasses.dataclass(frozen=True)
class EncoderBlockParams:
    """Belief about a Transformer encoder block."""

    attention: AttentionParams
    norm1: NormParams
    feed_forward: FeedForwardParams
    norm2: NormParams


@register_fields
@dataclasses.dataclass(frozen=True)
class DecoderBlockParams:
    """Belief about a Transformer decoder block."""

    self_attention: AttentionParams
    norm1: NormParams
    cross_attention: AttentionParams
    norm2: NormParams
    feed_forward: FeedForwardParams
    norm3: NormParams
