"""The methods that are compared: how each is trained, and what it says of images."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

import moment_jax as mj
from experiments import draws
from experiments.bayesian_network import Params
from experiments.classify.methods import (
    Trainer,
    answers,
    by_average,
    by_average_logits,
    by_average_moments,
    by_draws,
    by_means,
    by_moments,
    in_chunks,
    relative,
)
from experiments.classify.scores import best_temperature, tempered
from experiments.predictions import scores

Array = jax.Array

LAPLACE = {"last_layer": "last-layer Laplace", "kfac": "linearised Laplace"}
Part = tuple[np.ndarray, np.ndarray]
"""Inputs (L, N, ...) and labels (L, N)."""

RATES = (0.01, 0.03, 0.1)  # of MC dropout
KL_WEIGHT = 0.03
SPREAD = 0.1  # of a weight, over its magnitude
BAYESIAN_MEMBERS = 3


class Compared(NamedTuple):
    """A trained method: inputs -> probabilities (L, N, C), seconds of training, what was chosen."""

    predict: Callable[[np.ndarray], np.ndarray]
    seconds: float
    chosen: dict[str, Any]


def train_all(trainer: Trainer, seeds: int, validation: Part, samples: int) -> dict[str, Compared]:
    """Every method on every seed.

    `trainer` has copies for all members of the ensembles: the first members of all seeds, then the
    second ones, and so on.
    """
    network, first = trainer.network, trainer.first(seeds)
    keys, count = first.keys, len(trainer.keys) // seeds
    copies, seconds = timed(partial(trainer.plain, "plain networks"))
    seconds /= count
    plain = jax.tree.map(lambda leaf: leaf[:seeds], copies)
    mean = by_means(network)
    members = members_of(copies, seeds)
    together = answers(by_average(mean), members, keys)
    averaged = answers(by_average_logits(network), members, keys)
    result = {
        "plain": Compared(answers(mean, plain, keys), seconds, {}),
        f"{count} plain": Compared(together, count * seconds, {}),
        f"{count} plain, averaged logits": Compared(averaged, count * seconds, {}),
        "MC dropout": mc_dropout(first, validation, samples, tempered_nll),
    }
    result |= {
        name: _laplace(first, plain, validation, kind, seconds) for kind, name in LAPLACE.items()
    }
    learned, took = timed(partial(first.elbo, KL_WEIGHT, plain, "ELBO"))
    took += seconds
    drawn = answers(by_draws(network, draws.weights, samples), learned, keys)
    result["ELBO, drawn"] = Compared(drawn, took, {})
    analytic = answers(by_moments(network), learned, keys)
    result["ELBO, analytic"] = Compared(analytic, took, {})
    count = min(BAYESIAN_MEMBERS, count)
    kind = partial(draws.relative, spread=SPREAD)
    some = trainer.first(count * seeds)
    copies, took = timed(partial(some.noisy, kind, "Bayesian networks", groups=1))
    copies = relative(copies, SPREAD)
    one = jax.tree.map(lambda leaf: leaf[:seeds], copies)
    alone = answers(by_moments(network), one, keys)
    result["Bayesian, analytic"] = Compared(alone, took / count, {})
    together = answers(by_average_moments(network), members_of(copies, seeds), keys)
    result[f"{count} Bayesian, analytic"] = Compared(together, took, {})
    return result


def members_of(copies: Params, seeds: int) -> Params:
    """Copies (members * seeds, ...) as (seeds, members, ...)."""
    return jax.tree.map(
        lambda leaf: leaf.reshape(-1, seeds, *leaf.shape[1:]).swapaxes(0, 1), copies
    )


def timed(work: Callable[[], Params]) -> tuple[Params, float]:
    """What the work gives, and its seconds."""
    start = time.perf_counter()
    return work(), time.perf_counter() - start


def mc_dropout(
    trainer: Trainer, validation: Part, samples: int, score: Callable[[Any, Part], float]
) -> Compared:
    """MC dropout at the rate of the best (lowest) score on the validation part, over all seeds."""
    found = {}
    for rate in RATES:
        kind = partial(draws.dropout, rate=rate)
        params, seconds = timed(partial(trainer.noisy, kind, f"MC dropout {rate:g}"))
        predict = answers(by_draws(trainer.network, kind, samples), params, trainer.keys)
        found[score(predict, validation)] = Compared(predict, seconds, {"rate": rate})
    return found[min(found)]


def _laplace(
    trainer: Trainer, plain: Params, validation: Part, kind: str, seconds: float
) -> Compared:
    """A Laplace approximation at the plain networks' weights, linearised.

    Each network's prior precision is that of the best validation NLL.
    """
    start = time.perf_counter()
    networks, beliefs, precisions = [], [], []
    for seed in range(len(trainer.keys)):
        module = trainer.network.module(jax.tree.map(lambda leaf, i=seed: leaf[i], plain))
        network = module.network(draws.means(module.params))
        network.eval()
        given, held_out = (tuple(p[seed] for p in part) for part in (trainer.given, validation))
        belief, receipt = mj.posterior.laplace(
            network, mj.objectives.Categorical(), given, kind=kind, held_out=held_out, receipt=True
        )  # fmt: skip
        networks.append(network)
        beliefs.append(belief)
        precisions.append(next(iter(receipt.prior_precision.values())))

    def predict(belief: Any, images: Array) -> Array:
        # A belief has all weights of its network.
        mean, cov = mj.bayesian(networks[0], belief, linearised=True)(images)
        dense = jax.vmap(lambda c: c.to_dense())(cov).reshape(*mean.shape, mean.shape[-1])
        return jax.vmap(mj.objectives.class_probabilities)(mean, dense)

    took = seconds + (time.perf_counter() - start)
    said = in_chunks(predict, [(belief,) for belief in beliefs])
    return Compared(said, took, {"prior_precision": precisions})


def nll(predict: Callable[[np.ndarray], np.ndarray], part: Part) -> float:
    """Mean over the copies."""
    pairs = zip(predict(part[0]), part[1], strict=True)
    return float(np.mean([scores(*pair)["nll"] for pair in pairs]))


def tempered_nll(predict: Callable[[np.ndarray], np.ndarray], part: Part) -> float:
    """The same at the best temperature."""
    given = predict(part[0])
    after = tempered(given, best_temperature(given, part[1]))
    return nll(lambda _: after, part)
