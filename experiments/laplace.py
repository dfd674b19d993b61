"""Laplace approximations of the digits' plain vision Transformer, against the network itself and laplax.

Trains the plain network of `classify`, with a smaller weight decay, in each division and with each
seed. All methods get the same weights, training and validation images. Approximations are linearised,
at the prior precision of the best validation NLL, of 17; "temperature" divides the logits, likewise.
Prints NLL, ECE and AUROC (of the entropy, the average over four kinds of other images) on test images,
with standard errors over the divisions, or over the seeds of a single one; in brackets the difference
from the plain network. --laplax adds that library (pip install 'moment_jax[laplax]'); its moments of
the logits go through the same expected softmax.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

import moment_jax as mj
from experiments import draws, predictions
from experiments.classify import images, scores
from experiments.classify.images import Task
from experiments.classify.methods import Budget, Trainer, stacked
from experiments.classify.networks import Network
from experiments.command_line import InputError, Parser
from experiments.data import Images
from experiments.outputs import write_json
from experiments.report import aligned

Moments = Callable[[Array], tuple[Array, Array]]
"""Images (N, H, W) -> mean (N, C) and covariance (N, C, C) of the logits."""

KINDS = ("kfac", "last_layer", "diagonal")
PRECISIONS = np.logspace(-2, 6, 17)  # those of `mj.posterior.laplace(held_out=)`
TEMPERATURES = np.logspace(-0.5, 1, 31)
WEIGHT_DECAY = 0.01  # with the 0.3 of `classify` every precision but the largest raises the NLL
PROBED = 1e3  # the precision at which both libraries' diagonals are compared
OTHERS, CHUNK = 250, 50  # other images of each kind; images at a time


def add_arguments(parser: Parser) -> None:
    """How many networks, and which curvature of laplax."""
    parser.whole("--seeds", 3, "networks in each division")
    parser.whole("--divisions", 1, "divisions into training, validation and test images")
    parser.whole("--plain-steps", Budget().plain_steps, "updates of a plain network")
    parser.choice("--laplax", ("lanczos", "diagonal"), (), "curvature of laplax to compare with")
    parser.whole("--rank", 300, "of laplax's lanczos")
    parser.json()


def run(args: argparse.Namespace) -> None:
    """Train, compare, print a table."""
    if args.laplax:
        _laplax()
    records: list[list[dict[str, dict[str, float]]]] = []
    for division in range(args.divisions):
        stack = images.load("digits", [division])
        task = the_only(stack)
        others = {name: given[0] for name, given in images.others(stack, OTHERS).items()}
        records.append([])
        for seed, model in enumerate(plain_networks(task, args.seeds, args.plain_steps)):
            records[-1].append(compared(model, task, others, args.laplax, args.rank))
            nll = {name: f"{found['nll']:.4f}" for name, found in records[-1][-1].items()}
            print(f"division {division}, seed {seed}, NLL: {nll}")
    show(records)
    write_json(args.json, {"settings": vars(args) | {"json": None}, "networks": records})


def the_only(task: Task) -> Task:
    """The task of a single division, without the axis of divisions."""
    arrays: tuple[Images, Images, Images, np.ndarray] = jax.tree.map(lambda x: x[0], task[:4])
    return Task(*arrays, task.patch_size)


def plain_networks(task: Task, seeds: int, steps: int) -> list[nnx.Module]:
    """Trained networks, in inference mode."""
    network = Network.of(task)
    keys = jax.random.split(jax.random.key(0), seeds)
    budget = Budget(plain_steps=steps, weight_decay=WEIGHT_DECAY)
    copies = Trainer(network, stacked(task.train, seeds), budget, keys).plain().params
    modules = [
        network.module(jax.tree.map(lambda leaf, i=i: leaf[i], copies)) for i in range(seeds)
    ]
    models = [module.network(draws.means(module.params)) for module in modules]
    for model in models:
        model.eval()
    return models


def compared(
    model: Any, task: Task, others: dict[str, np.ndarray], curvatures: list[str], rank: int
) -> dict[str, dict[str, float]]:
    """Scores, precision and seconds of every method."""

    def scored(moments: Moments, **more: float) -> dict[str, float]:
        predict = jax.jit(lambda x: jax.vmap(mj.objectives.class_probabilities)(*moments(x)))
        _in_chunks(predict, task.test.images[:CHUNK])
        start = time.perf_counter()
        test = _in_chunks(predict, task.test.images)
        seconds = (time.perf_counter() - start) / len(test)
        found = [scores.detection(test, _in_chunks(predict, x))["auroc"] for x in others.values()]
        return {
            **predictions.scores(test, task.test.labels),
            "auroc": float(np.mean(found)),
            "ms_an_image": 1e3 * seconds,
            **more,
        }

    def certain(factor: Any, given: Array) -> tuple[Array, Array]:
        logits = model(given) / factor
        return logits, jnp.zeros((*logits.shape, logits.shape[-1]))

    result = {"plain": scored(partial(certain, 1.0))}
    start = time.perf_counter()
    best = _best(certain, TEMPERATURES, task)
    seconds = time.perf_counter() - start
    result["temperature"] = scored(partial(certain, best), chosen=best, fit_s=seconds)
    for kind in KINDS:
        start = time.perf_counter()
        belief, receipt = mj.posterior.laplace(
            model, mj.objectives.Categorical(), tuple(task.train), kind=kind,
            held_out=tuple(task.validation), receipt=True,
        )  # fmt: skip
        seconds = time.perf_counter() - start
        precision = next(iter(receipt.prior_precision.values()))
        result[kind] = scored(linearised(model, belief), chosen=precision, fit_s=seconds)
    for curvature in curvatures:
        start = time.perf_counter()
        at = of_laplax(model, task, curvature, rank)
        best = _best(at, PRECISIONS, task)
        seconds = time.perf_counter() - start
        off = {"variances_off": _difference(model, task, at)} if curvature == "diagonal" else {}
        result[f"laplax, {curvature}"] = scored(
            partial(at, best), chosen=best, fit_s=seconds, **off
        )
    return result


def linearised(model: Any, belief: Any) -> Moments:
    """The linearised network's moments."""

    def moments(given: Array) -> tuple[Array, Array]:
        mean, cov = mj.bayesian(model, belief, linearised=True)(given)
        return mean, jax.vmap(lambda c: c.token_blocks()[0])(cov)

    return moments


def of_laplax(
    model: Any, task: Task, curvature: str, rank: int
) -> Callable[[Any, Array], tuple[Array, Array]]:
    """(Prior precision, images) -> moments of the network linearised by laplax."""
    laplax, pushforward = _laplax()
    split: Any = nnx.split(model, nnx.Param, ...)
    graph, state, rest = split
    params = nnx.to_pure_dict(state)

    def model_fn(input: Array, params: Any) -> Any:  # laplax gives both by name
        filled = jax.tree.map(lambda x: x, state)
        nnx.replace_by_pure_dict(filled, params)
        return nnx.merge(graph, filled, rest)(input[None])[0]

    data = tuple(jnp.asarray(part) for part in task.train)
    options: Any = {"rank": rank, "key": jax.random.key(0)} if curvature == "lanczos" else {}
    posterior, _ = laplax.laplace(
        model_fn, params, data, loss_fn="cross_entropy", curv_type=curvature, **options
    )
    steps = [pushforward.lin_setup, pushforward.lin_pred_mean, pushforward.lin_pred_cov]

    def at(precision: Any, given: Array) -> tuple[Array, Array]:
        of_one = pushforward.set_lin_pushforward(
            model_fn, params, posterior, {"prior_prec": precision}, pushforward_fns=steps
        )
        found = jax.vmap(of_one)(given)
        return found["pred_mean"], found["pred_cov"]

    return at


def _laplax() -> tuple[Any, Any]:
    try:
        import laplax
        from laplax.eval import pushforward
        from loguru import logger
    except ModuleNotFoundError as error:
        raise InputError(
            f"--laplax needs the package {error.name}; pip install 'moment_jax[laplax]'"
        ) from error
    logger.disable("laplax")
    return laplax, pushforward


def _best(at: Callable[[Any, Array], Any], grid: np.ndarray, task: Task) -> float:
    """The value of the grid with the lowest validation NLL."""
    predict = jax.jit(lambda v, x: jax.vmap(mj.objectives.class_probabilities)(*at(v, x)))
    given, labels = task.validation

    def nll(value: float) -> float:
        found = _in_chunks(lambda x: predict(value, x), given)
        return predictions.scores(found, labels)["nll"]

    return float(grid[np.nanargmin([nll(value) for value in grid])])


def _difference(model: Any, task: Task, at: Callable[[Any, Array], Any]) -> float:
    """The largest relative difference of the logits' variances, both by diagonals, on test images."""
    belief = mj.posterior.laplace(
        model, mj.objectives.Categorical(), tuple(task.train), kind="diagonal",
        prior_precision=PROBED,
    )  # fmt: skip
    given = jnp.asarray(task.test.images[:CHUNK])
    ours, theirs = (
        jnp.einsum("ncc->nc", of(given)[1])
        for of in (linearised(model, belief), jax.jit(partial(at, PROBED)))
    )
    return float(jnp.max(jnp.abs(ours / theirs - 1)))


def _in_chunks(predict: Callable[[Array], Array], given: np.ndarray) -> np.ndarray:
    filled = np.concatenate([given, np.repeat(given[-1:], -len(given) % CHUNK, axis=0)])
    parts = [predict(jnp.asarray(filled[i : i + CHUNK])) for i in range(0, len(filled), CHUNK)]
    return np.concatenate(parts)[: len(given)]


def show(records: list[list[dict[str, dict[str, float]]]]) -> None:
    """Means over divisions of the seeds' means; of one division, over its seeds."""
    groups = records if len(records) > 1 else [[network] for network in records[0]]

    def cell(name: str, score: str) -> str:
        def of(network: dict[str, dict[str, float]], other: str) -> float:
            return network[other][score]

        values = [float(np.mean([of(n, name) for n in group])) for group in groups]
        more = [np.mean([of(n, name) - of(n, "plain") for n in group]) for group in groups]
        found, gap = scores.summary(values), scores.summary([float(m) for m in more])
        text = f"{found['mean']:.4f} ± {found['error']:.4f}"
        return text if name == "plain" else f"{text} ({gap['mean']:+.4f} ± {gap['error']:.4f})"

    networks = [network for group in groups for network in group]
    rows = [["", "NLL", "ECE", "AUROC", "chosen", "fit", "an image"]]
    for name in networks[0]:
        row = [name, *(cell(name, score) for score in ("nll", "ece", "auroc"))]
        chosen = [n[name]["chosen"] for n in networks if "chosen" in n[name]]
        row.append(f"{min(chosen):.3g} to {max(chosen):.3g}" if chosen else "")
        fits = [n[name].get("fit_s", 0.0) for n in networks]
        times = [n[name]["ms_an_image"] for n in networks]
        rows.append([*row, f"{np.mean(fits):.1f} s", f"{np.mean(times):.2f} ms"])
        off = [n[name]["variances_off"] for n in networks if "variances_off" in n[name]]
        if off:
            print(f"variances of the logits, diagonals of both: at most {max(off):.1e} apart")
    print(aligned(rows))
