"""Random covariances and beliefs shared by the tests."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moment_jax.covariance import STRUCTURES, BatchSeparable, Covariance, Separable, TokenCorrelated
from moment_jax.layers import (
    AttentionParams,
    DecoderBlockParams,
    DenseParams,
    EncoderBlockParams,
    FeedForwardParams,
    NormParams,
)
from moment_jax.nn import VisionTransformer
from moment_jax.posterior import (
    Factorized,
    FullNormal,
    MatrixNormal,
    OutputShared,
    Point,
    Posterior,
)

Array = jax.Array

# Without a batch `BatchSeparable` is `Separable`: tests/covariance/test_batch_separable.py.
ALL_STRUCTURES = [s for s in STRUCTURES.values() if s is not BatchSeparable]
KERNEL_FAMILIES = [Point, Factorized, OutputShared, MatrixNormal, FullNormal]
VECTOR_FAMILIES = [Point, Factorized, FullNormal]


def draws(key: Array, *salt: int) -> np.random.Generator:
    """NumPy's random numbers, since jax would compile a program for every shape of an array."""
    words = np.ravel(jax.random.key_data(key))
    return np.random.default_rng([*map(int, words), *salt])


def random_psd(key: Array, size: int, rank: int | None = None) -> Array:
    """A random positive semidefinite matrix with a trace of about its size."""
    return jnp.asarray(_psd(draws(key), size, rank))


def _psd(random: np.random.Generator, size: int, rank: int | None = None) -> np.ndarray:
    factor = random.normal(size=(size, rank or 2 * size))
    return factor @ factor.T / factor.shape[1]


def random_dense(key: Array, shape: tuple[int, int], scale: float = 1.0) -> Array:
    """A random dense (T, D, T, D) covariance."""
    t, d = shape
    return jnp.asarray(scale**2 * _psd(draws(key), t * d).reshape(t, d, t, d))


def random_cov(
    key: Array, structure: type[Covariance], shape: tuple[int, int], scale: float = 1.0
) -> Covariance:
    """A random member of a structure; signed scales where the structure has them."""
    random, (t, d) = draws(key, 1), shape
    signs = np.sign(random.normal(size=shape))
    if structure is Separable:
        signs = np.sign(random.normal(size=(t, 1)) * random.normal(size=(1, d)))
    return _member(structure, random_dense(key, shape, scale), signs)


@functools.partial(jax.jit, static_argnums=0)
def _member(structure: type[Covariance], dense: Array, signs: Array) -> Covariance:
    cov = structure.project(dense)
    if structure is Separable:  # its operations on features are exact only for scales of rank one
        cov = rank_one(cov)
    return cov.rescale(signs) if structure in (Separable, TokenCorrelated) else cov


def rank_one(cov: Covariance) -> Covariance:
    """With a scale of rank one, so that projecting again is exact; other structures unchanged."""
    if not isinstance(cov, Separable | TokenCorrelated):
        return cov
    tokens, features = (jnp.mean(cov.scale, axis=a, keepdims=True) for a in (1, 0))
    scale = tokens * features / jnp.mean(cov.scale)
    known = {"sum_variance": None} if isinstance(cov, Separable) else {}
    return dataclasses.replace(cov, scale=scale, **known)


def random_kernel(
    key: Array, family: type[Posterior], shape: tuple[int, int], scale: float = 1.0
) -> Posterior:
    """A random kernel belief of any family."""
    random, (rows, columns) = draws(key), shape
    mean = random.normal(size=shape) / rows**0.5
    size = scale**2 / rows
    fields = {
        Point: lambda: (),
        Factorized: lambda: (size * random.uniform(0.2, 1, shape),),
        OutputShared: lambda: (size * random.uniform(0.2, 1, columns),),
        MatrixNormal: lambda: (size * _psd(random, rows), _psd(random, columns)),
        FullNormal: lambda: (size * _psd(random, rows * columns).reshape(*shape, *shape),),
    }[family]()
    return family(*map(jnp.asarray, (mean, *fields)))


def random_vector(
    key: Array, family: type[Posterior], size: int, scale: float = 1.0, centre: float = 0.0
) -> Posterior:
    """A random belief about a bias or a gain."""
    random = draws(key)
    mean = jnp.asarray(centre + 0.5 * random.normal(size=size))
    if family is Point:
        return Point(mean)
    if family is FullNormal:
        return FullNormal(mean, jnp.asarray(scale**2 * _psd(random, size)))
    return Factorized(mean, jnp.asarray(scale**2 * random.uniform(0.2, 1, size)))


def random_dense_params(
    key: Array, family: type[Posterior], shape: tuple[int, int], scale: float = 1.0
) -> DenseParams:
    """A random dense layer; its bias has the same family where that family has vectors."""
    keys = jax.random.split(key)
    vector = family if family in VECTOR_FAMILIES else Factorized
    return DenseParams(
        random_kernel(keys[0], family, shape, scale),
        random_vector(keys[1], vector, shape[1], 0.3 * scale),
    )


def random_block(
    key: Array,
    features: int,
    hidden: int,
    scale: float = 0.1,
    family: type[Posterior] = Factorized,
) -> EncoderBlockParams:
    """A random encoder block whose weights have a sd of about scale / sqrt(fan_in)."""
    keys = jax.random.split(key, 10)

    def dense(index: int, shape: tuple[int, int]) -> DenseParams:
        return random_dense_params(keys[index], family, shape, scale)

    def norm(index: int) -> NormParams:
        vector = family if family in VECTOR_FAMILIES else Factorized
        return NormParams(
            random_vector(keys[index], vector, features, 0.3 * scale, 1.0),
            random_vector(keys[index + 1], vector, features, 0.3 * scale),
        )

    square = (features, features)
    return EncoderBlockParams(
        AttentionParams(*(dense(i, square) for i in range(4))),
        norm(4),
        FeedForwardParams(dense(6, (features, hidden)), dense(7, (hidden, features))),
        norm(8),
    )


def decoder_of(
    first: EncoderBlockParams, second: EncoderBlockParams | None = None
) -> DecoderBlockParams:
    """A decoder block of the layers of two encoder blocks; without a second, of one."""
    second = second or first
    return DecoderBlockParams(
        first.attention,
        first.norm1,
        second.attention,
        second.norm1,
        second.feed_forward,
        second.norm2,
    )


def tiny_vision(**options: Any) -> VisionTransformer:
    """A vision Transformer of one block for 4 x 4 images; keywords override its options."""
    options = {"num_blocks": 1, "hidden_features": 6, "activation": "relu", **options}
    sizes = {"image_size": 4, "patch_size": 2, "num_classes": 3, "num_features": 4, "num_heads": 2}
    return VisionTransformer(**{**sizes, "rngs": nnx.Rngs(0), **options})


def assert_close(actual: Array, expected: Array, tolerance: float = 1e-10) -> None:
    """Assert that float64 arrays agree up to rounding, relative to the largest entry."""
    actual, expected = np.asarray(actual), np.asarray(expected)  # jax would compile each operation
    assert 0 in (actual.ndim, expected.ndim) or actual.ndim == expected.ndim
    difference = np.max(np.abs(actual - expected))
    size = max(1.0, np.max(np.abs(expected)))
    assert difference <= tolerance * size, f"largest difference {difference}, of {size}"
