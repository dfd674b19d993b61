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
from jax import Array
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
from experiments.rounding.bits import BITS, ways
from experiments.rounding.noise import Arrays, Programs
from experiments.training import Task, clipped_adam, fit

SIZES: dict[str, dict[str, int]] = {  # of 16 and 49 tokens
    "digits": {"num_blocks": 1, "image_size": 8, "patch_size": 2, "num_features": 32},
    "mnist5k": {"num_blocks": 2, "image_size": 28, "patch_size": 4, "num_features": 48},
}
# The first's gives the gradient.
STRUCTURES: tuple[type[mj.Covariance], ...] = (mj.Separable, mj.Diagonal)
BATCH = 32  # of plain training
ROWS = 128  # validation images, and those of an update with noise
ALLOCATIONS = 24  # at random, of 2 to 6 bits
WHOLE = 16  # bits that change nothing
DRAWS = 8  # for a gradient by draws; as often as takes the time of one pass's
SPREADS = (0.05, 0.1, 0.2, 0.3)  # of a weight on a device, over its magnitude
TRAINED_AT = 0.2

Points = dict[str, list[float]]
"""NLLs of rounded networks: those predicted in each structure, and the actual ones."""


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
    start, least, most = time.perf_counter(), *BITS[[0, -1]]
    if not least <= min(args.budget) <= max(args.budget) <= most:
        given = " ".join(f"{budget:g}" for budget in args.budget)
        raise InputError(f"--budget {given} cannot be met; needs numbers from {least} to {most}")
    seeds = range(args.seed, args.seed + args.seeds)
    task = images.load(args.data, seeds)
    out = writable_folder(args.out or Path("runs/rounding") / args.data, "--out")
    programs, records, points = None, [], []
    for place, seed in enumerate(seeds):
        parts = [Images(part.images[place], part.labels[place]) for part in task[:3]]
        sizes = SIZES[args.data]
        options = {"hidden_features": 2 * sizes["num_features"], "position_scale": 0.5, **sizes}
        network = vision_transformer(seed, **options)
        adam = clipped_adam(3e-3, args.steps, weight_decay=0.1)
        plain = Task(f"seed {seed}", _loss, adam, args.steps)
        network = fit(plain, network, (jax.random.key(seed), parts[0])).model
        programs = programs or Programs(network, STRUCTURES)
        arrays = noise.weights(network)
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


def _loss(model: Any, given: Any, step: jax.Array) -> jax.Array:
    pixels, labels = data.mini_batch(given[0], step, given[1], BATCH)
    return optax.softmax_cross_entropy_with_integer_labels(model(pixels), labels).mean()


def measured(
    programs: Programs, arrays: Arrays, parts: list[Images], args: Any, seed: int
) -> tuple[dict[str, Any], Points]:
    """All figures of one trained network, and the NLLs of the networks rounded at random."""
    train, test = parts[0], parts[2]
    rows = Images(parts[1].images[:ROWS], parts[1].labels[:ROWS])
    keys = jax.random.split(jax.random.key(seed), args.devices)

    def drawn(keys: Array, *given: Any) -> Any:
        return programs.drawn_gradient(*given, keys)

    def one_pass(_: Array, *given: Any) -> Any:
        return programs.gradient(*given)

    def timed(of: Any, count: int) -> Any:
        own = noise.relative_sd(arrays, TRAINED_AT)
        return lambda: jax.block_until_ready(of(keys[:count], arrays, own, *rows))

    took = interleaved({"": timed(one_pass, 1), "1": timed(drawn, 1), "8": timed(drawn, DRAWS)}, 5)
    many = max(1, round(took[""] / took["8"]))
    updates = {"plain": 0, "drawn noise": round(args.updates * took[""] / took["1"])}
    updates["one pass"] = args.updates

    def often(*given: Any) -> Any:
        each = [drawn(some, *given) for some in jax.random.split(keys[0], (many, DRAWS))]
        return jax.tree.map(lambda *values: sum(values) / many, *each)

    points = _predictions(programs, arrays, rows, seed)
    choose = ways(programs, arrays, rows, often)
    tops, bits, allocations, devices, training = noise.largest(arrays), {}, {}, {}, {}
    for name, way in choose.items():
        chosen = allocations[name] = {budget: way(budget) for budget in args.budget}
        values = {budget: noise.rounded(arrays, tops, own) for budget, own in chosen.items()}
        bits[name] = {budget: _scored(programs.nll, own, *test) for budget, own in values.items()}
    for spread in SPREADS:
        given = arrays, noise.relative_sd(arrays, spread), *rows
        devices[spread] = {name: float(of(*given)) for name, of in programs.values.items()}
        devices[spread]["drawn"] = float(programs.drawn(*given, keys)[0])
    for name, count in updates.items():
        gradient = one_pass if name == "one pass" else lambda key, *given: drawn(key[None], *given)
        own = noise.trained(gradient, arrays, train, ROWS, TRAINED_AT, count, seed)
        noisy = own, noise.relative_sd(own, TRAINED_AT), *test, keys
        training[name] = _scored(programs.drawn, *noisy)
    record = {
        "plain": _scored(programs.nll, arrays, *test), "draws_for_bits": many * DRAWS,
        "updates": updates,
        "prediction": _agreement(points),
        "bits": bits, "allocations": jax.tree.map(np.ndarray.tolist, allocations),
        "devices": devices, "training": training,
    }  # fmt: skip
    return record, points


def _scored(program: Any, *given: Any) -> dict[str, float]:
    """By one of the programs that give two figures."""
    return dict(zip(("nll", "accuracy"), map(float, program(*given)), strict=True))


def _predictions(programs: Programs, arrays: Arrays, rows: Images, seed: int) -> Points:
    """Of networks whose matrices are rounded at random."""
    tops, rng = noise.largest(arrays), np.random.default_rng(seed)
    found: Points = {name: [] for name in (*programs.values, "actual")}
    for _ in range(ALLOCATIONS):
        bits = list(rng.integers(2, 7, len(tops)))
        sd, values = (f(arrays, tops, bits) for f in (noise.rounding_sd, noise.rounded))
        for name, predict in programs.values.items():
            found[name].append(float(predict(arrays, sd, *rows)))
        found["actual"].append(float(programs.nll(values, *rows)[0]))
    return found


def _agreement(found: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Of each structure's predictions and the truth: correlation of the logs, median ratio."""
    logs = {name: np.log(values) for name, values in found.items()}
    actual = logs.pop("actual")
    return {
        name: {
            "correlation": float(np.corrcoef(own, actual)[0, 1]),
            "ratio": float(np.exp(np.median(own - actual))),
        }
        for name, own in logs.items()
    }


@plt.rc_context({**STYLE, **plt.style.library["tableau-colorblind10"]})
def figure(points: list[Points], found: dict[str, Any]) -> Figure:
    """Predictions against the truth, NLL by bits, and NLL of devices by their noise."""
    drawn, (left, middle, right) = plt.subplots(1, 3, figsize=(10.5, 3.6))
    names = [s.__name__ for s in STRUCTURES]
    actual = np.concatenate([one["actual"] for one in points])
    for name, marker in zip(names, "ox", strict=False):
        own = np.concatenate([one[name] for one in points])
        left.plot(actual, own, marker, markersize=3, label=name)
    ends = actual.min(), actual.max()
    left.plot(ends, ends, color="0.6", linewidth=1, label="equal")
    left.set(xscale="log", yscale="log", xlabel="NLL of the rounded network (nats)")
    left.set(ylabel="expected NLL by one pass (nats)", title="matrices rounded to 2 to 6 bits")
    for (name, own), marker in zip(found["bits"].items(), "ox^sD", strict=True):
        mean, error = ([one["nll"][k] for one in own.values()] for k in ("mean", "error"))
        line = {"marker": marker, "markersize": 4, "capsize": 2, "label": name}
        middle.errorbar([*own], mean, np.nan_to_num(error), **line)
    middle.axhline(found["plain"]["nll"]["mean"], color="0.6", linewidth=1, label="not rounded")
    middle.set(yscale="log", xlabel="bits for a weight on average", ylabel="NLL, test (nats)")
    middle.set(title="bits of each matrix chosen", xticks=[*own])
    for name, style in zip(("drawn", *names), ("ko", "-", "--"), strict=False):
        mean, error = (
            [one[name][k] for one in found["devices"].values()] for k in ("mean", "error")
        )
        given = [*found["devices"]], mean, np.nan_to_num(error)
        right.errorbar(*given, fmt=style, capsize=2, markersize=4, label=name)
    right.set(
        yscale="log", xlabel="sd of a weight, over its magnitude", ylabel="expected NLL (nats)"
    )
    right.set(title="devices of analogue memory")
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
    }
    for title, rows in tables.items():
        cells = [[name, *map(with_error, row.values())] for name, row in rows.items()]
        print(aligned([[title, *next(iter(rows.values()))], *cells]), end="\n\n")
