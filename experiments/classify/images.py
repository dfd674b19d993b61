"""Images to classify, rotated, and outside all classes; and the vision Transformer that does it."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from sklearn.datasets import load_digits, load_sample_images

import moment_jax as mj
from experiments import data
from experiments.data import Images
from experiments.networks import bayesian, vision_transformer

ANGLES = (0, 15, 30, 45, 60, 75, 90)
SIZES: dict[str, Any] = {"num_features": 32, "hidden_features": 64, "num_blocks": 1}
# As large as the patches, so that attention can tell places apart.
SIZES |= {"position_scale": 1.0}
STRUCTURE: type[mj.Covariance] = mj.Separable
LETTERS = "ABCEFGHJKLMNPRTUVWXY"  # none that is also a digit's shape


class Task(NamedTuple):
    """A data set divided at random into three parts, L times."""

    train: Images  # images (L, N, H, W), labels (L, N)
    validation: Images
    test: Images
    background: np.ndarray  # (L,), the value of an empty pixel
    patch_size: int


def load(name: str, divisions: Iterable[int]) -> Task:
    """The images of a data set, divided with each of these random seeds."""
    pixels, labels, patch_size = SETS[name]()
    each = [data.divided(pixels, labels, pixels.shape[-1], 0.2, seed) for seed in divisions]
    stack: tuple[Images, Images, Images, np.ndarray] = jax.tree.map(
        lambda *leaves: np.stack(leaves), *each
    )
    return Task(*stack, patch_size)


def _digits() -> tuple[np.ndarray, np.ndarray, int]:
    pixels, labels = load_digits(return_X_y=True)
    return pixels.reshape(-1, 8, 8) / 16, labels, 2


def _mnist5k() -> tuple[np.ndarray, np.ndarray, int]:
    pixels, labels = data.mnist5k()
    return pixels / 255, labels, 7


SETS: dict[str, Callable[[], tuple[np.ndarray, np.ndarray, int]]] = {
    "digits": _digits,
    "mnist5k": _mnist5k,
}


def turned(images: np.ndarray, angle: float, background: np.ndarray) -> np.ndarray:
    """Images (L, N, H, W) turned by an angle in degrees, with new corners empty."""
    pairs = zip(images, background, strict=True)
    return np.stack([data.turned(some, angle, empty) for some, empty in pairs])


def others(task: Task, count: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Images (L, count, H, W) that are none of the classes, in each division's scale of grey."""
    images = task.test.images[:, :count]
    side = images.shape[-1]
    random = np.random.default_rng(seed)
    low = task.background[:, None, None, None]
    high = np.quantile(images, 0.99, axis=(1, 2, 3), keepdims=True)
    shuffled = random.permuted(images.reshape(*images.shape[:2], -1), axis=2)
    found = {
        "letters": low + (high - low) * _letters(count, side, random),
        "photographs": low + (high - low) * _photographs(count, side, random),
        "inverted": high + low - images,
        "shuffled pixels": shuffled.reshape(images.shape),
    }
    return {name: given.astype(np.float32) for name, given in found.items()}


def _letters(count: int, side: int, random: np.random.Generator) -> np.ndarray:
    """Letters of matplotlib's fonts, upright and black, in [0, 1]."""
    drawn = []
    for family in ("DejaVu Sans", "DejaVu Serif", "DejaVu Sans Mono"):
        for letter in LETTERS + LETTERS.lower():
            figure = Figure(figsize=(1, 1), dpi=8 * side)
            canvas = FigureCanvasAgg(figure)
            figure.text(0.5, 0.48, letter, family=family, fontsize=62, ha="center", va="center")
            canvas.draw()
            grey = 1 - np.asarray(canvas.buffer_rgba())[..., 0] / 255
            drawn.append(grey.reshape(side, 8, side, 8).mean(axis=(1, 3)))
    chosen = np.stack(drawn)[random.integers(len(drawn), size=count)]
    shift = random.integers(-side // 16, side // 16 + 1, size=(count, 2))
    moved = [np.roll(one, by, axis=(0, 1)) for one, by in zip(chosen, shift, strict=True)]
    return np.stack(moved).astype(np.float32)


def _photographs(count: int, side: int, random: np.random.Generator) -> np.ndarray:
    """Parts of the two photographs that scikit-learn ships, each over its whole range of grey."""
    photographs = [image.mean(axis=2) for image in load_sample_images().images]
    parts = []
    for number in range(count):
        whole = photographs[number % len(photographs)]
        top, left = (random.integers(length - 8 * side + 1) for length in whole.shape)
        part = whole[top : top + 8 * side, left : left + 8 * side]
        part = part.reshape(side, 8, side, 8).mean(axis=(1, 3))
        parts.append((part - part.min()) / max(np.ptp(part), 1e-6))
    return np.stack(parts).astype(np.float32)


def classifier(image_size: int, patch_size: int, key: Array) -> mj.Bayesian:
    """A new model of square images."""
    network = vision_transformer(key, image_size=image_size, patch_size=patch_size, **SIZES)
    return bayesian(network, structure=STRUCTURE)
