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
from experiments.classify.methods import Answers, Trained, Trainer
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
    first, count = trainer.first(seeds), len(trainer.keys) // seeds
    every = trainer.plain("plain networks")
    plain, members = every.first(seeds), every.members(seeds)
    softmax, logits = methods.mean_softmax, methods.mean_logits

    def together(forward: Any, *last: Any) -> Compared:
        return Compared(Answers(forward, members, first.keys, *last), every.seconds, {})

    result = {
        "plain": compared(softmax, plain, first.keys),
        f"{count} plain": together(softmax),
        f"{count} plain, averaged logits": together(logits, jax.nn.softmax),
        "MC dropout": mc_dropout(first, validation, samples, tempered_nll),
    }
    result["calibrated"] = _calibrated(first, plain, validation)
    for name, random in LAPLACE.items():
        result[name] = _laplace(first, plain, validation, random)
    learned = first.elbo(KL_WEIGHT, plain.models, "ELBO")
    learned = learned._replace(seconds=learned.seconds + plain.seconds)
    by_draws = methods.mean_of_draws(draws.weights, samples)
    result["ELBO, drawn"] = compared(by_draws, learned, first.keys)
    analytic = methods.moments, methods.expected_softmax
    result["ELBO, analytic"] = compared(analytic[0], learned, first.keys, analytic[1])
    count = min(BAYESIAN_MEMBERS, count)
    noise = partial(draws.relative, spread=SPREAD)
    every = trainer.first(count * seeds).noisy(noise, "Bayesian networks", groups=1)
    members = [[methods.relative(model, SPREAD) for model in own] for own in every.members(seeds)]
    alone = every.first(seeds)
    result["Bayesian, analytic"] = compared(analytic[0], alone, first.keys, analytic[1])
    result[f"{count} Bayesian, analytic"] = together(*analytic)
    return result


def compared(
    forward: methods.Forward, trained: Trained, keys: Array, *last: Any, **chosen: Any
) -> Compared:
    """A trained method with its prediction function, of every copy alone."""
    answers = Answers(forward, [[model] for model in trained.models], keys, *last)
    return Compared(answers, trained.seconds, chosen)


def mc_dropout(
    trainer: Trainer, validation: Part, samples: int, score: Callable[[Any, Part], float]
) -> Compared:
    """MC dropout at the rate with the lowest validation score over all seeds."""

    def at(rate: float) -> Compared:
        kind = partial(draws.dropout, rate=rate)
        trained = trainer.noisy(kind, f"MC dropout {rate:g}")
        by_draws = methods.mean_of_draws(kind, samples)
        return compared(by_draws, trained, trainer.keys, rate=rate)

    return min(map(at, RATES), key=lambda method: score(method.predict, validation))


def _calibrated(trainer: Trainer, plain: Trained, validation: Part) -> Compared:
    """The plain networks with noise on their weights, one factor each by the validation density."""
    start = time.perf_counter()
    pairs = zip(plain.models, *validation, strict=True)
    copies = [mj.calibrate(own.at_means(), mj.Categorical(), (x, y)) for own, x, y in pairs]
    took = plain.seconds + (time.perf_counter() - start)
    beliefs = [draws.beliefs(model.beliefs)[0] for model in copies]
    factors = [float(np.mean(b.variance) / np.mean(b.mean**2)) ** 0.5 for b in beliefs]
    return compared(_probs, Trained(copies, took), trainer.keys, factor=factors)


def _laplace(trainer: Trainer, plain: Trained, validation: Part, random: Any) -> Compared:
    """A Laplace approximation at the plain networks' weights, linearised.

    Each network's prior precision is that of the best validation NLL.
    """
    start, copies, precisions = time.perf_counter(), [], []
    for seed, own in enumerate(plain.models):
        given, held_out = (tuple(p[seed] for p in part) for part in (trainer.given, validation))
        model, receipt = mj.laplace(
            own.at_means(), mj.Categorical(), given, random=random, held_out=held_out, receipt=True
        )  # fmt: skip
        copies.append(model)
        precisions.append(next(iter(receipt.prior_precision.values())))
    took = plain.seconds + (time.perf_counter() - start)
    chosen = {"prior_precision": precisions}
    return compared(_probs, Trained(copies, took), trainer.keys, **chosen)


def _probs(model: mj.Bayesian, key: Array, images: Array) -> Array:
    probabilities: Array = model.likelihood(model(images)).probs
    return probabilities


def nll(predict: Answer, part: Part) -> float:
    """Mean over the copies."""
    pairs = zip(predict(part[0]), part[1], strict=True)
    return float(np.mean([scores(*pair)["nll"] for pair in pairs]))


def tempered_nll(predict: Answer, part: Part) -> float:
    """The same at the best temperature."""
    given = predict(part[0])
    after = tempered(given, best_temperature(given, part[1]))
    return nll(lambda _: after, part)
