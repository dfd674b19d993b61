"""Random arrays: a sequence (T, D), planned by its shape, and the place of each array entry in it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from moment_jax.covariance.base import Cross

Axes = tuple[int, ...]
Places = np.ndarray
"""Integers of any shape: where each entry lies in another array, flattened; -1 for a certain zero."""
InSequence = Places  # of a random array, in its sequence (T, D)
InLayer = Places  # of a view, in the output (T, O) of a dense layer
InHeads = Places  # of attention's output, in the heads side by side (T, H K)
InScores = Places  # of attention weights, in the product that has their scores
InWeights = Places  # of a table (H, T, S), in the array of attention weights
InBelief = Places  # of an array of weights, in a belief


class Same:
    """An array as a key: equal to itself alone, and kept, so that nothing else takes its place."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __hash__(self) -> int:
        return id(self.array)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.array is other.array


class View:
    """An array of any shape whose entries lie at flat places of something else."""

    places: Places

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self.places.shape

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self.places.ndim

    def broadcast(self, shape: tuple[int, ...]) -> Self:
        """The array broadcast to a shape."""
        own: Any = self
        if self.shape == tuple(shape):
            return own
        return dataclasses.replace(own, places=np.broadcast_to(self.places, shape))


Carry = Callable[[Any], Any]  # Cov[u, input] -> Cov[u, output] for any u; None is zero
Compute = Callable[[], tuple[Any, ...]]  # -> mean (T, D), cov, and a `Carry` for each parent
_count = itertools.count()


def as_it_is(cross: Any) -> Any:
    """The `Carry` of what keeps its covariances."""
    return cross


@dataclasses.dataclass(eq=False, repr=False)
class Base:
    """A random sequence (T, D): planned by its shape, computed when its numbers are asked for."""

    shape: tuple[int, ...]
    compute: Compute
    parents: tuple[Sequence, ...] | None = ()  # None if it is unknown how it depends on them
    node: Any = None  # of the graph, whose moments these are first
    finish: Callable[[Any], Any] = as_it_is  # its covariance at landmarks, and pooled
    index: int = dataclasses.field(default_factory=lambda: next(_count))

    @functools.cached_property
    def numbers(self) -> tuple[Array, Any, list[Carry]]:
        """Mean, covariance, and how it carries covariances with each parent."""
        mean, cov, *carries = self.compute()
        return mean, self.finish(cov), carries

    @functools.cached_property
    def dtype(self) -> Any:
        """Of its numbers, without computing them."""
        kinds = [x.base.dtype for x in self.parents or ()]
        return jnp.result_type(*kinds) if kinds else self.compute()[0].dtype

    def at(self, order: Places, tokens: Axes = (), features: Axes = ()) -> Sequence:
        """The sequence of its entries at these places, (T, D)."""
        return Sequence(self, order, tokens, features)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Moments(View):
    """A random sequence (T, D) viewed as an array of any shape.

    Reshapes, transposes, slices and repeats only change `places`; moments are recomputed when the array
    is used as a sequence with other tokens or features.
    """

    base: Base
    places: InSequence
    known: dict[Any, Sequence] = dataclasses.field(default_factory=dict, init=False)

    def array(self) -> Array:
        """Mean of the array."""
        return take(self.base.numbers[0], self.places)

    def variance(self) -> Array:
        """Variances of the array."""
        return take(self.base.numbers[1].variance(), self.places)

    def axes(self) -> tuple[Axes, Axes]:
        """The array's token axes and feature axes; an axis along which both change is a feature axis."""
        by_token, by_feature = (
            [i for i in range(self.ndim) if (x.take(range(min(1, x.shape[i])), i) != x).any()]
            for x in np.divmod(self.places, self.base.shape[1])
        )
        return tuple(i for i in by_token if i not in by_feature), tuple(by_feature)

    def natural(self) -> tuple[Axes, Axes]:
        """Token axes and feature axes, which together hold every axis longer than one."""
        tokens, features = self.axes()
        long = [i for i, n in enumerate(self.shape) if n > 1]
        features = features or tuple(i for i in long if i not in tokens)
        return tuple(sorted({*tokens, *long} - {*features})), features

    def sequence(self, tokens: Axes | None = None, features: Axes = ()) -> Sequence:
        """The array as a sequence with these axes, in order; by default the natural ones."""
        if tokens is None:
            tokens, features = self.natural()
        if (tokens, features) not in self.known:
            order = as_rows(self.places, tokens, features)
            self.known[tokens, features] = self.base.at(order, tokens, features)
        return self.known[tokens, features]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Sequence:
    """A random array as tokens by features, and the axes along which these lie."""

    base: Base
    order: InSequence  # of its entries in the base, (T, D)
    tokens: Axes = ()
    features: Axes = ()

    @functools.cached_property
    def moments(self) -> tuple[Array, Any]:
        """Mean (T, D) and covariance, computed."""
        mean, cov, _ = self.base.numbers
        if in_order(self.order, self.base.shape):
            return mean, cov
        return take(mean, self.order), take_cov(cov, self.order)

    @property
    def mean(self) -> Array:
        """(T, D)."""
        return self.moments[0]

    @property
    def cov(self) -> Any:
        """A covariance of the same shape."""
        return self.moments[1]

    @property
    def shape(self) -> tuple[int, ...]:
        """(T, D)."""
        return self.order.shape

    @property
    def dtype(self) -> Any:
        """Of its numbers."""
        return self.base.dtype

    @property
    def axes(self) -> tuple[Axes, Axes]:
        """The token axes and the feature axes."""
        return self.tokens, self.features

    def same(self, other: Sequence) -> bool:
        """Whether both are one array."""
        return self.base is other.base and np.array_equal(self.order, other.order)

    def made(self, compute: Compute, shape: Any) -> Moments:
        """An array of this shape, with the same axes, made of this one alone."""
        return made(compute, self.shape, ordered(shape, *self.axes), self)

    def arranged(self, cross: Any) -> Any:
        """Cov[u, this sequence], given Cov[u, base]; None where the structure cannot hold it."""
        if in_order(self.order, self.base.shape):
            return cross
        rows, columns = table(self.order, self.base.shape[1])
        if rows is not None:
            return cross.take(rows, columns)
        return cross.entries(self.order) if isinstance(cross, Cross) else None


def made(compute: Compute, shape: Any, places: Places, *parents: Sequence) -> Moments:
    """A random array whose entries lie at these places of a new sequence, made of these."""
    return Moments(Base(tuple(shape), compute, parents), places)


def ordered(shape: tuple[int, ...], tokens: Axes, features: Axes) -> Places:
    """Places of an array's entries in a sequence with these axes."""
    rest = tuple(i for i in range(len(shape)) if i not in (*tokens, *features))
    order = (*rest, *tokens, *features)
    return numbered([shape[i] for i in order]).transpose(np.argsort(order))


def numbered(shape: Any) -> Places:
    """The places of an array's own entries."""
    return np.arange(math.prod(shape)).reshape(shape)


def in_order(places: Places, shape: Any) -> bool:
    """Whether these are the places of an array's own entries."""
    return places.shape == tuple(shape) and np.array_equal(places, numbered(shape))


def by_last_axis(ndim: int) -> tuple[Axes, Axes]:
    """Token and feature axes, with the last one for features."""
    axes = tuple(range(ndim))
    return axes[:-1], axes[-1:]


def as_rows(array: Any, *groups: Axes) -> Any:
    """An array with each group of axes merged into one, such as tokens and features into (T, D).

    All remaining axes must have length one.
    """
    named = [i for axes in groups for i in axes]
    rest = (i for i in range(array.ndim) if i not in named)
    size = [math.prod(array.shape[i] for i in axes) for axes in groups]
    return array.transpose(*rest, *named).reshape(size)


def take(array: Any, places: Places) -> Any:
    """Entries at these places."""
    if np.array_equal(places.ravel(), np.arange(array.size)):
        return array.reshape(places.shape)
    values = array.reshape(-1)[np.maximum(places, 0)]
    xp: Any = np if isinstance(array, np.ndarray) else jnp  # known while tracing
    return xp.where(places < 0, 0, values) if (places < 0).any() else values


def table(places: Places, width: int) -> tuple[Any, Any]:
    """The rows and columns of (T, width) of which places (U, O) are a table; None if they are none."""
    rows = np.where(places < 0, -1, places // width).max(axis=1)
    columns = np.where(places < 0, -1, places % width).max(axis=0)
    known = (rows >= 0)[:, None] & (columns >= 0)
    whole = np.where(known, rows[:, None] * width + columns, -1)
    return (rows, columns) if np.array_equal(places, whole) else (None, None)


def take_cov(cov: Any, places: Places) -> Any:
    """Covariance of the sequence made of the entries at these places of another."""
    num_tokens, num_features = cov.shape
    rows, columns = table(places, num_features)
    if rows is None:
        return cov.entries(places)
    if not np.array_equal(rows, np.arange(num_tokens)):
        cov = cov.map_tokens(jax.nn.one_hot(rows, num_tokens, dtype=cov.dtype))
    if not np.array_equal(columns, np.arange(num_features)):
        cov = cov.map_features(jax.nn.one_hot(columns, num_features, dtype=cov.dtype).T)
    return cov


class Factor(NamedTuple):
    """The axes of one factor of a product (`dot_general`)."""

    batch: Axes
    free: Axes
    contracted: Axes


def factors(node: Any) -> tuple[Factor, Factor]:
    """The axes of a product's two factors; the result has the batch axes, then the free ones."""
    contracted, batch = node.params["dimension_numbers"]
    left, right = (
        Factor(tuple(b), tuple(i for i in range(np.ndim(x)) if i not in (*c, *b)), tuple(c))
        for x, c, b in zip(node.operands, contracted, batch, strict=True)
    )
    return left, right


def in_product(node: Any, side: int, entries: np.ndarray) -> np.ndarray:
    """An array of the product's entries, which has the free axes of `side` before those of the other.

    The entries come in any shape whose C order is that of batch, own free and other free axes.
    """
    own, other = factors(node)[side], factors(node)[1 - side]
    shape = [np.shape(node.operands[side])[i] for i in (*own.batch, *own.free)]
    shape += [np.shape(node.operands[1 - side])[i] for i in other.free]
    entries = entries.reshape(shape)
    if side == 1:
        start, count = len(own.batch), len(own.free)
        entries = np.moveaxis(entries, range(start, start + count), range(-count, 0))
    return entries
