"""Gram matrices of many rows from a few of them: the Nystroem approximation.

Attention weights average the keys, so queries' results are much alike. Their Gram matrix is computed by
regression on a few queries, the landmarks. The result is exact on the landmarks, positive semidefinite
and never above the true matrix. The landmarks' common part is removed first and kept exactly.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.covariance.numerics import safe_divide
from moment_jax.xla import default_precision, diagonal_matrix, kernel_path, rows_diagonal

_RIDGE = 1e-2
"""Ridge relative to each landmark's variance. A tenth of it brings sds .001 closer to those with all
queries, but one of five images was pure rounding in float32."""


def in_float32() -> AbstractContextManager[None]:
    """Context for float32 products, whatever the default precision: regression takes differences."""
    return jax.default_matmul_precision("float32")


def coarse_products() -> bool:
    """Whether matrix products are in bfloat16, the default on a TPU."""
    precision = default_precision()
    if precision in (None, "default"):
        return "tpu" in (jax.default_backend(), kernel_path())
    return precision in ("fastest", "bfloat16", "BF16_BF16_F32", "F16_F16_F32", "F16_F16_F16")


def choose_landmarks(importance: Array, count: int, exists: Array | None) -> Array:
    """Positions (M,) of landmarks by systematic sampling: half by importance (T,), half evenly.

    Only among tokens that exist, (T,) boolean; None for all.
    """
    even = jnp.ones_like(importance) if exists is None else exists.astype(importance.dtype)
    importance = jax.lax.stop_gradient(jnp.maximum(importance, 0) * even)
    share = 0.5 * _shares(importance) + 0.5 * _shares(even)
    marks = (jnp.arange(count, dtype=share.dtype) + 0.5) / count * jnp.sum(share)
    places = jnp.sum(jnp.cumsum(share)[None, :] < marks[:, None], axis=1)
    return jnp.minimum(places, importance.shape[0] - 1)


def _shares(parts: Array) -> Array:
    return safe_divide(parts, jnp.broadcast_to(jnp.sum(parts), parts.shape))


class Regression(NamedTuple):
    """Regression on M landmarks, given inner products."""

    inverse: Array  # of the centred Gram matrix of the landmarks, (M, M)
    mean: Array  # inner products of the landmarks with their mean, (M,)

    @classmethod
    def on(cls, gram: Array) -> Regression:
        """Build from the landmarks' Gram matrix, (M, M)."""
        mean = jnp.mean(gram, axis=0)
        centred = gram - mean[:, None] - mean[None, :] + jnp.mean(mean)
        return cls(ridge_inverse(centred), mean)

    def weights(self, left: Array, total: Array) -> Array:
        """Weights of the landmarks that replace sums with weights of this total, (T, M); see `left`."""
        centred = self._centred(left, total) @ self.inverse
        rest = total - jnp.sum(centred, axis=1)
        return centred + rest[:, None] / left.shape[1]

    def between(self, left: Array, right: Array) -> Array:
        """Inner products of averages with averages, (T, U), from those with the landmarks."""
        one = jnp.ones_like(left[:, 0])
        return self.left(left, one) @ self.right(right).T

    def left(self, left: Array, total: Array) -> Array:
        """Features of sums, (T, M + 2); their products with `right` are inner products with averages.

        Takes inner products with the landmarks, (T, M), and the total of each sum's weights, (T,).
        """
        mean = jnp.mean(left, axis=1)[:, None]
        centred = self._centred(left, total) @ self.inverse
        return jnp.concatenate((centred, mean, total[:, None]), axis=1)

    def right(self, right: Array) -> Array:
        """Features of averages, (U, M + 2), from their inner products with the landmarks, (U, M)."""
        one = jnp.ones_like(right[:, :1])
        mean = jnp.mean(right, axis=1)[:, None] - jnp.mean(self.mean)
        return jnp.concatenate((self._centred(right, one[:, 0]), one, mean), axis=1)

    def _centred(self, products: Array, total: Array) -> Array:
        """Inner products with the mean landmark removed on both sides."""
        mean = jnp.mean(products, axis=1)[:, None]
        return products - mean - total[:, None] * (self.mean - jnp.mean(self.mean))[None, :]


class Sketch(NamedTuple):
    """A positive semidefinite (S, S) matrix K, known by its products with a few rows of weights."""

    columns: Array  # K times these rows, (S, M)
    regression: Regression

    @classmethod
    def of(cls, gram: Array, rows: Array) -> Sketch:
        """Build from a Gram matrix and rows of weights (M, S) with sum one."""
        columns = gram @ rows.T
        return cls(columns, Regression.on(rows @ columns))

    def product(self, weights: Array) -> Array:
        """W K for rows of weights (T, S), (T, S)."""
        return self.left(weights) @ self.regression.right(self.columns).T

    def left(self, weights: Array) -> Array:
        """Features of sums with weights (T, S), see `Regression.left`."""
        return self.regression.left(weights @ self.columns, jnp.sum(weights, axis=1))

    def right(self, weights: Array) -> Array:
        """Features of averages with weights (T, S) of sum one, see `Regression.right`."""
        return self.regression.right(weights @ self.columns)


def mixed_by_landmarks(tokens: Array, entering: Array, mixed: Array, at: Array) -> Array:
    """The product tokens mixed^T, (T, T), by regression of the averages in `mixed` on some of them.

    `tokens` is the covariance of tokens of x with those that enter the branch, `entering` that of the
    entering tokens, both (T, T). Rows of `mixed` (T, T), the weights of the averages, have equal sums.
    `at` (M,) are the landmarks' positions.
    """
    with in_float32():
        few = mixed[at]
        columns = entering @ few.T
        regression = Regression.on(few @ columns)
        shares = regression.weights(mixed @ columns, jnp.ones_like(mixed[:, 0]))
        return (tokens @ few.T) @ shares.T


@jax.custom_jvp
def ridge_inverse(gram: Array) -> Array:
    """Inverse (M, M) of a positive semidefinite matrix with a ridge `_RIDGE`, one sweep per row.

    Rows below the ridge are rounding, and give zeros.
    """
    size = gram.shape[0]
    rows, own = jnp.arange(size), rows_diagonal(gram)
    ridge = _RIDGE * jnp.maximum(own, 1e-3 * jnp.max(own))

    def sweep(m: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        swept, kept = state
        row, here = swept[m], rows == m
        keep = row[m] > 0.5 * ridge[m]
        pivot = jnp.where(keep, row[m], 1)
        other = jnp.where(here[:, None], row[None, :], row[:, None]) / pivot
        other = jnp.where(here[:, None] & here[None, :], -1 / pivot, other)
        after = swept - row[:, None] * (row[None, :] / pivot)
        after = jnp.where(here[:, None] | here[None, :], other, after)
        return jnp.where(keep, after, swept), kept | (here & keep)

    start = 0.5 * (gram + gram.T) + diagonal_matrix(ridge), jnp.zeros(size, bool)
    swept, kept = jax.lax.fori_loop(0, size, sweep, start)
    return jnp.where(kept[:, None] & kept[None, :], -swept, 0)


@ridge_inverse.defjvp
def _inverse_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    inverse, change = ridge_inverse(*primals), tangents[0]
    change = change + diagonal_matrix(_RIDGE * rows_diagonal(change))
    return inverse, -inverse @ change @ inverse
