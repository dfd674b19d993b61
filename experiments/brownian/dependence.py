"""Distance correlation of two random vectors, and a permutation test that they are independent."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

import moment_jax as mj


class Dependence(NamedTuple):
    """A bias-corrected distance correlation and its permutation p value, scalars."""

    correlation: Array  # about 0 if independent, 1 if one is the other turned and rescaled
    p_value: Array  # at least 1 / (permutations + 1)


@partial(jax.jit, static_argnames=("permutations",))
def independence_test(x: Array, y: Array, key: Array, *, permutations: int = 199) -> Dependence:
    """Test whether the rows of x (N, T, D) and y (N, T, E) are independent; detects any dependence.

    Vector t of x is compared with vector t of y, and all T together permuted, so that what ties the
    vectors of a row to each other does no harm.

    Source: Szekely and Rizzo, Partial distance correlation with methods for dissimilarities (2014).
    """
    if x.ndim != 3 or x.shape[:2] != y.shape[:2] or y.ndim != 3 or x.shape[0] < 4:
        raise ValueError(
            "`independence_test` needs x (N, T, D) and y (N, T, E) with N >= 4. Got "
            f"{tuple(x.shape)} and {tuple(y.shape)}."
        )
    of_x, of_y = (jax.lax.map(_centred, jnp.swapaxes(part, 0, 1)) for part in (x, y))
    scale = jnp.sqrt(jnp.sum(of_x**2) * jnp.sum(of_y**2))

    def product(order: Array) -> Array:
        return jnp.sum(of_x * of_y[:, order][:, :, order])

    observed = product(jnp.arange(x.shape[0]))
    shuffled = jax.lax.map(
        lambda k: product(jax.random.permutation(k, x.shape[0])),
        jax.random.split(key, permutations),
    )
    rank = 1 + jnp.sum(shuffled >= observed)
    return Dependence(observed / jnp.where(scale > 0, scale, 1), rank / (permutations + 1))


def _centred(points: Array) -> Array:
    """U-centred distances of points (N, D): rows and columns sum to zero, so does the diagonal."""
    n = points.shape[0]
    outside = ~jnp.eye(n, dtype=bool)
    distances = jnp.where(outside, jnp.sqrt(mj.brownian.squared_distances(points, points)), 0)
    row = jnp.sum(distances, axis=1) / (n - 2)
    total = jnp.sum(distances) / ((n - 1) * (n - 2))
    return jnp.where(outside, distances - row[:, None] - row[None, :] + total, 0)
