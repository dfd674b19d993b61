"""Training, checkpoints and loading of the main job's two networks."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
from flax import nnx

import moment_jax as mj
from experiments import classifiers, data
from experiments.checkpoints import Checkpoints
from experiments.classifiers import Belief
from experiments.command_line import InputError
from experiments.data import Digits
from experiments.training import Compiled, Task, TrainState, fit_saved


class Training(NamedTuple):
    """One of the two networks and its training."""

    name: str
    graph: Any
    params: Any  # of the first seed
    task: Task
    settings: dict[str, Any]  # of a checkpoint

    def network(self, params: Any) -> Any:
        """The network for prediction."""
        network = nnx.merge(self.graph, params)
        is_plain = isinstance(network, mj.nn.PlainVisionTransformer)
        return network if is_plain else classifiers.predicting(network)

    def compile(self) -> Compiled:
        """The programs, for all seeds."""
        return self.task.compile(self.task.start(self.params, jax.random.key(0)))

    def fit(
        self, args: argparse.Namespace, params: Any, seed: int, key: int, save_every: int,
        compiled: Callable[[], Compiled],
    ) -> TrainState:  # fmt: skip
        """Train from `params`; the random key is that of `seed` + `key`."""
        own = argparse.Namespace(**{**vars(args), "seed": seed})
        name = f"{self.name}/seed_{seed}"
        return fit_saved(
            self.task, params, own, name, self.settings, seed + key, save_every, compiled
        )


def plain(args: argparse.Namespace, digits: Digits) -> Training:
    """The plain network and its training."""
    graph, params = nnx.split(classifiers.plain_network(args.seed))
    options: dict[str, Any] = {
        "num_steps": args.plain_steps,
        "batch_size": min(args.batch_size, digits.train.labels.size),
        "learning_rate": args.plain_learning_rate,
        "weight_decay": args.weight_decay,
    }
    return Training(
        "plain", graph, params, classifiers.plain_task(graph, digits, **options), options
    )


def bayesian(args: argparse.Namespace, digits: Digits) -> Training:
    """The Bayesian network and its training."""
    graph, params = nnx.split(_network(args, args.seed))
    options: dict[str, Any] = {
        "num_steps": args.steps,
        "batch_size": min(args.batch_size, digits.train.labels.size),
        "learning_rate": args.learning_rate,
        "kl_weight": args.kl_weight,
        "warm_up_steps": args.warm_up,
    }
    task = classifiers.bayesian_task(graph, digits, **options)
    belief = {name: getattr(args, name) for name in ("structure", "posterior", "plain_steps")}
    return Training("bayesian", graph, params, task, {**belief, **options})


def _network(args: argparse.Namespace, seed: int) -> mj.nn.VisionTransformer:
    return classifiers.bayesian_network(Belief(args.structure, args.posterior), seed)


def train_plain(
    args: argparse.Namespace, training: Training, compiled: Callable[[], Compiled], seed: int
) -> tuple[Any, float]:
    """The best parameters by the validation NLL, and the seconds."""
    start = time.perf_counter()
    # Its updates are cheap: one checkpoint halfway.
    every = max(1, args.plain_steps // 2)
    params = nnx.state(classifiers.plain_network(seed))
    state = training.fit(args, params, seed, 0, every, compiled)
    assert state.best is not None
    return state.best.params, time.perf_counter() - start


def train_bayesian(
    args: argparse.Namespace,
    training: Training,
    compiled: Callable[[], Compiled],
    seed: int,
    plain: mj.nn.PlainVisionTransformer,
) -> tuple[Any, float]:
    """Start at the trained plain network's weights, with small spreads, and maximise the ELBO."""
    network = _network(args, seed)
    network.load(plain)
    start = time.perf_counter()
    state = training.fit(args, nnx.state(network), seed, 1, args.save_every, compiled)
    return state.params, time.perf_counter() - start


def trained(run_folder: Path) -> tuple[mj.nn.VisionTransformer, Digits]:
    """The first seed's Bayesian network in the --out of a finished main job, and its data."""
    try:
        stored = json.loads((run_folder / "metrics.json").read_text())["settings"]
        args = argparse.Namespace(**{**stored, "out": run_folder})
        digits = data.load()
        training = bayesian(args, digits)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise InputError(
            f"{run_folder} holds no finished run of the main job ({error}); make one by "
            f"python -m experiments digits --out {run_folder}"
        ) from error
    start = training.task.start(training.params, jax.random.key(args.seed + 1))
    folder = run_folder / "checkpoints" / training.name / f"seed_{args.seed}"
    with Checkpoints(folder, {"seed": args.seed, **training.settings}, resume=True) as store:
        state = store.restore(start)
    if state is None:
        raise InputError(f"{run_folder} holds no checkpoint; run the main job into it again")
    return training.network(state.params), digits
