"""Arguments of layers: beliefs about weights; and checks, made while tracing, of all that layers take.

Errors state the rule, the value and the fix.
"""

import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from moment_jax.covariance import STRUCTURES, Covariance
from moment_jax.covariance.fields import check_array, register_fields
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


# -- checks -----------------------------------------------------------------------------------------


def check_moments(name: str, mean: Array, cov: Covariance) -> None:
    """Raise unless `mean` is one (T, D) sequence and `cov` a structure of the same shape."""
    needs = f"`{name}(mean, cov)` needs"
    if not isinstance(cov, Covariance):
        raise TypeError(
            f"{needs} a covariance structure. Got {type(cov).__name__}. Use one of "
            f"{', '.join(STRUCTURES)}, for instance Diagonal.zeros(mean.shape)."
        )
    check_array(f"{name}(mean, cov)", mean)
    fields = list(map(jnp.shape, jax.tree.leaves(cov)))
    if fields and len(fields[0]) != cov.num_axes:  # `vmap` removed an axis too many, or too few
        raise ValueError(
            f"{needs} the covariance of one sequence. Got {type(cov).__name__} of fields "
            f"{', '.join(map(str, fields))}. For a batch, use jax.vmap({name}), with in_axes=None for a "
            "shared covariance."
        )
    if mean.ndim != 2 or cov.shape != mean.shape or 0 in mean.shape:
        raise ValueError(
            f"{needs} a mean of shape (T, D), with at least one token and one feature, and cov.shape == "
            f"mean.shape. Got {tuple(mean.shape)} and {tuple(cov.shape)}. For a batch, use "
            f"jax.vmap({name}); drop empty sequences."
        )


def check_belief(name: str, what: str, size: int, belief: object) -> None:
    """Raise unless this is a belief about a kernel (size, out), or a vector (size,) or None."""
    kernel = what == "kernel"
    if belief is None and not kernel:
        return
    if not isinstance(belief, Posterior):
        raise TypeError(
            f"`{name}` needs a belief about its {what} (a Posterior). Got {type(belief).__name__}. For "
            f"a certain {what}, use mj.posterior.Point({what})."
        )
    if len(belief.shape) != 1 + kernel or belief.shape[0] != size:
        raise ValueError(
            f"`{name}` needs a {what} of shape ({size}, {'out' * kernel}). Got {tuple(belief.shape)}. "
            "Kernels are (in, out), as in Flax; transpose kernels from PyTorch."
        )


def check_order(name: str, order: int) -> None:
    """Raise unless `order` is 1 or 2."""
    if order not in (1, 2):
        raise ValueError(
            f"`{name}` needs order=1 (first-order Taylor, as derived) or order=2 (with the "
            f"second-order correction of the mean). Got order={order!r}. Use order=2."
        )


def check_heads(name: str, num_heads: Any, widths: list[int]) -> None:
    """Raise unless query, key and value have one width that `num_heads` divides."""
    whole = hasattr(num_heads, "__index__") and num_heads >= 1
    if not whole or len(set(widths)) > 1 or widths[0] % num_heads:
        raise ValueError(
            f"`{name}` needs num_heads, a whole number, to divide the one width of query, key, value. "
            f"Got num_heads={num_heads!r} and widths {widths}. Use a divisor, or other kernels."
        )


def check_mask(name: str, what: str, mask: Any, *shapes: tuple[int, ...]) -> None:
    """Raise unless `mask` is None or a boolean array of one of these shapes; `what` describes them."""
    if mask is None:
        return
    known = isinstance(mask, (jax.Array, np.ndarray))
    if not known or mask.dtype != bool or tuple(mask.shape) not in shapes:
        raise ValueError(
            f"`{name}` needs a boolean mask of shape {' or '.join(map(str, shapes))}, {what}. Got "
            f"{described(mask)}. Use jnp.asarray(mask, bool) in that shape."
        )


def described(array: Any) -> str:
    """The type and shape of a bad array, for a message."""
    known = isinstance(array, (jax.Array, np.ndarray))
    return f"{tuple(array.shape)} of {array.dtype}" if known else type(array).__name__
