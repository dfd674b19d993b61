"""The main job's two networks: training, checkpoints and loading."""

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array

import moment_jax as mj
from experiments import data, networks
from experiments.checkpoints import Checkpoints, structure_of
from experiments.command_line import InputError
from experiments.data import Digits
from experiments.networks import vision_transformer
from experiments.stopping import StopRequest
from experiments.training import Compiled, Report, Task, TrainState, clipped_adam, fit_saved

NUM_BLOCKS = 2
SIZES = {"patch_size": 2, "num_features": 32, "hidden_features": 64}
# As large as the patches; Flax's customary 0.02 leaves attention blind to place.
POSITION_SCALE = 1.0
PLAIN_RATE, WEIGHT_DECAY = 5e-3, 0.3  # of the plain network: peak of the rate, AdamW's decay
RATE, WARM_UP = 1e-3, 50  # of the Bayesian network: updates in which the KL's weight rises from 0
SAVE_EVERY = 50  # updates of the Bayesian network between checkpoints


def plain_network(seed: int) -> mj.nn.VisionTransformer:
    """The plain network, untrained."""
    return vision_transformer(seed, num_blocks=NUM_BLOCKS, position_scale=POSITION_SCALE, **SIZES)


def bayesian_network(args: argparse.Namespace, plain: mj.nn.VisionTransformer) -> mj.Bayesian:
    """The plain network with random weights, small spreads about its own, and learned prior scales."""
    return networks.bayesian(plain, learn_prior=True, structure=mj.STRUCTURES[args.structure])


class Training(NamedTuple):
    """One of the two networks and its training."""

    name: str
    task: Task
    params: Any  # their shapes, to compile for
    settings: dict[str, Any]  # of a checkpoint
    save_every: int
    own_key: int  # added to the seed for the random key

    def compile(self) -> Compiled:
        """The programs, for all seeds."""
        return self.task.compile(self.start())

    def start(self) -> TrainState:
        """The shapes of a state."""
        state: TrainState = jax.eval_shape(self.task.start, self.params, jax.random.key(0))
        return state

    def fit(
        self, args: argparse.Namespace, params: Any, seed: int, compiled: Callable[[], Compiled],
        request: StopRequest | None = None,
    ) -> tuple[Any, float]:  # fmt: skip
        """Train one seed from `params`: those chosen, and the seconds, of waiting for programs too."""
        start = time.perf_counter()
        own = argparse.Namespace(**{**vars(args), "seed": seed})
        task = dataclasses.replace(self.task, name=f"{self.task.name}, seed {seed}")
        state = fit_saved(
            task, params, own, f"{self.name}/seed_{seed}", self.settings, seed + self.own_key,
            self.save_every, compiled, request,
        )  # fmt: skip
        return state.chosen, time.perf_counter() - start


def plain(args: argparse.Namespace, digits: Digits) -> Training:
    """Cross-entropy with weight decay, stopped where the validation NLL is best."""
    size, steps = min(args.batch_size, digits.train.labels.size), args.plain_steps

    def loss(network: Any, key: Array, step: Array) -> tuple[Array, Report]:
        images, labels = data.mini_batch(key, step, digits.train, size)
        losses = optax.softmax_cross_entropy_with_integer_labels(network(images), labels)
        return losses.mean(), {}

    def validate(network: Any) -> Array:
        images, labels = (jnp.asarray(part) for part in digits.validation)
        return mj.objectives.negative_log_likelihood(jax.nn.softmax(network(images)), labels)

    optimizer = clipped_adam(PLAIN_RATE, steps, norm=1.0, weight_decay=WEIGHT_DECAY)
    graph, params = nnx.split(nnx.eval_shape(lambda: plain_network(args.seed)))
    task = Task("plain network", loss, optimizer, steps, validate, graph)
    settings = {"num_steps": steps, "batch_size": size}
    # Its updates are cheap: one checkpoint halfway.
    return Training("plain", task, params, settings, max(1, steps // 2), 0)


def bayesian(args: argparse.Namespace, digits: Digits) -> Training:
    """The negative analytic ELBO for each training image, by one pass of moments a step."""
    size = min(args.batch_size, digits.train.labels.size)

    count = digits.train.labels.size

    def loss(network: mj.Bayesian, key: Array, step: Array) -> tuple[Array, Report]:
        images, labels = data.mini_batch(key, step, digits.train, size)
        weight = mj.objectives.kl_warmup(step, WARM_UP, args.kl_weight)
        bound = network.elbo(images, labels, dataset_size=count, kl_weight=weight)
        kl = network.kl()
        return -bound, {"fit": bound + weight * kl / count, "kl": kl}

    optimizer = clipped_adam(RATE, args.steps)
    abstract = nnx.eval_shape(lambda: bayesian_network(args, plain_network(args.seed)))
    graph, params = nnx.split(abstract)
    task = Task("Bayesian network", loss, optimizer, args.steps, graph=graph)
    settings = {name: getattr(args, name) for name in ("structure", "plain_steps", "kl_weight")}
    settings |= {"num_steps": args.steps, "batch_size": size}
    return Training("bayesian", task, params, settings, SAVE_EVERY, 1)


def started(args: argparse.Namespace, plain: mj.nn.VisionTransformer) -> Any:
    """The Bayesian network's parameters at a plain one's weights."""
    return nnx.state(bayesian_network(args, plain))


def trained(run_folder: Path) -> tuple[mj.Bayesian, Digits]:
    """The first seed's Bayesian network in the --out of a finished main job, and its data."""
    try:
        stored = json.loads((run_folder / "metrics.json").read_text())["settings"]
        structure_of(run_folder, stored)
        args = argparse.Namespace(**{**stored, "out": run_folder})
        digits = data.load()
        training = bayesian(args, digits)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise InputError(
            f"{run_folder} holds no finished run of the main job ({error}); make one by "
            f"python -m experiments digits --out {run_folder}"
        ) from error
    folder = run_folder / "checkpoints" / training.name / f"seed_{args.seed}"
    with Checkpoints(folder, {"seed": args.seed, **training.settings}, resume=True) as store:
        state = store.restore(training.start())
    if state is None:
        raise InputError(f"{run_folder} holds no checkpoint; run the main job into it again")
    return training.task.model(state.params), digits
