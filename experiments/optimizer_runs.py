"""Training a model by one optimiser: the loss after every update, and the time of an update."""

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

import moment_jax as mj
from experiments.optimizer_tasks import OptimizerTask

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Method:
    """An optimiser with its settings.

    Args:
      optimizer: (model, **settings) -> the Optax transformation; settings may be arrays.
      grid: values to try of every setting.
      curvature: keyword arguments of `value_grad_and_factors`; None for a first-order method.
    """

    optimizer: Callable[..., optax.GradientTransformation]
    grid: Mapping[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    curvature: dict[str, Any] | None = None


class Course(NamedTuple):
    """What a training has come to."""

    losses: np.ndarray  # on the evaluated examples, after every update
    iterations: (
        np.ndarray
    )  # of conjugate gradients, a layer's average, at every update; empty if none

    def steps_to(self, target: float) -> int | None:
        """Updates until the loss is at most `target` for the first time."""
        reached = np.flatnonzero(self.losses <= target)
        return int(reached[0]) + 1 if reached.size else None

    @property
    def diverged(self) -> bool:
        """Whether the loss is no number in the end, or above where it began."""
        return not self.losses[-1] <= self.losses[0]


Settings = dict[str, float]
Update = Callable[[Any, Any, Array, Array], tuple[Any, Any]]


def make_update(
    task: OptimizerTask, method: Method, settings: Mapping[str, Any]
) -> tuple[Any, optax.GradientTransformationExtraArgs, Update]:
    """Graph, transformation, and the update (params, state, key, step) -> (params, state)."""
    model = task.create(0)
    tx = optax.with_extra_args_support(method.optimizer(model, **settings))
    graph, _ = nnx.split(model)

    def gradients(params: Any, batch: Any, key: Array, step: Array) -> tuple[Any, dict[str, Any]]:
        model = nnx.merge(graph, params, copy=True)
        if method.curvature is None:
            loss = lambda model: task.loss(model, *batch)[0]  # noqa: E731
            return nnx.grad(loss)(model), {}
        compute = mj.optim.value_grad_and_factors(task.loss, **method.curvature)
        every = task.curvature_every
        when = None if every == 1 else (step % every == 0) | (step < every)
        _, grads, factors = compute(model, *batch, key=jax.random.fold_in(key, step), when=when)
        return grads, {"factors": factors}

    def update(params: Any, state: Any, key: Array, step: Array) -> tuple[Any, Any]:
        grads, extra = gradients(params, task.batch(key, step), key, step)
        changes, state = tx.update(nnx.as_pure(grads), state, nnx.as_pure(params), **extra)
        new = optax.apply_updates(nnx.as_pure(params), changes)
        return jax.tree.unflatten(jax.tree.structure(params), jax.tree.leaves(new)), state

    return graph, tx, update


def train(
    task: OptimizerTask,
    method: Method,
    settings: list[Settings],
    seeds: list[int],
    num_steps: int,
    evaluate_every: int = 1,
) -> list[list[Course]]:
    """Train with every setting from every seed, the loss evaluated after every so many updates.

    Compiled once: the settings are arguments. Between evaluations the last loss is repeated.
    """
    evaluated = task.evaluated

    @jax.jit
    def course(params: Any, values: dict[str, Array], key: Array) -> Any:
        graph, tx, update = make_update(task, method, values)

        def record(carry: Any, step: Array) -> Any:
            params, state = update(carry[0], carry[1], key, step)
            loss = jax.lax.cond(
                (step + 1) % evaluate_every == 0, evaluate, lambda _: carry[2], params
            )
            return (params, state, loss), (loss, _iterations(state))

        def evaluate(params: Any) -> Array:
            return task.loss(nnx.merge(graph, params, copy=True), *evaluated)[0]

        start = (params, tx.init(nnx.as_pure(params)), evaluate(params))
        return jax.lax.scan(record, start, jnp.arange(num_steps))[1]

    starts = [(nnx.split(task.create(seed))[1], jax.random.key(seed)) for seed in seeds]
    return [
        [_course(course(params, jax.tree.map(jnp.float32, chosen), key)) for params, key in starts]
        for chosen in settings
    ]


def seconds_per_step(
    task: OptimizerTask, methods: dict[str, tuple[Method, Settings]], num_steps: int
) -> dict[str, float]:
    """Median over rounds of the time of an update; all take turns, so what slows one slows all.

    Every round goes on where the last one ended, so what the first updates do more of is left out.
    """
    runs = {}
    for name, (method, settings) in methods.items():
        _, tx, update = make_update(task, method, settings)
        params = nnx.split(task.create(0))[1]
        start = (params, tx.init(nnx.as_pure(params)))
        compiled = jax.jit(update)
        runs[name] = (compiled, start)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for round_number in range(6):
        for name, (compiled, (params, state)) in runs.items():
            began = time.perf_counter()
            for step in range(round_number * num_steps, (round_number + 1) * num_steps):
                params, state = compiled(params, state, jax.random.key(0), jnp.int32(step))
            jax.block_until_ready((params, state))
            runs[name] = (compiled, (params, state))
            if round_number:  # the first one compiles
                times[name].append((time.perf_counter() - began) / num_steps)
    return {name: float(np.median(taken)) for name, taken in times.items()}


def _course(recorded: Any) -> Course:
    losses, iterations = recorded
    return Course(np.asarray(losses), np.asarray(iterations))


def _iterations(state: Any) -> Array:
    """The average number of iterations of conjugate gradients in an optimiser's state."""
    found = [
        leaf.astype(jnp.float32)
        for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]
        if any(getattr(key, "name", None) == "iterations" for key in path)
    ]
    return jnp.mean(jnp.concatenate(found)) if found else jnp.zeros((0,))
