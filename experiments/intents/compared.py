"""The methods that are compared: logistic regression, and a Transformer trained in three ways."""

import time
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline

import moment_jax as mj
from experiments.classify import methods
from experiments.classify.compared import Compared, compared, mc_dropout, nll
from experiments.classify.methods import Answers, Trainer, stacked
from experiments.intents.texts import PADDING, IntentSet, Part

KL_WEIGHTS = (0.01, 0.03, 0.1)
STRENGTHS = (4.0, 16.0, 64.0, 256.0, 1024.0)  # C of the logistic regression
NUM_FEATURES, NUM_HEADS, HIDDEN_FEATURES, RELATIVE_SCALE = 64, 4, 128, 0.05
STRUCTURE: type[mj.Covariance] = mj.Separable


class TextClassifier(nnx.Module):
    """Embedding and learned positions -> pre-norm encoder -> mean over the words -> linear head.

    Padding has no influence.
    """

    def __init__(self, num_ids: int, length: int, num_classes: int, *, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(num_ids, NUM_FEATURES, rngs=rngs)
        self.positions = mj.nn.LearnedPositions(length, NUM_FEATURES, rngs=rngs)
        blocks: Any = {"hidden_features": HIDDEN_FEATURES, "norm_first": True, "activation": "gelu"}
        self.encoder = mj.nn.Encoder(1, NUM_FEATURES, NUM_HEADS, rngs=rngs, **blocks)
        self.head = nnx.Linear(NUM_FEATURES, num_classes, rngs=rngs)

    def __call__(self, ids: Array) -> Array:
        """Ids (N, T) -> logits (N, C)."""
        valid = ids != PADDING
        x = self.encoder(self.positions(self.embed(ids)), mask=valid[:, None, None, :])
        return self.head(jnp.mean(x, axis=1, where=valid[:, :, None]))


def text_model(num_ids: int, length: int, num_classes: int, key: Array) -> mj.Bayesian:
    """A new model, all weights random."""
    network = TextClassifier(num_ids, length, num_classes, rngs=nnx.Rngs(key))
    options: Any = {"structure": STRUCTURE, "relative_scale": RELATIVE_SCALE}
    return mj.Bayesian(network, mj.Categorical(), **options)


def logistic_regression(given: IntentSet) -> Compared:
    """On TF-IDF of words and pairs of words; C has the best validation NLL."""

    def fitted(strength: float) -> Compared:
        start = time.perf_counter()
        model = make_pipeline(
            TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, token_pattern=r"\w+"),
            LogisticRegression(C=strength, max_iter=1000),
        ).fit(*given.train)
        seconds = time.perf_counter() - start
        return Compared(lambda texts: model.predict_proba(texts)[None], seconds, {"C": strength})

    held_out = given.validation[0], given.validation[1][None]
    return min(map(fitted, STRENGTHS), key=lambda method: nll(method.predict, held_out))


def transformers(
    trainer: Trainer, seeds: int, validation: Part, samples: int
) -> Iterator[tuple[str, Compared]]:
    """Train the Transformers one after the other; open settings have the best validation NLL.

    The trainer has copies as for `classify`: the first members of all seeds, then the second ones.
    """
    every, members = trainer.plain("plain Transformers"), len(trainer.keys) // seeds
    trainer, plain = trainer.first(seeds), every.first(seeds)
    held_out = stacked(validation, seeds)

    def alike(method: Compared) -> Compared:
        """The method with the same texts (N, ...) for all copies."""
        predict = method.predict
        return method._replace(predict=lambda t: predict(np.broadcast_to(t, (seeds, *t.shape))))

    yield "plain Transformer", alike(compared(methods.mean_softmax, plain, trainer.keys))
    together = Answers(methods.mean_softmax, every.members(seeds), trainer.keys)
    yield f"{members} plain Transformers", alike(Compared(together, every.seconds, {}))
    yield "MC dropout", alike(mc_dropout(trainer, held_out, samples, nll))
    # From the plain networks by the ELBO of drawn networks, predicted by moments.
    analytic = methods.moments, methods.expected_softmax

    def bayesian(weight: float) -> Compared:
        trained = trainer.elbo(weight, plain.models, f"Bayesian, KL weight {weight:g}")
        trained = trained._replace(seconds=plain.seconds + trained.seconds)
        return compared(analytic[0], trained, trainer.keys, analytic[1], kl_weight=weight)

    best = min(map(bayesian, KL_WEIGHTS), key=lambda method: nll(method.predict, held_out))
    yield "Bayesian Transformer, analytic", alike(best)
