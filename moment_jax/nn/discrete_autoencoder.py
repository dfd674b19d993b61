"""Images -> a grid of categorical codes -> images: `DiscreteAutoencoder`."""

import math
from functools import partial
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from moment_jax import discrete
from moment_jax.covariance import Diagonal, Moments
from moment_jax.layers import softmax
from moment_jax.nn import likelihood as likelihoods
from moment_jax.nn.bayesian import Bayesian
from moment_jax.nn.networks import Patches, TokenTransformer
from moment_jax.nn.plain import Module
from moment_jax.objectives import Bernoulli, Gaussian
from moment_jax.objectives.lower_bound import check_weight


class NegativeElbo(NamedTuple):
    """The parts of the negative ELBO, in nats for each image; lower is better."""

    reconstruction: Array  # -E[log p(x | z, weights)] over codes and the decoder's weights, (...,)
    code_kl: Array  # KL(q(z | x) || uniform), summed over the grid of codes, (...,)
    weight_kl: Array  # an image's share of KL(q(weights) || prior), a scalar; 0 for plain networks

    @property
    def total(self) -> Array:
        """Their sum, (...,)."""
        return self.reconstruction + self.code_kl + self.weight_kl


class DiscreteAutoencoder(Module):
    """x -> encoder -> pi -> z ~ Categorical(pi) -> decoder -> x_hat.

    An image's patches are T tokens with one of K codes each, with a uniform prior. Each of the two
    networks is plain or an `mj.Bayesian`, whose moments are used then. Given the weights, codes are
    independent, with probabilities pi_t = softmax(f_t). The decoder's input is drawn from q(z | x) =
    prod_t Categorical(z_t | E[pi_t]), the exact law of every single code under random weights; the
    softmax of the mean logits is not, for E[softmax(f)] is flatter. q omits the dependence between the
    codes of one image through their common weights: a choice of q, not an approximation of the bound.

    Args:
      encoder: patches (..., T, P) -> logits of the codes (..., T, K); Bayesian ones of one batch axis.
      decoder: codes (..., T, K) -> patches (..., T, P): logits of the pixels for `Bernoulli`, their
        means for `Gaussian`.
      patches: cuts the images.
      image_size: height and width of the images.
      num_codes: K, at least 2.
      likelihood: of the pixels: `mj.Bernoulli()` where None, `mj.Gaussian(variance)`, or
        `mj.Gaussian()` to learn the noise.

    Raises:
      TypeError, ValueError: if sizes do not fit, or the likelihood is another.

    Source: handwritten notes, x -> Enc -> pi, z ~ Mult(z | pi) -> Dec -> x_hat.

    >>> import jax, jax.numpy as jnp, moment_jax as mj
    >>> from flax import nnx
    >>> plain = mj.nn.DiscreteAutoencoder.transformers(
    ...     image_size=4, patch_size=2, num_codes=3, num_features=4, rngs=nnx.Rngs(0))
    >>> model = plain.bayesian(structure=mj.Diagonal)
    >>> jax.eval_shape(model.code_log_probs, jnp.ones((5, 4, 4))).shape
    (5, 4, 3)
    """

    def __init__(
        self, encoder: Any, decoder: Any, *, patches: Patches, image_size: int, num_codes: int,
        likelihood: Gaussian | Bernoulli | None = None,
    ) -> None:  # fmt: skip
        self.num_tokens = _num_tokens(patches, image_size, num_codes)
        self.encoder, self.decoder = encoder, decoder
        self.patches, self.image_size, self.num_codes = patches, image_size, num_codes
        likelihood = Bernoulli() if likelihood is None else likelihood
        if not isinstance(likelihood, Gaussian | Bernoulli):
            raise TypeError(
                "`DiscreteAutoencoder` needs the likelihood mj.Bernoulli(), mj.Gaussian(variance) or "
                f"mj.Gaussian(). Got {likelihood!r}."
            )
        self.kind, self.noise = likelihoods.stored(likelihood)

    @classmethod
    def transformers(
        cls, *, image_size: int, patch_size: int, num_codes: int, channels: int = 1,
        num_encoder_blocks: int = 1, num_decoder_blocks: int = 1,
        likelihood: Gaussian | Bernoulli | None = None, rngs: nnx.Rngs, **options: Any,
    ) -> Self:  # fmt: skip
        """The autoencoder of two plain `TokenTransformer`s, whose other arguments are the `options`."""
        patches, pixels = Patches(patch_size, channels), patch_size**2 * channels
        num_tokens = _num_tokens(patches, image_size, num_codes)
        make: Any = partial(TokenTransformer, num_tokens, rngs=rngs, **options)
        return cls(
            make(pixels, num_codes, num_blocks=num_encoder_blocks),
            make(num_codes, pixels, num_blocks=num_decoder_blocks),
            patches=patches, image_size=image_size, num_codes=num_codes, likelihood=likelihood,
        )  # fmt: skip

    @property
    def likelihood(self) -> Gaussian | Bernoulli:
        """The pixels' observation model, a learned noise at its present value."""
        found: Gaussian | Bernoulli = likelihoods.present(self.kind, self.noise)
        return found

    def bayesian(self, **options: Any) -> Self:
        """The autoencoder with both networks made random, by `mj.Bayesian(network, **options)`."""
        return self._of(lambda network, _: Bayesian(network, **options))

    def at_means(self) -> Self:
        """The plain autoencoder at the means."""
        return self._of(lambda x, _: x.at_means() if isinstance(x, Bayesian) else x)

    def sample(self, key: Array) -> Self:
        """The plain autoencoder of one draw of the weights."""
        keys = jax.random.split(key)
        return self._of(lambda x, key: x.sample(key) if isinstance(x, Bayesian) else x, *keys)

    def _of(self, fn: Any, *keys: Any) -> Self:
        """A copy with `fn(network, key)` in the place of each network."""
        other = nnx.clone(self)
        other.encoder, other.decoder = map(fn, (other.encoder, other.decoder), keys or (None, None))
        return other

    def kl(self) -> Array:
        """KL(posterior || prior) of all random weights, in nats."""
        random = (x for x in (self.encoder, self.decoder) if isinstance(x, Bayesian))
        return sum((network.kl() for network in random), jnp.zeros(()))

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

    def encode(self, images: Array) -> Array | Moments:
        """The codes' logits or their moments, (..., height, width[, channels]) -> (..., T, K)."""
        return _output(self.encoder, self.cut(images))

    def probabilities(self, images: Array) -> Array | Moments:
        """The codes' probabilities pi or their moments, (..., T, K)."""
        logits = self.encode(images)
        if not isinstance(logits, Moments):
            return jax.nn.softmax(logits)
        return Moments(*_over_images(softmax, logits))

    def code_log_probs(self, images: Array) -> Array:
        """Log q(z_t = k | x) = log E[pi_tk], (..., T, K)."""
        logits = self.encode(images)
        if not isinstance(logits, Moments):
            return discrete.log_probabilities(logits)
        return jnp.asarray(_over_images(discrete.log_category_probabilities, logits))

    def decode(self, z: Array) -> Array | Moments:
        """Patches or their moments given codes, one-hot or relaxed: (..., T, K) -> (..., T, P)."""
        return _output(self.decoder, z)

    def __call__(
        self, images: Array, key: Array, temperature: Array | float, **options: Any
    ) -> Array | Moments:
        """The patches or their moments, given one draw of every image's codes by `gumbel_softmax`."""
        z = discrete.gumbel_softmax(key, self.code_log_probs(images), temperature, **options)
        return self.decode(z)

    def negative_elbo(
        self, images: Array, key: Array, temperature: Array | float, *,
        dataset_size: int | None = None, kl_weight: Array | float = 1.0, straight_through: bool = False,
    ) -> NegativeElbo:  # fmt: skip
        """The negative ELBO in nats for each image, from one draw of its codes and no draw of weights.

        -E[log p(x | z, w)] + KL(q(z | x) || uniform) + kl_weight KL(q(w) || p(w)) / dataset_size,

        The expectation over the decoder's weights uses their moments; the KL divergences are exact. As
        q(z | x) is a function of the beliefs about the encoder's weights, a bound on the evidence needs
        only the decoder's KL; adding the encoder's keeps it a bound, and regularises. With
        straight_through the codes are hard, with the gradient of relaxed ones, and the result is an
        unbiased estimate of the bound; with relaxed codes it is a surrogate with less noisy gradients.

        Args:
          images: (..., height, width[, channels]); numbers in [0, 1] for `Bernoulli`.
          key: of the draw.
          temperature: of the relaxation.
          dataset_size: the number of training images; needed where a network is Bayesian.
          kl_weight: 1 for the bound itself, or not negative; below 1 for warm-up or a cold posterior.
          straight_through: hard codes.
        """
        target, weight_kl = self.cut(images), jnp.zeros(())
        if isinstance(self.encoder, Bayesian) or isinstance(self.decoder, Bayesian):
            if dataset_size is None or dataset_size < max(1, math.prod(target.shape[:-2])):
                raise ValueError(
                    "`negative_elbo` needs dataset_size >= 1, the number of training images, and not "
                    f"below the number of images given. Got {dataset_size} for {tuple(images.shape)}."
                )
            check_weight("negative_elbo", "kl_weight", kl_weight)
            weight_kl = kl_weight * self.kl() / dataset_size
        log_probs = self.code_log_probs(images)
        z = discrete.gumbel_softmax(key, log_probs, temperature, straight_through=straight_through)
        code_kl = jnp.sum(discrete.categorical_kl(log_probs), axis=-1)
        return NegativeElbo(-self.log_likelihood(target, self.decode(z)), code_kl, weight_kl)

    def log_likelihood(self, target: Array, decoded: Array | Moments) -> Array:
        """(Expected) log p(x | z), (...,), of patches (..., T, P) given what `decode` returned."""
        if not isinstance(decoded, Moments):
            if self.noise is None:  # no quadrature without uncertainty
                return jnp.sum(target * decoded - jax.nn.softplus(decoded), axis=(-2, -1))
            decoded = Moments(decoded, Diagonal(jnp.zeros_like(decoded)))
        return jnp.sum(likelihoods.expected(self.likelihood, target, decoded), axis=-1)


def _num_tokens(patches: Patches, image_size: int, num_codes: int) -> int:
    """T, the number of patches of an image; raises if sizes do not fit."""
    if num_codes < 2 or patches.channels < 1:
        raise ValueError(
            "`DiscreteAutoencoder` needs num_codes >= 2 and channels >= 1. Got "
            f"{num_codes} and {patches.channels}."
        )
    return patches.count("DiscreteAutoencoder", image_size)


def _output(network: Any, x: Array) -> Any:
    """The network's output or its moments, for sequences (..., T, D) with any batch axes."""
    if not isinstance(network, Bayesian):
        return network(x)
    if network.batch_axes != 1:
        raise ValueError(
            f"`DiscreteAutoencoder` needs Bayesian networks of batch_axes=1. Got {network.batch_axes}."
        )
    lead, moments = x.shape[:-2], network(x.reshape(-1, *x.shape[-2:]))
    return jax.tree.map(lambda leaf: leaf.reshape(*lead, *leaf.shape[1:]), moments)


def _over_images(fn: Any, moments: Moments) -> Any:
    """`fn` of the moments (T, K) of each image."""
    for _ in moments.mean.shape[:-2]:
        fn = jax.vmap(fn)
    return fn(*moments)
