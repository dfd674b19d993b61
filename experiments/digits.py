"""Train a Bayesian vision Transformer on handwritten digits by the analytic ELBO.

The last block and the head of a plain network become random; they train in `Diagonal`, whose program
compiles in a third of the time, and predict in --structure. Compares the plain network, an average of
five, the Bayesian one, networks sampled from it, and a pass that takes tokens as independent, for
several seeds, each with its own division of the images, by programs that are compiled once. Writes
metrics.json and figures (of the first seed, but for that of time), and prints one table with standard
errors over the seeds.
"""

import argparse
import dataclasses
import itertools
import json
import os
import time
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array

import moment_jax as mj
from experiments import data, figures, networks, predictions
from experiments.agreement import Agreement
from experiments.checkpoints import run_folder
from experiments.command_line import InputError, Parser
from experiments.data import Digits, Images
from experiments.outputs import aligned, duration, over_seeds, with_error, write_json
from experiments.predictions import Prediction
from experiments.programs import Program, compile_program
from experiments.stopping import StopRequest
from experiments.training import Fitted, Task, clipped_adam, compiling, fit_saved, together

NUM_BLOCKS = 2
SIZES = {"patch_size": 2, "num_features": 32, "hidden_features": 64}
# As large as the patches; Flax's customary 0.02 leaves attention blind to place.
POSITION_SCALE = 1.0
PLAIN_RATE, WEIGHT_DECAY = 1e-2, 0.3  # of a plain network: peak of the rate, AdamW's decay
RATE = 3e-3  # of the Bayesian one
RISE = 1 / 3  # share of its updates in which the KL rises
TRAINED = mj.nn.VariationalMean, mj.nn.VariationalScale, mj.nn.PriorScale
MEMBERS = 5  # plain networks of a seed: the first begins the Bayesian one, all are averaged
ANGLES = (45, 60)  # at which the test images are turned too
SCORES = ("accuracy", "nll", "brier", "ece")
DRAWN = 2, 4, 8, 16, 32, 100  # and all: networks by which labels are predicted together

Given = tuple[Array, Digits]
"""What a loss takes: a random key, and the images."""
Results = dict[str, dict[str, Prediction]]
"""Predictions by the name of the images, see `_images`, and that of the method."""


def add_arguments(parser: Parser) -> None:
    """The options of the main job."""
    parser.training("runs/digits", steps=60, batch_size=32, kl_weight=0.03)
    what = "how many times all is done, with --seed and those that follow it"
    parser.whole("--seeds", 3, what, most=1000)
    parser.whole("--plain-steps", 400, "updates of a plain network")
    what = "networks sampled from the posterior to compare with"
    parser.whole("--samples", 300, what, least=2, most=100_000)


def run(args: argparse.Namespace) -> None:
    """Train and compare all networks for every seed; write the results."""
    start, out = time.perf_counter(), run_folder(args)
    divisions = {seed: data.load(seed) for seed in range(args.seed, args.seed + args.seeds)}
    tasks = plain, bayesian = [task(args, divisions[args.seed]) for task in (_plain, _bayesian)]
    programs = _programs(args, tasks, divisions[args.seed])
    plain_update, update, *predict = programs.values()
    advance = plain_update.result().call  # before Ctrl-C is taken to wait for updates
    one = partial(_fit, plain, args)
    begun = [
        partial(one, plain_network(seed, member), seed, digits, advance, member=member)
        for seed, digits in divisions.items()
        for member in range(MEMBERS)
    ]
    found = together(begun, threads=os.cpu_count())
    plains = [found[first : first + MEMBERS] for first in range(0, len(found), MEMBERS)]
    one, advance = partial(_fit, bayesian, args), update.result().call
    fitted = together([
        partial(one, bayesian_network(own[0].model), seed, digits, advance)
        for own, (seed, digits) in zip(plains, divisions.items(), strict=True)
    ])  # fmt: skip
    passes, records = [program.result().call for program in predict], []
    for (seed, digits), own, random in zip(divisions.items(), plains, fitted, strict=True):
        results = _predict(args, passes, own, random.model, digits, seed)
        records.append({
            "seconds": {"plain": own[0].seconds, "bayesian": random.seconds},
            "kl": float(random.model.kl()),
            **_compare(digits, results),
        })  # fmt: skip
        if seed == args.seed:
            *_, analytic, independent, samples = results["test"].values()
            figures.save(figures.spread(analytic, independent, samples), out / "spread.png")
            figures.save(figures.doubt(analytic, digits.test), out / "doubt.png")
    metrics = {"settings": vars(args), **over_seeds(records), "seeds": records}
    figures.save(figures.together(metrics["together"]), out / "together.png")
    compiled = {name: program.result().seconds for name, program in programs.items()}
    metrics["seconds"] |= {"compiled": compiled, "total": time.perf_counter() - start}
    write_json(out / "metrics.json", metrics)
    _print(out, metrics)


def trained(run_folder: Path) -> tuple[mj.Bayesian, Digits]:
    """The first seed's Bayesian network in the --out of a finished main job, and its data."""
    try:
        stored = json.loads((run_folder / "metrics.json").read_text())["settings"]
        args = argparse.Namespace(**{**stored, "out": run_folder, "resume": True})
        digits = data.load(args.seed)
        network = bayesian_network(plain_network(args.seed, 0))
        # Its checkpoint is of the last update, so this trains no further.
        found = _fit(_bayesian(args, digits), args, network, args.seed, digits).model
        return found.replace(structure=mj.STRUCTURES[args.structure]), digits
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise InputError(
            f"{run_folder} holds no finished run of the main job ({error}); make one by "
            f"python -m experiments digits --out {run_folder}"
        ) from error


@nnx.jit
def plain_network(seed: int, member: int) -> mj.nn.VisionTransformer:
    """An untrained plain network, one of those of a seed."""
    key = jax.random.fold_in(jax.random.key(seed), member)
    options = {"num_blocks": NUM_BLOCKS, "position_scale": POSITION_SCALE, **SIZES}
    return networks.vision_transformer(key, **options)


@nnx.jit
def bayesian_network(plain: mj.nn.VisionTransformer) -> mj.Bayesian:
    """The plain network with a random last block and head: small spreads, learned prior scales."""

    def random(path: Any, _: Any) -> bool:
        return path[0] == "head" or path[:3] == ("encoder", "blocks", NUM_BLOCKS - 1)

    return networks.bayesian(plain, random=random, learn_prior=True, structure=mj.Diagonal)


def _fit(
    task: Task, args: argparse.Namespace, network: Any, seed: int, digits: Digits,
    advance: Any = None, request: StopRequest | None = None, *, member: int = 0,
) -> Fitted:  # fmt: skip
    """Train the network of one seed, or one of its plain ones."""
    number = f"{seed}.{member}" if member else seed
    named = dataclasses.replace(task, name=f"{task.name} {number}")
    folder = f"{task.name.split()[0].lower()}/seed_{number}"
    add = int(task.validate is None) + 1000 * member
    return fit_saved(named, network, args, folder, seed, advance, request, add=add, data=digits)


def _plain(args: argparse.Namespace, digits: Digits) -> Task:
    """Cross-entropy with weight decay, stopped where the validation NLL is best."""
    size = min(args.batch_size, digits.train.labels.size)

    def loss(network: Any, given: Given, step: Array) -> Array:
        images, labels = data.mini_batch(given[0], step, given[1].train, size)
        return optax.softmax_cross_entropy_with_integer_labels(network(images), labels).mean()

    def validate(network: Any, given: Given) -> Array:
        images, labels = (jnp.asarray(part) for part in given[1].validation)
        return optax.softmax_cross_entropy_with_integer_labels(network(images), labels).mean()

    optimizer = clipped_adam(PLAIN_RATE, args.plain_steps, norm=1.0, weight_decay=WEIGHT_DECAY)
    settings = {"batch_size": size}
    return Task("plain network", loss, optimizer, args.plain_steps, validate, settings=settings)


def _bayesian(args: argparse.Namespace, digits: Digits) -> Task:
    """The negative analytic ELBO for each training image, by one pass of moments a step.

    What is certain stays as the plain network has it.
    """
    count = digits.train.labels.size
    size = min(args.batch_size, count)

    def loss(network: mj.Bayesian, given: Given, step: Array) -> Array:
        images, labels = data.mini_batch(given[0], step, given[1].train, size)
        weight = mj.objectives.kl_warmup(step, int(RISE * args.steps), args.kl_weight)
        return -network.elbo(images, labels, dataset_size=count, kl_weight=weight)

    settings = {name: getattr(args, name) for name in ("plain_steps", "kl_weight")}
    adam = clipped_adam(RATE, args.steps)
    settings["batch_size"] = size
    return Task("Bayesian network", loss, adam, args.steps, wrt=TRAINED, settings=settings)


def _programs(
    args: argparse.Namespace, tasks: list[Task], digits: Digits
) -> dict[str, Future[Program]]:
    """All that the seeds share, compiled in the background in the order in which it is needed."""
    network, test = plain_network(args.seed, 0), digits.test.images
    random, given = bayesian_network(network), (jax.random.key(0), digits)
    judged = random.replace(structure=mj.STRUCTURES[args.structure])
    chunk, keys = jnp.asarray(test[: predictions.CHUNK]), _keys(args, args.seed)
    plain, analytic, drawn = predictions.plain, predictions.analytic, predictions.drawn
    return compiling({
        "updates of a plain network": partial(tasks[0].compile, network, given),
        "updates of the Bayesian one": partial(tasks[1].compile, random, given),
        "its pass": partial(compile_program, analytic, judged, chunk),
        "the pass with independent tokens": partial(compile_program, analytic, random, chunk),
        "sampled networks": partial(compile_program, drawn, random, test, keys),
        "plain networks": partial(compile_program, plain, network, chunk),
    })  # fmt: skip


def _keys(args: argparse.Namespace, seed: int) -> Array:
    """Of the sampled networks; XLA's own generator compiles in a fraction of the time of JAX's."""
    return jax.random.split(jax.random.key(seed + 2, impl="rbg"), args.samples)


def _images(digits: Digits) -> dict[str, Images]:
    """Test images first, then those that not all methods see: of validation, and turned."""
    images, labels = digits.test
    turned = {
        _turned(angle): Images(data.turned(images, angle, digits.background), labels)
        for angle in ANGLES
    }
    return {"test": digits.test, "validation": digits.validation, **turned}


def _turned(angle: int) -> str:
    return f"turned by {angle} degrees"


def _predict(
    args: argparse.Namespace, programs: list[Any], plains: list[Fitted], random: mj.Bayesian,
    digits: Digits, seed: int,
) -> Results:  # fmt: skip
    """Predictions of all methods; those of the last two of the test images alone."""
    images, in_chunks = _images(digits), predictions.in_chunks
    every = np.concatenate([part.images for part in images.values()])
    analytic, independent, drawn, plain = programs
    members = [in_chunks(plain, one.model, every) for one in plains]
    test, judged = digits.test.images, random.replace(structure=mj.STRUCTURES[args.structure])
    whole = {
        "plain network": members[0],
        f"{MEMBERS} plain networks": predictions.averaged(members),
        "Bayesian, one pass": in_chunks(analytic, judged, every),
        "tokens taken as independent": in_chunks(independent, random, test),
        f"Bayesian, {args.samples:,} samples": predictions.sampled(
            drawn, random, test, _keys(args, seed)
        ),
    }
    ends = itertools.pairwise(np.cumsum([0, *(len(part.labels) for part in images.values())]))
    parts = {name: slice(*own) for name, own in zip(images, ends, strict=True)}
    return {
        of: {n: one.at(p) for n, one in whole.items() if p.stop <= len(one.probabilities)}
        for of, p in parts.items()
    }


def _compare(digits: Digits, results: Results) -> dict[str, Any]:
    """Scores, how the analytic logits agree with sampled ones, and labels predicted together."""
    _, plains, analytic, independent, samples = results["test"].values()
    logits, independents = (
        Agreement.of(*one[1:3], *samples[1:3])._asdict() for one in (analytic, independent)
    )
    scores = {
        of: {name: one.scores(part.labels) for name, one in results[of].items()}
        for of, part in _images(digits).items()
    }
    labels, most, by = digits.test.labels, len(samples.members), predictions.together_by
    together = {
        **{str(n): by(samples, labels, n) for n in (*(n for n in DRAWN if n < most), most)},
        "one pass of moment_jax": predictions.together(analytic, labels),
        "the same, tokens independent": predictions.together(independent, labels),
        f"{MEMBERS} plain networks": by(plains, labels, MEMBERS),
    }
    best = together[str(most)]["nll"]
    together = {name: {**one, "above": one["nll"] - best} for name, one in together.items()}
    return {**scores, "logits": logits, "independent": independents, "together": together}


def _print(out: Path, metrics: dict[str, Any]) -> None:
    logits, independent, settings = (metrics[k] for k in ("logits", "independent", "settings"))
    heads = [f"NLL at {angle}°" for angle in ANGLES]
    rows = [["", "accuracy", "NLL", "Brier", "ECE", *heads, "time per image"]]
    for name, scores in metrics["test"].items():
        turned = [metrics[_turned(angle)].get(name) for angle in ANGLES]
        nlls = [with_error(found["nll"], ".2f") if found else "" for found in turned]
        time_per_image = duration(scores["seconds_per_image"]["mean"])
        rows.append([name, *(with_error(scores[key]) for key in SCORES), *nlls, time_per_image])
    print(aligned(rows))
    print(
        f"analytic against sampled: logit sd ratio {with_error(logits['sd_ratio'])}, "
        f"correlation {logits['sd_correlation']['mean']:.3f}, mean error "
        f"{logits['mean_error']['mean']:.3f} sd; with tokens taken as independent the sd ratio is "
        f"{with_error(independent['sd_ratio'])}"
    )
    nlls = [f"{name}: {with_error(one['nll'])}" for name, one in metrics["together"].items()]
    print(f"NLL of {predictions.LABELS} labels of an image together, by so many sampled networks or "
          f"{'; '.join(nlls)}")  # fmt: skip
    compiled = ", ".join(f"{name} {s:.1f} s" for name, s in metrics["seconds"]["compiled"].items())
    print(f"compiled meanwhile: {compiled}")
    print(f"{settings['seeds']} seeds from {settings['seed']}; KL weight {settings['kl_weight']:g}; "
          f"{metrics['seconds']['total']:.0f} s in all; figures and metrics.json in {out}")  # fmt: skip
