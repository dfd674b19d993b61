"""Compare optimisers: steps and seconds to a loss, and the time of a step against Adam's.

Every method is tuned on the first seed over a grid of the same size, then run from all seeds; with
--untuned, second order runs with its defaults and the others with their best of nine rates. The loss
is that of the first 512 training examples, evaluated after every update outside of the timing. Prints
one table for each task: the time is that of the median number of updates to the target, from the start
and without compilation; "update" is one of the updates that come later. Both are on the clock and, in
parentheses, of this process on all cores.
"""

import argparse
import itertools
from typing import Any

import jax
import numpy as np

from experiments import report
from experiments.command_line import InputError, Parser, number
from experiments.optimizers import runs
from experiments.optimizers.methods import tuned, untuned
from experiments.optimizers.runs import Course, Method, Settings, Spent, Training
from experiments.optimizers.tasks import NUM_HEADS, TASKS, TUNED_ON, OptimizerTask
from experiments.outputs import write_json

DEFAULT_TASKS = ("autoencoder", "transformer", "bayesian")
MORE_TASKS = ("attention", "convolution")
TIMED_STEPS = 20
TUNING_STRIDE = 5


def add_arguments(parser: Parser) -> None:
    """The options of the comparison."""
    parser.choice("--task", TASKS, (), f"tasks, if none is named {', '.join(DEFAULT_TASKS)}; with "
                  f"--untuned {' and '.join(MORE_TASKS)} too")  # fmt: skip
    parser.choice(
        "--method", tuned() | untuned(), (), "methods, all if none is named; adam always runs"
    )
    parser.flag(
        "--untuned", "second order with its defaults: kfac and cg_fac against adam, adamw and muon"
    )
    parser.whole(
        "--steps", None, "updates of a run (default: each task's own, fewer in second order)"
    )
    parser.whole("--seeds", 3, "seeds of weights and batches")
    parser.add_argument(
        "--widths",
        type=number(int, least=4),
        nargs="+",
        default=[],
        metavar="D",
        help="instead: memory and time of an update of the Transformer at these widths, multiples of 4",
    )
    parser.json()


def run(args: argparse.Namespace) -> None:
    """Go through the tasks."""
    if args.widths:
        _widths(args)
        return
    default = DEFAULT_TASKS + (MORE_TASKS if args.untuned else ())
    tasks = [TASKS[name]() for name in dict.fromkeys(args.task or default)]
    chosen: dict[str, dict[str, Settings]] = {}
    records = []
    for task in tasks:
        records.append(_compare(task, args, chosen))
        write_json(args.json, records)


def _methods(args: argparse.Namespace) -> dict[str, Method]:
    """Adam, and the wanted methods."""
    known = untuned() if args.untuned else tuned()
    wanted = dict.fromkeys(["adam", *(args.method or known)])
    for name in wanted:
        if name not in known:
            raise InputError(
                f"--method {name} is for runs {'without' if args.untuned else 'with'} --untuned"
            )
    return {name: known[name] for name in wanted}


def _widths(args: argparse.Namespace) -> None:
    """Memory and time of an update against the width; the settings do not matter for either."""
    methods, costs = _methods(args), []
    rows = [["width", "", "MB", "mean seconds (CPU)", "new inverses", "new curvature", "neither"]]
    for width in args.widths:
        if width % NUM_HEADS:
            raise InputError(f"--widths must be multiples of {NUM_HEADS} heads; got {width}")
        for name, method in methods.items():
            settings = {key: values[0] for key, values in method.grid.items()}
            cost = runs.cost_of_update(width, name, method, settings)
            costs.append(cost)
            times = (cost[kind] for kind in ("mean", *runs.KINDS))
            shown = [f"{each.seconds:.3g} ({each.cpu:.3g})" for each in times]
            rows.append([str(width), name, f"{cost['megabytes']:.0f}", *shown])
    print(report.aligned(rows), flush=True)
    write_json(args.json, costs)


def _compare(
    task: OptimizerTask, args: argparse.Namespace, chosen: dict[str, dict[str, Settings]]
) -> dict[str, Any]:
    """All methods on one task; Adam first, for its last loss may be the target."""
    methods = _methods(args)
    seeds, target = list(range(args.seeds)), task.target
    courses: dict[str, list[Course]] = {}
    settings: dict[str, Settings] = {}
    trainings: dict[str, Training] = {}
    for name, method in methods.items():
        first_order = method.curvature is None
        steps = args.steps or (task.num_steps if first_order else task.num_second_order_steps)
        # A task of new data takes the settings of the one it is meant to check.
        source = chosen.get(TUNED_ON.get(task.name, ""), {}).get(name)
        trainings[name] = training = Training(task, method, steps)
        settings[name] = source or _best(training, target)
        courses[name] = training.courses(settings[name], seeds, task.evaluate_every)
        if target is None:
            target = float(np.median([course.last_loss for course in courses[name]]))
    chosen[task.name] = settings
    assert target is not None
    each = {name: (trainings[name], settings[name]) for name in methods}
    update = runs.timings(each, dict.fromkeys(methods, TIMED_STEPS), anew=False)
    reached = {
        name: float(np.median([course.steps_to(target) for course in own]))
        for name, own in courses.items()
    }
    counts = {name: int(np.ceil(steps)) for name, steps in reached.items() if steps < np.inf}
    whole = runs.timings({name: each[name] for name in counts}, counts, anew=True)
    rows = {}
    for name in methods:
        spent = whole.get(name, Spent(np.inf, np.inf))
        rows[name] = {
            "settings": settings[name],
            "steps": [course.steps_to(target) for course in courses[name]],
            "median_steps": reached[name],
            "seconds": spent.seconds,
            "cpu_seconds": spent.cpu,
            "seconds_per_step": update[name].seconds / TIMED_STEPS,
            "cpu_seconds_per_step": update[name].cpu / TIMED_STEPS,
            "last_loss": float(np.median([course.last_loss for course in courses[name]])),
            "diverged": sum(course.diverged for course in courses[name]),
            "losses": [course.losses.tolist() for course in courses[name]],
        }
    record = {"task": task.name, "target": target, "device": str(jax.devices()[0]), "methods": rows}
    _print(record)
    return record


def _best(training: Training, target: float | None) -> Settings:
    """The setting that reaches the target first, or else ends lowest, from the first seed."""
    chosen = itertools.product(*training.grid.values())
    grid = [dict(zip(training.grid, values, strict=True)) for values in chosen]
    if len(grid) == 1:
        return grid[0]

    def rank(settings: Settings) -> tuple[float, float]:
        (course,) = training.courses(settings, [0], evaluate_every=TUNING_STRIDE)
        reached = np.inf if target is None else course.steps_to(target)
        return reached, np.nan_to_num(course.last_loss, nan=np.inf)

    return min(grid, key=rank)


def _print(record: dict[str, Any]) -> None:
    rows = [
        ["", "settings", "steps", "seconds", "over Adam's", "update / Adam's", "last", "diverged"]
    ]
    adam = record["methods"]["adam"]

    def over(row: dict[str, Any], name: str) -> str:
        return f"{row[name] / adam[name]:.2f} ({row[f'cpu_{name}'] / adam[f'cpu_{name}']:.2f})"

    for name, row in record["methods"].items():
        settings = " ".join(f"{key} {value:g}" for key, value in row["settings"].items())
        reached = ", ".join(f"{steps}".replace("inf", "-") for steps in row["steps"])
        times = [f"{row['seconds']:.3g} ({row['cpu_seconds']:.3g})", over(row, "seconds")]
        last = f"{row['last_loss']:.4f}"
        update = over(row, "seconds_per_step")
        rows.append([name, settings, reached, *times, update, last, str(row["diverged"])])
    print(f"{record['task']}: to a loss of {record['target']:.4f}")
    print(report.aligned(rows), flush=True)
