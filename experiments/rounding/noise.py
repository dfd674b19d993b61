"""Noise of a network's weights that is known, and its expected loss: by one pass, and by draws."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array

import moment_jax as mj
from experiments import draws
from experiments.data import Images
from experiments.training import clipped_adam

Arrays = dict[tuple[Any, ...], Any]
"""The weights of a network, or something of each of them, by path."""
RATE = 1e-3  # the highest with which a trained network goes on


def weights(network: nnx.Module) -> Arrays:
    """All weights of a network."""
    tree = nnx.to_pure_dict(nnx.state(network, nnx.Param))
    values: Arrays = nnx.traversals.flatten_mapping(jax.device_get(tree))
    return values


def largest(arrays: Arrays) -> Arrays:
    """The largest magnitude of each matrix; not of biases and gains."""
    return {p: np.abs(w).max() for p, w in arrays.items() if p[-1] not in ("bias", "scale")}


def step(top: Any, bits: Any) -> Any:
    """Between neighbours of the 2^bits values from -top to top."""
    return 2 * top / (2.0**bits - 1)


def rounded(arrays: Arrays, tops: Arrays, bits: Iterable[Any]) -> Arrays:
    """The weights, with those of the matrices in `tops` at the nearest of these values."""
    found = dict(arrays)
    for (path, top), own in zip(tops.items(), bits, strict=True):
        size, last = step(top, own), (2.0**own - 1) / 2
        values = np.clip(np.round(arrays[path] / size - 0.5) + 0.5, -last, last) * size
        found[path] = values.astype(np.float32)
    return found


def rounding_sd(arrays: Arrays, tops: Arrays, bits: Iterable[Any]) -> Arrays:
    """Standard deviation of rounding errors, taken as uniform within a step; 0 of other weights."""
    found = {path: np.zeros_like(w) for path, w in arrays.items()}
    for (path, top), own in zip(tops.items(), bits, strict=True):
        found[path] += step(top, own) / 12**0.5
    return found


def relative_sd(arrays: Arrays, spread: float) -> Arrays:
    """Standard deviation of the noise of analogue memory, in proportion to each weight."""
    return {path: spread * abs(w) for path, w in arrays.items()}


class Programs:
    """Losses of networks of one form, compiled once for all their weights.

    Of (weights, sd of their noise, images, labels) the expected NLL, in nats: `values` by one pass in
    each structure; `gradient` in the first, with its gradients by weights and sd. The same of drawn
    networks, one for each key, the last argument: `drawn`, with the accuracy, and `drawn_gradient`.
    Without noise: `nll`, with the accuracy, and `fisher`, the diagonal of the empirical information.
    """

    def __init__(self, network: nnx.Module, structures: Iterable[type[mj.Covariance]]) -> None:
        self._apply = draws.function_of(network)
        passes = {s.__name__: partial(self._one_pass, s) for s in structures}
        self.values = {name: jax.jit(one) for name, one in passes.items()}
        self.gradient = jax.jit(jax.value_and_grad(next(iter(passes.values())), (0, 1)))
        self.nll, self.drawn = jax.jit(self._nll), jax.jit(self._drawn)
        self.fisher = jax.jit(self._fisher)
        drawn = jax.value_and_grad(lambda *given: self._drawn(*given)[0], (0, 1))
        self.drawn_gradient = jax.jit(drawn)

    def _one_pass(self, structure: Any, arrays: Arrays, sd: Arrays, x: Array, y: Array) -> Array:
        of = jax.vmap(mj.propagate(self._apply, structure=structure), (None, 0))
        moments = mj.Moments(*of(nnx.traversals.unflatten_mapping(_beliefs(arrays, sd)), x))
        fit = partial(mj.objectives.expected_log_likelihood, mj.Categorical())
        return -jax.vmap(fit)(y, moments.mean[:, 0], moments.features[:, 0]).mean()

    def _nll(self, arrays: Arrays, x: Array, y: Array) -> tuple[Array, Array]:
        logits = self._apply(nnx.traversals.unflatten_mapping(arrays), x)
        each = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        return each.mean(), (logits.argmax(axis=-1) == y).mean()

    def _drawn(self, arrays: Arrays, sd: Arrays, x: Array, y: Array, keys: Array) -> Any:
        draw = partial(mj.posterior.sample_params, _beliefs(arrays, sd))
        each = jax.lax.map(lambda key: self._nll(draw(key), x, y), keys)
        return jax.tree.map(jnp.mean, each)

    def _fisher(self, arrays: Arrays, x: Array, y: Array) -> Arrays:
        one = jax.grad(lambda w, x, y: self._nll(w, x[None], y[None])[0])
        each = jax.vmap(one, (None, 0, 0))(arrays, x, y)
        return jax.tree.map(lambda g: jnp.mean(g**2, axis=0), each)


def _beliefs(arrays: Arrays, sd: Arrays) -> Arrays:
    return {path: mj.posterior.Factorized(w, sd[path] ** 2) for path, w in arrays.items()}


def trained(
    gradient: Any, arrays: Arrays, train: Images, size: int, spread: float, updates: int, seed: int
) -> Arrays:
    """The weights after so many updates on the expected NLL under relative noise.

    `gradient(key, arrays, sd, images, labels)` is one of `Programs`, of mini-batches of this size.
    """
    optimizer, rng = clipped_adam(RATE, updates), np.random.default_rng(seed)

    @jax.jit
    def update(arrays: Arrays, by_weight: Arrays, by_sd: Arrays, state: Any) -> Any:
        whole = {p: by_weight[p] + spread * jnp.sign(w) * by_sd[p] for p, w in arrays.items()}
        changes, state = optimizer.update(whole, state, arrays)
        return optax.apply_updates(arrays, changes), state

    state = optimizer.init(arrays)
    for key in jax.random.split(jax.random.key(seed), updates):
        part = train.part(rng.choice(len(train.labels), size, replace=False))
        _, found = gradient(key, arrays, relative_sd(arrays, spread), *part)
        arrays, state = update(arrays, *found, state)
    return jax.device_get(arrays)
