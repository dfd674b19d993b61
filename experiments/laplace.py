"""Laplace approximations of the digits' plain vision Transformer, against the network itself and laplax.

Trains the plain network of `classify`, with a smaller weight decay, with each seed. All methods get the
same weights, training and validation images. Approximations are linearised, at the prior precision of
the best validation NLL, of 17; "temperature" divides the logits, likewise. Prints NLL, ECE and AUROC (of
the entropy, the average over four kinds of other images) on test images, with standard errors over the
seeds; in brackets the difference from the plain network. --laplax adds that library (pip install
'moment_jax[laplax]'); its moments of the logits go through the same expected softmax.
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
from experiments.outputs import write_json
from experiments.report import aligned

Moments = Callable[[Array], tuple[Array, Array]]
"""Images (N, H, W) -> mean (N, C) and covariance (N, C, C) of the logits."""
At = Callable[[Any, Array], tuple[Array, Array]]
"""The same at a prior precision or temperature."""
Scores = dict[str, dict[str, float]]
"""Figures of each method."""

KINDS = ("kfac", "last_layer", "diagonal")
PRECISIONS = np.logspace(-2, 6, 17)  # those of `mj.laplace(held_out=)`
TEMPERATURES = np.logspace(-0.5, 1, 31)
RANK = 300  # of laplax's lanczos
WEIGHT_DECAY = 0.01  # with the 0.3 of `classify` every precision but the largest raises the NLL
PROBED = 1e3  # the precision at which both libraries' diagonals are compared
OTHERS, CHUNK = 250, 50  # other images of each kind; images at a time


def add_arguments(parser: Parser) -> None:
    """How many networks, and which curvature of laplax."""
    parser.whole("--seeds", 3, "networks")
    parser.whole("--plain-steps", Budget().plain_steps, "updates of a plain network")
    parser.choice("--laplax", ("lanczos", "diagonal"), (), "curvature of laplax to compare with")
    parser.json()


def run(args: argparse.Namespace) -> None:
    """Train, compare, print a table."""
    if args.laplax:
        _laplax()
    stack = images.load("digits", [0])
    train, validation, test, background = jax.tree.map(lambda x: x[0], stack[:4])
    task = Task(train, validation, test, background, stack.patch_size)
    others = {name: given[0] for name, given in images.others(stack, OTHERS).items()}
    records = []
    for seed, model in enumerate(plain_networks(task, args.seeds, args.plain_steps)):
        records.append(compared(model, task, others, args.laplax))
        nll = {name: f"{found['nll']:.4f}" for name, found in records[-1].items()}
        print(f"seed {seed}, NLL: {nll}")
    show(records)
    write_json(args.json, {"settings": vars(args) | {"json": None}, "networks": records})


def plain_networks(task: Task, seeds: int, steps: int) -> list[nnx.Module]:
    """Trained networks, in inference mode."""
    network, keys = Network.of(task), jax.random.split(jax.random.key(0), seeds)
    budget = Budget(plain_steps=steps, weight_decay=WEIGHT_DECAY)
    copies = Trainer(network, stacked(task.train, seeds), budget, keys).plain().params
    models = []
    for seed in range(seeds):
        module = network.module(jax.tree.map(lambda leaf, i=seed: leaf[i], copies))
        models.append(module.network(draws.means(module.params)))
        models[-1].eval()
    return models


def compared(
    model: Any, task: Task, others: dict[str, np.ndarray], curvatures: list[str]
) -> Scores:
    """Scores, precision and seconds of every method."""
    result: Scores = {}

    def add(name: str, fit: Callable[[], tuple[Moments, dict[str, float]]]) -> None:
        start = time.perf_counter()
        moments, more = fit()
        fit_s = time.perf_counter() - start
        predict = jax.jit(lambda x: jax.vmap(mj.objectives.class_probabilities)(*moments(x)))
        _in_chunks(predict, task.test.images[:CHUNK])
        start = time.perf_counter()
        test = _in_chunks(predict, task.test.images)
        ms_an_image = 1e3 * (time.perf_counter() - start) / len(test)
        found = [scores.detection(test, _in_chunks(predict, x))["auroc"] for x in others.values()]
        result[name] = {
            **predictions.scores(test, task.test.labels),
            "auroc": float(np.mean(found)),
            "ms_an_image": ms_an_image,
            "fit_s": fit_s,
            **more,
        }

    def certain(factor: Any, given: Array) -> tuple[Array, Array]:
        logits = model(given) / factor
        return logits, jnp.zeros((*logits.shape, logits.shape[-1]))

    def by_grid(at: At, grid: np.ndarray) -> tuple[Moments, dict[str, float]]:
        best = _best(at, grid, task)
        return partial(at, best), {"chosen": best}

    def own(kind: str) -> tuple[Moments, dict[str, float]]:
        belief, receipt = mj.laplace(
            model, mj.objectives.Categorical(), tuple(task.train), kind=kind,
            held_out=tuple(task.validation), receipt=True,
        )  # fmt: skip
        return linearised(model, belief), {"chosen": next(iter(receipt.prior_precision.values()))}

    ats: dict[str, At] = {}

    def theirs(curvature: str) -> tuple[Moments, dict[str, float]]:
        ats[curvature] = of_laplax(model, task, curvature)
        return by_grid(ats[curvature], PRECISIONS)

    add("plain", lambda: (partial(certain, 1.0), {}))
    add("temperature", lambda: by_grid(certain, TEMPERATURES))
    for kind in KINDS:
        add(kind, partial(own, kind))
    for curvature in curvatures:
        add(f"laplax, {curvature}", partial(theirs, curvature))
    if "diagonal" in ats:
        result["laplax, diagonal"]["variances_off"] = _difference(model, task, ats["diagonal"])
    return result


def linearised(model: Any, belief: Any) -> Moments:
    """The linearised network's moments."""

    def moments(given: Array) -> tuple[Array, Array]:
        mean, cov = mj.bayesian(model, belief, linearised=True)(given)
        return mean, jax.vmap(lambda c: c.token_blocks()[0])(cov)

    return moments


def of_laplax(model: Any, task: Task, curvature: str) -> At:
    """The network linearised by laplax, at a prior precision."""
    laplax, pushforward = _laplax()
    split: Any = nnx.split(model, nnx.Param, ...)
    graph, state, rest = split
    params = nnx.to_pure_dict(state)

    def model_fn(input: Array, params: Any) -> Any:  # laplax gives both by name
        filled = jax.tree.map(lambda x: x, state)
        nnx.replace_by_pure_dict(filled, params)
        return nnx.merge(graph, filled, rest)(input[None])[0]

    data = tuple(jnp.asarray(part) for part in task.train)
    options: Any = {"rank": RANK, "key": jax.random.key(0)} if curvature == "lanczos" else {}
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


def _best(at: At, grid: np.ndarray, task: Task) -> float:
    """The value of the grid with the lowest validation NLL."""
    predict = jax.jit(lambda v, x: jax.vmap(mj.objectives.class_probabilities)(*at(v, x)))
    given, labels = task.validation

    def nll(value: float) -> float:
        found = _in_chunks(lambda x: predict(value, x), given)
        return predictions.scores(found, labels)["nll"]

    return float(grid[np.nanargmin([nll(value) for value in grid])])


def _difference(model: Any, task: Task, at: At) -> float:
    """The largest relative difference of the logits' variances, both by diagonals, on test images."""
    belief = mj.laplace(
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


def show(records: list[Scores]) -> None:
    """Means over the networks, and paired differences from the plain one."""

    def every(name: str, figure: str) -> list[float]:
        return [network[name][figure] for network in records if figure in network[name]]

    def cell(name: str, score: str) -> str:
        own, plain = every(name, score), every("plain", score)
        found, gap = scores.summary(own), scores.summary(list(np.subtract(own, plain)))
        text = f"{found['mean']:.4f} ± {found['error']:.4f}"
        return text if name == "plain" else f"{text} ({gap['mean']:+.4f} ± {gap['error']:.4f})"

    rows = [["", "NLL", "ECE", "AUROC", "chosen", "fit", "an image"]]
    for name in records[0]:
        row = [name, *(cell(name, score) for score in ("nll", "ece", "auroc"))]
        chosen, off = every(name, "chosen"), every(name, "variances_off")
        row.append(f"{min(chosen):.3g} to {max(chosen):.3g}" if chosen else "")
        times = np.mean(every(name, "ms_an_image"))
        rows.append([*row, f"{np.mean(every(name, 'fit_s')):.1f} s", f"{times:.2f} ms"])
        if off:
            print(f"variances of the logits, diagonals of both: at most {max(off):.1e} apart")
    print(aligned(rows))
