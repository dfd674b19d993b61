"""The methods that are compared: how each is trained, and what it says of images."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import moment_jax as mj
from experiments import draws
from experiments.bayesian_network import Params
from experiments.classify.methods import (
    CHUNK,
    Predict,
    Recipe,
    Trainer,
    by_draws,
    by_means,
    by_moments,
    predictions,
)
from experiments.predictions import scores

Array = jax.Array

LAPLACE = {"last_layer": "last-layer Laplace", "kfac": "linearised Laplace"}
Part = tuple[np.ndarray, np.ndarray]
"""Inputs and labels."""

RATES = (0.01, 0.03, 0.1)  # of MC dropout


class Compared(NamedTuple):
    """A trained method: inputs -> probabilities (seeds, N, C), seconds of training, what was chosen."""

    predict: Callable[[np.ndarray], np.ndarray]
    seconds: float
    chosen: dict[str, Any]


def train_all(
    trainer: Trainer, seeds: int, recipe: Recipe, validation: Part, samples: int
) -> dict[str, Compared]:
    """Every method on every seed.

    `trainer` has copies for all members of the ensembles: the first members of all seeds, then the
    second ones, and so on.
    """
    network, first = trainer.network, trainer.first(seeds)
    num_members = len(trainer.keys) // seeds
    copies, seconds = timed(trainer.plain)
    seconds /= num_members
    plain = members_of(copies, seeds, 1)[0]
    said = partial(answers, keys=first.keys)
    result = {
        "plain": Compared(said(by_means(network), plain), seconds, {}),
        f"ensemble of {num_members}": Compared(
            _mean([said(by_means(network), m) for m in members_of(copies, seeds, num_members)]),
            num_members * seconds,
            {},
        ),
        "MC dropout": mc_dropout(first, validation, samples),
    }
    cheap = Recipe("sampled", recipe.kl_weight)
    sampled, took = timed(partial(first.bayesian, cheap, plain, "sampled VI"))
    drawn = said(by_draws(network, draws.weights, samples), sampled)
    result["sampled VI"] = Compared(drawn, seconds + took, {})
    for kind, name in LAPLACE.items():
        result[name] = _laplace(first, plain, validation, kind, seconds)
    count = recipe.members
    some = trainer.first(count * seeds)
    start = jax.tree.map(lambda leaf: leaf[: count * seeds], copies)
    copies, took = timed(partial(some.bayesian, recipe, start, "Bayesian networks"))
    bayesian = [said(by_moments(network), m) for m in members_of(copies, seeds, count)]
    took = seconds + took / count
    result["Bayesian, analytic"] = Compared(bayesian[0], took, {})
    if count > 1:
        result[f"{count} Bayesian, analytic"] = Compared(_mean(bayesian), count * took, {})
    return result


def members_of(copies: Params, seeds: int, count: int) -> list[Params]:
    """The first `count` members of all seeds."""
    return [
        jax.tree.map(lambda leaf, m=m: leaf[m * seeds : (m + 1) * seeds], copies)
        for m in range(count)
    ]


def timed(work: Callable[[], Params]) -> tuple[Params, float]:
    """What the work gives, and its seconds."""
    start = time.perf_counter()
    return work(), time.perf_counter() - start


def answers(predict: Predict, params: Params, *, keys: Array) -> Callable[[np.ndarray], np.ndarray]:
    """Inputs -> probabilities (L, N, C) of every copy."""
    compiled = jax.jit(predict)
    return lambda inputs: predictions(compiled, params, keys, inputs)


def _mean(
    members: list[Callable[[np.ndarray], np.ndarray]],
) -> Callable[[np.ndarray], np.ndarray]:
    return lambda images: np.mean([member(images) for member in members], axis=0)


def mc_dropout(trainer: Trainer, validation: Part, samples: int) -> Compared:
    """MC dropout at the rate of the best validation NLL, over all seeds."""
    found = {}
    for rate in RATES:
        params, seconds = timed(partial(trainer.dropout, rate, f"MC dropout {rate:g}"))
        kind = partial(draws.dropout, rate=rate)
        predict = answers(by_draws(trainer.network, kind, samples), params, keys=trainer.keys)
        found[nll(predict, validation)] = Compared(predict, seconds, {"rate": rate})
    return found[min(found)]


def _laplace(
    trainer: Trainer, plain: Params, validation: Part, kind: str, seconds: float
) -> Compared:
    """A Laplace approximation at the plain networks' weights, linearised.

    Each network's prior precision is that of the best validation NLL.
    """
    start = time.perf_counter()
    networks, beliefs, precisions = [], [], []
    for copy in range(len(trainer.keys)):
        module = trainer.network.module(jax.tree.map(lambda leaf, i=copy: leaf[i], plain))
        network = module.network(draws.means(module.params))
        network.eval()
        given = trainer.given[0][copy], trainer.given[1][copy]
        belief, receipt = mj.posterior.laplace(
            network, mj.objectives.Categorical(), given, kind=kind, held_out=validation, receipt=True
        )  # fmt: skip
        networks.append(network)
        beliefs.append(belief)
        precisions.append(next(iter(receipt.prior_precision.values())))

    @jax.jit
    def predict(belief: Any, images: Array) -> Array:  # a belief has all weights of its network
        mean, cov = mj.bayesian(networks[0], belief, linearised=True)(images)
        dense = jax.vmap(lambda c: c.to_dense())(cov).reshape(*mean.shape, mean.shape[-1])
        return jax.vmap(mj.objectives.class_probabilities)(mean, dense)

    took = seconds + (time.perf_counter() - start)
    said = partial(_in_chunks, predict, beliefs)
    return Compared(said, took, {"prior_precision": precisions})


def _in_chunks(
    predict: Callable[[Any, Array], Array], beliefs: list[Any], images: np.ndarray
) -> np.ndarray:
    filled = np.concatenate([images, np.repeat(images[-1:], -len(images) % CHUNK, axis=0)])
    parts = [
        np.stack([np.asarray(predict(b, jnp.asarray(filled[i : i + CHUNK]))) for b in beliefs])
        for i in range(0, len(filled), CHUNK)
    ]
    return np.concatenate(parts, axis=1)[:, : len(images)]


def nll(predict: Callable[[np.ndarray], np.ndarray], part: Part) -> float:
    """Mean over the seeds."""
    inputs, labels = part
    return float(np.mean([scores(one, labels)["nll"] for one in predict(inputs)]))
