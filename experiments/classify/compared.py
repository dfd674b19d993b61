"""The compared methods: training and prediction."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax import Array

import moment_jax as mj
from experiments import draws
from experiments.classify import methods
from experiments.classify.methods import Answers, Predict, Trained, Trainer
from experiments.classify.scores import best_temperature, tempered
from experiments.predictions import scores

LAPLACE: dict[str, Any] = {  # method -> which weights are random
    "last-layer Laplace": nnx.PathContains("head"),
    "linearised Laplace": nnx.Param,
}
Part = tuple[np.ndarray, np.ndarray]
"""Inputs (L, N, ...) and labels (L, N)."""
Answer = Callable[[np.ndarray], np.ndarray]
"""Inputs (L, N, ...) -> class probabilities (L, N, C)."""

RATES = (0.01, 0.03, 0.1)  # of MC dropout
KL_WEIGHT = 0.03
SPREAD = 0.1  # of a weight, over its magnitude
BAYESIAN_MEMBERS = 3


class Compared(NamedTuple):
    """A trained method."""

    predict: Answer  # inputs -> class probabilities
    seconds: float  # of training, all seeds
    chosen: dict[str, Any]  # on validation data


def train_all(trainer: Trainer, seeds: int, validation: Part, samples: int) -> dict[str, Compared]:
    """Every method on every seed.

    `trainer` has copies for all members of the ensembles: the first members of all seeds, then the
    second ones, and so on.
    """
    network, first = trainer.network, trainer.first(seeds)
    alone, on_average = partial(methods.alone, network), partial(methods.on_average, network)
    count = len(trainer.keys) // seeds
    every = trainer.plain("plain networks")
    plain, members = every.first(seeds), every.members(seeds)
    softmax, logits = methods.mean_softmax, methods.mean_logits
    average_logits = on_average(logits, jax.nn.softmax)
    result = {
        "plain": compared(alone(softmax), plain, first.keys),
        f"{count} plain": compared(on_average(softmax), members, first.keys),
        f"{count} plain, averaged logits": compared(average_logits, members, first.keys),
        "MC dropout": mc_dropout(first, validation, samples, tempered_nll),
    }
    for name, random in LAPLACE.items():
        result[name] = _laplace(first, plain, validation, random)
    learned = first.elbo(KL_WEIGHT, plain.state, "ELBO")
    learned = learned._replace(seconds=learned.seconds + plain.seconds)
    by_draws = methods.mean_of_draws(draws.weights, samples)
    result["ELBO, drawn"] = compared(alone(by_draws), learned, first.keys)
    analytic = methods.moments, methods.expected_softmax
    result["ELBO, analytic"] = compared(alone(*analytic), learned, first.keys)
    count = min(BAYESIAN_MEMBERS, count)
    noise = partial(draws.relative, spread=SPREAD)
    every = trainer.first(count * seeds).noisy(noise, "Bayesian networks", groups=1)
    spread = jax.vmap(lambda state: nnx.state(methods.relative(network.module(state), SPREAD)))
    every = every._replace(state=spread(every.state))
    result["Bayesian, analytic"] = compared(alone(*analytic), every.first(seeds), first.keys)
    average = on_average(*analytic)
    result[f"{count} Bayesian, analytic"] = compared(average, every.members(seeds), first.keys)
    return result


def compared(predict: Predict, trained: Trained, keys: Array, **chosen: Any) -> Compared:
    """A trained method with its prediction function."""
    answers = Answers.of(predict, trained.state, keys)
    return Compared(answers, trained.seconds, chosen)


def mc_dropout(
    trainer: Trainer, validation: Part, samples: int, score: Callable[[Any, Part], float]
) -> Compared:
    """MC dropout at the rate with the lowest validation score over all seeds."""

    def at(rate: float) -> Compared:
        kind = partial(draws.dropout, rate=rate)
        trained = trainer.noisy(kind, f"MC dropout {rate:g}")
        predict = methods.alone(trainer.network, methods.mean_of_draws(kind, samples))
        return compared(predict, trained, trainer.keys, rate=rate)

    return min(map(at, RATES), key=lambda method: score(method.predict, validation))


def _laplace(trainer: Trainer, plain: Trained, validation: Part, random: Any) -> Compared:
    """A Laplace approximation at the plain networks' weights, linearised.

    Each network's prior precision is that of the best validation NLL.
    """
    start = time.perf_counter()
    copies, precisions = [], []
    for seed in range(len(trainer.keys)):
        module = trainer.network.module(jax.tree.map(lambda leaf, i=seed: leaf[i], plain.state))
        given, held_out = (tuple(p[seed] for p in part) for part in (trainer.given, validation))
        model, receipt = mj.laplace(
            module.at_means(), mj.Categorical(), given, random=random, held_out=held_out, receipt=True
        )  # fmt: skip
        graph, state = nnx.split(model)
        copies.append((state,))
        precisions.append(next(iter(receipt.prior_precision.values())))

    def predict(state: Any, images: Array) -> Array:
        probabilities: Array = nnx.merge(graph, state).predict(images).probs
        return probabilities

    took = plain.seconds + (time.perf_counter() - start)
    return Compared(Answers(predict, copies), took, {"prior_precision": precisions})


def nll(predict: Answer, part: Part) -> float:
    """Mean over the copies."""
    pairs = zip(predict(part[0]), part[1], strict=True)
    return float(np.mean([scores(*pair)["nll"] for pair in pairs]))


def tempered_nll(predict: Answer, part: Part) -> float:
    """The same at the best temperature."""
    given = predict(part[0])
    after = tempered(given, best_temperature(given, part[1]))
    return nll(lambda _: after, part)
