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
    log_likelihood: Callable[[Array], Array],
    key: Array,
    temperature: Array | float,
    straight_through: bool,
) -> tuple[Array, Array]:
    """Reconstruction and KL of the codes of images.

    Args:
      log_probs: log q(z_t = k | x), (..., T, K).
      log_likelihood: codes (..., T, K) -> (expected) log p(x | z), (...,).
      key: of `gumbel_softmax`, which draws the codes, as the next two.
      temperature: of the relaxation.
      straight_through: hard codes, with the relaxed ones' gradient.
    """
    z = gumbel_softmax(key, log_probs, temperature, straight_through=straight_through)
    return -log_likelihood(z), jnp.sum(categorical_kl(log_probs), axis=-1)


def over_images(fn: Callable[..., Array], target: Array, *moments: Any) -> Array:
    """`fn` of every image's patches (..., T, P) and what belongs to them."""
    for _ in target.shape[:-2]:
        fn = jax.vmap(fn)
    return fn(target, *moments)


def prior_codes(key: Array, num_images: int, num_tokens: int, num_codes: int) -> Array:
    """Codes from the uniform prior, integers (N, T)."""
    if num_images < 1:
        raise ValueError(f"`sample_images` needs num_images >= 1. Got {num_images}.")
    return jax.random.randint(key, (num_images, num_tokens), 0, num_codes)


def cut(patches: Patches, images: Array, image_size: int) -> Array:
    """The patches of images of this size, (..., T, P).

    Raises:
      ValueError: for images of another size.
    """
    tokens = patches(images)
    if tokens.shape[-2] != (image_size // patches.size) ** 2:
        raise ValueError(
            f"This autoencoder needs images of {image_size} x {image_size} pixels. Got "
            f"{tuple(images.shape)}."
        )
    return tokens


def joined(tokens: Array, patches: Patches, image_size: int) -> Array:
    """The inverse of `Patches`: (..., T, P) -> (..., height, width[, channels])."""
    batch, side, size = tokens.shape[:-2], image_size // patches.size, patches.size
    squares = tokens.reshape(*batch, side, side, size, size, patches.channels)
    images = jnp.moveaxis(squares, -3, -4)
    images = images.reshape(*batch, image_size, image_size, patches.channels)
    return images[..., 0] if patches.channels == 1 else images
