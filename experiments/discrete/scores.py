"""Negative ELBOs with hard codes, usage of the codes, and decoded images."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import moment_jax as mj

Array = jax.Array
Decode = Callable[[Array], tuple[Array, Array]]


@dataclasses.dataclass(frozen=True)
class Coder:
    """A trained autoencoder as two functions, plain and Bayesian ones alike.

    Args:
      encode: images (N, ...) -> log q(z_t = k | x), (N, T, K).
      decode: codes (N, T, K) -> mean and variance of the patches, (N, T, P); the variance is that which
        the weights' uncertainty makes, 0 for a plain network.
      images: patches (N, T, P) -> images.
      patches: images -> patches.
      likelihood: of the pixels.
    """

    encode: Callable[[Array], Array]
    decode: Decode
    images: Callable[[Array], Array]
    patches: Callable[[Array], Array]
    likelihood: Any

    @classmethod
    def plain(cls, network: mj.nn.PlainDiscreteAutoencoder) -> Coder:
        """A plain autoencoder."""

        def decode(z: Array) -> tuple[Array, Array]:
            mean = network.decode(z)
            return mean, jnp.zeros_like(mean)

        parts = jax.jit(network.code_log_probs), jax.jit(decode)
        return cls(*parts, network.pixels, network.patches, network.likelihood)

    @classmethod
    def bayesian(cls, network: mj.nn.DiscreteAutoencoder) -> Coder:
        """A Bayesian one, its weights' uncertainty by moments."""

        def decode(z: Array) -> tuple[Array, Array]:
            mean, cov = network.decode(z)
            return mean, jax.vmap(lambda c: c.variance())(cov)

        parts = jax.jit(network.code_log_probs), jax.jit(decode)
        return cls(*parts, network.pixels, network.patches, network.likelihood)

    def shown(self, mean: Array, variance: Array) -> np.ndarray:
        """Images in [0, 1] of decoded patches: the expected pixels."""
        if isinstance(self.likelihood, mj.objectives.Bernoulli):
            mean = mj.objectives.bernoulli_probabilities(mean, variance)
        return np.clip(np.asarray(self.images(mean)), 0, 1)


@dataclasses.dataclass(frozen=True)
class Scores:
    """Nats for each image, averaged over draws of its codes, and the codes of the last draw."""

    reconstruction: np.ndarray
    code_kl: np.ndarray
    codes: np.ndarray
    num_codes: int
    decoded: tuple[Array, Array]
    draw_sd: float

    @property
    def total(self) -> np.ndarray:
        """The negative ELBO of each image given the weights' distribution, (N,)."""
        return self.reconstruction + self.code_kl

    def summary(self) -> dict[str, float]:
        """What metrics.json holds of it."""
        usage = mj.discrete.code_usage(jnp.asarray(self.codes), self.num_codes)
        by_place = jax.vmap(lambda column: mj.discrete.code_usage(column, self.num_codes))(
            jnp.asarray(self.codes.T)
        )
        return {
            "negative_elbo": float(self.total.mean()),
            "standard_error": float(self.total.std(ddof=1) / len(self.total) ** 0.5),
            "sd_of_one_draw": self.draw_sd,
            "reconstruction": float(self.reconstruction.mean()),
            "code_kl": float(self.code_kl.mean()),
            "num_codes": self.num_codes,
            "codes_per_image": self.codes.shape[1],
            "perplexity": float(mj.discrete.perplexity(jnp.log(usage))),
            "perplexity_by_place": float(jnp.mean(mj.discrete.perplexity(jnp.log(by_place)))),
        }


def score(coder: Coder, images: np.ndarray, key: Array, num_draws: int) -> Scores:
    """The negative ELBO of images by hard codes: exact draws, nothing relaxed."""
    target = coder.patches(jnp.asarray(images))
    log_probs = coder.encode(jnp.asarray(images))
    num_codes = log_probs.shape[-1]
    every, codes, decoded = [], None, None
    for draw in range(num_draws):
        codes = mj.discrete.gumbel_max(jax.random.fold_in(key, draw), log_probs)
        decoded = coder.decode(jax.nn.one_hot(codes, num_codes))
        every.append(-np.asarray(_fit(coder.likelihood, target, *decoded)))
    assert codes is not None
    assert decoded is not None
    code_kl = np.asarray(mj.discrete.categorical_kl(log_probs).sum(axis=-1))
    losses = np.stack(every)
    spread = float(losses.mean(axis=1).std(ddof=1)) if num_draws > 1 else 0.0
    return Scores(losses.mean(axis=0), code_kl, np.asarray(codes), num_codes, decoded, spread)


def sampled_reconstruction(
    network: mj.nn.DiscreteAutoencoder,
    coder: Coder,
    images: np.ndarray,
    key: Array,
    num_networks: int,
) -> tuple[float, float]:
    """The reconstruction term by networks sampled from the posterior, and its standard error.

    Every sampled network decodes a draw of its own of the codes; the error is that over networks.
    """
    target = coder.patches(jnp.asarray(images))
    log_probs = coder.encode(jnp.asarray(images))

    @jax.jit
    def one(key: Array) -> Array:
        weights_key, codes_key = jax.random.split(key)
        codes = mj.discrete.gumbel_max(codes_key, log_probs)
        mean = network.decoder.sample(weights_key)(jax.nn.one_hot(codes, log_probs.shape[-1]))
        return -_fit(coder.likelihood, target, mean, jnp.zeros_like(mean)).mean()

    losses = np.asarray([one(k) for k in jax.random.split(key, num_networks)])
    return float(losses.mean()), float(losses.std(ddof=1) / num_networks**0.5)


@jax.jit
def _fit(likelihood: Any, target: Array, mean: Array, variance: Array) -> Array:
    fits = jax.vmap(mj.objectives.expected_log_likelihood, (None, 0, 0, 0))
    return fits(likelihood, target, mean, variance)
