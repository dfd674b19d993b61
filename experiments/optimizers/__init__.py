"""Compare optimisers: updates and seconds to AdamW's last loss, and what is held out.

First order runs with warm-up and a cosine to zero, at the rate of seven that ends lowest on the first
seed; second order with its defaults and without a schedule; each task says whether those were chosen on
it. The loss is that of fixed training examples, every twenty updates, outside of the timing.
Seconds are updates times the time of one, medians of turns that the methods take, without compilation.
"""

import argparse
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx
from jax import Array
from matplotlib.figure import Figure

import moment_jax as mj
from experiments.command_line import Parser, writable_folder
from experiments.figures import save, styled
from experiments.optimizers.tasks import TASKS, OptimizerTask
from experiments.outputs import aligned, write_json
from experiments.programs import interleaved

ROUNDS = 7  # of timings in which all methods take turns
EVERY = 20  # updates from one evaluation to the next, and in a timing
RATES = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3e-2)  # tried of first-order methods
ADAM_RATE = 3e-3  # the largest of Muon's Adam


def _muon(rate: Any, others: Any) -> optax.GradientTransformation:
    """For the matrices inside; embeddings, heads and vectors by Adam, at its own rate."""

    def inside(path: tuple[Any, ...], x: Array) -> Any:
        outer = any(word in jax.tree_util.keystr(path) for word in ("embed", "head", "positions"))
        return optax.contrib.MuonDimensionNumbers() if x.ndim == 2 and not outer else None

    which = partial(jax.tree_util.tree_map_with_path, inside)
    options = {"muon_weight_dimension_numbers": which, "consistent_rms": 0.2}
    return optax.contrib.muon(rate, adam_learning_rate=others, **options)


FIRST: dict[str, Callable[[Any, Any], Any]] = {
    "adamw": lambda rate, _: optax.adamw(rate, weight_decay=1e-4),
    "muon": _muon,
}
if importlib.util.find_spec("soap_jax"):  # github.com/haydn-jones/SOAP_JAX, which PyPI has not
    FIRST["soap"] = lambda rate, _: importlib.import_module("soap_jax").soap(rate)
SECOND: dict[str, Any] = {"kfac": mj.optim.kfac, "cg_fac": mj.optim.cg_fac}


class Course(NamedTuple):
    """Losses (evaluations,) of one training."""

    train: np.ndarray
    held_out: np.ndarray

    def steps_to(self, target: float) -> float:
        """Updates to a training loss, between evaluations in proportion; infinite if it never is."""
        lowest = np.minimum.accumulate(self.train)
        updates = EVERY * np.arange(len(lowest))
        return float(np.interp(-target, -lowest, updates)) if lowest[-1] <= target else np.inf


class Training:
    """Training on one task by one method, compiled once for all rates and seeds."""

    def __init__(self, task: OptimizerTask, method: str, num_steps: int) -> None:
        self.task, self.method, self.num_steps = task, method, num_steps
        self.graph, _ = nnx.split(task.create(0))
        self._start = jax.jit(lambda params, rate: self._optimizer(rate).init(nnx.as_pure(params)))
        self._advance = jax.jit(self._advanced)

        def losses(params: Any) -> list[Array]:
            model = nnx.merge(self.graph, params, copy=True)
            return [task.loss(model, *part)[0] for part in (task.train, task.held_out)]

        self._losses = jax.jit(losses)

    def course(self, seed: int, rate: float = 0.0) -> Course:
        """Train from a seed; the rate is that of first-order methods."""
        params, key = nnx.split(self.task.create(seed))[1], jax.random.key(seed)
        state, losses = self._start(params, rate), [self._losses(params)]
        for first in range(0, self.num_steps, EVERY):
            params, state = self._advance(params, state, rate, key, first)
            losses.append(self._losses(params))
        return Course(*np.asarray(losses, float).T)

    def timed(self) -> Callable[[], Any]:
        """A function that does `EVERY` updates, always those that follow the first so many."""
        params, key = nnx.split(self.task.create(0))[1], jax.random.key(0)
        start = self._advance(params, self._start(params, RATES[0]), RATES[0], key, 0)
        return lambda: jax.block_until_ready(self._advance(*start, RATES[0], key, EVERY))

    def state_bytes(self) -> int:
        """Of the optimiser's state."""
        state = jax.eval_shape(self._start, nnx.split(self.task.create(0))[1], 0.0)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))

    def _optimizer(self, rate: Any) -> optax.GradientTransformationExtraArgs:
        if self.method in SECOND:
            task, method = self.task, SECOND[self.method]
            batch = task.batch(jax.random.key(0), jax.numpy.int32(0))
            return mj.optim.for_model(task.loss, task.create(0), *batch, method=method)
        total = self.num_steps
        shape = optax.warmup_cosine_decay_schedule(0.0, 1.0, total // 20, total)
        rates = [lambda step, most=most: most * shape(step + 1) for most in (rate, ADAM_RATE)]
        return optax.with_extra_args_support(FIRST[self.method](*rates))

    def _advanced(self, params: Any, state: Any, rate: Array, key: Array, first: Array) -> Any:
        """After `EVERY` updates."""
        tx, task = self._optimizer(rate), self.task

        def one(step: Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
            params, state = carry
            model, batch = nnx.merge(self.graph, params, copy=True), task.batch(key, step)
            if self.method in SECOND:
                compute = mj.optim.value_grad_and_factors(task.loss)
                own, when = jax.random.fold_in(key, step), mj.optim.curvature_due(state)
                value, grads, factors = compute(model, *batch, key=own, when=when)
                extra: dict[str, Any] = {"factors": factors, "value": value}
            else:
                grads, extra = nnx.grad(lambda model: task.loss(model, *batch)[0])(model), {}
            changes, state = tx.update(nnx.as_pure(grads), state, nnx.as_pure(params), **extra)
            new = optax.apply_updates(nnx.as_pure(params), changes)
            return jax.tree.unflatten(jax.tree.structure(params), jax.tree.leaves(new)), state

        return jax.lax.fori_loop(first, first + EVERY, one, (params, state))


def add_arguments(parser: Parser) -> None:
    """The options of the comparison."""
    parser.choice("--task", TASKS, None, "tasks")
    parser.choice("--method", FIRST | SECOND, None, "methods; adamw always runs")
    parser.whole("--steps", None, "updates of a run (default: each task's own)")
    parser.whole("--seeds", 3, "seeds of weights and batches")
    parser.out("runs/optimizers", "metrics.json and losses.png")


def run(args: argparse.Namespace) -> None:
    """Go through the tasks."""
    records: list[dict[str, Any]] = []
    out = writable_folder(args.out, "--out")
    for name in dict.fromkeys(args.task):
        records.append(_compare(TASKS[name](), args))
        write_json(out / "metrics.json", records)
        save(_figure(records), out / "losses.png")


def _compare(task: OptimizerTask, args: argparse.Namespace) -> dict[str, Any]:
    """All methods on one task."""
    courses: dict[str, list[Course]] = {}
    each: dict[str, Training] = {}
    rates: dict[str, float] = {}
    for name in dict.fromkeys(["adamw", *args.method]):
        each[name] = Training(task, name, args.steps or task.num_steps)
        tried = {rate: each[name].course(0, rate) for rate in (RATES if name in FIRST else (0.0,))}
        rates[name] = min(tried, key=lambda rate: np.nan_to_num(tried[rate].train[-1], nan=np.inf))
        later = [each[name].course(seed, rates[name]) for seed in range(1, args.seeds)]
        courses[name] = [tried[rates[name]], *later]
    target = float(np.median([course.train[-1] for course in courses["adamw"]]))
    seconds = interleaved({name: training.timed() for name, training in each.items()}, ROUNDS)
    rows = {
        name: {
            "rate": rates[name],
            "steps": [course.steps_to(target) for course in own],
            "seconds_per_step": seconds[name] / EVERY,
            "state_bytes": each[name].state_bytes(),
            "train": [course.train for course in own],
            "held_out": [course.held_out for course in own],
        }
        for name, own in courses.items()
    }
    record = {"task": task.name, "defaults": task.defaults, "target": target, "methods": rows}
    record["device"] = str(jax.devices()[0])
    _print(record)
    return record


def _print(record: dict[str, Any]) -> None:
    adamw = record["methods"]["adamw"]
    table = [["", "rate", "updates", "time", "an update", "state", "last loss", "held out"]]
    whole = np.median(adamw["steps"]) * adamw["seconds_per_step"]
    for name, row in record["methods"].items():
        reached = ", ".join(f"{steps:.0f}".replace("inf", "-") for steps in row["steps"])
        time = np.median(row["steps"]) * row["seconds_per_step"] / whole
        cells = [time, *(row[key] / adamw[key] for key in ("seconds_per_step", "state_bytes"))]
        last = [np.median([losses[-1] for losses in row[key]]) for key in ("train", "held_out")]
        rate = f"{row['rate']:g}" if row["rate"] else ""
        ratios = [f"{cell:.2f}".replace("inf", "-") for cell in cells]
        table.append([name, rate, reached, *ratios, *(f"{loss:.4f}" for loss in last)])
    print(
        f"{record['task']} (defaults: {record['defaults']}); to {record['target']:.4f}, over AdamW's"
    )
    print(aligned(table), flush=True)


@styled
def _figure(records: list[dict[str, Any]]) -> Figure:
    """The training loss against seconds, one panel for each task; medians over seeds."""
    columns, rows = min(len(records), 4), -(-len(records) // 4)
    size = 2.8 * columns, 2.6 * rows
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False)
    for axis, record in zip(axes.flat, records, strict=False):
        for name, row in record["methods"].items():
            losses = np.median(row["train"], axis=0)
            axis.plot(EVERY * row["seconds_per_step"] * np.arange(len(losses)), losses, label=name)
        axis.set(title=record["task"], xlabel="seconds", ylabel="training loss", yscale="log")
    for axis in axes.flat[len(records) :]:
        axis.remove()
    axes[0, 0].legend(fontsize=6)
    return figure
