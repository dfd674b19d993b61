"""Training on all splits at once, and selection of settings on validation rows."""

import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from experiments.side_by_side import SideBySide
from experiments.uci.methods import Method, Setting
from experiments.uci.networks import Params
from experiments.uci.sets import Rows, Splits, mean_over_rows

RISE = 0.5  # share of the updates in which the KL's weight rises from 0 to 1
LEARNING_RATE = 0.02
# Candidate factors on the noise variance; one is chosen for each split.
FACTORS = np.geomspace(1 / 16, 16, 17).astype(np.float32)

Settings = dict[str, np.ndarray]


class Budget(NamedTuple):
    """How long to train."""

    num_steps: int
    batch_size: int


class Scores(NamedTuple):
    """Of each split (S,): negative log-likelihood (nats, in the targets' unit) and error (the same)."""

    nll: np.ndarray
    rmse: np.ndarray


class Trained(NamedTuple):
    """Scores on the test rows, what was chosen for each split, and the seconds of the final training."""

    scores: Scores
    setting: dict[str, np.ndarray]
    factor: np.ndarray
    seconds: float


def choose_and_fit(
    method: Method, validation: Splits, test: Splits, budget: Budget, key: Array, label: str
) -> Trained:
    """Train every candidate on a part of each split's training rows, then the best on all of them.

    The best of a split is that of the lowest negative log-likelihood on its own validation rows.
    """
    trainer = Trainer(method, budget, key)
    count = len(validation.scale)
    candidates = [
        {name: np.full(count, value, np.float32) for name, value in candidate.items()}
        for candidate in method.candidates
    ]
    found = []
    for number, setting in enumerate(candidates):
        name = f"{label}, candidate {number + 1} of {len(candidates)}"
        params = trainer.fit(setting, validation.train, name)
        found += [trainer.score(params, setting, validation, f).nll for f in FACTORS]
    best = np.argmin(np.nan_to_num(found, nan=np.inf), axis=0)
    setting = {
        name: np.stack([candidate[name] for candidate in candidates])[
            best // len(FACTORS), np.arange(count)
        ]
        for name in candidates[0]
    }
    factor = FACTORS[best % len(FACTORS)]
    start = time.perf_counter()
    params = trainer.fit(setting, test.train, f"{label}, chosen")
    seconds = time.perf_counter() - start
    return Trained(trainer.score(params, setting, test, factor), setting, factor, seconds)


class Trainer:
    """Trains one method on all splits side by side; compiled once for all its candidates."""

    def __init__(self, method: Method, budget: Budget, key: Array) -> None:
        self.method, self.budget, self.key = method, budget, key
        self.training = SideBySide(self._loss, budget.num_steps, LEARNING_RATE)
        self._score = jax.jit(jax.vmap(self._score_one))

    def fit(self, setting: Settings, rows: Rows, label: str) -> Params:
        """The parameters of every split after training."""
        keys = jax.random.split(self.key, len(rows.y))
        params = jax.vmap(self.method.network.start)(keys)
        return self.training.fit(params, (setting, rows), keys, label)

    def score(
        self, params: Params, setting: Settings, splits: Splits, factor: np.ndarray | float
    ) -> Scores:
        """Scores on the second part of every split, with this factor on the noise variance."""
        count = len(splits.scale)
        keys = jax.random.split(self.key, count)
        factors = np.broadcast_to(np.asarray(factor, np.float32), (count,))
        scores = self._score(params, setting, splits.test, splits.scale, keys, factors)
        return Scores(*(np.asarray(part) for part in scores))

    def _loss(self, params: Params, given: tuple[Setting, Rows], key: Array, step: Array) -> Array:
        setting, rows = given
        row_key, draw_key = jax.random.split(key)
        num_rows = jnp.sum(rows.weight)
        chosen = (jax.random.uniform(row_key, (self.budget.batch_size,)) * num_rows).astype(int)
        share = jnp.minimum(1.0, (step + 1) / (RISE * self.budget.num_steps))
        batch = rows.x[chosen], rows.y[chosen]
        return self.method.loss(params, setting, draw_key, batch, share, num_rows)

    def _score_one(
        self, params: Params, setting: Setting, rows: Rows, scale: Array, key: Array, factor: Array
    ) -> tuple[Array, Array]:
        given = self.method.predict(params, setting, key, rows.x, factor)
        nll = jnp.log(scale) - mean_over_rows(given.log_density(rows.y), rows.weight)
        squares = mean_over_rows((given.centre() - rows.y) ** 2, rows.weight)
        return nll, scale * jnp.sqrt(squares)
