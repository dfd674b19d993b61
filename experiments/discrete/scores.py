"""Negative ELBOs with hard codes, and how many codes are in use."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import moment_jax as mj


class Scores(NamedTuple):
    """Nats for each image, averaged over draws of its codes; codes of the last draw."""

    reconstruction: np.ndarray
    code_kl: np.ndarray
    codes: np.ndarray
    num_codes: int

    @property
    def total(self) -> np.ndarray:
        """The negative ELBO of each image given the weights' distribution, (N,)."""
        return self.reconstruction + self.code_kl

    def summary(self) -> dict[str, float]:
        """The entry of metrics.json."""
        usage = mj.discrete.code_usage(jnp.asarray(self.codes), self.num_codes)
        return {
            "negative_elbo": float(self.total.mean()),
            "standard_error": float(self.total.std(ddof=1) / len(self.total) ** 0.5),
            "reconstruction": float(self.reconstruction.mean()),
            "code_kl": float(self.code_kl.mean()),
            "num_codes": self.num_codes,
            "codes_per_image": self.codes.shape[1],
            "perplexity": float(mj.discrete.perplexity(jnp.log(usage))),
        }


def score(
    network: mj.nn.DiscreteAutoencoder, images: np.ndarray, key: Array, num_draws: int
) -> Scores:
    """The negative ELBO of images by exact draws of hard codes; by moments where weights are random."""
    target = network.cut(jnp.asarray(images))
    log_probs = jax.jit(network.code_log_probs)(jnp.asarray(images))

    @jax.jit
    def draw(key: Array) -> tuple[Array, Array]:
        codes = mj.discrete.gumbel_max(key, log_probs)
        z = jax.nn.one_hot(codes, network.num_codes)
        return codes, -network.log_likelihood(target, network.decode(z))

    drawn = [draw(jax.random.fold_in(key, i)) for i in range(num_draws)]
    code_kl = np.asarray(mj.discrete.categorical_kl(log_probs).sum(axis=-1))
    fit = np.mean([loss for _, loss in drawn], axis=0)
    return Scores(fit, code_kl, np.asarray(drawn[-1][0]), network.num_codes)
