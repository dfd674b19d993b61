"""`PlainDiscreteAutoencoder`: categorical codes between any two plain networks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from moment_jax import objectives
from moment_jax.discrete import log_probabilities
from moment_jax.nn.code_bound import (
    NegativeElbo,
    PixelLikelihood,
    code_terms,
    flattened,
    joined,
)
from moment_jax.nn.vision import Patches

Array = jax.Array


class PlainDiscreteAutoencoder(nnx.Module):
    """x -> encoder -> pi -> z ~ Categorical(pi) -> decoder -> x_hat, without beliefs about weights.

    Args:
      encoder: a module, patches (..., T, P) -> logits of the codes (..., T, K).
      decoder: a module, codes (..., T, K) -> patches (..., T, P): logits of the pixels for
        `Bernoulli`, their means for `Gaussian`.
      patches: how images are cut.
      image_size: height and width of the images.
      num_codes: K.
      likelihood: of the pixels; the noise variance of a `Gaussian` is where it starts, and is learned.
    """

    def __init__(
        self,
        encoder: Any,
        decoder: Any,
        *,
        patches: Patches,
        image_size: int,
        num_codes: int,
        likelihood: PixelLikelihood,
    ) -> None:
        self.encoder = encoder
        self.decoder = decoder
        self.patches = patches
        self.image_size = image_size
        self.num_codes = num_codes
        self.log_noise = nnx.data(log_noise(likelihood))

    @property
    def likelihood(self) -> PixelLikelihood:
        """The pixels' observation model, with the noise as it is by now."""
        return with_noise(self.log_noise)

    def code_log_probs(self, images: Array) -> Array:
        """Log pi, (..., height, width[, channels]) -> (..., T, K)."""
        batch, tokens = flattened(self.patches, images, self.image_size)
        return log_probabilities(self.encoder(tokens)).reshape(*batch, -1, self.num_codes)

    def decode(self, z: Array) -> Array:
        """Codes (..., T, K), one-hot or relaxed -> patches (..., T, P)."""
        return self.decoder(z)

    def pixels(self, tokens: Array) -> Array:
        """Patches (..., T, P) as images."""
        return joined(tokens, self.patches, self.image_size)

    def negative_elbo(
        self,
        images: Array,
        key: Array,
        temperature: Array | float,
        *,
        straight_through: bool = False,
    ) -> NegativeElbo:
        """The negative ELBO in nats for each image: `DiscreteAutoencoder.negative_elbo`."""
        batch, target = flattened(self.patches, images, self.image_size)

        def decode(z: Array) -> tuple[Array, Array]:
            mean = self.decoder(z)
            return mean, jnp.zeros_like(mean)

        fit, code_kl = code_terms(
            log_probabilities(self.encoder(target)),
            decode,
            target,
            self.likelihood,
            (key, temperature, straight_through),
        )
        return NegativeElbo(fit.reshape(batch), code_kl.reshape(batch), jnp.zeros((), fit.dtype))


def log_noise(likelihood: PixelLikelihood) -> nnx.Param | None:
    """The logarithm of a Gaussian's noise variance as a parameter; None for `Bernoulli`.

    Raises:
      TypeError: for another likelihood. ValueError: unless the noise variance is one positive number.
    """
    if isinstance(likelihood, objectives.Bernoulli):
        return None
    if not isinstance(likelihood, objectives.Gaussian):
        raise TypeError(
            "A discrete autoencoder needs a likelihood, mj.objectives.Bernoulli() or "
            f"Gaussian(noise_variance). Got {likelihood!r}."
        )
    if jnp.ndim(likelihood.noise_variance) != 0 or not float(likelihood.noise_variance) > 0:
        raise ValueError(
            "A discrete autoencoder needs one positive noise variance for all pixels. Got "
            f"{likelihood.noise_variance}."
        )
    return nnx.Param(jnp.log(jnp.asarray(likelihood.noise_variance, jnp.float32)))


def with_noise(log_noise: nnx.Param | None) -> PixelLikelihood:
    """The likelihood of this noise."""
    if log_noise is None:
        return objectives.Bernoulli()
    return objectives.Gaussian(jnp.exp(log_noise[...]))
