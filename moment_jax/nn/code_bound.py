"""The negative ELBO of an autoencoder with categorical codes, for plain and Bayesian networks alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moment_jax import objectives
from moment_jax.discrete import categorical_kl, gumbel_softmax
from moment_jax.nn.vision import Patches

Array = jax.Array
PixelLikelihood = objectives.Gaussian | objectives.Bernoulli


class NegativeElbo(NamedTuple):
    """The parts of the negative ELBO, in nats for each image; lower is better.

    Attributes:
      reconstruction: -E[log p(x | z, weights)] under the codes and the decoder's weights, (...,).
      code_kl: KL(q(z | x) || uniform), summed over the grid of codes, (...,).
      weight_kl: the image's share of KL(q(weights) || prior), a scalar; 0 for plain networks.
    """

    reconstruction: Array
    code_kl: Array
    weight_kl: Array

    @property
    def total(self) -> Array:
        """Their sum, (...,)."""
        return self.reconstruction + self.code_kl + self.weight_kl


def code_terms(
    log_probs: Array,
    decode: Callable[[Array], tuple[Array, Any]],
    target: Array,
    likelihood: PixelLikelihood,
    draw: tuple[Array, Array | float, bool],
) -> tuple[Array, Array]:
    """Reconstruction and KL of the codes for a batch of images cut into patches.

    Args:
      log_probs: log q(z_t = k | x), (N, T, K).
      decode: codes (N, T, K) -> mean (N, T, P) and covariance of the patches.
      target: the patches, (N, T, P).
      likelihood: of the pixels.
      draw: key, temperature and straight_through of the `gumbel_softmax` that draws the codes.
    """
    key, temperature, straight_through = draw
    z = gumbel_softmax(key, log_probs, temperature, straight_through=straight_through)
    fit = jax.vmap(objectives.expected_log_likelihood, (None, 0, 0, 0))(
        likelihood, target, *decode(z)
    )
    return -fit, jnp.sum(categorical_kl(log_probs), axis=-1)


def joined(tokens: Array, patches: Patches, image_size: int) -> Array:
    """The inverse of `Patches`: (..., T, P) -> (..., height, width[, channels])."""
    batch, side, size = tokens.shape[:-2], image_size // patches.size, patches.size
    cut = tokens.reshape(*batch, side, side, size, size, patches.channels)
    images = jnp.moveaxis(cut, -3, -4).reshape(*batch, image_size, image_size, patches.channels)
    return images[..., 0] if patches.channels == 1 else images


def flattened(patches: Patches, images: Array, image_size: int) -> tuple[tuple[int, ...], Array]:
    """The batch axes of images, and their patches as (N, T, P)."""
    tokens = patches(images)
    expected = (image_size // patches.size) ** 2
    if tokens.shape[-2] != expected:
        raise ValueError(
            f"This autoencoder needs images of {image_size} x {image_size} pixels. Got "
            f"{tuple(images.shape)}."
        )
    return tokens.shape[:-2], tokens.reshape(-1, *tokens.shape[-2:])
