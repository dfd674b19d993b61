"""`PlainDiscreteAutoencoder`: categorical codes between any two plain networks."""

from __future__ import annotations

from functools import partial
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
    cut,
    joined,
    over_images,
    prior_codes,
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

    @property
    def num_tokens(self) -> int:
        """T, the patches of an image."""
        return (self.image_size // self.patches.size) ** 2

    def code_log_probs(self, images: Array) -> Array:
        """Log pi, (..., height, width[, channels]) -> (..., T, K)."""
        return log_probabilities(self.encoder(cut(self.patches, images, self.image_size)))

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
        target = cut(self.patches, images, self.image_size)

        def log_likelihood(z: Array) -> Array:
            mean = self.decoder(z)
            if isinstance(self.likelihood, objectives.Bernoulli):
                # Without uncertainty no quadrature is needed.
                return jnp.sum(target * mean - jax.nn.softplus(mean), axis=(-2, -1))
            return over_images(
                partial(objectives.expected_log_likelihood, self.likelihood),
                target,
                mean,
                jnp.zeros_like(mean),
            )

        log_probs = log_probabilities(self.encoder(target))
        fit, code_kl = code_terms(log_probs, log_likelihood, key, temperature, straight_through)
        return NegativeElbo(fit, code_kl, jnp.zeros((), fit.dtype))

    def sample_images(self, key: Array, num_images: int) -> tuple[Array, Array]:
        """Codes (N, T) from the uniform prior, and what `decode` makes of them."""
        codes = prior_codes(key, num_images, self.num_tokens, self.num_codes)
        return codes, self.decode(jax.nn.one_hot(codes, self.num_codes))


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
