"""A model's targets: their likelihood, and its expectation over a batch."""

from functools import partial
from typing import Any, get_args

import jax.numpy as jnp
from flax import nnx
from jax import Array

from moment_jax import objectives
from moment_jax.covariance import Moments
from moment_jax.covariance.fields import need
from moment_jax.objectives import Categorical, Gaussian, HeteroscedasticGaussian, Likelihood
from moment_jax.objectives.checks import labels_of, over_batch


class LogNoise(nnx.Param):
    """The log variance of a Gaussian likelihood's noise, which is learned."""


def check(caller: str, likelihood: Any) -> None:
    """Raise unless it is a `Likelihood`."""
    rule = (
        f"a likelihood, one of {', '.join(f'{kind.__name__}()' for kind in get_args(Likelihood))}"
    )
    came = repr(likelihood) if isinstance(likelihood, str | type) else type(likelihood).__name__
    mend = "Give an object, after the network, as in mj.Bayesian(network, mj.Categorical())."
    need(caller, isinstance(likelihood, Likelihood), rule, came, mend, TypeError)


def stored(likelihood: Any) -> tuple[Any, Any]:
    """The likelihood, a static value, and the noise of a Gaussian one, a variable."""
    if likelihood is not None:
        check("mj.Bayesian", likelihood)
    if not isinstance(likelihood, Gaussian):
        return likelihood, nnx.data(None)
    if likelihood.noise_variance is None:
        return Gaussian(), nnx.data(LogNoise(jnp.zeros(())))
    return Gaussian(), nnx.data(nnx.Variable(jnp.asarray(likelihood.noise_variance)))


def present(kind: Any, noise: Any) -> Any:
    """The likelihood that was stored so, a learned noise at its present value; None without one."""
    if noise is None:
        return kind
    value = noise[...]
    return Gaussian(jnp.exp(value) if isinstance(noise, LogNoise) else value)


def expected(caller: str, likelihood: Any, y: Array, moments: Moments) -> Array:
    """E[log p(y | f)] of each example, (B,), in nats; of moments (B, ..., C)."""
    mean = moments.mean
    known = moments.variance if moments.cov.entrywise else moments.features
    fn = partial(objectives.expected_log_likelihood, likelihood)
    if isinstance(likelihood, Categorical):
        y = labels_of(caller, y, mean)
    else:
        width = mean.shape[-1] // (2 if isinstance(likelihood, HeteroscedasticGaussian) else 1)
        y = jnp.asarray(y, mean.dtype)
        y = y[..., None] if y.shape == mean.shape[:-1] and width == 1 else y
        shape = (*mean.shape[:-1], width)
        need(caller, y.shape == shape, f"targets of shape {shape}, the output's", tuple(y.shape))
    fits = over_batch(lambda m, c, y: fn(y, m, c), mean, known, y)
    return fits.reshape(len(fits), -1).sum(axis=-1)
