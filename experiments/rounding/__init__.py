"""Noise that is known: weights of few bits, and of analogue memory. One pass predicts the loss.

Trains small vision Transformers, and predicts and measures their NLL with matrices rounded at random.
Chooses the bits of each matrix by the gradient of that prediction, and in other ways, on validation
images; the scores are of test images. Predicts the NLL of devices whose weights have relative noise, and
trains with it. Prints means and standard errors over the seeds; writes metrics.json and a figure.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from matplotlib.ticker import LogLocator, NullFormatter

import moment_jax as mj
from experiments import data
from experiments.classify import images
from experiments.command_line import InputError, Parser, number, writable_folder
from experiments.data import Images
from experiments.figures import STYLE, Figure, plt, save
from experiments.networks import vision_transformer
from experiments.outputs import aligned, over_seeds, with_error, write_json
from experiments.programs import interleaved
from experiments.rounding import noise
from experiments.rounding.noise import Arrays, Programs
from experiments.training import Task, clipped_adam, fit

SIZES = {"digits": (1, 8, 2, 32), "mnist5k": (2, 28, 4, 48)}
"""Blocks, and sides of an image and of its patches; features: 16 and 49 tokens."""
STRUCTURES: tuple[type[mj.Covariance], ...] = mj.Separable, mj.Diagonal  # the first's gradient
BATCH = 32  # of plain training
ROWS = 128  # validation images, and those of an update with noise
ALLOCATIONS = 24  # at random, of 2 to 6 bits
DRAWS = 8  # for a gradient by draws; as often as takes the time of one pass's
SPREADS = (0.05, 0.1, 0.2, 0.3)  # of a weight on a device, over its magnitude
TRAINED_AT = 0.2

Points = dict[str, list[float]]
"""NLLs of networks rounded at random: those predicted in each structure, and the actual ones."""


def add_arguments(parser: Parser) -> None:
    """The options of the experiment."""
    parser.choice("--data", SIZES, "digits", "images")
    what = "folder for metrics.json and the figure (default: runs/rounding/NAME of --data)"
    parser.place("--out", None, what)
    parser.seed("first random seed, of the division too")
    what = "how many times all is done, with this seed and those that follow it"
    parser.whole("--seeds", 5, what)
    parser.whole("--steps", 1500, "updates of a plain network")
    parser.add_argument(
        "--budget", type=number(float, least=1), nargs="+", default=[2.5, 3.0, 3.5], metavar="BITS",
        help="bits that a weight may have on average (default: 2.5 3 3.5)",
    )  # fmt: skip
    parser.whole("--updates", 60, "updates on the expected NLL of devices")
    parser.whole("--devices", 100, "devices that are drawn", least=DRAWS)


def run(args: argparse.Namespace) -> None:
    """Train, predict, choose and compare, seed by seed; write the results so far."""
    start, least, most = time.perf_counter(), *noise.BITS[[0, -1]]
    if not least <= min(args.budget) <= max(args.budget) <= most:
        given = " ".join(f"{budget:g}" for budget in args.budget)
        raise InputError(f"--budget {given} cannot be met; needs numbers from {least} to {most}")
    seeds = range(args.seed, args.seed + args.seeds)
    task = images.load(args.data, seeds)
    out = writable_folder(args.out or Path("runs/rounding") / args.data, "--out")
    programs, records, points = None, [], []
    for place, seed in enumerate(seeds):
        parts = [Images(part.images[place], part.labels[place]) for part in task[:3]]
        arrays, network = _trained(args, parts[0], seed)
        programs = programs or Programs(network, STRUCTURES)
        record, found = measured(programs, arrays, parts, args, seed)
        records.append(record)
        points.append(found)
        metrics = {
            "settings": vars(args), "over_seeds": over_seeds(records), "seeds": records,
            "matrices": ["/".join(map(str, path)) for path in noise.largest(arrays)],
            "points": points, "seconds": time.perf_counter() - start,
        }  # fmt: skip
        write_json(out / "metrics.json", metrics)
        save(figure(points, metrics["over_seeds"]), out / "rounding.png")
    _print(metrics["over_seeds"])
    print(f"{metrics['seconds']:.0f} s in all; metrics.json and rounding.png in {out}")


def _trained(args: argparse.Namespace, train: Images, seed: int) -> tuple[Arrays, Any]:
    """A plain network's weights, and the network."""
    blocks, image, patch, features = SIZES[args.data]
    network = vision_transformer(
        seed, num_blocks=blocks, image_size=image, patch_size=patch, num_features=features,
        hidden_features=2 * features, position_scale=0.5,
    )  # fmt: skip

    def loss(model: Any, given: Any, step: jax.Array) -> jax.Array:
        pixels, labels = data.mini_batch(given[0], step, given[1], BATCH)
        return optax.softmax_cross_entropy_with_integer_labels(model(pixels), labels).mean()

    adam = clipped_adam(3e-3, args.steps, weight_decay=0.1)
    task = Task(f"seed {seed}", loss, adam, args.steps)
    network = fit(task, network, (jax.random.key(seed), train)).model
    return noise.weights(network), network


def measured(
    programs: Programs, arrays: Arrays, parts: list[Images], args: Any, seed: int
) -> tuple[dict[str, Any], Points]:
    """All figures of one trained network, and the NLLs of the networks rounded at random."""
    train, rows, test = parts[0], parts[1].part(np.arange(ROWS)), parts[2]
    keys, tops = jax.random.split(jax.random.key(seed), args.devices), noise.largest(arrays)

    def drawn(keys: jax.Array, *given: Any) -> Any:
        return programs.drawn_gradient(*given, keys)

    def one_pass(_: jax.Array, *given: Any) -> Any:
        return programs.gradient(*given)

    def timed(of: Any, count: int) -> Any:
        own = noise.relative_sd(arrays, TRAINED_AT)
        return lambda: jax.block_until_ready(of(keys[:count], arrays, own, *rows))

    took = interleaved({"": timed(one_pass, 1), "1": timed(drawn, 1), "8": timed(drawn, DRAWS)}, 5)
    many = max(1, round(took[""] / took["8"]))

    def often(*given: Any) -> Any:
        each = [drawn(some, *given) for some in jax.random.split(keys[0], (many, DRAWS))]
        return jax.tree.map(lambda *values: sum(values) / many, *each)

    def scored(program: Any, *given: Any) -> dict[str, float]:
        return dict(zip(("nll", "accuracy"), map(float, program(*given)), strict=True))

    points: Points = {name: [] for name in (*programs.values, "actual")}
    rng = np.random.default_rng(seed)
    for _ in range(ALLOCATIONS):
        drawn_bits = rng.integers(2, 7, len(tops))
        sd, values = (f(arrays, tops, drawn_bits) for f in (noise.rounding_sd, noise.rounded))
        for name, predict in programs.values.items():
            points[name].append(float(predict(arrays, sd, *rows)))
        points["actual"].append(float(programs.nll(values, *rows)[0]))
    bits, allocations, devices, training = {}, {}, {}, {}
    for name, way in noise.ways(programs, arrays, rows, often).items():
        chosen = allocations[name] = {budget: way(budget) for budget in args.budget}
        values = {budget: noise.rounded(arrays, tops, own) for budget, own in chosen.items()}
        bits[name] = {budget: scored(programs.nll, own, *test) for budget, own in values.items()}
    for spread in SPREADS:
        given = arrays, noise.relative_sd(arrays, spread), *rows
        devices[spread] = {name: float(of(*given)) for name, of in programs.values.items()}
        devices[spread]["drawn"] = float(programs.drawn(*given, keys)[0])
    updates = {"plain": 0, "drawn noise": round(args.updates * took[""] / took["1"])}
    updates["one pass"] = args.updates
    for name, count in updates.items():
        gradient = one_pass if name == "one pass" else lambda key, *given: drawn(key[None], *given)
        own = noise.trained(gradient, arrays, train, ROWS, TRAINED_AT, count, seed)
        noisy = own, noise.relative_sd(own, TRAINED_AT), *test, keys
        training[name] = scored(programs.drawn, *noisy)
    record = {
        "plain": scored(programs.nll, arrays, *test), "draws_for_bits": many * DRAWS,
        "updates": updates,
        "prediction": {name: _agreement(points, name) for name in programs.values},
        "bits": bits, "allocations": jax.tree.map(np.ndarray.tolist, allocations),
        "devices": devices, "training": training,
    }  # fmt: skip
    return record, points


def _agreement(points: Points, name: str) -> dict[str, float]:
    """Of a structure's predictions and the truth: correlation of the logs, median ratio."""
    own, actual = np.log(points[name]), np.log(points["actual"])
    correlation = float(np.corrcoef(own, actual)[0, 1])
    return {"correlation": correlation, "ratio": float(np.exp(np.median(own - actual)))}


@plt.rc_context({**STYLE, **plt.style.library["tableau-colorblind10"]})
def figure(points: list[Points], found: dict[str, Any]) -> Figure:
    """Predictions against the truth, NLL by bits, and NLL of devices by their noise."""
    drawn, (left, middle, right) = plt.subplots(1, 3, figsize=(10.5, 3.6))
    names, nll = [s.__name__ for s in STRUCTURES], {"yscale": "log", "ylabel": "NLL, test (nats)"}
    actual = np.concatenate([one["actual"] for one in points])
    for name, marker in zip(names, "ox", strict=False):
        own = np.concatenate([one[name] for one in points])
        left.plot(actual, own, marker, markersize=3, label=name)
    ends = actual.min(), actual.max()
    left.plot(ends, ends, color="0.6", linewidth=1, label="equal")
    left.set(xscale="log", yscale="log", xlabel="NLL of the rounded network (nats)")
    left.set(ylabel="expected NLL by one pass (nats)", title="matrices rounded to 2 to 6 bits")

    def line(axis: Any, by: dict[float, Any], style: str, label: str) -> None:
        mean, error = ([one[k] for one in by.values()] for k in ("mean", "error"))
        error = np.nan_to_num(error)
        axis.errorbar([*by], mean, error, fmt=style, markersize=4, capsize=2, label=label)

    for (name, own), marker in zip(found["bits"].items(), "ox^s", strict=True):
        line(middle, {budget: one["nll"] for budget, one in own.items()}, f"{marker}-", name)
    middle.axhline(found["plain"]["nll"]["mean"], color="0.6", linewidth=1, label="not rounded")
    middle.set(xlabel="bits for a weight on average", xticks=[*own], **nll)
    middle.set(title="bits of each matrix chosen")
    for name, style in zip(("drawn", *names), ("ko", "-", "--"), strict=False):
        line(right, {spread: one[name] for spread, one in found["devices"].items()}, style, name)
    right.set(xlabel="sd of a weight, over its magnitude", ylabel="expected NLL (nats)")
    right.set(title="devices of analogue memory", yscale="log")
    for axis in (left.xaxis, left.yaxis, middle.yaxis, right.yaxis):  # plain numbers, a few
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())
    for axis in (left, middle, right):
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, fontsize=7)
    return drawn


def _print(found: dict[str, Any]) -> None:
    tables = {
        "predicted NLL": found["prediction"],
        "bits for a weight": {
            name: {f"{k}, {b:g}": one[k] for b, one in own.items() for k in ("nll", "accuracy")}
            for name, own in found["bits"].items()
        },
        "devices, by noise": {f"{spread:g}": one for spread, one in found["devices"].items()},
        f"devices of noise {TRAINED_AT:g}": found["training"],
        "": {"plain, without noise": found["plain"]},
    }  # fmt: skip
    for title, rows in tables.items():
        cells = [[name, *map(with_error, row.values())] for name, row in rows.items()]
        print(aligned([[title, *next(iter(rows.values()))], *cells]), end="\n\n")
