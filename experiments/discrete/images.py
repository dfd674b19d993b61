"""Binary images for autoencoders: scikit-learn's digits, split once and for all."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from sklearn.model_selection import train_test_split

from experiments import data


class ImageSet(NamedTuple):
    """Images (N, size, size) whose pixels are 0 or 1."""

    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray

    @property
    def image_size(self) -> int:
        """Height and width."""
        return int(self.train.shape[1])


def digits() -> ImageSet:
    """1,797 images of 8 x 8 pixels: 1,147 to train, 150 to choose settings by, 500 to test.

    A pixel is 0 or 1, whichever is nearer. The split is the same for every --seed: runs are to be
    compared on the same images.
    """
    images = (data.pixels() >= 0.5).astype(np.float32)
    options = {"random_state": data.SPLIT_SEED}
    rest, test = train_test_split(images, test_size=data.NUM_TEST, **options)
    train, validation = train_test_split(rest, test_size=data.NUM_VALIDATION, **options)
    return ImageSet(train, validation, test)
