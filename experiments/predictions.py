"""Predictions for images: class probabilities, moments of the logits, and their time."""

from __future__ import annotations

import math
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from scipy import special

import moment_jax as mj
from experiments.programs import interleaved

CHUNK = 250  # images at a time, to bound memory
BINS = 15  # of confidence, equally wide
LABELS = 10  # of an image, to be predicted together


class Prediction(NamedTuple):
    """Predictions for N images and C classes."""

    probabilities: np.ndarray  # (N, C)
    logit_mean: np.ndarray  # (N, C)
    logit_sd: np.ndarray  # (N, C); zero for a network without uncertainty
    seconds_per_image: float
    logit_cov: Any = None  # (N, C, C), of one pass
    members: Any = None  # their logits (S, N, C), of several networks

    def at(self, part: slice) -> Prediction:
        """The predictions for some of the images."""
        probabilities, mean, sd = (array[part] for array in self[:3])
        cov = None if self.logit_cov is None else self.logit_cov[part]
        members = None if self.members is None else self.members[:, part]
        return Prediction(probabilities, mean, sd, self.seconds_per_image, cov, members)

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
def analytic(model: mj.Bayesian, images: Array) -> tuple[Array, Array, Array, Array]:
    """The same from one pass of moments, and the covariances of the logits (n, C, C)."""
    logits = model(images)
    return model.likelihood(logits).probs, logits.mean, logits.sd, logits.features


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
    probabilities, mean, sd, *covs = (
        np.concatenate(part)[: len(images)] for part in zip(*results, strict=True)
    )
    return Prediction(probabilities, mean, sd, float(np.median(times)) / CHUNK, *covs)


def averaged(members: list[Prediction]) -> Prediction:
    """The average of several networks' probabilities."""
    logits = np.stack([member.logit_mean for member in members])
    return _average(logits, sum(member.seconds_per_image for member in members))


def sampled(program: Any, model: mj.Bayesian, images: np.ndarray, keys: Array) -> Prediction:
    """The average of the drawn networks, by a compiled `drawn`."""
    start = time.perf_counter()
    logits = np.asarray(program(model, jnp.asarray(images), keys))
    return _average(logits, (time.perf_counter() - start) / len(images))


def _average(logits: np.ndarray, seconds: float) -> Prediction:
    probabilities = np.asarray(jax.nn.softmax(logits)).mean(axis=0)
    mean, sd = logits.mean(axis=0), logits.std(axis=0, ddof=1)
    return Prediction(probabilities, mean, sd, seconds, members=logits)


def together(found: Prediction, labels: np.ndarray) -> dict[str, float]:
    """NLL of `LABELS` labels of each image together (nats) by one pass, and its seconds an image."""
    given = found.logit_mean, found.logit_cov, jnp.asarray(labels)
    took = interleaved({"": lambda: jax.block_until_ready(_together(*given))}, 3)[""]
    seconds = found.seconds_per_image + took / len(labels)
    return {"nll": float(-_together(*given).mean()), "seconds": seconds}


@jax.jit
def _together(mean: Array, cov: Array, labels: Array) -> Array:
    prediction = mj.Categorical()(mj.Moments(mean, mj.Full(cov[:, None, :, None])))
    return prediction.joint_log_prob(jnp.tile(labels[:, None], LABELS))


def together_by(found: Prediction, labels: np.ndarray, count: int) -> dict[str, float]:
    """The same by `count` of the networks that were averaged, the mean over groups of so many."""
    logs: Any = jax.nn.log_softmax(found.members)[:, np.arange(len(labels)), labels]  # (S, N)
    groups = LABELS * logs[: len(logs) // count * count].reshape(-1, count, len(labels))
    nll = math.log(count) - special.logsumexp(groups, axis=1).mean()
    return {"nll": float(nll), "seconds": found.seconds_per_image * count / len(logs)}


def scores(probabilities: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Accuracy, negative log-likelihood (nats), Brier score and expected calibration error."""
    one_hot, hits = np.eye(probabilities.shape[1])[labels], probabilities.argmax(axis=1) == labels
    chosen = np.maximum(np.sum(probabilities * one_hot, axis=1), np.finfo(np.float32).tiny)
    return {
        "accuracy": float(np.mean(hits)),
        "nll": -float(np.mean(np.log(chosen))),
        "brier": float(np.mean(np.sum((probabilities - one_hot) ** 2, axis=1))),
        "ece": float(calibration_error(probabilities.max(axis=1), hits)),
    }


def calibration_error(confidence: np.ndarray, hits: np.ndarray) -> Any:
    """The mean of |confidence - accuracy| by bins of confidence (N,), for each set of hits (..., N)."""
    bins = np.clip(np.ceil(confidence * BINS).astype(int) - 1, 0, BINS - 1)
    return np.abs((hits - confidence) @ np.eye(BINS)[bins]).sum(axis=-1) / len(bins)


def entropy(probabilities: np.ndarray) -> np.ndarray:
    """Entropy (nats) of the class probabilities (..., C)."""
    return -np.sum(probabilities * np.log(np.maximum(probabilities, 1e-30)), axis=-1)
