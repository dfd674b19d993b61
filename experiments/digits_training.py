"""The main job's two networks: training, checkpoints and loading."""

import argparse
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

import moment_jax as mj
from experiments import data, networks
from experiments.command_line import InputError
from experiments.data import Digits, Images
from experiments.networks import vision_transformer
from experiments.stopping import StopRequest
from experiments.training import Fitted, Task, clipped_adam, fit_saved

NUM_BLOCKS = 2
SIZES = {"patch_size": 2, "num_features": 32, "hidden_features": 64}
# As large as the patches; Flax's customary 0.02 leaves attention blind to place.
POSITION_SCALE = 1.0
PLAIN_RATE, WEIGHT_DECAY = 5e-3, 0.3  # of the plain network: peak of the rate, AdamW's decay
RATE, WARM_UP = 1e-3, 50  # of the Bayesian network: updates in which the KL's weight rises from 0


def plain_network(seed: int) -> mj.nn.VisionTransformer:
    """The plain network, untrained."""
    return vision_transformer(seed, num_blocks=NUM_BLOCKS, position_scale=POSITION_SCALE, **SIZES)


def bayesian_network(args: argparse.Namespace, plain: mj.nn.VisionTransformer) -> mj.Bayesian:
    """The plain network with random weights, small spreads about its own, and learned prior scales."""
    return networks.bayesian(plain, learn_prior=True, structure=mj.STRUCTURES[args.structure])


def fit(
    task: Task, args: argparse.Namespace, network: Any, seed: int, train: Images,
    advance: Callable[[], Any], request: StopRequest | None = None,
) -> Fitted:  # fmt: skip
    """Train one seed; the seconds are of waiting for the program too."""
    named = dataclasses.replace(task, name=f"{task.name}, seed {seed}")
    folder, add = f"{task.name.split()[0].lower()}/seed_{seed}", int(task.validate is None)
    return fit_saved(named, network, args, folder, seed, advance, request, add=add, data=train)


def plain(args: argparse.Namespace, digits: Digits) -> Task:
    """Cross-entropy with weight decay, stopped where the validation NLL is best."""
    size, steps = min(args.batch_size, digits.train.labels.size), args.plain_steps

    def loss(network: Any, given: tuple[Array, Images], step: Array) -> Array:
        images, labels = data.mini_batch(given[0], step, given[1], size)
        return optax.softmax_cross_entropy_with_integer_labels(network(images), labels).mean()

    def validate(network: Any) -> Array:
        images, labels = (jnp.asarray(part) for part in digits.validation)
        return mj.objectives.negative_log_likelihood(jax.nn.softmax(network(images)), labels)

    optimizer = clipped_adam(PLAIN_RATE, steps, norm=1.0, weight_decay=WEIGHT_DECAY)
    settings = {"batch_size": size}
    return Task("plain network", loss, optimizer, steps, validate, settings=settings)


def bayesian(args: argparse.Namespace, digits: Digits) -> Task:
    """The negative analytic ELBO for each training image, by one pass of moments a step."""
    count = digits.train.labels.size
    size = min(args.batch_size, count)

    def loss(network: mj.Bayesian, given: tuple[Array, Images], step: Array) -> Array:
        images, labels = data.mini_batch(given[0], step, given[1], size)
        weight = mj.objectives.kl_warmup(step, WARM_UP, args.kl_weight)
        return -network.elbo(images, labels, dataset_size=count, kl_weight=weight)

    names = "structure", "plain_steps", "kl_weight"
    settings = {name: getattr(args, name) for name in names} | {"batch_size": size}
    optimizer = clipped_adam(RATE, args.steps)
    return Task("Bayesian network", loss, optimizer, args.steps, settings=settings)


def trained(run_folder: Path) -> tuple[mj.Bayesian, Digits]:
    """The first seed's Bayesian network in the --out of a finished main job, and its data."""
    try:
        stored = json.loads((run_folder / "metrics.json").read_text())["settings"]
        args = argparse.Namespace(**{**stored, "out": run_folder, "resume": True})
        seed, digits = args.seed, data.load(args.seed)
        network = bayesian_network(args, plain_network(seed))
        # Its checkpoint is of the last update, so this trains no further.
        found = fit(bayesian(args, digits), args, network, seed, digits.train, lambda: None)
        return found.model, digits
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise InputError(
            f"{run_folder} holds no finished run of the main job ({error}); make one by "
            f"python -m experiments digits --out {run_folder}"
        ) from error
