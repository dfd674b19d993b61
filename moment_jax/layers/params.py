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
from moment_jax.covariance.fields import check_array, need, register_fields
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
    """Belief about a dense layer: a kernel (in, out) and an independent bias (out,), or None."""

    kernel: Posterior
    bias: Posterior | None = None

    def mean_output(self, mean: Array) -> Array:
        """E[x] @ E[kernel] + E[bias], (T, out)."""
        output = mean @ self.kernel.mean
        return output if self.bias is None else output + self.bias.mean[None, :]


@register_fields
@dataclasses.dataclass(frozen=True)
class NormParams:
    """Belief about a normalisation: a gain (D,) and an independent bias (D,); None for one and zero."""

    scale: Posterior | None = None
    bias: Posterior | None = None

    def mean_output(self, normal: Array) -> Array:
        """E[gain] * normal + E[bias], (T, D)."""
        output = normal if self.scale is None else normal * self.scale.mean[None, :]
        return output if self.bias is None else output + self.bias.mean[None, :]


@register_fields
@dataclasses.dataclass(frozen=True)
class AttentionParams:
    """Belief about multi-head attention, its four matrices mutually independent.

    Kernels of query, key and value are (D, H K), heads outermost, that of the output is (H K, D).
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
    call, kind = f"{name}(mean, cov)", type(cov).__name__
    mend = f"Use one of {', '.join(STRUCTURES)}, for instance Diagonal.zeros(mean.shape)."
    need(call, isinstance(cov, Covariance), "a covariance structure", kind, mend, TypeError)
    check_array(call, mean)
    fields = list(map(jnp.shape, jax.tree.leaves(cov)))
    came = f"{kind} of fields {', '.join(map(str, fields))}"
    mend = f"For a batch, use jax.vmap({name}), with in_axes=None for a shared covariance."
    # `vmap` may have removed too many axes, or too few.
    right = not fields or len(fields[0]) == cov.num_axes
    need(call, right, "the covariance of one sequence", came, mend)
    rule = "a mean (T, D) of at least one token and one feature, and cov.shape == mean.shape"
    right = mean.ndim == 2 and cov.shape == mean.shape and 0 not in mean.shape
    mend = f"For a batch, use jax.vmap({name}); drop empty sequences."
    need(call, right, rule, f"{mean.shape} and {cov.shape}", mend)


def check_belief(name: str, what: str, size: int, belief: Any) -> None:
    """Raise unless this is a belief about a kernel (size, out), or a vector (size,) or None."""
    kernel = what == "kernel"
    if belief is None and not kernel:
        return
    rule, came = f"a belief about its {what} (a Posterior)", type(belief).__name__
    mend = f"For a certain {what}, use mj.posterior.Point({what})."
    need(name, isinstance(belief, Posterior), rule, came, mend, TypeError)
    right = len(belief.shape) == 1 + kernel and belief.shape[0] == size
    mend = "Kernels are (in, out), as in Flax; transpose kernels from PyTorch."
    need(name, right, f"a {what} of shape ({size}, {'out' * kernel})", belief.shape, mend)


def check_heads(name: str, num_heads: Any, widths: list[int]) -> None:
    """Raise unless query, key and value have one width that `num_heads` divides."""
    whole = hasattr(num_heads, "__index__") and num_heads >= 1
    right = whole and len(set(widths)) == 1 and widths[0] % num_heads == 0
    rule = "num_heads, a whole number, to divide the one width of query, key, value"
    came = f"num_heads={num_heads!r} and widths {widths}"
    need(name, right, rule, came, "Use a divisor, or other kernels.")


def check_mask(name: str, what: str, mask: Any, *shapes: tuple[int, ...]) -> None:
    """Raise unless `mask` is None or a boolean array of one of these shapes; `what` describes them."""
    if mask is None:
        return
    known = isinstance(mask, (jax.Array, np.ndarray)) and mask.dtype == bool
    rule = f"a boolean mask of shape {' or '.join(map(str, shapes))}, {what}"
    mend = "Use jnp.asarray(mask, bool) in that shape."
    need(name, known and mask.shape in shapes, rule, described(mask), mend)


def described(array: Any) -> str:
    """The type and shape of a bad array, for a message."""
    known = isinstance(array, (jax.Array, np.ndarray))
    return f"{tuple(array.shape)} of {array.dtype}" if known else type(array).__name__
