"""Compare killed, preempted and moved runs with an undisturbed one."""

import argparse
import dataclasses
import time
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
from experiments.resilience.kills import Run, disturb, preempt
from experiments.training import TrainState

MOVES = {
    "1 x 4 devices, mesh 2 x 2, to 1 device": (Layout(1, 4, 2, 2), Layout(1, 1)),
    "2 x 2 devices, mesh 2 x 2, to 1 x 4, mesh 1 x 4": (Layout(2, 2, 2, 2), Layout(1, 4, 1, 4)),
}
"""Layouts: one that a run begins on, and one that it goes on with from the middle."""


def check(args: argparse.Namespace, layout: Layout) -> None:
    """Run the checks asked for, print the figures, and fail if a run is not the undisturbed one."""
    if any(args.out.iterdir()):
        raise InputError(f"--check: {args.out} is not empty; name a new folder by --out")
    start = time.perf_counter()
    with _run(args, layout, "undisturbed") as whole:
        whole.expect(0)
    results: dict[str, Any] = {"undisturbed": {"seconds": time.perf_counter() - start}}
    failures: list[str] = []
    if args.check is not None:
        results["kills"] = _killed(args, layout, whole, failures)
    if args.topologies:
        results["topologies"] = [_moved(args, name, whole, failures) for name in MOVES]
    results["seconds"] = time.perf_counter() - start
    write_json(args.json, results)
    print(f"{results['seconds']:.0f} s in all; everything is in {args.out}")
    if failures:
        raise PartError("; ".join(failures))


def _run(args: argparse.Namespace, layout: Layout, folder: str, **more: int) -> Run:
    """The command of these options on a layout."""
    options = {name: getattr(args, name) for name in (*SETTINGS, "save_every")}
    options |= {"processes": layout.processes, "devices": layout.devices, "data": layout.rows}
    options |= {"model": layout.model, **more}
    fsdp = "--fsdp" if layout.fsdp else "--no-fsdp"
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    return Run([*words, fsdp], args.out / folder)


def _killed(
    args: argparse.Namespace, layout: Layout, whole: Run, failures: list[str]
) -> dict[str, Any]:
    """Figures of the killed run."""
    rng = np.random.default_rng(args.seed)
    start = time.perf_counter()
    with _run(args, layout, "killed", restarts=args.check + 1) as run:
        kills = disturb(run, args.check, args.steps, rng)
        sigterm = preempt(run, kills[-1].starts)
        run.start()
        run.expect(0)
    starts, corrupt = run.events("start"), 0
    saved = {row["step"]: row["digest"] for row in whole.events("save")}
    for kill in kills:
        kill.resumed, digest = starts[kill.starts]["step"], starts[kill.starts]["digest"]
        kill.lost = max(0, kill.checkpoint - kill.resumed)
        corrupt += kill.resumed > 0 and digest != saved.get(kill.resumed)
    first, second = _final_state(args, whole), _final_state(args, run)
    named = zip(jax.tree_util.tree_leaves_with_path(first), jax.tree.leaves(second), strict=True)
    figures = {
        "kills": [dataclasses.asdict(kill) for kill in kills],
        "mid_save": sum(kill.mid_save for kill in kills),
        "steps_lost": sum(kill.lost for kill in kills),
        "steps_redone_most": max(kill.step - kill.resumed for kill in kills),
        "corrupt_chosen": corrupt,
        "sigterm": sigterm,
        "different_leaves": [
            jax.tree_util.keystr(path) for (path, a), b in named if bits(a) != bits(b)
        ],
        "same_metrics": _untimed(whole) == _untimed(run),
        "seconds": time.perf_counter() - start,
    }
    _print_kills(figures)
    wanted = {"steps_lost": 0, "corrupt_chosen": 0, "different_leaves": [], "same_metrics": True}
    failures += [f"{name} is {figures[name]}" for name, v in wanted.items() if figures[name] != v]
    return figures


def _untimed(run: Run) -> list[dict[str, Any]]:
    """The metrics without times: each update once, in order."""
    return [{name: x for name, x in row.items() if name != "seconds"} for row in run.metrics()]


def _moved(args: argparse.Namespace, name: str, whole: Run, failures: list[str]) -> dict[str, Any]:
    """Half a run on one layout, half on another."""
    before, after = MOVES[name]
    folder = f"moved_{list(MOVES).index(name)}"
    with _run(args, before, folder, stop_at=args.steps // 2) as first:
        first.expect(PREEMPTED)
    with _run(args, after, folder) as second:
        second.expect(0)
    restored = second.events("start")[-1]
    exact = restored["digest"] == first.events("saved")[0]["digest"]
    loss = second.metrics()[-1]["loss"] - whole.metrics()[-1]["loss"]
    both = [jax.tree.leaves(_final_state(args, run).params) for run in (whole, second)]
    difference = max(
        float(np.abs(a - b).max() / max(1e-30, np.abs(a).max()))
        for a, b in zip(*jax.tree.map(np.asarray, both), strict=True)
    )
    print(
        f"{name}: restored at update {restored['step']} "
        f"{'bit for bit' if exact else 'DIFFERENTLY'}; at the end the loss differs from the undisturbed "
        f"run's by {abs(loss):.1e}, parameters by {difference:.1e} of the largest"
    )
    if not exact:
        failures.append(f"{name}: what was restored differs")
    figures = {"loss_difference": loss, "parameter_difference": difference}
    return {"name": name, "exact": exact, **figures}


def _final_state(args: argparse.Namespace, run: Run) -> TrainState:
    """The last checkpoint of a run, on one device."""
    job = digits_job(vars(args))
    mesh = mj.parallel.make_mesh(1, 1, devices=jax.devices()[:1])
    with Store(run.folder, job, Blueprint.of(job, mesh)) as store:
        restored = store.last()
    assert restored is not None
    return restored[0]


def _print_kills(figures: dict[str, Any]) -> None:
    kills, term = figures["kills"], figures["sigterm"]
    rows = [["victim", "while", "update", "checkpoint", "mid-save", "went on from"]]
    for kill in kills:
        mid_save = "yes" if kill["mid_save"] else "no"
        cells = (kill["step"], kill["checkpoint"], mid_save, kill["resumed"])
        rows.append([kill["victim"], kill["moment"], *map(str, cells)])
    print(aligned(rows))
    same = "the same" if not figures["different_leaves"] else "NOT the same"
    print(
        f"{len(kills)} kills, {figures['mid_save']} in a save: {figures['steps_lost']} saved updates "
        f"lost, at most {figures['steps_redone_most']} done again, {figures['corrupt_chosen']} corrupt "
        f"checkpoints chosen; final state {same} bit for bit, metrics of every update "
        f"{'the same' if figures['same_metrics'] else 'NOT the same'}\n"
        f"SIGTERM: saved after {term['seconds_to_saved']:.1f} s, left after "
        f"{term['seconds_to_exit']:.1f} s with status {PREEMPTED}"
    )
