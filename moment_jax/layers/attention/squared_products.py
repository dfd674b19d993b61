"""The squared norm of the covariance of keys and values under each row's weights.

It needs S^2 products of features shared by all rows, or K^2 numbers per row: T S min(S, K^2) products
in all, where plain attention takes 2 T S K. It is the main cost of long sequences.
"""

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.xla import diagonal_matrix, on_chip, rows_product

_CHUNK = 512
"""Number of keys per chunk; a kernel holds one chunk's products with all keys."""


def squared_products(k: Array, v: Array, noise: Array, weights: Array) -> Array:
    """sum_cf W_ac W_af (k_c . k_f) (v_c . v_f + [c = f] noise_c), (T, 1).

    Takes keys (S, K), values (S, K), the values' noise summed over features (1, S), and weights W (T,
    S).
    """
    features = by_features(weights.shape[0], *k.shape)
    if on_chip() or features:
        size = _pairs_size
        if on_chip():
            size = _size_by_features if features else _size_by_keys
        own = jnp.sum(weights**2 * (of_each(k**2) * noise), axis=1, keepdims=True)
        return size(weights, k, v) + own
    products = (k @ k.T) * (v @ v.T + diagonal_matrix(noise[0]))
    return jnp.sum(weights * rows_product(weights, products), axis=1, keepdims=True)


def of_each(array: Array) -> Array:
    """The row sums of (S, K), as one row (1, S)."""
    if on_chip():  # cheaper there than transposing a column
        ones = jnp.ones((1, array.shape[1]), array.dtype)
        return jax.lax.dot_general(ones, array, (((1,), (1,)), ((), ())))
    return jnp.sum(array, axis=1)[None, :]


def _pairs_size(weights: Array, k: Array, v: Array) -> Array:
    """|sum_c W_ac k_c v_c^T|^2, (T, 1)."""
    pairs = (k[:, :, None] * v[:, None, :]).reshape(k.shape[0], -1)
    return jnp.sum(rows_product(weights, pairs) ** 2, axis=1, keepdims=True)


def by_features(num_queries: int, num_keys: int, width: int) -> bool:
    """Whether K^2 numbers per query cost less than S^2 for all, as with few queries."""
    return num_queries * width**2 < (num_queries + 2 * width) * num_keys


def products_of_row(num_queries: int, num_keys: int, width: int) -> int:
    """Multiplications per query and key in a kernel with this many queries per block."""
    if by_features(num_queries, num_keys, width):
        return width**2
    return num_keys + 2 * width * num_keys // num_queries


# In a kernel neither version stores its summands: S^2 numbers come in chunks of keys, K^2 per row
# feature by feature. Hand-written derivatives avoid storing them all.


@jax.custom_vjp
def _size_by_keys(weights: Array, k: Array, v: Array) -> Array:
    """|sum_c W_ac k_c v_c^T|^2, (T, 1), from products of keys with keys and values with values."""
    sizes = [
        jnp.sum(own * (weights @ (keys * values)), axis=1, keepdims=True)
        for own, keys, values in _chunks(weights, k, v)
    ]
    return _total(sizes)


def _size_by_keys_backward(
    saved: tuple[Array, Array, Array], slope: Array
) -> tuple[Array, Array, Array]:
    weights, k, v = saved
    slope = 2 * slope
    by_weights, by_k, by_v = [], [], []
    for start, (own, keys, values) in zip(
        range(0, k.shape[0], _CHUNK), _chunks(weights, k, v), strict=True
    ):
        by_weights.append(slope * (weights @ (keys * values)))
        meeting = weights.T @ (slope * own)  # (S, chunk)
        chunk = slice(start, start + _CHUNK)
        by_k.append((meeting * values) @ k[chunk])
        by_v.append((meeting * keys) @ v[chunk])
    return jnp.concatenate(by_weights, axis=1), _total(by_k), _total(by_v)


def _chunks(weights: Array, k: Array, v: Array) -> list[tuple[Array, Array, Array]]:
    """For each chunk of keys: weights (T, chunk), products of keys and of values (S, chunk)."""
    parts = [slice(start, start + _CHUNK) for start in range(0, k.shape[0], _CHUNK)]
    return [(weights[:, part], k @ k[part].T, v @ v[part].T) for part in parts]


_size_by_keys.defvjp(lambda *arrays: (_size_by_keys(*arrays), arrays), _size_by_keys_backward)


@jax.custom_vjp
def _size_by_features(weights: Array, k: Array, v: Array) -> Array:
    """|sum_c W_ac k_c v_c^T|^2, (T, 1), from K^2 numbers per row, K at a time."""

    def add(feature: Array, size: Array) -> Array:
        mixed = weights @ (_column(k, feature) * v)
        return size + jnp.sum(mixed**2, axis=1, keepdims=True)

    return jax.lax.fori_loop(0, k.shape[1], add, jnp.zeros_like(weights[:, :1]))


def _size_by_features_backward(
    saved: tuple[Array, Array, Array], slope: Array
) -> tuple[Array, Array, Array]:
    weights, k, v = saved

    def add(feature: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        by_weights, by_k, by_v = sums
        column = _column(k, feature)
        scaled = column * v
        pulled = 2 * slope * (weights @ scaled)
        meeting = weights.T @ pulled  # (S, K)
        at_feature = _at(k, feature)
        return (
            by_weights + pulled @ scaled.T,
            by_k + jnp.where(at_feature, jnp.sum(meeting * v, axis=1, keepdims=True), 0),
            by_v + column * meeting,
        )

    return jax.lax.fori_loop(0, k.shape[1], add, tuple(map(jnp.zeros_like, saved)))


def _column(array: Array, feature: Array) -> Array:
    """One column, (S, 1), as a masked sum: a kernel cannot slice at a dynamic position."""
    return jnp.sum(jnp.where(_at(array, feature), array, 0), axis=1, keepdims=True)


def _at(array: Array, feature: Array) -> Array:
    return jax.lax.broadcasted_iota(jnp.int32, array.shape, 1) == feature


_size_by_features.defvjp(
    lambda *arrays: (_size_by_features(*arrays), arrays), _size_by_features_backward
)


def _total(arrays: list[Array]) -> Array:
    total = arrays[0]
    for array in arrays[1:]:
        total = total + array
    return total
