"""Training by one optimiser: the loss after every update, and an update's time and memory."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array

import moment_jax as mj
from experiments.optimizers.tasks import OptimizerTask, transformer
from experiments.programs import needed_bytes

LAST_UPDATES = 20
ROUNDS = 5  # of timings in which all methods take turns
WIDTH_ROUNDS = 3  # of all kinds of update at one width
CURVATURE_EVERY, REFRESH_EVERY = 5, 10  # the defaults, which all methods here have
# States of the optimiser: next update with new inverses, with new curvature alone, with neither.
KINDS = {
    "inverses": {"due": True, "age": REFRESH_EVERY, "interval": REFRESH_EVERY},
    "curvature": {"due": True, "age": 0, "interval": REFRESH_EVERY},
    "neither": {"due": False, "age": 0, "interval": REFRESH_EVERY},
}


class Spent(NamedTuple):
    """Seconds on the clock, and CPU seconds of all threads, which a busy machine changes less."""

    seconds: float
    cpu: float

    @classmethod
    def now(cls) -> Spent:
        """By both clocks."""
        return cls(time.perf_counter(), time.process_time())

    @classmethod
    def since(cls, began: Spent) -> Spent:
        """What was spent since `now` gave this."""
        return cls(*np.subtract(cls.now(), began).tolist())


@dataclasses.dataclass(frozen=True)
class Method:
    """An optimiser with its settings."""

    optimizer: Callable[..., optax.GradientTransformation]  # (model, task, num_steps, **settings)
    grid: Mapping[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)  # values to try
    curvature: dict[str, Any] | None = None  # for `value_grad_and_factors`; None in first order


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


Settings = Mapping[str, Any]


class Training:
    """Training on one task by one method, compiled once for all settings and seeds.

    Compilation of a second-order update of a Bayesian network takes a minute or more, so tuning, the
    final runs and the timing share one program.
    """

    def __init__(self, task: OptimizerTask, method: Method, num_steps: int) -> None:
        self.task, self.method, self.num_steps = task, method, num_steps
        own = task.second_order if method.curvature is not None and method.grid else None
        self.grid = method.grid if own is None else own
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

    def timed(self, settings: Settings) -> Callable[[int], Spent]:
        """A function that continues training by a number of updates and returns their time."""
        values = jax.tree.map(jnp.float32, dict(settings))
        params: Any = nnx.split(self.task.create(0))[1]
        now = (params, self._start(params, values))
        done = 0

        def go_on(count: int) -> Spent:
            nonlocal now, done
            jax.block_until_ready(now)
            began = Spent.now()
            now = self._advance(*now, values, jax.random.key(0), done, count)
            jax.block_until_ready(now)
            done += count
            return Spent.since(began)

        return go_on

    def _start_of(self, params: Any, values: Settings) -> Any:
        tx, _ = make_update(self.task, self.method, self.num_steps, values)
        return tx.init(nnx.as_pure(params))

    def _advanced(
        self, params: Any, state: Any, values: Settings, key: Array, first: Array, count: Array
    ) -> tuple[Any, Any]:
        """After updates number first to first + count - 1."""
        _, update = make_update(self.task, self.method, self.num_steps, values)

        def one(step: Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
            return update(*carry, key, step)

        return jax.lax.fori_loop(first, first + count, one, (params, state))


Update = Callable[[Any, Any, Array, Array], tuple[Any, Any]]


def make_update(
    task: OptimizerTask, method: Method, num_steps: int, settings: Settings
) -> tuple[optax.GradientTransformationExtraArgs, Update]:
    """The transformation, and the update (params, state, key, step) -> (params, state)."""
    model = task.create(0)
    tx = optax.with_extra_args_support(method.optimizer(model, task, num_steps, **settings))
    graph, _ = nnx.split(model)

    # Where every update has new curvature for sure, one forward pass serves for all.
    always = task.curvature_every == 1 and method.grid

    def update(params: Any, state: Any, key: Array, step: Array) -> tuple[Any, Any]:
        model, batch = nnx.merge(graph, params, copy=True), task.batch(key, step)
        if method.curvature is None:
            grads, extra = nnx.grad(lambda model: task.loss(model, *batch)[0])(model), {}
        else:
            compute = mj.optim.value_grad_and_factors(task.loss, **method.curvature)
            when = None if always else mj.optim.curvature_due(state)
            own = jax.random.fold_in(key, step)
            value, grads, factors = compute(model, *batch, key=own, when=when)
            extra = {"factors": factors, "value": value}
        changes, state = tx.update(nnx.as_pure(grads), state, nnx.as_pure(params), **extra)
        new = optax.apply_updates(nnx.as_pure(params), changes)
        return jax.tree.unflatten(jax.tree.structure(params), jax.tree.leaves(new)), state

    return tx, update


def timings(
    trainings: Mapping[str, tuple[Training, Settings]], updates: Mapping[str, int], *, anew: bool
) -> dict[str, Spent]:
    """Median times of `updates[name]` updates over rounds in which all methods take turns.

    Args:
      trainings: with their settings, by name.
      updates: how many for each, in a round.
      anew: whether every round is a training from its start; else it goes on where the last one ended,
        so that what the first updates do more of is left out.
    """
    runs: dict[str, Callable[[int], Spent]] = {}
    spent: dict[str, list[Spent]] = {name: [] for name in trainings}
    for round_number in range(ROUNDS + 1):
        for name, (training, settings) in trainings.items():
            if anew or not round_number:
                runs[name] = training.timed(settings)
            taken = runs[name](updates[name])
            if round_number:  # the first one may compile
                spent[name].append(taken)
    return {name: Spent(*np.median(each, axis=0).tolist()) for name, each in spent.items()}


def cost_of_update(width: int, name: str, method: Method, settings: Settings) -> dict[str, Any]:
    """Memory and times of one update of the Transformer of this width, all kinds of it in turn.

    "megabytes" are arguments, results in their place (donated), and what is held between; the times
    (`Spent`) are those of `KINDS`, and "mean", that between two refreshes of the inverses.
    """
    task = transformer(width)
    tx, update = make_update(task, method, task.num_steps, settings)
    params: Any = nnx.split(task.create(0))[1]
    state = tx.init(nnx.as_pure(params))
    key, step = jax.random.key(0), jnp.int32(0)
    compiled = jax.jit(update, donate_argnums=(0, 1)).lower(params, state, key, step).compile()
    memory = compiled.memory_analysis()
    assert memory is not None  # every backend here has the analysis
    held = needed_bytes(compiled) - memory.alias_size_in_bytes
    params, state = compiled(params, state, key, step)  # the first call of a program is slower
    spent: dict[str, list[Spent]] = {kind: [] for kind in KINDS}
    for _ in range(WIDTH_ROUNDS):
        for kind, values in KINDS.items():
            state = _with(state, values)
            jax.block_until_ready((params, state))
            began = Spent.now()
            params, state = compiled(params, state, key, step)
            jax.block_until_ready((params, state))
            spent[kind].append(Spent.since(began))
    each = {kind: Spent(*np.median(times, axis=0).tolist()) for kind, times in spent.items()}
    new, curved = 1 / REFRESH_EVERY, 1 / CURVATURE_EVERY
    mean = np.average(list(each.values()), 0, [new, curved - new, 1 - curved])
    times = {"mean": Spent(*mean.tolist()), **each}
    return {"width": width, "method": name, "megabytes": held / 1e6, **times}


def _with(state: Any, values: dict[str, Any]) -> Any:
    """An optimiser's state with some scalars replaced by name."""

    def replaced(path: tuple[Any, ...], leaf: Any) -> Any:
        name = getattr(path[-1], "name", None) if path else None
        return jnp.asarray(values[name], leaf.dtype) if name in values else leaf

    return jax.tree_util.tree_map_with_path(replaced, state)
