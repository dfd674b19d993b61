"""The rows of a convolution: its patches, as inputs of a dense layer."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array


def is_plain_conv(layer: Any) -> bool:
    """Whether the convolution is ungrouped, unmasked and padded with zeros."""
    plain = layer.feature_group_count == 1 and getattr(layer, "mask", None) is None
    return plain and (not isinstance(layer.padding, str) or layer.padding in ("SAME", "VALID"))


def conv_rows(layer: Any, inputs: Array, output: Array) -> tuple[Array, Array]:
    """Patches (N, T, height * width * channels) in the kernel's order, and the output (N, T, out)."""
    rank = len(layer.kernel_size)
    lead = inputs.shape[: inputs.ndim - rank - 1]
    images = inputs.reshape(-1, *inputs.shape[inputs.ndim - rank - 1 :])
    patches = jax.lax.conv_general_dilated_patches(
        jnp.moveaxis(images, -1, 1),
        layer.kernel_size,
        _each(layer.strides, rank),
        _padding(layer.padding, rank),
        lhs_dilation=_each(layer.input_dilation, rank),
        rhs_dilation=_each(layer.kernel_dilation, rank),
    )
    # (M, channels * kernel, *places) -> (M, places, kernel * channels)
    places = math.prod(patches.shape[2:])
    channels = images.shape[-1]
    patches = patches.reshape(images.shape[0], channels, -1, places)
    rows = patches.transpose(0, 3, 2, 1).reshape(images.shape[0], places, -1)
    first = lead[0] if lead else 1
    return rows.reshape(first, -1, rows.shape[-1]), output.reshape(first, -1, output.shape[-1])


def _each(value: Any, rank: int) -> tuple[int, ...]:
    if value is None or isinstance(value, int):
        return (1 if value is None else value,) * rank
    return tuple(value)


def _padding(padding: Any, rank: int) -> Any:
    if isinstance(padding, str):
        return padding
    if isinstance(padding, int):
        return [(padding, padding)] * rank
    return [(each, each) if isinstance(each, int) else tuple(each) for each in padding]
