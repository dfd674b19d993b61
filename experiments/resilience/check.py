"""Compare killed, preempted and moved runs with an undisturbed one."""

import argparse
import dataclasses
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

import moment_jax as mj
from experiments.command_line import PREEMPTED, InputError, PartError
from experiments.loop import Layout
from experiments.loop.state import Blueprint, bits
from experiments.loop.store import Store
from experiments.outputs import write_json
from experiments.report import aligned
from experiments.resilience import SETTINGS
from experiments.resilience.job import digits_job
from experiments.resilience.kills import Kill, Run, disturb, plan, preempt, settle
from experiments.training import TrainState

KEPT_OPTIONS = (*SETTINGS, "save_every", "grace")
MOVES = {
    "1 x 4 devices, mesh 2 x 2, to 1 device": (Layout(1, 4, 2, 2), Layout(1, 1)),
    "2 x 2 devices, mesh 2 x 2, to 1 x 4, mesh 1 x 4": (Layout(2, 2, 2, 2), Layout(1, 4, 1, 4)),
}
"""Layouts: one that a run begins on, and one that it goes on with from the middle."""


def check(args: argparse.Namespace, layout: Layout) -> None:
    """Run the checks asked for, print the figures, and fail if a run is not the undisturbed one."""
    if any(args.out.iterdir()):
        raise InputError(f"--check: {args.out} is not empty; name a new folder by --out")
    cache = args.compile_cache or args.out / "compiled"  # our own, made just now
    common = [f"--compile-cache={cache.absolute()}"]
    common += [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in KEPT_OPTIONS]
    start = time.perf_counter()
    whole = Run([*common, *_layout_options(layout)], args.out / "undisturbed")
    with whole:
        whole.start()
        whole.expect(0)
    results: dict[str, Any] = {"undisturbed": {"seconds": time.perf_counter() - start}}
    failures: list[str] = []
    if args.check is not None:
        results["kills"] = _killed(args, layout, common, whole, failures)
    if args.topologies:
        results["topologies"] = [
            _moved(args, common, name, *layouts, whole, failures) for name, layouts in MOVES.items()
        ]
    results["seconds"] = time.perf_counter() - start
    write_json(args.json, results)
    print(f"{results['seconds']:.0f} s in all; everything is in {args.out}")
    if failures:
        raise PartError("; ".join(failures))


def _layout_options(layout: Layout) -> list[str]:
    fsdp = "--fsdp" if layout.fsdp else "--no-fsdp"
    options = {"processes": layout.processes, "devices": layout.devices, "data": layout.rows}
    return [*(f"--{name}={n}" for name, n in options.items()), f"--model={layout.model}", fsdp]


def _killed(
    args: argparse.Namespace, layout: Layout, common: list[str], whole: Run, failures: list[str]
) -> dict[str, Any]:
    """Figures of the killed run."""
    rng = np.random.default_rng(args.seed)
    kills = plan(args.check, rng)
    start = time.perf_counter()
    options = [*common, *_layout_options(layout), f"--restarts={args.check + 1}"]
    run = Run(options, args.out / "killed")
    with run:
        disturb(run, kills, args.steps, rng)
        sigterm = preempt(run, kills[-1].resumed or 0)
        run.start()
        run.expect(0)
    settle(run, kills)
    saved = {row["step"]: row["digest"] for row in whole.events("save")}
    corrupt = [k for k in kills if k.resumed and k.digest != saved.get(k.resumed)]
    figures = {
        "kills": [{**dataclasses.asdict(kill), "lost": kill.lost} for kill in kills],
        "mid_save": sum(kill.mid_save for kill in kills),
        "steps_lost": sum(kill.lost for kill in kills),
        "steps_redone_most": max((k.step - (k.resumed or 0) for k in kills), default=0),
        "corrupt_chosen": len(corrupt),
        "sigterm": sigterm,
        "different_leaves": different_leaves(args, whole.folder, run.folder),
        "same_metrics": _lines(whole) == _lines(run),
        "seconds": time.perf_counter() - start,
    }
    _print_kills(kills, figures)
    wanted = {"steps_lost": 0, "corrupt_chosen": 0, "different_leaves": [], "same_metrics": True}
    failures += [
        f"{name} is {figures[name]}" for name, value in wanted.items() if figures[name] != value
    ]
    return figures


def _lines(run: Run) -> list[dict[str, Any]]:
    """The metrics without times: each update once, in order."""
    return [{name: x for name, x in row.items() if name != "seconds"} for row in run.metrics()]


def _moved(
    args: argparse.Namespace,
    common: list[str],
    name: str,
    before: Layout,
    after: Layout,
    whole: Run,
    failures: list[str],
) -> dict[str, Any]:
    """Half a run on one layout, half on another."""
    folder = args.out / f"moved_{list(MOVES).index(name)}"
    first = Run([*common, *_layout_options(before), f"--stop-at={args.steps // 2}"], folder)
    second = Run([*common, *_layout_options(after)], folder)
    with first, second:
        first.start()
        first.expect(PREEMPTED)
        second.start()
        second.expect(0)
    restored = second.events("start")[-1]
    exact = restored["digest"] == first.events("saved")[0]["digest"]
    loss, expected = (run.metrics()[-1]["loss"] for run in (second, whole))
    difference = _largest_difference(args, whole.folder, folder)
    print(
        f"{name}: restored at update {restored['step']} "
        f"{'bit for bit' if exact else 'DIFFERENTLY'}; at the end the loss differs from the undisturbed "
        f"run's by {abs(loss - expected):.1e}, parameters by {difference:.1e} of the largest"
    )
    if not exact:
        failures.append(f"{name}: what was restored differs")
    return {
        "name": name,
        "exact": exact,
        "loss_difference": loss - expected,
        "parameter_difference": difference,
    }


def final_state(args: argparse.Namespace, folder: Path) -> TrainState:
    """The last checkpoint of a run, on one device."""
    job = digits_job(vars(args))
    mesh = mj.parallel.make_mesh(1, 1, devices=jax.devices()[:1])
    blueprint = Blueprint.of(job, mesh)
    with Store(folder, job, blueprint, any_version=False) as store:
        restored = store.restore()
    assert restored is not None
    return restored.state


def different_leaves(args: argparse.Namespace, first: Path, second: Path) -> list[str]:
    """Leaves of the last checkpoints that are not the same bit for bit."""
    both = [final_state(args, folder) for folder in (first, second)]
    named = [jax.tree_util.tree_leaves_with_path(state) for state in both]
    return [
        jax.tree_util.keystr(path)
        for (path, a), (_, b) in zip(*named, strict=True)
        if bits(a) != bits(b)
    ]


def _largest_difference(args: argparse.Namespace, first: Path, second: Path) -> float:
    """Of all parameters, relative to the largest of their array."""
    a, b = (jax.tree.leaves(final_state(args, folder).params) for folder in (first, second))
    pairs = [(np.asarray(x), np.asarray(y)) for x, y in zip(a, b, strict=True)]
    return max(float(np.abs(x - y).max() / max(1e-30, np.abs(x).max())) for x, y in pairs)


def _print_kills(kills: list[Kill], figures: dict[str, Any]) -> None:
    rows = [["victim", "while", "update", "checkpoint", "mid-save", "went on from"]]
    for kill in kills:
        cells = (kill.step, kill.checkpoint, "yes" if kill.mid_save else "no", kill.resumed)
        rows.append([kill.victim, kill.moment, *map(str, cells)])
    print(aligned(rows))
    same = "the same" if not figures["different_leaves"] else "NOT the same"
    term = figures["sigterm"]
    print(
        f"{len(kills)} kills, {figures['mid_save']} in a save: {figures['steps_lost']} saved updates "
        f"lost, at most {figures['steps_redone_most']} done again, {figures['corrupt_chosen']} corrupt "
        f"checkpoints chosen; final state {same} bit for bit, metrics of every update "
        f"{'the same' if figures['same_metrics'] else 'NOT the same'}\n"
        f"SIGTERM: saved after {term['seconds_to_saved']:.1f} s, left after "
        f"{term['seconds_to_exit']:.1f} s with status {PREEMPTED}"
    )
