"""A model's targets: their likelihood, its expectation over a batch, and predictions of them."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from moment_jax import objectives
from moment_jax.covariance import Moments
from moment_jax.objectives import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian
from moment_jax.objectives.checks import labels_of, over_batch

LIKELIHOODS = (Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian)


class LogNoise(nnx.Param):
    """The log variance of a Gaussian likelihood's noise, which is learned."""


def stored(likelihood: Any) -> tuple[Any, Any]:
    """The likelihood, a static value, and the noise of a Gaussian one, a variable."""
    if likelihood is None or isinstance(
        likelihood, Bernoulli | Categorical | HeteroscedasticGaussian
    ):
        return likelihood, nnx.data(None)
    if not isinstance(likelihood, Gaussian):
        names = ", ".join(f"{kind.__name__}()" for kind in LIKELIHOODS)
        raise TypeError(f"`mj.Bayesian` needs a likelihood, one of {names}. Got {likelihood!r}.")
    if likelihood.noise_variance is None:
        return Gaussian(), nnx.data(LogNoise(jnp.zeros(())))
    return Gaussian(), nnx.data(nnx.Variable(jnp.asarray(likelihood.noise_variance)))


def present(kind: Any, noise: Any) -> Any:
    """The likelihood that was stored so, a learned noise at its present value; None without one."""
    if noise is None:
        return kind
    value = noise[...]
    return Gaussian(jnp.exp(value) if isinstance(noise, LogNoise) else value)


def expected(likelihood: Any, y: Array, moments: Moments) -> Array:
    """E[log p(y | f)] at every place of a batch, (...) for moments (..., C), in nats."""
    mean = moments.mean
    known = moments.variance if moments.cov.entrywise else moments.features
    fn = partial(objectives.expected_log_likelihood, likelihood)
    if isinstance(likelihood, Categorical):
        y = labels_of("elbo", y, mean)
    else:
        width = mean.shape[-1] // (2 if isinstance(likelihood, HeteroscedasticGaussian) else 1)
        y = jnp.asarray(y, mean.dtype)
        y = y[..., None] if y.shape == mean.shape[:-1] and width == 1 else y
        if y.shape != (*mean.shape[:-1], width):
            raise ValueError(
                f"`elbo` needs targets of shape {(*mean.shape[:-1], width)}, the output's. Got "
                f"{tuple(y.shape)}."
            )
    return over_batch(lambda m, c, y: fn(y, m, c), mean, known, y)


def predicted(
    model: nnx.Module, inputs: Any, options: dict[str, Any], batch_size: int, axes: int
) -> Any:
    """`model.likelihood(model(*inputs, **options))`, batch by batch where there are batch axes.

    The last batch is filled up with its first example.
    """
    if batch_size < 1:
        raise ValueError(f"`predict` needs batch_size >= 1. Got {batch_size}.")
    graph, state = nnx.split(model)
    known = _Static(options)
    size = jax.tree.leaves(inputs)[0].shape[0] if axes and inputs else 0
    if size <= batch_size:
        return _predicted(graph, state, inputs, known=known)
    parts = []
    for first in range(0, size, batch_size):
        rows = np.arange(first, first + batch_size)
        rows = np.where(rows < size, rows, first)
        batch = jax.tree.map(lambda x, rows=rows: jnp.asarray(x)[rows], inputs)
        part = _predicted(graph, state, batch, known=known)
        parts.append(jax.tree.map(lambda x, left=size - first: x[:left], part))
    return jax.tree.map(lambda *each: jnp.concatenate(each), *parts)


class _Static:
    """Keyword arguments as a static argument: arrays count by their values, and stay known."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        leaves, tree = jax.tree.flatten(options)
        arrays = jax.Array | np.ndarray
        known = [
            (np.asarray(x).tobytes(), x.shape, str(x.dtype)) if isinstance(x, arrays) else x
            for x in leaves
        ]
        self.key = tree, *known

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Static) and self.key == other.key


@partial(jax.jit, static_argnums=0, static_argnames="known")
def _predicted(graph: Any, state: Any, inputs: Any, *, known: _Static) -> Any:
    model: Any = nnx.merge(graph, state)
    return model.likelihood(model(*inputs, **known.options))
