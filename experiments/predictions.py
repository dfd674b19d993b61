"""What the networks say about images: class probabilities, moments of the logits, and what it costs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import moment_jax as mj

Array = jax.Array

CHUNK = 100  # images at a time, so that memory does not grow with their number


class Prediction(NamedTuple):
    """Predictions for N images and C classes."""

    probabilities: np.ndarray  # (N, C)
    logit_mean: np.ndarray  # (N, C)
    logit_sd: np.ndarray  # (N, C); zero for a network without uncertainty
    seconds_per_image: float

    def at(self, part: slice) -> Prediction:
        """The predictions for some of the images."""
        return self._replace(
            probabilities=self.probabilities[part],
            logit_mean=self.logit_mean[part],
            logit_sd=self.logit_sd[part],
        )


Outputs = tuple[Array, Array, Array]


def plain(network: nnx.Module, images: np.ndarray) -> Prediction:
    """One deterministic pass."""
    graph, params = nnx.split(network)

    def predict(params: Any, images: Array) -> Outputs:
        logits = nnx.merge(graph, params)(images)
        return jax.nn.softmax(logits), logits, jnp.zeros_like(logits)

    return _in_chunks(predict, params, images)


def analytic(network: mj.nn.VisionTransformer, images: np.ndarray) -> Prediction:
    """One pass of moments, and the class probabilities that the logits' moments imply."""
    graph, params = nnx.split(network)

    def predict(params: Any, images: Array) -> Outputs:
        mean, cov = nnx.merge(graph, params)(images)
        probabilities = jax.vmap(mj.objectives.class_probabilities)(mean, cov)
        return probabilities, mean, jnp.sqrt(jnp.einsum("ncc->nc", cov))

    return _in_chunks(predict, params, images)


def sampled(
    network: mj.nn.VisionTransformer, images: np.ndarray, key: Array, num_samples: int
) -> Prediction:
    """The average of `num_samples` plain networks drawn from the posterior."""
    graph, state = nnx.split(network)

    def moments(state: Any, images: Array, key: Array) -> tuple[Array, Array]:
        model = nnx.merge(graph, state)

        def outputs(draw: Any) -> Array:
            logits = model.network(draw)(images)
            return jnp.stack([jax.nn.softmax(logits), logits])

        truth = mj.monte_carlo(outputs, model.params, key, num_samples, batch_size=1)
        return truth.mean, truth.standard_deviation

    arguments = (state, jnp.asarray(images), key)
    compiled = jax.jit(moments).lower(*arguments).compile()
    start = time.perf_counter()
    mean, deviation = (np.asarray(part) for part in compiled(*arguments))
    seconds = (time.perf_counter() - start) / len(images)
    return Prediction(mean[0], mean[1], deviation[1], seconds)


def catch_up(
    network: mj.nn.VisionTransformer,
    images: np.ndarray,
    labels: np.ndarray,
    key: Array,
    num_samples: int,
    target: float,
) -> int | None:
    """The least number of sampled networks whose averaged probabilities have an NLL of at most `target`.

    Of the counts 1, 2, 3, 5, 10, 20, 30, 50, ...; each count's NLL is the mean over all groups of so
    many that `num_samples` draws hold. None if no count reaches it.
    """
    graph, state = nnx.split(network)

    @jax.jit
    def likelihoods(state: Any, images: Array, labels: Array, key: Array) -> Array:
        model = nnx.merge(graph, state)

        def of_one(key: Array) -> Array:
            logits = model.network(mj.posterior.sample_params(model.params, key))(images)
            return jnp.take_along_axis(jax.nn.softmax(logits), labels[:, None], axis=1)[:, 0]

        return jax.lax.map(of_one, jax.random.split(key, num_samples))

    # The NLL needs no more than every network's probability of the label: (num_samples, N).
    drawn = np.asarray(likelihoods(state, jnp.asarray(images), jnp.asarray(labels), key))
    for count in (k * 10**power for power in range(6) for k in (1, 2, 3, 5)):
        groups = num_samples // count
        if groups == 0:
            break
        mixed = drawn[: groups * count].reshape(groups, count, -1).mean(axis=1)
        if -np.log(np.maximum(mixed, np.finfo(np.float32).tiny)).mean() <= target:
            return count
    return None


def _in_chunks(
    predict: Callable[[Any, Array], Outputs], params: Any, images: np.ndarray
) -> Prediction:
    """Predict chunk by chunk, all of one size for one compilation; the median time counts."""
    size = min(CHUNK, len(images))
    starts = range(0, len(images), size)
    chunks = [
        jnp.asarray(np.resize(images[i : i + size], (size, *images.shape[1:]))) for i in starts
    ]
    compiled = jax.jit(predict).lower(params, chunks[0]).compile()
    results, times = [], []
    for chunk in chunks:
        start = time.perf_counter()
        results.append(jax.block_until_ready(compiled(params, chunk)))
        times.append(time.perf_counter() - start)
    probabilities, mean, sd = (
        np.concatenate(part)[: len(images)] for part in zip(*results, strict=True)
    )
    return Prediction(probabilities, mean, sd, float(np.median(times)) / size)


def scores(probabilities: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Accuracy, negative log-likelihood (nats), Brier score and expected calibration error."""
    given, truth = jnp.asarray(probabilities), jnp.asarray(labels)
    objectives = mj.objectives
    return {
        "accuracy": float(objectives.accuracy(given, truth)),
        "nll": float(objectives.negative_log_likelihood(given, truth)),
        "brier": float(objectives.brier_score(given, truth)),
        "ece": float(objectives.expected_calibration_error(given, truth)),
    }


def entropy(probabilities: np.ndarray) -> np.ndarray:
    """Entropy (nats) of the class probabilities (..., C)."""
    return -np.sum(probabilities * np.log(np.maximum(probabilities, 1e-30)), axis=-1)
