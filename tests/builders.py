"""Random covariances and beliefs shared by the tests."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moment_jax.covariance import STRUCTURES, Covariance, Separable, register_fields
from moment_jax.layers import (
    AttentionParams,
    DecoderBlockParams,
    DenseParams,
    EncoderBlockParams,
    FeedForwardParams,
    NormParams,
)
from moment_jax.nn import DecoderBlock, EncoderBlock, VisionTransformer
from moment_jax.posterior import (
    Factorized,
    FullNormal,
    KroneckerEigen,
    OutputShared,
    Point,
    Posterior,
)

Array = jax.Array

ALL_STRUCTURES = list(STRUCTURES.values())


def quickly(structure: type[Covariance]) -> pytest.MarkDecorator:
    """For laws that take long to compile: this structure, and in the slow part the others too."""
    others = [pytest.param(s, marks=pytest.mark.slow) for s in ALL_STRUCTURES if s is not structure]
    return pytest.mark.parametrize("structure", [structure, *others])


KERNEL_FAMILIES = [Point, Factorized, OutputShared, KroneckerEigen, FullNormal]
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
    """A random member of a structure, with correlations of both signs."""
    return _member(structure, random_dense(key, shape, scale))


@functools.partial(jax.jit, static_argnums=0)
def _member(structure: type[Covariance], dense: Array) -> Covariance:
    return member(structure.project(dense))


def member(cov: Covariance) -> Covariance:
    """Of the family Cov[x_td, x_se] = G_ts C_de / tr C if `Separable`; other structures unchanged."""
    if not isinstance(cov, Separable):
        return cov
    variances = jnp.diagonal(cov.tokens)[:, None] * cov.shares()[None]
    return dataclasses.replace(cov, variances=variances)


def define_pairs() -> type[Covariance]:
    """A user's structure: tokens 2i and 2i + 1 are correlated, all others independent."""

    @register_fields
    @dataclasses.dataclass(frozen=True)
    class Pairs(Covariance):
        cov: Array  # (T, D, T, D), zero between pairs

        num_axes = 4

        @classmethod
        def zeros(cls, shape, dtype=jnp.float32, landmarks=None):
            return cls(jnp.zeros(2 * shape, dtype))

        @classmethod
        def project(cls, dense):
            pair = jnp.arange(dense.shape[0]) // 2
            return cls(jnp.where((pair[:, None] == pair[None])[:, None, :, None], dense, 0))

        def to_dense(self):
            return self.cov

    return Pairs


Pairs = define_pairs()


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
        KroneckerEigen: lambda: (
            *(np.linalg.qr(random.normal(size=(n, n)))[0] for n in shape),
            size * random.uniform(0.2, 1, shape),
        ),
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
    key: Array, features: int, hidden: int, scale: float = 0.1, family: type[Posterior] = Factorized
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


# Parameter groups and the trees of Flax's networks, as `nnx.to_pure_dict(nnx.state(net, nnx.Param))` and
# `mj.Bayesian(net).beliefs` are. Leaves are arrays or beliefs.


def in_shape(leaf: Any, shape: tuple[int, ...]) -> Any:
    """An array or a belief in another shape."""
    if isinstance(leaf, OutputShared | KroneckerEigen):
        return dataclasses.replace(leaf, mean=leaf.mean.reshape(shape))
    if isinstance(leaf, FullNormal):
        return FullNormal(leaf.mean.reshape(shape), leaf.cov.reshape(2 * shape))
    return jax.tree.map(lambda a: a.reshape(shape), leaf)


def param_tree(params: Any, num_heads: int = 1) -> dict[str, Any]:
    """A parameter group as the tree of a Flax layer, or of a block of `mj.nn`."""
    if isinstance(params, AttentionParams):
        features, width = params.query.kernel.shape
        split = num_heads, width // num_heads
        tree = {
            name: {
                "kernel": in_shape(getattr(params, name).kernel, (features, *split)),
                "bias": in_shape(getattr(params, name).bias, split),
            }
            for name in ("query", "key", "value")
        }
        kernel = in_shape(params.output.kernel, (*split, params.output.kernel.shape[1]))
        return {**tree, "out": {"kernel": kernel, "bias": params.output.bias}}
    if isinstance(params, FeedForwardParams):
        return {name: param_tree(getattr(params, name)) for name in ("hidden", "output")}
    fields = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    if isinstance(params, EncoderBlockParams | DecoderBlockParams):
        feed_forward = param_tree(fields.pop("feed_forward"))
        return {name: param_tree(p, num_heads) for name, p in fields.items()} | feed_forward
    return fields


def block_params(tree: dict[str, Any]) -> EncoderBlockParams:
    """The way back: the parameters of an encoder block, with kernels of two axes."""

    def dense(given: dict[str, Any], rows: int | None = None) -> DenseParams:
        kernel, bias = given["kernel"], given["bias"]
        size = math.prod(kernel.shape)
        shape = (kernel.shape[0], size // kernel.shape[0]) if rows is None else (rows, size // rows)
        return DenseParams(in_shape(kernel, shape), in_shape(bias, shape[1:]))

    attention, out = tree["attention"], tree["attention"]["out"]
    projections = (dense(attention[name]) for name in ("query", "key", "value"))
    return EncoderBlockParams(
        AttentionParams(*projections, dense(out, math.prod(out["kernel"].shape[:-1]))),
        NormParams(**tree["norm1"]),
        FeedForwardParams(dense(tree["hidden"]), dense(tree["output"])),
        NormParams(**tree["norm2"]),
    )


def filled(network: Any, tree: Any) -> Any:
    """The network, now with the arrays of a tree or of a parameter group; some may be missing."""
    nnx.update(network, tree if isinstance(tree, dict) else param_tree(tree))
    return network


def plain_linear(arrays: DenseParams) -> nnx.Linear:
    """Flax's dense layer with these arrays."""
    return filled(nnx.Linear(*arrays.kernel.shape, rngs=nnx.Rngs(0)), arrays)


def plain_norm(arrays: NormParams, epsilon: float = 1e-6) -> nnx.LayerNorm:
    """Flax's layer normalisation with this gain and this bias."""
    size = len(arrays.scale)
    norm = nnx.LayerNorm(size, epsilon=epsilon, use_fast_variance=False, rngs=nnx.Rngs(0))
    return filled(norm, arrays)


def plain_attention(arrays: AttentionParams, num_heads: int) -> nnx.MultiHeadAttention:
    """Flax's attention with these arrays."""
    size = num_heads, len(arrays.query.kernel)
    layer = nnx.MultiHeadAttention(*size, decode=False, rngs=nnx.Rngs(0))
    return filled(layer, param_tree(arrays, num_heads))


def plain_block(
    arrays: EncoderBlockParams | DecoderBlockParams, num_heads: int, **options: Any
) -> EncoderBlock | DecoderBlock:
    """A plain block of `mj.nn` with these arrays; keywords are its options."""
    make = EncoderBlock if isinstance(arrays, EncoderBlockParams) else DecoderBlock
    features, hidden = arrays.feed_forward.hidden.kernel.shape
    block = make(features, num_heads, hidden_features=hidden, rngs=nnx.Rngs(0), **options)
    return filled(block, param_tree(arrays, num_heads))


def scaled(params: Any, gain: float) -> Any:
    """Parameters of `Factorized` beliefs, multiplied by `gain`."""

    def one(belief: Factorized) -> Factorized:
        return Factorized(gain * belief.mean, gain**2 * belief.variance)

    return jax.tree.map(one, params, is_leaf=lambda leaf: isinstance(leaf, Factorized))


def stacked(rows: list[Any]) -> Any:
    """Trees of arrays as one tree with a leading axis."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *rows)


def first_tokens(cov: Covariance, count: int) -> Covariance:
    """The same of the first tokens only."""
    if isinstance(cov, Separable):
        cov = cov.pooled(jnp.arange(len(cov.pool)) < count)
        tokens = cov.tokens[:count, :count]
        return Separable(cov.variances[:count], tokens, cov.features, cov.pool[:count])
    return type(cov).project(cov.to_dense()[:count, :, :count])


def random_moments(
    structure: type[Covariance], shape: tuple[int, int], count: int
) -> tuple[np.ndarray, Covariance, np.ndarray]:
    """Means (N, T, D), covariances of low rank, large, small and zero, and masks (N, T, T)."""
    random, (t, d) = np.random.default_rng(0), shape
    scales = 10 ** random.uniform(-2, 0.3, count) * (np.arange(count) % 10 > 0)
    factors = scales[:, None, None] * random.normal(size=(count, t * d, 6)) / 6**0.5

    @jax.jit
    @jax.vmap
    def project(factor: Array) -> Covariance:
        return structure.project((factor @ factor.T).reshape(*shape, *shape))

    means = 2 * random.normal(size=(count, *shape))
    means[::7] = 0
    means[1::7] = 1  # equal keys
    masks = random.random((count, t, t)) < 0.7
    masks[: count // 2] = True
    return means, project(factors), masks


def assert_semidefinite(
    mean: Array, dense: Array, variance: Array, tolerance: float = 1e-10
) -> None:
    """Assert that dense covariances (N, T, D, T, D) are finite, symmetric and semidefinite."""
    dense = np.asarray(dense, np.float64)
    size = dense.shape[1] * dense.shape[2]
    spectrum = np.linalg.eigvalsh(dense.reshape(-1, size, size))
    lowest, largest = spectrum[:, 0], np.maximum(spectrum[:, -1], 1)
    assert np.isfinite(mean).all()
    assert np.min(variance) >= 0
    assert (lowest >= -tolerance * largest).all(), (lowest / largest).min()
    difference = np.abs(dense - dense.transpose(0, 3, 4, 1, 2)).max(axis=(1, 2, 3, 4))
    assert (difference <= tolerance * largest).all()


def assert_close(actual: Array, expected: Array, tolerance: float = 1e-10) -> None:
    """Assert that float64 arrays agree up to rounding, relative to the largest entry."""
    actual, expected = np.asarray(actual), np.asarray(expected)  # jax would compile each operation
    assert 0 in (actual.ndim, expected.ndim) or actual.ndim == expected.ndim
    difference = np.max(np.abs(actual - expected))
    size = max(1.0, np.max(np.abs(expected)))
    assert difference <= tolerance * size, f"largest difference {difference}, of {size}"
