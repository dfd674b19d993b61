"""The methods that are compared: logistic regression, and the Transformer trained in three ways."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import jax
import numpy as np
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import Pipeline, make_pipeline

from experiments.bayesian_network import Params
from experiments.classify.compared import Compared, mc_dropout, nll, timed
from experiments.classify.methods import Trainer, answers, by_means, by_moments, stacked
from experiments.intents.files import IntentSet, Part

STRENGTHS = (4.0, 16.0, 64.0, 256.0, 1024.0)  # C of the logistic regression


def logistic_regression(given: IntentSet) -> Compared:
    """On TF-IDF of words and pairs of words; C has the best validation NLL."""
    found = {}
    for strength in STRENGTHS:
        start = time.perf_counter()
        model = make_pipeline(
            TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, token_pattern=r"\w+"),
            LogisticRegression(C=strength, max_iter=1000),
        ).fit(*given.train)
        seconds = time.perf_counter() - start

        def predict(texts: np.ndarray, model: Pipeline = model) -> np.ndarray:
            return model.predict_proba(texts)[None]

        found[nll(predict, (given.validation[0], given.validation[1][None]))] = Compared(
            predict, seconds, {"C": strength}
        )
    return found[min(found)]


def transformers(
    trainer: Trainer, validation: Part, kl_weights: list[float], samples: int
) -> Iterator[tuple[str, Compared]]:
    """The Transformers, one method after the other; what one leaves open has the best validation NLL."""
    held_out = stacked(validation, len(trainer.keys))
    plain, seconds = timed(partial(trainer.plain, "plain Transformers"))
    predict = answers(by_means(trainer.network), plain, trainer.keys)
    yield "plain Transformer", _alike(Compared(predict, seconds, {}), len(trainer.keys))
    yield "MC dropout", _alike(mc_dropout(trainer, held_out, samples, nll), len(trainer.keys))
    bayesian = _bayesian(trainer, held_out, kl_weights, plain, seconds)
    yield "Bayesian Transformer, analytic", _alike(bayesian, len(trainer.keys))


def _alike(method: Compared, copies: int) -> Compared:
    """The method with the same texts (N, ...) for all copies."""

    def predict(texts: np.ndarray) -> np.ndarray:
        return method.predict(np.broadcast_to(texts, (copies, *texts.shape)))

    return method._replace(predict=predict)


def _bayesian(
    trainer: Trainer, validation: Part, kl_weights: list[float], plain: Params, seconds: float
) -> Compared:
    """From the plain networks by the ELBO of drawn networks, predicted by moments."""
    predict, found = jax.jit(by_moments(trainer.network)), {}
    for weight in dict.fromkeys(kl_weights):
        work = partial(trainer.elbo, weight, plain, f"Bayesian, KL weight {weight:g}")
        params, took = timed(work)
        answer = answers(predict, params, trainer.keys)
        found[nll(answer, validation)] = Compared(answer, seconds + took, {"kl_weight": weight})
    return found[min(found)]
