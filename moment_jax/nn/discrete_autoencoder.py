"""`DiscreteAutoencoder`: images -> a grid of categorical codes -> images, with random weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from moment_jax import objectives
from moment_jax.covariance import Covariance
from moment_jax.discrete import category_moments, gumbel_softmax, log_category_probabilities
from moment_jax.nn.base import BayesianModule
from moment_jax.nn.code_bound import (
    NegativeElbo,
    PixelLikelihood,
    code_terms,
    flattened,
    joined,
)
from moment_jax.nn.plain_discrete_autoencoder import (
    PlainDiscreteAutoencoder,
    log_noise,
    with_noise,
)
from moment_jax.nn.settings import Settings
from moment_jax.nn.token_transformer import TokenTransformer
from moment_jax.nn.vision import Patches
from moment_jax.reference import Stage

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DiscreteAutoencoderParams:
    """Beliefs about both halves of a `DiscreteAutoencoder`."""

    encoder: Any
    decoder: Any


class DiscreteAutoencoder(BayesianModule):
    """x -> Transformer -> pi -> z ~ Categorical(pi) -> Transformer -> x_hat, with random weights.

    The image's patches are T tokens, each gets one of K codes, and the prior of the codes is uniform.
    Given the weights, codes are independent: q(z | x, w) = prod_t Categorical(z_t | softmax(f_t)), f the
    encoder's output, of which `encode` gives mean and covariance. What the decoder is given is drawn
    from q(z | x) = prod_t Categorical(z_t | E[pi_t]). That is the exact law of every code under
    random weights, P(z_t = k) = E[P(z_t = k | w)] = E[pi_tk]; a draw from the softmax of the mean logits
    would not be (E[softmax(f)] is flatter). Dependence between the codes of one image that comes from
    their common weights is left out of q. That is a choice of q, and no approximation of the bound.

    Args:
      image_size: height and width of the images.
      patch_size: height and width of a patch, a divisor of image_size.
      num_codes: K, at least 2.
      channels: channels of the images.
      num_features: D.
      num_heads: H.
      num_encoder_blocks: blocks before the codes.
      num_decoder_blocks: blocks after the codes.
      hidden_features: width of the feed-forward layers; 4 D where None.
      norm_first: pre-norm if True.
      activation: "relu", "gelu", "tanh" or "silu".
      likelihood: `mj.objectives.Bernoulli()`, or `Gaussian(noise_variance)` with the one variance at
        which the noise starts; it is learned.
      rngs: Flax random streams.
      settings: keyword arguments of `Settings`.

    Raises:
      ValueError: if patches do not divide the image, heads do not divide the features, or there are
        fewer than two codes. TypeError: for another likelihood.

    Source: handwritten notes, x -> Enc -> pi, z ~ Mult(z | pi) -> Dec -> x_hat.
    """

    def __init__(
        self,
        *,
        image_size: int,
        patch_size: int,
        num_codes: int,
        channels: int = 1,
        num_features: int = 32,
        num_heads: int = 4,
        num_encoder_blocks: int = 1,
        num_decoder_blocks: int = 1,
        hidden_features: int | None = None,
        norm_first: bool = True,
        activation: str = "gelu",
        likelihood: PixelLikelihood | None = None,
        rngs: nnx.Rngs,
        **settings: Any,
    ) -> None:
        if patch_size < 1 or image_size % patch_size:
            raise ValueError(
                "`DiscreteAutoencoder` needs patch_size to divide image_size. Got "
                f"{patch_size} and {image_size}."
            )
        if num_codes < 2:
            raise ValueError(f"`DiscreteAutoencoder` needs num_codes >= 2. Got {num_codes}.")
        self.settings = Settings(**settings)
        self.patches = Patches(patch_size, channels)
        self.image_size = image_size
        self.num_codes = num_codes
        self.num_tokens = (image_size // patch_size) ** 2
        pixels = patch_size**2 * channels
        options: dict[str, Any] = {
            "num_features": num_features,
            "num_heads": num_heads,
            "hidden_features": hidden_features,
            "norm_first": norm_first,
            "activation": activation,
            "rngs": rngs,
            **settings,
        }
        self.encoder = TokenTransformer(
            self.num_tokens, pixels, num_codes, num_blocks=num_encoder_blocks, **options
        )
        self.decoder = TokenTransformer(
            self.num_tokens, num_codes, pixels, num_blocks=num_decoder_blocks, **options
        )
        self.log_noise = nnx.data(log_noise(likelihood or objectives.Bernoulli()))

    def load(self, network: PlainDiscreteAutoencoder) -> None:
        """Take the weights of a trained plain network (as `mean_network` makes them) as means."""
        self.encoder.load(network.encoder)
        self.decoder.load(network.decoder)
        if self.log_noise is not None and network.log_noise is not None:
            self.log_noise.set_value(network.log_noise[...])

    @property
    def params(self) -> DiscreteAutoencoderParams:
        """Beliefs about all weights."""
        return DiscreteAutoencoderParams(self.encoder.params, self.decoder.params)

    @property
    def likelihood(self) -> PixelLikelihood:
        """The pixels' observation model, with the noise as it is by now."""
        return with_noise(self.log_noise)

    def network(self, params: DiscreteAutoencoderParams) -> PlainDiscreteAutoencoder:
        """The plain autoencoder with these arrays."""
        return PlainDiscreteAutoencoder(
            self.encoder.network(params.encoder),
            self.decoder.network(params.decoder),
            patches=self.patches,
            image_size=self.image_size,
            num_codes=self.num_codes,
            likelihood=self.likelihood,
        )

    def encode(self, images: Array) -> tuple[Array, Covariance]:
        """Moments of the codes' logits, (..., height, width[, channels]) -> (..., T, K)."""
        batch, tokens = flattened(self.patches, images, self.image_size)
        mean, cov = self.encoder(tokens)
        return jax.tree.map(lambda leaf: leaf.reshape(*batch, *leaf.shape[1:]), (mean, cov))

    def probabilities(self, images: Array) -> tuple[Array, Covariance]:
        """Moments of pi, the codes' probabilities: mean (..., T, K), and covariance alike."""
        batch, tokens = flattened(self.patches, images, self.image_size)
        moments = jax.vmap(category_moments)(*self.encoder(tokens))
        return jax.tree.map(lambda leaf: leaf.reshape(*batch, *leaf.shape[1:]), moments)

    def code_log_probs(self, images: Array) -> Array:
        """Log E[pi], the logarithm of q(z_t = k | x), (..., T, K)."""
        batch, tokens = flattened(self.patches, images, self.image_size)
        log_probs = jax.vmap(log_category_probabilities)(*self.encoder(tokens))
        return log_probs.reshape(*batch, *log_probs.shape[1:])

    def decode(self, z: Array) -> tuple[Array, Covariance]:
        """Moments of the patches given codes, one-hot or relaxed: (..., T, K) -> (..., T, P).

        Of the logits of pixels for `Bernoulli`, of the pixels for `Gaussian` (without their noise). The
        codes are certain: what is random are the weights.
        """
        return self.decoder(z)

    def pixels(self, tokens: Array) -> Array:
        """Patches (..., T, P), such as a mean or a variance that `decode` gives, as images."""
        return joined(tokens, self.patches, self.image_size)

    def __call__(
        self,
        images: Array,
        key: Array,
        temperature: Array | float,
        *,
        straight_through: bool = False,
    ) -> tuple[Array, Covariance]:
        """`decode` of one draw of the codes of every image (`mj.discrete.gumbel_softmax`)."""
        log_probs = self.code_log_probs(images)
        return self.decode(
            gumbel_softmax(key, log_probs, temperature, straight_through=straight_through)
        )

    def negative_elbo(
        self,
        images: Array,
        key: Array,
        temperature: Array | float,
        *,
        dataset_size: int,
        kl_weight: Array | float = 1.0,
        straight_through: bool = False,
    ) -> NegativeElbo:
        """The negative ELBO in nats for each image, by one draw of its codes and no draw of weights.

        -E[log p(x | z, w)] + KL(q(z | x) || uniform) + kl_weight KL(q(w) || p(w)) / dataset_size,

        the expectation over the decoder's weights by their moments, with exact KL divergences. As
        q(z | x) is a function of the beliefs about the encoder's weights, a bound on the evidence needs
        the decoder's KL alone; that of the encoder's weights keeps it a bound, and regularises them.
        With straight_through the codes are hard, and the result is an unbiased estimate of the bound;
        with relaxed ones it is a surrogate, whose gradients vary less.

        Args:
          images: (..., height, width[, channels]); numbers in [0, 1] for `Bernoulli`.
          key: a JAX random key.
          temperature: of the relaxation.
          dataset_size: the number of training images.
          kl_weight: 1 for the bound itself; below 1 for warm-up or a cold posterior.
          straight_through: hard codes, with the relaxed ones' gradient.

        Raises:
          ValueError: if shapes do not fit, or dataset_size is below 1.
        """
        if dataset_size < 1:
            raise ValueError(
                f"`negative_elbo` needs dataset_size >= 1, the training images. Got {dataset_size}."
            )
        batch, target = flattened(self.patches, images, self.image_size)
        fit, code_kl = code_terms(
            jax.vmap(log_category_probabilities)(*self.encoder(target)),
            self.decode,
            target,
            self.likelihood,
            (key, temperature, straight_through),
        )
        weight_kl = jnp.asarray(kl_weight, fit.dtype) * self.kl() / dataset_size
        return NegativeElbo(fit.reshape(batch), code_kl.reshape(batch), weight_kl)

    def generate(self, key: Array, num_images: int) -> tuple[Array, Array, Covariance]:
        """Images from the prior: uniform codes, decoded.

        Returns:
          Codes (num_images, T), and moments of the patches as `decode` gives them.
        """
        codes = jax.random.randint(key, (num_images, self.num_tokens), 0, self.num_codes)
        mean, cov = self.decode(jax.nn.one_hot(codes, self.num_codes, dtype=self.settings.dtype))
        return codes, mean, cov

    @property
    def stages(self) -> list[Stage]:
        """The encoder's sublayers, up to the logits of the codes: given z, the decoder has its own."""
        return self.encoder.stages

    def sequence(self, x: Array) -> Array:
        """One image as its patches."""
        return self.patches(x)
