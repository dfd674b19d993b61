"""Compare optimisers: steps and seconds to a loss, and the time of a step against Adam's.

Second order runs with its defaults, the others with the best of nine learning rates on the first seed.
The loss is that of the first 512 training examples, evaluated after every update outside of the timing.
Prints one table for each task: the time is that of the median number of updates to the target, from the
start and without compilation; "update" is one of the updates that come later.
"""

import argparse
from typing import Any

import jax
import numpy as np

from experiments.command_line import Parser
from experiments.optimizers import runs
from experiments.optimizers.runs import METHODS, Course, Settings, Training
from experiments.optimizers.tasks import TASKS, OptimizerTask
from experiments.outputs import aligned, write_json

TIMED_STEPS = 20
TUNING_STRIDE = 5


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
    names = dict.fromkeys(["adam", *args.method])
    courses: dict[str, list[Course]] = {}
    each: dict[str, tuple[Training, Settings]] = {}
    for name in names:
        method = METHODS[name]
        own = task.num_steps if method.rates else task.num_second_order_steps
        training = Training(task, method, args.steps or own)
        each[name] = training, _best(training, task.target)
        courses[name] = training.courses(each[name][1], list(range(args.seeds)))
    update = runs.timings(each, dict.fromkeys(names, TIMED_STEPS), anew=False)
    reached = {
        name: float(np.median([course.steps_to(task.target) for course in own]))
        for name, own in courses.items()
    }
    counts = {name: int(np.ceil(steps)) for name, steps in reached.items() if steps < np.inf}
    whole = runs.timings({name: each[name] for name in counts}, counts, anew=True)
    rows = {}
    for name in names:
        rows[name] = {
            "settings": each[name][1],
            "steps": [course.steps_to(task.target) for course in courses[name]],
            "seconds": whole.get(name, np.inf),
            "seconds_per_step": update[name] / TIMED_STEPS,
            "last_loss": float(np.median([course.last_loss for course in courses[name]])),
            "diverged": sum(course.diverged for course in courses[name]),
            "losses": [course.losses.tolist() for course in courses[name]],
        }
    record = {
        "task": task.name, "target": task.target, "device": str(jax.devices()[0]), "methods": rows,
    }  # fmt: skip
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
