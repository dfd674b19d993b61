"""The predictive distribution of a target: a mixture of Gaussians for every method."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

NUM_NODES = 32


class Mixture(NamedTuple):
    """Components k with log weights (K, 1), means (K, N) and variances (K, N)."""

    log_weight: Array
    mean: Array
    variance: Array

    def log_density(self, y: Array) -> Array:
        """Log p(y) for each of the N targets, in nats."""
        squares = (y - self.mean) ** 2 / self.variance + jnp.log(2 * jnp.pi * self.variance)
        return jax.nn.logsumexp(self.log_weight - 0.5 * squares, axis=0)

    def centre(self) -> Array:
        """E[y], (N,)."""
        return jnp.sum(jnp.exp(self.log_weight) * self.mean, axis=0)


def of_moments(mean: Array, cov: Array, noise: Array) -> Mixture:
    """The prediction from the outputs' moments (N, O) and (N, O, O), O = 1 or 2.

    With a second output, the log noise variance g, there is no closed form: given g the target is
    Gaussian, and over g we take a Gauss-Hermite rule. `noise` is the noise variance (O = 1), or a factor
    on exp(g).
    """
    if mean.shape[1] == 1:
        return Mixture(jnp.zeros((1, 1)), mean.T, cov[:, 0].T + noise)
    points, weights = np.polynomial.hermite_e.hermegauss(NUM_NODES)
    spread = jnp.sqrt(jnp.maximum(cov[:, 1, 1], 1e-12))
    slope = cov[:, 0, 1] / spread
    z = jnp.asarray(points, mean.dtype)[:, None]
    log_noise = mean[:, 1] + spread * z
    rest = jnp.maximum(cov[:, 0, 0] - slope**2, 0.0)
    log_weight = jnp.log(jnp.asarray(weights / weights.sum(), mean.dtype))[:, None]
    return Mixture(log_weight, mean[:, 0] + slope * z, rest + noise * jnp.exp(log_noise))


def of_draws(outputs: Array, noise: Array) -> Mixture:
    """The prediction from outputs (K, N, O) of K networks; `noise` as in `of_moments`."""
    mean = outputs[..., 0]
    variance = noise * jnp.exp(outputs[..., 1]) if outputs.shape[-1] == 2 else noise
    log_weight = jnp.full((mean.shape[0], 1), -jnp.log(mean.shape[0]))
    return Mixture(log_weight, mean, jnp.broadcast_to(variance, mean.shape))


def log_likelihood(outputs: Array, y: Array, log_noise: Array) -> Array:
    """Log p(y | outputs), (N,), of outputs (N, O) of one network."""
    log_variance = outputs[:, 1] if outputs.shape[1] == 2 else log_noise
    squares = (y - outputs[:, 0]) ** 2 * jnp.exp(-log_variance)
    return -0.5 * (jnp.log(2 * jnp.pi) + log_variance + squares)
