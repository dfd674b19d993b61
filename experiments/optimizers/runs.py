"""The methods, training by them: the loss after every update, and the time of updates."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array

import moment_jax as mj
from experiments.optimizers.tasks import OptimizerTask

LAST_UPDATES = 20
ROUNDS = 5  # of timings in which all methods take turns
RATES = (3e-4, 5e-4, 1e-3, 2e-3, 3e-3, 5e-3, 1e-2, 2e-2, 3e-2)  # tried of first-order methods
OTHERS_RATE = 3e-2  # of Adam for the positions, which belong to no layer

Settings = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Method:
    """An optimiser; of first order with the rate to choose, of second order with its defaults."""

    optimizer: Callable[..., optax.GradientTransformation]  # (model, **settings)
    rates: tuple[float, ...] = ()

    @property
    def grid(self) -> list[Settings]:
        """Settings to choose from."""
        return [{"learning_rate": rate} for rate in self.rates] or [{}]


def _first_order(
    method: Any, model: nnx.Module, *, learning_rate: Any
) -> optax.GradientTransformation:
    """Apply `method`; positions have their own rate."""
    owned = {leaf for block in mj.optim.find_blocks(model) for leaf in block.leaves}

    def part(path: tuple[Any, ...], _: Any) -> str:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return "layers" if name in owned else "others"

    def label(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(part, nnx.as_pure(params))

    methods = {"layers": method(learning_rate), "others": optax.adam(OTHERS_RATE)}
    return optax.partition(methods, label)


FIRST = {"adam": optax.adam, "adamw": optax.adamw, "muon": optax.contrib.muon}
SECOND: dict[str, Any] = {"kfac": mj.optim.kfac, "cg_fac": mj.optim.cg_fac}
METHODS = {name: Method(partial(_first_order, each), RATES) for name, each in FIRST.items()} | {
    name: Method(partial(mj.optim.for_model, method=each)) for name, each in SECOND.items()
}
"""Every method by name."""


class Course(NamedTuple):
    """The losses of one training, on the evaluated examples, after every update."""

    losses: np.ndarray

    def steps_to(self, target: float) -> float:
        """Updates until the loss is at most `target` for the first time; infinite if it never is."""
        reached = np.flatnonzero(self.losses <= target)
        return int(reached[0]) + 1 if reached.size else np.inf

    @property
    def last_loss(self) -> float:
        """The median of the last updates, so that no single one decides."""
        return float(np.median(self.losses[-LAST_UPDATES:]))

    @property
    def diverged(self) -> bool:
        """Whether the final loss is not finite or above the first."""
        return not self.losses[-1] <= self.losses[0]


class Training:
    """Training on one task by one method, compiled once for all settings and seeds."""

    def __init__(self, task: OptimizerTask, method: Method, num_steps: int) -> None:
        self.task, self.method, self.num_steps = task, method, num_steps
        self.graph, _ = nnx.split(task.create(0))
        self._start = jax.jit(self._start_of)
        self._advance = jax.jit(self._advanced)
        self._evaluate = jax.jit(
            lambda params: task.loss(nnx.merge(self.graph, params, copy=True), *task.evaluated)[0]
        )

    def courses(
        self, settings: Settings, seeds: list[int], evaluate_every: int = 1
    ) -> list[Course]:
        """Train from every seed, and evaluate the loss every `evaluate_every` updates.

        Between evaluations the last loss is repeated.
        """
        values, found = jax.tree.map(jnp.float32, dict(settings)), []
        for seed in seeds:
            params, key = nnx.split(self.task.create(seed))[1], jax.random.key(seed)
            state = self._start(params, values)
            last, losses = float(self._evaluate(params)), []
            for first in range(0, self.num_steps, evaluate_every):
                count = min(evaluate_every, self.num_steps - first)
                params, state = self._advance(params, state, values, key, first, count)
                losses += [last] * (count - 1)
                last = float(self._evaluate(params))
                losses.append(last)
            found.append(Course(np.asarray(losses)))
        return found

    def timed(self, settings: Settings) -> Callable[[int], float]:
        """A function that continues training by a number of updates and returns their time."""
        values = jax.tree.map(jnp.float32, dict(settings))
        params: Any = nnx.split(self.task.create(0))[1]
        now = (params, self._start(params, values))
        done = 0

        def go_on(count: int) -> float:
            nonlocal now, done
            jax.block_until_ready(now)
            began = time.perf_counter()
            now = self._advance(*now, values, jax.random.key(0), done, count)
            jax.block_until_ready(now)
            done += count
            return time.perf_counter() - began

        return go_on

    def _start_of(self, params: Any, values: Settings) -> Any:
        return self._transformation(values).init(nnx.as_pure(params))

    def _transformation(self, values: Settings) -> optax.GradientTransformationExtraArgs:
        return optax.with_extra_args_support(self.method.optimizer(self.task.create(0), **values))

    def _advanced(
        self, params: Any, state: Any, values: Settings, key: Array, first: Array, count: Array
    ) -> tuple[Any, Any]:
        """After updates number first to first + count - 1."""
        tx, task = self._transformation(values), self.task

        def one(step: Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
            params, state = carry
            model, batch = nnx.merge(self.graph, params, copy=True), task.batch(key, step)
            if self.method.rates:
                grads, extra = nnx.grad(lambda model: task.loss(model, *batch)[0])(model), {}
            else:
                compute = mj.optim.value_grad_and_factors(task.loss)
                own, when = jax.random.fold_in(key, step), mj.optim.curvature_due(state)
                value, grads, factors = compute(model, *batch, key=own, when=when)
                extra = {"factors": factors, "value": value}
            changes, state = tx.update(nnx.as_pure(grads), state, nnx.as_pure(params), **extra)
            new = optax.apply_updates(nnx.as_pure(params), changes)
            return jax.tree.unflatten(jax.tree.structure(params), jax.tree.leaves(new)), state

        return jax.lax.fori_loop(first, first + count, one, (params, state))


def timings(
    trainings: Mapping[str, tuple[Training, Settings]], updates: Mapping[str, int], *, anew: bool
) -> dict[str, float]:
    """Median times of `updates[name]` updates over rounds in which all methods take turns.

    Args:
      trainings: with their settings, by name.
      updates: how many for each, in a round.
      anew: whether every round is a training from its start; else it goes on where the last one ended,
        so that what the first updates do more of is left out.
    """
    runs: dict[str, Callable[[int], float]] = {}
    spent: dict[str, list[float]] = {name: [] for name in trainings}
    for round_number in range(ROUNDS + 1):
        for name, (training, settings) in trainings.items():
            if anew or not round_number:
                runs[name] = training.timed(settings)
            taken = runs[name](updates[name])
            if round_number:  # the first one may compile
                spent[name].append(taken)
    return {name: float(np.median(each)) for name, each in spent.items()}
