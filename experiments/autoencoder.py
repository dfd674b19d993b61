"""Images of zeros and ones -> a grid of categorical codes -> images: `DiscreteAutoencoder`."""

from functools import partial
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

import moment_jax as mj


class NegativeElbo(NamedTuple):
    """The parts of the negative ELBO, in nats for each image; lower is better."""

    reconstruction: Array  # -E[log p(x | z, weights)] over the decoder's weights, (N,)
    code_kl: Array  # KL(q(z | x) || uniform), summed over the grid of codes, (N,)
    weight_kl: Array  # an image's share of KL(q(weights) || prior), a scalar; 0 for plain networks

    @property
    def total(self) -> Array:
        """Their sum, (N,)."""
        return self.reconstruction + self.code_kl + self.weight_kl


class DiscreteAutoencoder(nnx.Module):
    """x -> encoder -> pi -> z ~ Categorical(pi) -> decoder -> x_hat.

    An image's patches are T tokens with one of K codes each, with a uniform prior. Each of the two
    networks is plain or an `mj.Bayesian`, whose moments are used then. Given the weights, codes are
    independent, with probabilities pi_t = softmax(f_t). The decoder's input is drawn from q(z | x) =
    prod_t Categorical(z_t | E[pi_t]), the exact law of every single code under random weights; the
    softmax of the mean logits is not, for E[softmax(f)] is flatter. q omits the dependence between the
    codes of one image through their common weights: a choice of q, not an approximation of the bound.

    Args:
      encoder: patches (N, T, P) -> logits of the codes (N, T, K).
      decoder: codes (N, T, K) -> logits of the pixels (N, T, P), which are `mj.Bernoulli`.
      patches: cuts the images.
      num_codes: K, at least 2.

    Source: handwritten notes, x -> Enc -> pi, z ~ Mult(z | pi) -> Dec -> x_hat.
    """

    def __init__(self, encoder: Any, decoder: Any, patches: mj.nn.Patches, num_codes: int) -> None:
        self.encoder, self.decoder = encoder, decoder
        self.patches, self.num_codes = patches, num_codes

    @classmethod
    def transformers(
        cls, *, image_size: int, patch_size: int, num_codes: int, rngs: nnx.Rngs, **options: Any
    ) -> Self:
        """The autoencoder of two plain `TokenTransformer`s, whose other arguments are the `options`."""
        num_tokens, pixels = (image_size // patch_size) ** 2, patch_size**2
        make: Any = partial(mj.nn.TokenTransformer, num_tokens, rngs=rngs, **options)
        encoder, decoder = make(pixels, num_codes), make(num_codes, pixels)
        return cls(encoder, decoder, mj.nn.Patches(patch_size), num_codes)

    def bayesian(self, **options: Any) -> Self:
        """The autoencoder with both networks made random, by `mj.Bayesian(network, **options)`."""
        encoder, decoder = (mj.Bayesian(x, **options) for x in (self.encoder, self.decoder))
        return type(self)(encoder, decoder, self.patches, self.num_codes)

    def kl(self) -> Array:
        """KL(posterior || prior) of all random weights, in nats."""
        random = (x for x in (self.encoder, self.decoder) if isinstance(x, mj.Bayesian))
        return sum((network.kl() for network in random), jnp.zeros(()))

    def code_log_probs(self, images: Array) -> Array:
        """Log q(z_t = k | x) = log E[pi_tk], (N, T, K), of images (N, height, width)."""
        logits = self.encoder(self.patches(images))
        if not isinstance(logits, mj.Moments):
            return jax.nn.log_softmax(logits)
        probs, _ = jax.vmap(mj.softmax)(*logits)
        return jnp.log(jnp.maximum(probs, jnp.finfo(probs.dtype).tiny))

    def code_kl(self, log_probs: Array) -> Array:
        """KL(q(z | x) || uniform), summed over the grid of codes, (N,), of log q (N, T, K)."""
        return jnp.sum(jnp.exp(log_probs) * (log_probs + jnp.log(self.num_codes)), axis=(-2, -1))

    def negative_elbo(
        self, images: Array, key: Array, temperature: Array | float, *,
        dataset_size: int, kl_weight: Array | float = 1.0, straight_through: bool = False,
    ) -> NegativeElbo:  # fmt: skip
        """The negative ELBO in nats for each image, from one draw of its codes and no draw of weights.

        -E[log p(x | z, w)] + KL(q(z | x) || uniform) + kl_weight KL(q(w) || p(w)) / dataset_size,

        The expectation over the decoder's weights uses their moments; the KL divergences are exact. As
        q(z | x) is a function of the beliefs about the encoder's weights, a bound on the evidence needs
        only the decoder's KL; adding the encoder's keeps it a bound, and regularises. With
        straight_through the codes are hard, with the gradient of relaxed ones, and the result is an
        unbiased estimate of the bound; with relaxed codes it is a surrogate with less noisy gradients.

        Args:
          images: (N, height, width), numbers in [0, 1].
          key: of the draw.
          temperature: of the relaxation.
          dataset_size: the number of training images.
          kl_weight: 1 for the bound itself; below 1 for warm-up or a cold posterior.
          straight_through: hard codes.
        """
        log_probs = self.code_log_probs(images)
        options = {"straight_through": straight_through}
        z = mj.discrete.gumbel_softmax(key, log_probs, temperature, **options)
        code_kl, fit = self.code_kl(log_probs), self.log_likelihood(images, z)
        return NegativeElbo(-fit, code_kl, kl_weight * self.kl() / dataset_size)

    def log_likelihood(self, images: Array, z: Array) -> Array:
        """(Expected) log p(x | z), (N,), given codes (N, T, K), one-hot or relaxed."""
        target, decoded = self.patches(images), self.decoder(z)
        if not isinstance(decoded, mj.Moments):  # no quadrature without uncertainty
            return jnp.sum(target * decoded - jax.nn.softplus(decoded), axis=(-2, -1))
        fit = partial(mj.objectives.expected_log_likelihood, mj.Bernoulli())
        return jax.vmap(fit)(target, decoded.mean, decoded.variance)
