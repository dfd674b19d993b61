"""Random covariances and beliefs shared by the tests."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moment_jax as mj
from moment_jax import AttentionParams, DenseParams, FeedForwardParams, NormParams, Separable
from moment_jax.covariance import STRUCTURES, Covariance, register_fields
from moment_jax.posterior import Factorized, FullNormal, KroneckerEigen, OutputShared, Point

ALL_STRUCTURES = list(STRUCTURES.values())
KERNEL_FAMILIES = [Point, Factorized, OutputShared, KroneckerEigen, FullNormal]
VECTOR_FAMILIES = [Point, Factorized, FullNormal]


def quickly(structure):
    """For laws that take long to compile: this structure, and in the slow part the others too."""
    others = [pytest.param(s, marks=pytest.mark.slow) for s in ALL_STRUCTURES if s is not structure]
    return pytest.mark.parametrize("structure", [structure, *others])


def draws(key):
    """NumPy's random numbers, since jax would compile a program for every shape of an array."""
    return np.random.default_rng([*map(int, np.ravel(jax.random.key_data(key)))])


def random_psd(key, size, rank=None):
    """A random positive semidefinite matrix with a trace of about its size."""
    return jnp.asarray(_psd(draws(key), size, rank))


def _psd(random, size, rank=None):
    factor = random.normal(size=(size, rank or 2 * size))
    return factor @ factor.T / factor.shape[1]


def random_dense(key, shape, scale=1.0):
    """A random dense (T, D, T, D) covariance."""
    return jnp.asarray(scale**2 * _psd(draws(key), shape[0] * shape[1]).reshape(2 * shape))


def random_cov(key, structure, shape, scale=1.0):
    """A random member of a structure, with correlations of both signs."""
    return _member(structure, random_dense(key, shape, scale))


@functools.partial(jax.jit, static_argnums=0)
def _member(structure, dense):
    return member(structure.project(dense))


def member(cov):
    """Of the family Cov[x_td, x_se] = G_ts C_de / tr C if `Separable`; other structures unchanged."""
    if not isinstance(cov, Separable):
        return cov
    variances = jnp.diagonal(cov.tokens)[:, None] * cov.shares()[None]
    return dataclasses.replace(cov, variances=variances)


def define_pairs():
    """A user's structure: tokens 2i and 2i + 1 are correlated, all others independent."""

    @register_fields
    @dataclasses.dataclass(frozen=True)
    class Pairs(Covariance):
        cov: jax.Array  # (T, D, T, D), zero between pairs

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


def random_belief(random, family, mean, size):
    """A belief of any family with this mean, and with variances of about this size."""
    shape, n = mean.shape, mean.size
    matrix = shape[0], n // shape[0]
    fields = {
        Point: lambda: (),
        Factorized: lambda: (size * random.uniform(0.2, 1, shape),),
        OutputShared: lambda: (size * random.uniform(0.2, 1, matrix[1]),),
        KroneckerEigen: lambda: (
            *(np.linalg.qr(random.normal(size=(n, n)))[0] for n in matrix),
            size * random.uniform(0.2, 1, matrix),
        ),
        FullNormal: lambda: (size * _psd(random, n).reshape(2 * shape),),
    }[family]()
    return family(*map(jnp.asarray, (mean, *fields)))


def random_kernel(key, family, shape, scale=1.0):
    """A random kernel belief of any family."""
    random, rows = draws(key), shape[0]
    return random_belief(random, family, random.normal(size=shape) / rows**0.5, scale**2 / rows)


def random_vector(key, family, size, scale=1.0, centre=0.0):
    """A random belief about a bias or a gain, of `Factorized` for families without vectors."""
    random, family = draws(key), family if family in VECTOR_FAMILIES else Factorized
    return random_belief(random, family, centre + 0.5 * random.normal(size=size), scale**2)


def random_dense_params(key, family, shape, scale=1.0):
    """A random dense layer."""
    keys = jax.random.split(key)
    kernel = random_kernel(keys[0], family, shape, scale)
    return DenseParams(kernel, random_vector(keys[1], family, shape[1], 0.3 * scale))


def random_block(key, features, hidden, scale=0.1, family=Factorized):
    """A random encoder block whose weights have a sd of about scale / sqrt(fan_in)."""
    keys = jax.random.split(key, 10)

    def dense(index, *shape):
        return random_dense_params(keys[index], family, shape, scale)

    def vector(index, centre):
        return random_vector(keys[index], family, features, 0.3 * scale, centre)

    def norm(index):
        return NormParams(vector(index, 1.0), vector(index + 1, 0.0))

    return mj.EncoderBlockParams(
        AttentionParams(*(dense(i, features, features) for i in range(4))),
        norm(4),
        FeedForwardParams(dense(6, features, hidden), dense(7, hidden, features)),
        norm(8),
    )


def decoder_of(one, two=None):
    """A decoder block of the layers of two encoder blocks; without a second, of one."""
    two = two or one
    layers = one.attention, one.norm1, two.attention, two.norm1, two.feed_forward, two.norm2
    return mj.DecoderBlockParams(*layers)


# Parameter groups and the trees of Flax's networks, as `nnx.to_pure_dict(nnx.state(net, nnx.Param))` and
# `mj.Bayesian(net).beliefs` are. Leaves are arrays or beliefs.


def in_shape(leaf, shape):
    """An array or a belief in another shape."""
    if isinstance(leaf, OutputShared | KroneckerEigen):
        return dataclasses.replace(leaf, mean=leaf.mean.reshape(shape))
    if isinstance(leaf, FullNormal):
        return FullNormal(leaf.mean.reshape(shape), leaf.cov.reshape(2 * shape))
    return jax.tree.map(lambda a: a.reshape(shape), leaf)


def param_tree(params, num_heads=1):
    """A parameter group as the tree of a Flax layer, or of a block of `mj.nn`."""
    fields = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    if isinstance(params, AttentionParams):
        features, width = params.query.kernel.shape
        split, out = (num_heads, width // num_heads), fields.pop("output")
        tree = {
            name: {
                "kernel": in_shape(p.kernel, (features, *split)),
                "bias": in_shape(p.bias, split),
            }
            for name, p in fields.items()
        }
        kernel = in_shape(out.kernel, (*split, out.kernel.shape[1]))
        return {**tree, "out": {"kernel": kernel, "bias": out.bias}}
    if isinstance(params, DenseParams | NormParams):
        return fields
    tree = {name: param_tree(p, num_heads) for name, p in fields.items()}
    return tree | tree.pop("feed_forward", {})


def filled(network, tree):
    """The network, now with the arrays of a tree or of a parameter group; some may be missing."""
    nnx.update(network, tree if isinstance(tree, dict) else param_tree(tree))
    return network


def plain_linear(arrays):
    """Flax's dense layer with these arrays."""
    return filled(nnx.Linear(*arrays.kernel.shape, rngs=nnx.Rngs(0)), arrays)


def plain_norm(arrays, epsilon=1e-6):
    """Flax's layer normalisation with this gain and this bias."""
    options = {"epsilon": epsilon, "use_fast_variance": False, "rngs": nnx.Rngs(0)}
    return filled(nnx.LayerNorm(len(arrays.scale), **options), arrays)


def plain_attention(arrays, num_heads):
    """Flax's attention with these arrays."""
    size = num_heads, len(arrays.query.kernel)
    layer = nnx.MultiHeadAttention(*size, decode=False, rngs=nnx.Rngs(0))
    return filled(layer, param_tree(arrays, num_heads))


def plain_block(arrays, num_heads, **options):
    """A plain block of `mj.nn` with these arrays; keywords are its options."""
    encodes = isinstance(arrays, mj.EncoderBlockParams)
    make = mj.nn.EncoderBlock if encodes else mj.nn.DecoderBlock
    features, hidden = arrays.feed_forward.hidden.kernel.shape
    block = make(features, num_heads, hidden_features=hidden, rngs=nnx.Rngs(0), **options)
    return filled(block, param_tree(arrays, num_heads))


def scaled(params, gain):
    """Parameters of `Factorized` beliefs, multiplied by `gain`."""

    def one(belief):
        return Factorized(gain * belief.mean, gain**2 * belief.variance)

    return jax.tree.map(one, params, is_leaf=lambda leaf: isinstance(leaf, Factorized))


def stacked(rows):
    """Trees of arrays as one tree with a leading axis."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *rows)


def first_tokens(cov, count):
    """The same of the first tokens only."""
    if isinstance(cov, Separable):
        cov = cov.pooled(jnp.arange(len(cov.pool)) < count)
        tokens = cov.tokens[:count, :count]
        return Separable(cov.variances[:count], tokens, cov.features, cov.pool[:count])
    return type(cov).project(cov.to_dense()[:count, :, :count])


def random_moments(structure, shape, count):
    """Means (N, T, D), covariances of low rank, large, small and zero, and masks (N, T, T)."""
    random, (t, d) = np.random.default_rng(0), shape
    scales = 10 ** random.uniform(-2, 0.3, count) * (np.arange(count) % 10 > 0)
    factors = scales[:, None, None] * random.normal(size=(count, t * d, 6)) / 6**0.5

    @jax.jit
    @jax.vmap
    def project(factor):
        return structure.project((factor @ factor.T).reshape(*shape, *shape))

    means = 2 * random.normal(size=(count, *shape))
    means[::7] = 0
    means[1::7] = 1  # equal keys
    masks = random.random((count, t, t)) < 0.7
    masks[: count // 2] = True
    return means, project(factors), masks


def assert_semidefinite(mean, dense, variance, tolerance=1e-10):
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


def assert_close(actual, expected, tolerance=1e-10):
    """Assert that float64 arrays agree up to rounding, relative to the largest entry."""
    actual, expected = np.asarray(actual), np.asarray(expected)  # jax would compile each operation
    assert 0 in (actual.ndim, expected.ndim) or actual.ndim == expected.ndim
    difference = np.max(np.abs(actual - expected))
    size = max(1.0, np.max(np.abs(expected)))
    assert difference <= tolerance * size, f"largest difference {difference}, of {size}"
