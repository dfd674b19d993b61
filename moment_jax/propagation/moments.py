"""Random arrays: moments of a (T, D) sequence, and the place of each array entry in it."""

from __future__ import annotations

import dataclasses
import math
from functools import singledispatch
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from moment_jax.covariance import Covariance, Diagonal, Full, Separable
from moment_jax.covariance.numerics import weighted

if TYPE_CHECKING:
    from moment_jax.propagation.branches import Branch

Axes = tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Moments:
    """Mean and covariance of a sequence (T, D), viewed as an array of any shape.

    Reshapes, transposes, slices and repeats only change `places`; moments are recomputed when the array
    is used as a sequence with other tokens or features.
    """

    mean: Array  # (T, D)
    cov: Covariance
    places: np.ndarray  # of each entry of the array in the flat (T, D); -1 where it is zero
    branches: tuple[Branch, ...] = ()  # dependence on other random arrays, for sums and products
    known: dict[Any, Any] = dataclasses.field(default_factory=dict)  # cache of `sequence`

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self.places.shape

    def array(self) -> Array:
        """Mean of the array."""
        return taken(self.mean, self.places)

    def axes(self) -> tuple[Axes, Axes]:
        """The array's token axes and feature axes; an axis along which both change is a feature axis."""
        tokens, features = np.divmod(self.places, self.mean.shape[1])
        by_feature = tuple(i for i in range(features.ndim) if _changes(features, i))
        by_token = tuple(
            i for i in range(tokens.ndim) if i not in by_feature and _changes(tokens, i)
        )
        return by_token, by_feature

    def natural(self) -> tuple[Axes, Axes]:
        """Token axes and feature axes, which together hold every axis longer than one."""
        tokens, features = self.axes()
        long = [i for i, n in enumerate(self.shape) if n > 1]
        if not features:
            features = tuple(i for i in long if i not in tokens)
        others = (i for i in long if i not in (*tokens, *features))
        return tuple(sorted((*tokens, *others))), features

    def sequence(self, tokens: Axes, features: Axes) -> tuple[Array, Any]:
        """Mean and covariance of the array as a sequence with these token and feature axes, in order."""
        if (tokens, features) not in self.known:
            order = as_rows(self.places, tokens, features)
            same = np.array_equal(order, np.arange(self.mean.size).reshape(self.mean.shape))
            found = self.mean, self.cov
            if not same:
                found = taken(self.mean, order), gather(self.cov, order)
            self.known[tokens, features] = found
        return self.known[tokens, features]


def fresh(
    mean: Array,
    cov: Covariance,
    shape: tuple[int, ...],
    tokens: Axes,
    features: Axes,
    branches: tuple[Branch, ...] = (),
) -> Moments:
    """A random array of this shape from its moments as a sequence."""
    rest = tuple(i for i in range(len(shape)) if i not in (*tokens, *features))
    order = (*rest, *tokens, *features)
    places = np.arange(mean.size).reshape([shape[i] for i in order])
    return Moments(mean, cov, places.transpose(np.argsort(order)), branches)


def as_rows(array: Any, tokens: Axes, features: Axes, *last: int) -> Any:
    """An array as (T, D): rows run along the token axes, columns along the feature axes.

    The axes in `last` are merged into a third one; all remaining axes must have length one.
    """
    named = (*tokens, *features, *last)
    rest = (i for i in range(array.ndim) if i not in named)
    size = [math.prod(array.shape[i] for i in axes) for axes in (tokens, features)]
    return array.transpose(*rest, *named).reshape(*size, *(-1 for _ in last[:1]))


def taken(array: Array, places: np.ndarray) -> Array:
    """Entries at these flat places; zero at place -1."""
    if np.array_equal(places.ravel(), np.arange(array.size)):
        return array.reshape(places.shape)
    values = array.reshape(-1)[np.maximum(places, 0)]
    return jnp.where(places < 0, 0, values) if (places < 0).any() else values


def _changes(values: np.ndarray, axis: int) -> bool:
    return bool((values.take(range(min(1, values.shape[axis])), axis) != values).any())


def gather(cov: Any, places: np.ndarray) -> Any:
    """Covariance of the sequence made of these entries of another; -1 stands for zero."""
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
    """Arbitrary entries, by way of the dense covariance."""
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
    """Windows of a sequence without its dense covariance, if each column holds one feature."""
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
