"""Predictions of windows of text: bits per character, uncertainty, and a continuation."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from sklearn.metrics import roc_auc_score

import moment_jax as mj
from experiments.language.model import CONTEXT, CharacterModel, PlainCharacterModel

NUM_POINTS = 512
CHUNK = 8  # windows at a time, to bound memory


class Scores(NamedTuple):
    """Averages over the characters of each window, (N,)."""

    bits: np.ndarray  # bits per character, -log2 of the predictive probability
    total: np.ndarray  # uncertainties, in nats
    aleatoric: np.ndarray
    epistemic: np.ndarray


Parts = tuple[Array, Array, Array]
"""Of one window: log-probabilities (T, V); aleatoric and epistemic uncertainty (T,)."""


def _entropy(log_probs: Array) -> Array:
    return -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)


def plain(network: PlainCharacterModel, windows: np.ndarray) -> Scores:
    """One deterministic pass."""

    def predict(network: Any, inputs: Array) -> Parts:
        log_probs = jax.nn.log_softmax(network(inputs))
        entropy = _entropy(log_probs)
        return log_probs, entropy, jnp.zeros_like(entropy)

    return _scores(predict, network, windows)


def analytic(network: CharacterModel, windows: np.ndarray) -> Scores:
    """One pass of moments, and the integral over the logits."""

    def integrate(mean: Array, variance: Array) -> Parts:
        log_probs = mj.objectives.log_class_probabilities(mean, variance, num_points=NUM_POINTS)
        parts = mj.objectives.token_uncertainty(mean, variance, num_points=NUM_POINTS)
        return log_probs, parts.aleatoric, parts.epistemic

    def predict(network: Any, inputs: Array) -> Parts:
        mean, variance = network(inputs[None])
        return jax.vmap(integrate)(mean[0], variance[0])

    return _scores(predict, network, windows)


def sampled(network: CharacterModel, windows: np.ndarray, key: Array, num_samples: int) -> Scores:
    """The average over plain networks drawn from the posterior, the same for all windows."""

    def predict(network: Any, inputs: Array) -> Parts:
        def outputs(draw: Any) -> Array:
            log_probs = jax.nn.log_softmax(network.network(draw)(inputs))
            entropy = _entropy(log_probs)[..., None]
            return jnp.concatenate([jnp.exp(log_probs), entropy], axis=-1)

        mean = mj.monte_carlo(outputs, network.params, key, num_samples, batch_size=1).mean
        log_probs = jnp.log(jnp.maximum(mean[..., :-1], jnp.finfo(mean.dtype).tiny))
        aleatoric = mean[..., -1]
        return log_probs, aleatoric, _entropy(log_probs) - aleatoric

    return _scores(predict, network, windows)


def _scores(predict: Callable[[Any, Array], Parts], network: Any, windows: np.ndarray) -> Scores:
    graph, state = nnx.split(network)

    @jax.jit
    def run(state: Any, windows: Array) -> tuple[Array, ...]:
        network = nnx.merge(graph, state)

        def one(window: Array) -> tuple[Array, ...]:
            log_probs, aleatoric, epistemic = predict(network, window[:-1])
            own = jnp.take_along_axis(log_probs, window[1:, None], axis=-1)
            bits = -own.mean() / math.log(2)
            return bits, (aleatoric + epistemic).mean(), aleatoric.mean(), epistemic.mean()

        return jax.lax.map(one, windows, batch_size=CHUNK)

    return Scores(*(np.asarray(part) for part in run(state, jnp.asarray(windows))))


def split(scores: Scores, ends: np.ndarray) -> list[Scores]:
    """The scores of several texts, cut after these numbers of windows."""
    pieces = [np.split(part, ends) for part in scores]
    return [Scores(*parts) for parts in zip(*pieces, strict=True)]


def auroc(known: np.ndarray, foreign: np.ndarray) -> float:
    """How often a foreign window scores higher than a known one, from 0 to 1."""
    labels = np.repeat([0, 1], [len(known), len(foreign)])
    return float(roc_auc_score(labels, np.concatenate([known, foreign])))


def continuation(
    network: CharacterModel, prompt: np.ndarray, key: Array, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens drawn after a prompt of more than CONTEXT tokens, and the epistemic part at each."""
    graph, state = nnx.split(network)

    @jax.jit
    def run(state: Any, kept: Array, first: Array, key: Array) -> Any:
        model = nnx.merge(graph, state)

        def step(kept: Array, tokens: Array) -> tuple[Array, Array, Array]:
            kept = jnp.concatenate([kept[:, 1:], tokens[:, None]], axis=1)
            mean, variance = model(kept)
            return mean[:, -1], variance[:, -1], kept

        return mj.decoding.sample(key, step, kept, first, length, num_points=NUM_POINTS)

    kept, first = prompt[None, -CONTEXT - 1 : -1], prompt[None, -1]
    decoded = run(state, jnp.asarray(kept), jnp.asarray(first), key)
    return np.asarray(decoded.tokens[0]), np.asarray(decoded.uncertainty.epistemic[0])
