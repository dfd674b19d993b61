"""Variances of a convolution of a `Separable` image, exactly."""

from __future__ import annotations

from functools import singledispatch
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moment_jax.covariance import Separable
from moment_jax.covariance.numerics import safe_divide, safe_sqrt
from moment_jax.xla import rows_diagonal

Array = jax.Array


@singledispatch
def with_window_variance(mapped: Any, image: Any, places: np.ndarray, kernel: Array) -> Any:
    """The covariance of windows @ kernel, with variances that know the pixels' own correlation.

    `Separable` has one correlation for the columns of all windows, that of the sum over them, in which
    all offsets are as good as the same pixel. What neighbours in a window really have in common is in
    the image's token correlation. The variances of `Separable` are set to those it gives; the tokens'
    Gram matrix is scaled to fit, the covariance of the sum is exact already. Costs
    P K C^2 O for P windows of K pixels.

    Args:
      mapped: covariance of the output, (P, O), by `map_features`.
      image: covariance of the image's sequence, (T, C).
      places: flat index into it of what each window sees, (P, K C), -1 for zero.
      kernel: (K C, O).
    """
    del image, places, kernel
    return mapped


@with_window_variance.register
def _separable(mapped: Separable, image: Separable, places: np.ndarray, kernel: Array) -> Any:
    channels = image.shape[1]
    if places.shape[1] % channels or places.shape[1] == channels:
        return mapped
    by_offset = (len(places), places.shape[1] // channels, channels)
    tokens = (np.maximum(places, 0) // channels).reshape(by_offset)[:, :, 0]
    known = (places >= 0).reshape(by_offset)
    seen = tokens[:, :, None] * channels + np.arange(channels)
    if not (known == known[:, :, :1]).all() or (seen != places.reshape(by_offset))[known].any():
        return mapped  # windows over channels, or an image of other tokens
    scale = jnp.where(known, image.scale[tokens], 0)  # (P, K, C)
    pairs = image.token_correlation[tokens[:, :, None], tokens[:, None, :]]

    def of_output(column: Array) -> Array:
        gained = scale * column[None]
        return jnp.sum((gained @ image.feature_correlation) @ gained.mT * pairs, axis=(1, 2))

    columns = jnp.moveaxis(kernel.reshape(*by_offset[1:], -1), -1, 0)
    variance = jnp.maximum(jax.lax.map(of_output, columns), 0).T
    token_gram = mapped.token_gram()
    root = safe_sqrt(safe_divide(jnp.sum(variance, axis=1), rows_diagonal(token_gram)))
    token_gram = root[:, None] * token_gram * root[None, :]
    return type(mapped).from_moments(variance, token_gram, mapped.features(), mapped.pool)
