"""The training loop: compiled updates, a progress bar, checkpoints, and the best of a validation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from tqdm import tqdm

from experiments.checkpoints import Checkpoints

Array = jax.Array
Params = Any
Report = dict[str, Array]
Loss = Callable[[Params, Array, Array], tuple[Array, Report]]

VALIDATE_EVERY = 50
SHOW_EVERY = 10


class Best(NamedTuple):
    """The parameters that a validation liked most so far, and their score; lower is better."""

    params: Params
    score: Array


class TrainState(NamedTuple):
    """All that a run needs to go on: parameters, optimiser, number of updates made, random key."""

    params: Params
    optimizer: Any
    step: Array
    key: Array
    best: Best | None = None


@dataclasses.dataclass(frozen=True)
class Task:
    """What to train.

    Args:
      name: shown at the progress bar.
      loss: (params, key, step) -> the loss to minimise and what else to show; it draws its own
        mini-batch from the key, which is the same for the whole run, and the step.
      optimizer: an optax transformation.
      num_steps: number of updates.
      validate: parameters -> a score, lower is better; then the best parameters seen are kept, not the
        last. None to keep the last.
    """

    name: str
    loss: Loss
    optimizer: optax.GradientTransformation
    num_steps: int
    validate: Callable[[Params], Array] | None = None

    def start(self, params: Params, key: Array) -> TrainState:
        """The state before the first update; the parameters are copied, for updates donate theirs."""
        params = jax.tree.map(jnp.copy, params)
        best = None
        if self.validate is not None:
            best = Best(jax.tree.map(jnp.copy, params), jnp.asarray(jnp.inf, jnp.float32))
        return TrainState(params, self.optimizer.init(params), jnp.int32(0), key, best)

    def update(self, state: TrainState) -> tuple[TrainState, Report]:
        """One step of the optimiser."""
        compute = jax.value_and_grad(self.loss, has_aux=True)
        (value, report), grads = compute(state.params, state.key, state.step)
        changes, optimizer = self.optimizer.update(grads, state.optimizer, state.params)
        params = optax.apply_updates(state.params, changes)
        new = TrainState(params, optimizer, state.step + 1, state.key, state.best)
        return new, {"loss": value, **report}

    def keep_best(self, state: TrainState) -> TrainState:
        """Compare the parameters with the best so far."""
        assert self.validate is not None
        assert state.best is not None
        score = self.validate(state.params).astype(state.best.score.dtype)
        better = score < state.best.score
        chosen = jax.tree.map(partial(jnp.where, better), state.params, state.best.params)
        return state._replace(best=Best(chosen, jnp.minimum(score, state.best.score)))


def fit(task: Task, state: TrainState, checkpoints: Checkpoints, save_every: int) -> TrainState:
    """Train, from the latest checkpoint if there is one.

    Args:
      task: what to train.
      state: where to start if there is no checkpoint.
      checkpoints: where to save; the end is saved too.
      save_every: updates between checkpoints.

    Returns:
      The state after `task.num_steps` updates.

    Raises:
      InputError: if the checkpoint is of other settings.
    """
    restored = checkpoints.restore(state)
    if restored is not None:
        state = restored
    update = jax.jit(task.update, donate_argnums=0)
    keep_best = jax.jit(task.keep_best, donate_argnums=0)
    first = int(state.step)
    steps = range(first + 1, task.num_steps + 1)
    with tqdm(
        steps, task.name, total=task.num_steps, initial=first, unit="step", disable=None
    ) as bar:
        for step in bar:
            state, report = update(state)
            last = step == task.num_steps
            if task.validate is not None and (step % VALIDATE_EVERY == 0 or last):
                state = keep_best(state)
            if step % SHOW_EVERY == 0 or last:
                bar.set_postfix({name: f"{float(value):.4g}" for name, value in report.items()})
            if step % save_every == 0 or last:
                checkpoints.save(step, state)
    return state
