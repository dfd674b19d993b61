"""Random arrays: the moments of a (T, D) sequence, and the place of each of its entries in the array."""

from __future__ import annotations

import dataclasses
import math
from functools import singledispatch
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from moment_jax.covariance import Covariance, Diagonal, Full, Separable
from moment_jax.covariance.numerics import weighted

if TYPE_CHECKING:
    from moment_jax.propagation.branches import Branch

Array = jax.Array
Axes = tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Moments:
    """Mean and covariance of a sequence (T, D), seen as an array of any shape.

    Reshapes, transpositions, slices and repetitions move `places` alone; moments are computed when
    the array is used as a sequence of other tokens or features.

    Args:
      mean: (T, D).
      cov: covariance of shape (T, D).
      places: for each entry of the array, the flat index of its entry in (T, D); -1 where it is zero.
      branches: how it came from other random arrays, for its sum with one of them.
    """

    mean: Array
    cov: Covariance
    places: np.ndarray
    branches: tuple[Branch, ...] = ()
    known: dict[Any, Any] = dataclasses.field(default_factory=dict)  # as sequences

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array."""
        return self.places.shape

    def array(self) -> Array:
        """The array's mean."""
        return taken(self.mean, self.places)

    def variance(self) -> Array:
        """The array's variances."""
        return taken(self.cov.variance(), self.places)

    def axes(self) -> tuple[Axes, Axes]:
        """The axes of the array along which tokens change, and those along which features do.

        An axis along which both change counts as one of features.
        """
        tokens, features = np.divmod(self.places, self.mean.shape[1])
        by_feature = tuple(i for i in range(features.ndim) if _changes(features, i))
        by_token = tuple(
            i for i in range(tokens.ndim) if i not in by_feature and _changes(tokens, i)
        )
        return by_token, by_feature

    def natural(self) -> tuple[Axes, Axes]:
        """The axes of tokens and of features; all that is longer than one belongs to either."""
        tokens, features = self.axes()
        if not features:  # one feature, or none that changes: the last long axis that is no token's
            rest = [i for i, n in enumerate(self.shape) if n > 1 and i not in tokens]
            features = tuple(rest)
        others = tuple(
            i for i, n in enumerate(self.shape) if n > 1 and i not in (*tokens, *features)
        )
        return tuple(sorted((*tokens, *others))), features

    def sequence(self, tokens: Axes, features: Axes) -> tuple[Array, Any]:
        """The array as a sequence with these axes as tokens and those as features, in this order."""
        if (tokens, features) not in self.known:
            self.known[tokens, features] = self._sequence(tokens, features)
        return self.known[tokens, features]

    def _sequence(self, tokens: Axes, features: Axes) -> tuple[Array, Any]:
        order = as_rows(self.places, tokens, features)
        if np.array_equal(order, np.arange(self.mean.size).reshape(self.mean.shape)):
            return self.mean, self.cov
        return taken(self.mean, order), gather(self.cov, order)


def fresh(
    mean: Array, cov: Covariance, shape: tuple[int, ...], tokens: Axes, features: Axes
) -> Moments:
    """A new random array of this shape from its moments as a sequence."""
    rest = tuple(i for i in range(len(shape)) if i not in (*tokens, *features))
    order = (*rest, *tokens, *features)
    places = np.arange(mean.size).reshape([shape[i] for i in order])
    return Moments(mean, cov, places.transpose(np.argsort(order)))


def as_rows(array: Any, tokens: Axes, features: Axes, *last: int) -> Any:
    """An array, of numpy or JAX, as (T, D): rows along the axes of tokens, columns along the others.

    Axes that are neither have length one, but for those in `last`, which become one axis at the end.
    """
    named = (*tokens, *features, *last)
    rest = (i for i in range(array.ndim) if i not in named)
    size = [math.prod(array.shape[i] for i in axes) for axes in (tokens, features)]
    return array.transpose(*rest, *named).reshape(*size, *(-1 for _ in last[:1]))


def taken(array: Array, places: np.ndarray) -> Array:
    """Entries at these flat places, zero at place -1."""
    if np.array_equal(places.ravel(), np.arange(array.size)):
        return array.reshape(places.shape)
    values = array.reshape(-1)[np.maximum(places, 0)]
    return jnp.where(places < 0, 0, values) if (places < 0).any() else values


def _changes(values: np.ndarray, axis: int) -> bool:
    return bool((values.take(range(min(1, values.shape[axis])), axis) != values).any())


def gather(cov: Any, places: np.ndarray) -> Any:
    """Covariance of the sequence whose entries are these of another, -1 for zero."""
    tokens, features = np.divmod(np.maximum(places, 0), cov.shape[1])
    rows, columns = tokens[:, 0], features[0]
    known = places >= 0
    whole = (tokens == rows[:, None]) & (features == columns[None]) & known
    if whole.all():
        if not np.array_equal(rows, np.arange(cov.shape[0])):
            cov = cov.map_tokens(jax.nn.one_hot(rows, cov.shape[0], dtype=cov.dtype))
        if not np.array_equal(columns, np.arange(cov.shape[1])):
            cov = cov.map_features(jax.nn.one_hot(columns, cov.shape[1], dtype=cov.dtype).T)
        return cov
    return _gathered(cov, tokens, features, known)


@singledispatch
def _gathered(cov: Any, tokens: np.ndarray, features: np.ndarray, known: np.ndarray) -> Any:
    """Any entries in any order, by way of the dense covariance."""
    dense = cov.to_dense()[tokens[:, :, None, None], features[:, :, None, None], tokens, features]
    both = known[:, :, None, None] & known
    return type(cov).project(jnp.where(both, dense, 0))


@_gathered.register
def _gathered_diagonal(
    cov: Diagonal, tokens: np.ndarray, features: np.ndarray, known: np.ndarray
) -> Diagonal:
    return Diagonal(jnp.where(known, cov.variances[tokens, features], 0))


@_gathered.register
def _gathered_separable(
    cov: Separable, tokens: np.ndarray, features: np.ndarray, known: np.ndarray
) -> Separable:
    """Windows of a sequence without its dense covariance, where a column is of one feature."""
    columns = features.max(axis=0)
    if tokens.shape[0] == 1 or (known & (features != columns)).any():
        return _gathered.dispatch(Full)(cov, tokens, features, known)
    scale = jnp.where(known, cov.scale[tokens, features], 0)

    def pairs(total: Array, column: tuple[Array, Array]) -> tuple[Array, None]:
        s, at = column
        return total + (s[:, None] * s[None]) * cov.token_correlation[at[:, None], at[None]], None

    start = jnp.zeros((tokens.shape[0], tokens.shape[0]), scale.dtype)
    token_gram, _ = jax.lax.scan(pairs, start, (scale.T, jnp.asarray(tokens.T)))
    spread = jnp.zeros((cov.shape[0], tokens.shape[1]), scale.dtype)
    spread = spread.at[tokens, np.arange(tokens.shape[1])[None]].add(weighted(scale, None))
    shown = cov.feature_correlation[columns[:, None], columns[None]]
    feature_gram = shown * (spread.T @ (cov.token_correlation @ spread))
    return cov.from_moments(scale**2, token_gram, feature_gram)
