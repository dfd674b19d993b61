"""Training on all splits at once, and selection of settings on validation rows."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import moment_jax as mj
from experiments.training import Progress, Task, clipped_adam
from experiments.uci.methods import Method, Setting
from experiments.uci.sets import Rows, Splits, mean_over_rows

Build = Callable[[Array], mj.Bayesian]  # of a key

RISE = 0.5  # share of the updates in which the KL's weight rises from 0 to 1
LEARNING_RATE = 0.02
# Candidate factors on the noise variance; one is chosen for each split.
FACTORS = np.geomspace(1 / 16, 16, 17).astype(np.float32)


class Trained(NamedTuple):
    """Of each split (S,): scores on the test rows and what was chosen; seconds of the last training."""

    nll: np.ndarray  # nats, in the targets' unit
    rmse: np.ndarray  # in the same
    setting: dict[str, np.ndarray]
    factor: np.ndarray  # on the noise variance
    seconds: float


def choose_and_fit(
    method: Method, build: Build, validation: Splits, test: Splits, sizes: tuple[int, int],
    key: Array, label: str,
) -> Trained:  # fmt: skip
    """Train every candidate on a part of each split's training rows, then the best on all of them.

    The best of a split is that of the lowest negative log-likelihood on its own validation rows.
    `sizes`: updates, and rows of each.
    """
    count = len(validation.scale)
    fit, scores = _programs(method, build, sizes, jax.random.split(key, count))
    candidates = [
        {name: np.full(count, value, np.float32) for name, value in candidate.items()}
        for candidate in method.candidates
    ]
    found = []
    for number, setting in enumerate(candidates, 1):
        params = fit(setting, validation.train, f"{label}, candidate {number} of {len(candidates)}")
        found += [scores(params, setting, validation, factor)[0] for factor in FACTORS]
    best = np.argmin(np.nan_to_num(found, nan=np.inf), axis=0)
    chosen, splits = best // len(FACTORS), np.arange(count)
    setting = {
        name: np.stack([candidate[name] for candidate in candidates])[chosen, splits]
        for name in candidates[0]
    }
    factor = FACTORS[best % len(FACTORS)]
    start = time.perf_counter()
    params = fit(setting, test.train, f"{label}, chosen")
    seconds = time.perf_counter() - start
    nll, rmse = scores(params, setting, test, factor)
    return Trained(nll, rmse, setting, factor, seconds)


def _programs(
    method: Method, build: Build, sizes: tuple[int, int], keys: Array
) -> tuple[Callable[..., Any], Callable[..., list[np.ndarray]]]:
    """Training and scores of all splits side by side, compiled once for all settings."""
    num_steps, batch_size = sizes

    def loss(model: mj.Bayesian, given: tuple[Array, Setting, Rows], step: Array) -> Array:
        key, setting, rows = given
        row_key, draw_key = jax.random.split(jax.random.fold_in(key, step))
        num_rows = jnp.sum(rows.weight)
        chosen = (jax.random.uniform(row_key, (batch_size,)) * num_rows).astype(int)
        share = jnp.minimum(1.0, (step + 1) / (RISE * num_steps))
        batch = rows.x[chosen], rows.y[chosen]
        return method.loss(model, setting, draw_key, batch, share, num_rows)

    task = Task("", loss, clipped_adam(LEARNING_RATE, num_steps), num_steps)
    training = task.start(build(keys[0]))[0]
    advance = jax.jit(jax.vmap(training.advance, (0, 0, None, None)))

    @jax.jit
    @jax.vmap
    def start(key: Array) -> Any:
        return task.start(build(key))[1]

    def fit(setting: Any, rows: Rows, label: str) -> Any:
        progress, given = (
            Progress(label, num_steps),
            jax.tree.map(jnp.asarray, (keys, setting, rows)),
        )
        state = start(keys)
        chunks = training.run(state, lambda _: given, num_steps, advance=advance)
        for step, state, loss in chunks:  # noqa: B007 (the last one is wanted)
            progress.update(step, float(jnp.mean(loss)))
        return state

    @jax.jit
    @jax.vmap
    def score(
        state: Any, setting: Setting, rows: Rows, scale: Array, key: Array, factor: Array
    ) -> tuple[Array, Array]:
        given = method.predict(training.model(state), setting, key, rows.x, factor)
        nll = jnp.log(scale) - mean_over_rows(given.log_density(rows.y), rows.weight)
        squares = mean_over_rows((given.centre() - rows.y) ** 2, rows.weight)
        return nll, scale * jnp.sqrt(squares)

    def scores(state: Any, setting: Any, splits: Splits, factor: Any) -> list[np.ndarray]:
        factors = np.broadcast_to(np.asarray(factor, np.float32), keys.shape)
        found = score(state, setting, splits.test, splits.scale, keys, factors)
        return [np.asarray(part) for part in found]

    return fit, scores
