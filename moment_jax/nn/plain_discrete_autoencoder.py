"""The plain discrete autoencoder, and its base class, which the Bayesian one shares."""

import abc
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from moment_jax import objectives
from moment_jax.discrete import categorical_kl, gumbel_softmax, log_probabilities
from moment_jax.nn.vision import Patches

PixelLikelihood = objectives.Gaussian | objectives.Bernoulli


class NegativeElbo(NamedTuple):
    """The parts of the negative ELBO, in nats for each image; lower is better."""

    reconstruction: Array  # -E[log p(x | z, weights)] over codes and the decoder's weights, (...,)
    code_kl: Array  # KL(q(z | x) || uniform), summed over the grid of codes, (...,)
    weight_kl: Array  # an image's share of KL(q(weights) || prior), a scalar; 0 for plain networks

    @property
    def total(self) -> Array:
        """Their sum, (...,)."""
        return self.reconstruction + self.code_kl + self.weight_kl


class CodedImages:
    """Images cut into patches with one of `num_codes` codes each, and the pixels' likelihood."""

    patches: Patches
    image_size: int
    num_codes: int
    decoder: Any
    log_noise: nnx.Param | None

    @property
    def likelihood(self) -> PixelLikelihood:
        """The pixels' observation model at the current noise variance."""
        if self.log_noise is None:
            return objectives.Bernoulli()
        return objectives.Gaussian(jnp.exp(self.log_noise[...]))

    @property
    def num_tokens(self) -> int:
        """T, the number of patches of an image."""
        return (self.image_size // self.patches.size) ** 2

    def cut(self, images: Array) -> Array:
        """The patches of images, (..., T, P); ValueError for images of another size."""
        tokens = self.patches(images)
        if tokens.shape[-2] != self.num_tokens:
            raise ValueError(
                f"This autoencoder needs images of {self.image_size} x {self.image_size} pixels. Got "
                f"{tuple(images.shape)}."
            )
        return tokens

    def pixels(self, tokens: Array) -> Array:
        """Patches (..., T, P), such as a mean or a variance from `decode`, as images."""
        batch, size, channels = tokens.shape[:-2], self.patches.size, self.patches.channels
        side = self.image_size // size
        images = jnp.moveaxis(tokens.reshape(*batch, side, side, size, size, channels), -3, -4)
        images = images.reshape(*batch, self.image_size, self.image_size, channels)
        return images[..., 0] if channels == 1 else images

    def prior_codes(self, key: Array, num_images: int) -> Array:
        """Codes from the uniform prior, integers (N, T)."""
        if num_images < 1:
            raise ValueError(f"`sample_images` needs num_images >= 1. Got {num_images}.")
        return jax.random.randint(key, (num_images, self.num_tokens), 0, self.num_codes)

    def decode(self, z: Array) -> Any:
        """Patches given codes, one-hot or relaxed: (..., T, K) -> (..., T, P), or their moments.

        They are the pixels' logits for `Bernoulli`, the pixels without their noise for `Gaussian`. Codes
        are certain, even where weights are random.
        """
        return self.decoder(z)

    @abc.abstractmethod
    def code_log_probs(self, images: Array) -> Array:
        """Log q(z_t = k | x), (..., height, width[, channels]) -> (..., T, K)."""

    @abc.abstractmethod
    def _log_likelihood(self, target: Array, z: Array) -> Array:
        """(Expected) log p(x | z), (...,), of patches (..., T, P) given codes (..., T, K)."""

    def _over_images(self, target: Array, *moments: Any) -> Array:
        """The expected log-likelihood of every image's patches under moments of the decoder's output."""
        fn = partial(objectives.expected_log_likelihood, self.likelihood)
        for _ in target.shape[:-2]:
            fn = jax.vmap(fn)
        return fn(target, *moments)

    def _bound(
        self, images: Array, key: Array, temperature: Array | float, *, straight_through: bool
    ) -> NegativeElbo:
        """The negative ELBO for each image, without the divergence of the weights."""
        log_probs = self.code_log_probs(images)
        z = gumbel_softmax(key, log_probs, temperature, straight_through=straight_through)
        fit = self._log_likelihood(self.cut(images), z)
        code_kl = jnp.sum(categorical_kl(log_probs), axis=-1)
        return NegativeElbo(-fit, code_kl, jnp.zeros((), fit.dtype))


class PlainDiscreteAutoencoder(CodedImages, nnx.Module):
    """x -> encoder -> pi -> z ~ Categorical(pi) -> decoder -> x_hat, with certain weights.

    Args:
      encoder: a module, patches (..., T, P) -> logits of the codes (..., T, K).
      decoder: a module, codes (..., T, K) -> patches (..., T, P): logits of the pixels for
        `Bernoulli`, their means for `Gaussian`.
      patches: cuts the images.
      image_size: height and width of the images.
      num_codes: K.
      likelihood: of the pixels; the noise variance of a `Gaussian` is an initial value, and is learned.
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

    def code_log_probs(self, images: Array) -> Array:
        """Log pi, (..., height, width[, channels]) -> (..., T, K)."""
        return log_probabilities(self.encoder(self.cut(images)))

    def _log_likelihood(self, target: Array, z: Array) -> Array:
        mean = self.decoder(z)
        if isinstance(self.likelihood, objectives.Bernoulli):
            # No quadrature without uncertainty.
            return jnp.sum(target * mean - jax.nn.softplus(mean), axis=(-2, -1))
        return self._over_images(target, mean, jnp.zeros_like(mean))

    def negative_elbo(
        self,
        images: Array,
        key: Array,
        temperature: Array | float,
        *,
        straight_through: bool = False,
    ) -> NegativeElbo:
        """The negative ELBO in nats for each image: see `DiscreteAutoencoder.negative_elbo`."""
        return self._bound(images, key, temperature, straight_through=straight_through)

    def sample_images(self, key: Array, num_images: int) -> tuple[Array, Array]:
        """Codes (N, T) from the uniform prior, and the patches that they decode to."""
        codes = self.prior_codes(key, num_images)
        return codes, self.decode(jax.nn.one_hot(codes, self.num_codes))


def log_noise(likelihood: PixelLikelihood) -> nnx.Param | None:
    """The log noise variance of a `Gaussian` as a parameter; None for `Bernoulli`."""
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
