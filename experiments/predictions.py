"""Predictions for images: class probabilities, moments of the logits, and their time."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

import moment_jax as mj

CHUNK = 250  # images at a time, to bound memory


class Prediction(NamedTuple):
    """Predictions for N images and C classes."""

    probabilities: np.ndarray  # (N, C)
    logit_mean: np.ndarray  # (N, C)
    logit_sd: np.ndarray  # (N, C); zero for a network without uncertainty
    seconds_per_image: float

    def at(self, part: slice) -> Prediction:
        """The predictions for some of the images."""
        probabilities, mean, sd = (array[part] for array in self[:3])
        return Prediction(probabilities, mean, sd, self.seconds_per_image)

    def scores(self, labels: np.ndarray) -> dict[str, float]:
        """Those of `scores`, and the seconds for an image."""
        found = scores(self.probabilities, labels)
        return {**found, "seconds_per_image": self.seconds_per_image}


@nnx.jit
def plain(network: Any, images: Array) -> tuple[Array, Array, Array]:
    """Class probabilities, mean and sd of the logits, each (n, C): one deterministic pass."""
    logits = network(images)
    return jax.nn.softmax(logits), logits, jnp.zeros_like(logits)


@nnx.jit
def analytic(model: mj.Bayesian, images: Array) -> tuple[Array, Array, Array]:
    """The same from one pass of moments."""
    logits = model(images)
    return model.likelihood(logits).probs, logits.mean, logits.sd


@nnx.jit
def drawn(model: mj.Bayesian, images: Array, keys: Array) -> Array:
    """Logits (S, n, C) of networks drawn from the posterior with each of the keys."""
    return jax.lax.map(lambda key: jnp.asarray(model.sample(key)(images)), keys)


def in_chunks(program: Any, network: Any, images: np.ndarray) -> Prediction:
    """Predict chunk by chunk, by a compiled `plain` or `analytic`; the median time counts."""
    results, times = [], []
    for i in range(0, len(images), CHUNK):
        chunk = jnp.asarray(np.resize(images[i : i + CHUNK], (CHUNK, *images.shape[1:])))
        start = time.perf_counter()
        results.append(jax.block_until_ready(program(network, chunk)))
        times.append(time.perf_counter() - start)
    probabilities, mean, sd = (
        np.concatenate(part)[: len(images)] for part in zip(*results, strict=True)
    )
    return Prediction(probabilities, mean, sd, float(np.median(times)) / CHUNK)


def averaged(members: list[Prediction]) -> Prediction:
    """The average of several networks' probabilities; the spread of their logits is among them."""
    probabilities, logits = (np.stack([member[i] for member in members]) for i in (0, 1))
    seconds = sum(member.seconds_per_image for member in members)
    return Prediction(probabilities.mean(axis=0), logits.mean(axis=0), logits.std(axis=0), seconds)


def sampled(program: Any, model: mj.Bayesian, images: np.ndarray, keys: Array) -> Prediction:
    """The average of the drawn networks, by a compiled `drawn`."""
    start = time.perf_counter()
    logits = np.asarray(program(model, jnp.asarray(images), keys))
    seconds = (time.perf_counter() - start) / len(images)
    probabilities = np.asarray(jax.nn.softmax(logits)).mean(axis=0)
    return Prediction(probabilities, logits.mean(axis=0), logits.std(axis=0, ddof=1), seconds)


def scores(probabilities: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Accuracy, negative log-likelihood (nats), Brier score and expected calibration error."""
    given, truth = jnp.asarray(probabilities), jnp.asarray(labels)
    objectives, one_hot = mj.objectives, np.eye(probabilities.shape[1])[labels]
    return {
        "accuracy": float(objectives.accuracy(given, truth)),
        "nll": float(objectives.negative_log_likelihood(given, truth)),
        "brier": float(np.mean(np.sum((probabilities - one_hot) ** 2, axis=1))),
        "ece": float(objectives.expected_calibration_error(given, truth)),
    }


def risk(
    probabilities: np.ndarray, labels: np.ndarray, doubt: np.ndarray | None = None
) -> np.ndarray:
    """Share of errors among the n predictions of least doubt, n = 1 .. N, (N,); None: the entropy."""
    order = np.argsort(entropy(probabilities) if doubt is None else doubt, kind="stable")
    wrong = (probabilities.argmax(axis=1) != labels)[order]
    return np.cumsum(wrong) / np.arange(1, len(labels) + 1)


def entropy(probabilities: np.ndarray) -> np.ndarray:
    """Entropy (nats) of the class probabilities (..., C)."""
    return -np.sum(probabilities * np.log(np.maximum(probabilities, 1e-30)), axis=-1)
