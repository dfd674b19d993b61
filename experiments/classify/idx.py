"""The IDX files of MNIST and its kin: images and labels of one part, as published or gzipped."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np

from experiments.command_line import InputError


def read(folder: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Images (N, H, W) and labels (N,), bytes both, of the part "train" or "t10k"."""
    pixels = _array(folder, f"{part}-images-idx3-ubyte", 3)
    labels = _array(folder, f"{part}-labels-idx1-ubyte", 1)
    if len(pixels) != len(labels):
        raise InputError(f"{folder} has {len(pixels)} images and {len(labels)} labels of {part}")
    return pixels, labels


def _array(folder: Path, name: str, ndim: int) -> np.ndarray:
    """Two zero bytes, the type (8: unsigned bytes), the number of axes, their lengths, the bytes."""
    path = next((p for p in (folder / name, folder / f"{name}.gz") if p.is_file()), None)
    if path is None:
        raise InputError(f"{folder} has neither {name} nor {name}.gz")
    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix == ".gz" else content
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} cannot be read ({error})") from error
    head = 4 + 4 * ndim
    shape = np.frombuffer(content[4:head], ">u4")
    if content[:4] != bytes([0, 0, 8, ndim]) or len(content) - head != np.prod(shape, dtype=int):
        raise InputError(f"{path} is no whole IDX file of unsigned bytes with {ndim} axes")
    return np.frombuffer(content, np.uint8, offset=head).reshape(shape)
