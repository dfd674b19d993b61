"""Compare optimisers: steps and seconds to a loss, and the time of a step against Adam's.

Second order runs with its defaults, the others with the best of nine learning rates on the first seed.
The loss is that of the first 512 training examples, evaluated after every update outside of the timing.
Prints one table for each task: the time is that of the median number of updates to the target, from the
start and without compilation; "update" is one of the updates that come later.
"""

import argparse
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
from experiments.command_line import Parser
from experiments.optimizers.tasks import TASKS, OptimizerTask
from experiments.outputs import aligned, write_json
from experiments.programs import interleaved

ROUNDS = 5  # of timings in which all methods take turns
TIMED_STEPS = 20  # those that follow the first so many
TUNING_STRIDE = 5
LAST_UPDATES = 20
RATES = (3e-4, 5e-4, 1e-3, 2e-3, 3e-3, 5e-3, 1e-2, 2e-2, 3e-2)  # tried of first-order methods
OTHERS_RATE = 3e-2  # of Adam for the positions, which belong to no layer

Settings = Mapping[str, Any]


class Method(NamedTuple):
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

    label = partial(jax.tree_util.tree_map_with_path, part)

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
            losses = [float(self._evaluate(params))]
            for first in range(0, self.num_steps, evaluate_every):
                count = min(evaluate_every, self.num_steps - first)
                params, state = self._advance(params, state, values, key, first, count)
                losses += [losses[-1]] * (count - 1) + [float(self._evaluate(params))]
            found.append(Course(np.asarray(losses[1:])))
        return found

    def timed(self, settings: Settings, count: int, *, after: int = 0) -> Callable[[], Any]:
        """A function that does `count` updates, always those that follow the first `after`."""
        values, key = jax.tree.map(jnp.float32, dict(settings)), jax.random.key(0)
        params: Any = nnx.split(self.task.create(0))[1]
        start = self._advance(params, self._start(params, values), values, key, 0, after)
        return lambda: jax.block_until_ready(self._advance(*start, values, key, after, count))

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


def add_arguments(parser: Parser) -> None:
    """The options of the comparison."""
    parser.choice("--task", TASKS, None, "tasks")
    parser.choice("--method", METHODS, None, "methods; adam always runs")
    parser.whole("--steps", None, "updates of a run (default: each task's own)")
    parser.whole("--seeds", 3, "seeds of weights and batches")
    parser.json()


def run(args: argparse.Namespace) -> None:
    """Go through the tasks."""
    records = []
    for name in dict.fromkeys(args.task):
        records.append(_compare(TASKS[name](), args))
        write_json(args.json, records)


def _compare(task: OptimizerTask, args: argparse.Namespace) -> dict[str, Any]:
    """All methods on one task."""
    courses: dict[str, list[Course]] = {}
    each: dict[str, tuple[Training, Settings]] = {}
    for name in dict.fromkeys(["adam", *args.method]):
        method = METHODS[name]
        own = task.num_steps if method.rates else task.num_second_order_steps
        training = Training(task, method, args.steps or own)
        each[name] = training, _best(training, task.target)
        courses[name] = training.courses(each[name][1], list(range(args.seeds)))
    steps = {name: [c.steps_to(task.target) for c in own] for name, own in courses.items()}
    later, whole = {}, {}
    for name, (training, settings) in each.items():
        later[name] = training.timed(settings, TIMED_STEPS, after=TIMED_STEPS)
        if np.median(steps[name]) < np.inf:
            whole[name] = training.timed(settings, int(np.ceil(np.median(steps[name]))))
    update, seconds = (interleaved(functions, ROUNDS) for functions in (later, whole))
    rows = {
        name: {
            "settings": each[name][1],
            "steps": steps[name],
            "seconds": seconds.get(name, np.inf),
            "seconds_per_step": update[name] / TIMED_STEPS,
            "last_loss": float(np.median([course.last_loss for course in own])),
            "diverged": sum(course.diverged for course in own),
            "losses": [course.losses for course in own],
        }
        for name, own in courses.items()
    }
    device = str(jax.devices()[0])
    record = {"task": task.name, "target": task.target, "device": device, "methods": rows}
    _print(record)
    return record


def _best(training: Training, target: float) -> Settings:
    """The setting that reaches the target first, or else ends lowest, from the first seed."""
    grid = training.method.grid
    if len(grid) == 1:
        return grid[0]

    def rank(settings: Settings) -> tuple[float, float]:
        (course,) = training.courses(settings, [0], evaluate_every=TUNING_STRIDE)
        return course.steps_to(target), np.nan_to_num(course.last_loss, nan=np.inf)

    return min(grid, key=rank)


def _print(record: dict[str, Any]) -> None:
    rows = [
        ["", "settings", "steps", "seconds", "over Adam's", "update / Adam's", "last", "diverged"]
    ]
    adam = record["methods"]["adam"]

    def over(row: dict[str, Any], name: str) -> str:
        return f"{row[name] / adam[name]:.2f}"

    for name, row in record["methods"].items():
        settings = " ".join(f"{key} {value:g}" for key, value in row["settings"].items())
        reached = ", ".join(f"{steps}".replace("inf", "-") for steps in row["steps"])
        times = [f"{row['seconds']:.3g}", over(row, "seconds")]
        last = f"{row['last_loss']:.4f}"
        update = over(row, "seconds_per_step")
        rows.append([name, settings, reached, *times, update, last, str(row["diverged"])])
    print(f"{record['task']}: to a loss of {record['target']:.4f}")
    print(aligned(rows), flush=True)
