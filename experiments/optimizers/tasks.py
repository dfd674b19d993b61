"""The tasks of the comparison: networks of Flax, losses, batches, and what is held out."""

import sysconfig
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array
from sklearn.datasets import load_sample_image

import moment_jax as mj
from experiments import data
from experiments.seq2seq import data as temperatures

Batch = tuple[Array, ...]
Loss = Callable[..., tuple[Array, mj.optim.Prediction]]  # (model, *batch) -> (loss, prediction)

LENGTH, FORECAST = 96, 24  # hours known, in twelve tokens, and hours wanted
WINDOW = 64  # characters
MODULES = (
    "turtle", "doctest", "pickle", "mailbox", "optparse", "difflib", "statistics", "configparser",
    "ftplib", "threading",
)  # fmt: skip
READ = ("inspect", "typing", "pydoc", "argparse", "tarfile", "subprocess", "zipfile", "ast")
HELD_OUT = ("smtplib", "enum")
KEPT = np.array([9, 10, *range(32, 127)])  # characters, by their codes
NEVER = "never seen when they were chosen"


class OptimizerTask(NamedTuple):
    """One comparison."""

    name: str
    create: Callable[[int], nnx.Module]  # seed -> an untrained model
    loss: Loss
    batch: Callable[[Array, Array], Batch]  # (key, step) -> the examples of an update
    train: Batch  # on which the loss is followed
    held_out: Batch
    num_steps: int
    defaults: str = "chosen on it and others"  # how those of second order know the task


class Block(nnx.Module):
    """A block, normalised first."""

    def __init__(self, width: int, causal: bool, rngs: nnx.Rngs) -> None:
        self.norm1, self.norm2 = (nnx.LayerNorm(width, rngs=rngs) for _ in range(2))
        self.inputs = nnx.List(nnx.Linear(width, width, rngs=rngs) for _ in range(3))
        self.mixed = nnx.Linear(width, width, rngs=rngs)
        self.hidden = nnx.Linear(width, 4 * width, rngs=rngs)
        self.output, self.causal = nnx.Linear(4 * width, width, rngs=rngs), causal

    def __call__(self, x: Array) -> Array:
        """(N, T, D) -> (N, T, D)."""
        z = self.norm1(x)
        heads = [each(z).reshape(*x.shape[:2], 4, -1) for each in self.inputs]
        attended = jax.nn.dot_product_attention(*heads, is_causal=self.causal)
        x = x + self.mixed(attended.reshape(x.shape))
        return x + self.output(nnx.gelu(self.hidden(self.norm2(x))))


class Transformer(nnx.Module):
    """Two blocks over symbols or patches, and a head of each token, of their mean, or of all."""

    def __init__(
        self, seed: int, *, tokens: int, width: int, outputs: int, patch: int = 0, symbols: int = 0,
        read: str = "each",
    ) -> None:  # fmt: skip
        rngs, start = nnx.Rngs(seed), nnx.initializers.normal(0.02)
        table = nnx.Embed(symbols or outputs, width, embedding_init=start, rngs=rngs)
        self.embed = nnx.Linear(patch, width, rngs=rngs) if patch else table
        self.positions = nnx.Param(start(rngs.params(), (tokens, width)))
        self.blocks = nnx.List(Block(width, read == "each", rngs) for _ in range(2))
        self.norm, self.read = nnx.LayerNorm(width, rngs=rngs), read
        self.head = nnx.Linear(width * (tokens if read == "all" else 1), outputs, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        """(N, T) symbols or (N, T, patch) -> (N, T, outputs) or (N, outputs)."""
        x = self.embed(x) + self.positions[...]
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if self.read != "each":
            x = x.mean(axis=1) if self.read == "mean" else x.reshape(len(x), -1)
        return self.head(x)


def _perceptron(seed: int, widths: Sequence[int], activation: Any) -> nnx.Module:
    """Dense layers with an activation between them, but for none at the narrowest and at the end."""
    rngs, narrow = nnx.Rngs(seed), min(widths)
    layers: list[Any] = []
    for before, after in pairwise(widths):
        layers += [nnx.Linear(before, after, rngs=rngs), *[activation] * (after > narrow)]
    return nnx.Sequential(*layers[: len(layers) - (widths[-1] > narrow)])


def _classes(model: Any, x: Array, labels: Array) -> tuple[Array, mj.optim.Prediction]:
    logits = model(x)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean(), mj.optim.CategoricalPrediction(logits)


def _pixels(model: Any, pixels: Array) -> tuple[Array, mj.optim.Prediction]:
    output = model(pixels)
    return jnp.sum((output - pixels) ** 2, -1).mean() / 2, mj.optim.NormalPrediction(output)


def _patches(model: Any, before: Array, after: Array) -> tuple[Array, mj.optim.Prediction]:
    output = model(before)
    return jnp.sum((output - after) ** 2, (1, 2)).mean() / 2, mj.optim.NormalPrediction(output)


def _hours(model: Any, past: Array, future: Array) -> tuple[Array, mj.optim.Prediction]:
    output = model(past)
    return jnp.mean((output - future) ** 2), mj.optim.NormalPrediction(output, 12**0.5)


def _task(
    name: str, create: Callable[[int], nnx.Module], loss: Loss, arrays: Sequence[np.ndarray],
    held_out: Sequence[np.ndarray], size: int, shown: int = 500,
) -> OptimizerTask:  # fmt: skip
    """Batches in epochs; the loss is followed on examples spread over the training data."""

    def batch(key: Array, step: Array) -> Batch:
        chosen = data.batch_indices(key, step, len(arrays[0]), size)
        return tuple(jnp.asarray(array)[chosen] for array in arrays)

    train = tuple(jnp.asarray(array[:: len(arrays[0]) // shown]) for array in arrays)
    return OptimizerTask(name, create, loss, batch, train, tuple(map(jnp.asarray, held_out)), 400)


def _symbols(text: str) -> np.ndarray:
    """Characters as 1 to 97; 0 is any other."""
    codes = np.frombuffer(text.encode("ascii", "ignore"), np.uint8)
    return np.where(np.isin(codes, KEPT), 1 + np.searchsorted(KEPT, codes), 0).astype(np.int32)


def _library(name: str) -> str:
    """The source of a module of Python's."""
    return (Path(sysconfig.get_paths()["stdlib"]) / f"{name}.py").read_text("utf-8")


def _characters() -> OptimizerTask:
    """Modules of Python's library, in its own characters; other modules are held out."""

    def windows(names: Sequence[str], count: int) -> np.ndarray:
        ids = _symbols("".join(map(_library, names)))
        starts = np.linspace(0, len(ids) - WINDOW - 1, count).astype(int)
        return ids[starts[:, None] + np.arange(WINDOW + 1)]

    text, held_out = windows(READ, 8000), windows(HELD_OUT, 48)
    create = partial(Transformer, tokens=WINDOW, width=64, outputs=len(KEPT) + 1)
    first, later = ((ids[:, :-1], ids[:, 1:]) for ids in (text, held_out))
    return _task("GPT, characters", create, _classes, first, later, 16, 48)._replace(num_steps=300)


def _lines() -> OptimizerTask:
    """Which module a line of Python's library is from; every tenth line is held out."""
    ids: list[np.ndarray] = []
    labels: list[int] = []
    for label, name in enumerate(MODULES):
        lines = dict.fromkeys(line.strip()[:WINDOW] for line in _library(name).splitlines())
        ids += [
            _symbols(f"{line:<{WINDOW}}") for line in lines if len(line) > 20 and line.isascii()
        ]
        labels += [label] * (len(ids) - len(labels))
    every = np.arange(len(ids)) % 10 == 0
    arrays = np.stack(ids), np.array(labels, np.int32)
    first, later = (tuple(array[part] for array in arrays) for part in (~every, every))
    sizes = {"tokens": WINDOW, "width": 48, "outputs": len(MODULES), "symbols": len(KEPT) + 1}
    create = partial(Transformer, **sizes, read="mean")
    return _task("lines to modules", create, _classes, first, later, 32)


def _pixels_of_digits() -> OptimizerTask:
    """A digit's pixels one after another, each a grey of 17; every tenth digit is held out."""
    ids = np.round(16 * data.pixels().reshape(-1, 64)).astype(np.int32)
    every = np.arange(len(ids)) % 10 == 0
    first, later = ((ids[part][:, :-1], ids[part][:, 1:]) for part in (~every, every))
    create = partial(Transformer, tokens=63, width=48, outputs=17)
    return _task("greys of digits", create, _classes, first, later, 32)._replace(defaults=NEVER)


def _next_patches() -> OptimizerTask:
    """Along strips of a photograph of Scikit-learn, each patch by those before; each sixth held out."""
    image = load_sample_image("flower.jpg")[:424:2, ::2].astype(np.float32)
    scaled = ((image - image.mean()) / image.std()).reshape(53, 4, 80, 4, 3)
    patches = scaled.swapaxes(1, 2).reshape(53, 80, 48)
    windows = np.lib.stride_tricks.sliding_window_view(patches, 17, axis=1).swapaxes(2, 3)
    every = np.arange(len(windows)) % 6 == 0
    parts = (windows[part].reshape(-1, 17, 48) for part in (~every, every))
    first, later = ((x[:, :-1], x[:, 1:]) for x in parts)
    create = partial(Transformer, tokens=16, width=64, outputs=48, patch=48)
    return _task("next patches", create, _patches, first, later, 32)._replace(defaults=NEVER)


def _mnist(name: str, create: Callable[[int], nnx.Module], patch: int, size: int) -> OptimizerTask:
    """Images of MNIST as patches (N, T, patch^2), or whole if there is one; 500 are held out."""
    parts = data.divided(*data.mnist5k(), 28, 500, 0)
    side = 28 // patch

    def cut(part: data.Images) -> tuple[np.ndarray, np.ndarray]:
        x = part.images.reshape(-1, side, patch, side, patch).swapaxes(2, 3)
        return x.reshape((len(x), side**2, patch**2) if side > 1 else (len(x), -1)), part.labels

    return _task(name, create, _classes, cut(parts.train), cut(parts.test), size)


def _series() -> OptimizerTask:
    """A day of temperatures from four, by changes since the last hour; the last fifth is held out."""
    series = temperatures.load().temperature
    series = ((series - series.mean()) / series.std()).astype(np.float32)
    windows = np.lib.stride_tricks.sliding_window_view(series, LENGTH + FORECAST)
    windows = windows - windows[:, LENGTH - 1 : LENGTH]
    past = windows[:, :LENGTH].reshape(len(windows), 12, -1)
    future, cut = windows[:, LENGTH:], int(0.8 * len(windows))
    later = slice(cut + LENGTH + FORECAST, None, 2)
    create = partial(Transformer, tokens=12, width=48, outputs=FORECAST, patch=8, read="all")
    parts = (past[:cut], future[:cut]), (past[later], future[later])
    task = _task("series, patches", create, _hours, *parts, 32, 1200)
    return task._replace(defaults="not chosen on it, but looked at")


def _autoencoder() -> OptimizerTask:
    """Digits through 16 numbers; half the squared error of an image, pixels in [0, 1]."""
    pixels = np.random.default_rng(0).permutation(data.pixels().reshape(-1, 64))
    create = partial(_perceptron, widths=(64, 96, 48, 16, 48, 96, 64), activation=nnx.gelu)
    return _task("autoencoder, digits", create, _pixels, (pixels[:1400],), (pixels[1400:],), 32)


_vit = partial(Transformer, tokens=16, width=48, outputs=10, patch=49, read="mean")
_mlp = partial(_perceptron, widths=(784, 160, 160, 160, 10), activation=nnx.relu)
TASKS: dict[str, Callable[[], OptimizerTask]] = {
    "gpt": _characters,
    "vit": partial(_mnist, "ViT, mnist5k", _vit, 7, 32),
    "series": _series,
    "autoencoder": _autoencoder,
    "mlp": partial(_mnist, "MLP, mnist5k", _mlp, 28, 64),
    "lines": _lines,
    "greys": _pixels_of_digits,
    "strips": _next_patches,
}
"""Every task by name."""
