"""Token Gram matrices (T, T): arrays, or for long sequences `TokenGram`, known at r landmark tokens.

Both add, multiply entry by entry, and multiply matrices (`G @ W`, `W @ G`); where more is asked for, the
functions here take either. A product with a T x T matrix costs T^2, with a `TokenGram` T r (Nystroem:
Williams and Seeger, 2001).
"""

import dataclasses
import functools
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from moment_jax import xla
from moment_jax.covariance import numerics
from moment_jax.covariance.fields import need, register_fields
from moment_jax.covariance.numerics import nonnegative, safe_divide, safe_sqrt
from moment_jax.linalg import dot, ridge_inverse

SHORT = 256  # up to this many tokens, all are landmarks unless told otherwise
USUAL = 64  # landmarks of longer sequences
_RIDGE = 1e-2  # of every landmark's variance: a few tokens have most of what attention looks at


@register_fields
@dataclasses.dataclass(frozen=True)
class TokenGram:
    """A semidefinite G (T, T) that is known at landmark tokens: its columns there, and its diagonal.

    Sums, multiples and entrywise products keep exactly the numbers that they are given. A product with
    a matrix is that of `factored`.
    """

    columns: Array  # G at the landmarks, (T, r)
    diagonal: Array  # (T,)

    @property
    def places(self) -> np.ndarray:
        """The landmark tokens, (r,)."""
        return landmarks(*self.columns.shape[-2:])

    def __add__(self, other: Any) -> Self:
        columns, diagonal = self._parts_of(other)
        return type(self)(self.columns + columns, self.diagonal + diagonal)

    def __mul__(self, other: Any) -> Self:
        columns, diagonal = self._parts_of(other)
        return type(self)(self.columns * columns, self.diagonal * diagonal)

    __radd__, __rmul__ = __add__, __mul__

    def __pow__(self, power: int) -> Self:
        return type(self)(self.columns**power, self.diagonal**power)

    def __matmul__(self, rows: Array) -> Array:
        return factored(self) @ rows

    def __rmatmul__(self, rows: Array) -> Array:
        return rows @ factored(self)

    @property
    def T(self) -> Self:  # noqa: N802
        """Itself, for it is symmetric."""
        return self

    def _parts_of(self, other: Any) -> tuple[Any, Any]:
        """Columns and diagonal of a `TokenGram`, a number, or an array (T, 1), (1, T) or (T, T)."""
        if isinstance(other, TokenGram):
            mine, theirs = count_of(self), count_of(other)
            mend = "Begin both with Separable.zeros(shape, landmarks=r)."
            came = f"{mine} and {theirs}"
            need("a sum or product", mine == theirs, "the same landmark tokens", came, mend)
            return other.columns, other.diagonal
        if jnp.ndim(other) == 0:
            return other, other
        t, s = other.shape
        own = xla.diagonal_of(other) if t == s else other.reshape(-1)
        return other if s == 1 else other[:, self.places], own


Tokens = Array | TokenGram


class Factored(NamedTuple):
    """The symmetric matrix columns inverse columns^T + diag(rest), (T, T)."""

    columns: Array  # (T, r)
    inverse: Array  # (r, r)
    rest: Array  # (T,)

    def __matmul__(self, rows: Array) -> Array:
        low = _dot(self.inverse, _dot(self.columns.T, rows))
        return _dot(self.columns, low) + self.rest[:, None] * rows

    def __rmatmul__(self, rows: Array) -> Array:
        rest = self.rest if rows.ndim == 1 else self.rest[None, :]
        return _dot(rows, self.columns, self.inverse, self.columns.T) + rows * rest


# -- either form -----------------------------------------------------------------------------------


def count_of(tokens: Tokens) -> int:
    """The number of landmarks; all tokens in an array."""
    return (tokens.columns if isinstance(tokens, TokenGram) else tokens).shape[-1]


def diagonal_of(tokens: Tokens) -> Array:
    """The diagonal, (T,)."""
    return tokens.diagonal if isinstance(tokens, TokenGram) else xla.diagonal_of(tokens)


def whole(tokens: Tokens | Factored) -> Array:
    """The matrix, (T, T)."""
    known = factored(tokens) if isinstance(tokens, TokenGram) else tokens
    if not isinstance(known, Factored):
        return known
    columns, inverse, rest = known
    return _dot(columns, inverse, columns.T) + xla.diagonal_matrix(rest)


def factored(tokens: Tokens) -> Array | Factored:
    """G in the form in which it multiplies: itself, or C (G_JJ + ridge)^-1 C^T + diag(rest).

    The rest is what the diagonal has left. Rows whose first term exceeds it are scaled down, so the
    result stays semidefinite and bounded by its diagonal where approximated products are not.
    """
    if not isinstance(tokens, TokenGram):
        return tokens
    columns, inverse = _low_rank(tokens.columns)
    own, low = nonnegative(tokens.diagonal), nonnegative(_quadratic(columns, inverse))
    shrink = jnp.where(low > own, safe_sqrt(safe_divide(own, low)), 1)[:, None]
    return Factored(shrink * columns, inverse, nonnegative(own - low))


def product(left: Array, right: Array, count: int) -> Tokens:
    """The symmetric product left right^T of two (T, D) arrays."""
    if count >= len(left):
        return left @ right.T
    columns = _dot(left, right[landmarks(len(left), count)].T)
    return TokenGram(columns, jnp.sum(left * right, axis=1))


def gram(rows: Array, metric: Array | Factored | None, count: int) -> Tokens:
    """`numerics.gram`, of a metric that may be what `factored` gives."""
    if count >= len(rows) and not isinstance(metric, Factored):
        return numerics.gram(rows, metric)
    mapped = rows @ metric if isinstance(metric, Factored) else numerics.under(rows, metric)
    return product(mapped, rows, count)


def vecmat(rows: Array, tokens: Tokens, shown: Array | None = None) -> Array:
    """The product rows G, (T,) or (U, T), without tokens of weight zero that are not `shown`, (T,)."""
    if not isinstance(tokens, TokenGram):
        return numerics.weighted_sum(rows, tokens) if rows.ndim == 1 else rows @ tokens
    seen = jnp.any(jnp.atleast_2d(rows) != 0, axis=0)
    return rows @ seen_only(tokens, seen if shown is None else seen | shown)


def quadratic(rows: Array, tokens: Tokens) -> Array:
    """The quadratic forms rows G rows^T, rows (U, T), all (U, U) of them."""
    if not isinstance(tokens, TokenGram):
        return numerics.gram(rows, tokens)
    return vecmat(rows, tokens) @ rows.T


def right_multiply(cross: Tokens, mapping: Array) -> Tokens:
    """X mapping, (T, T), for a covariance X of tokens; of a `TokenGram` the symmetric part."""
    if not isinstance(cross, TokenGram):
        return cross @ mapping
    weights = mapping.T
    seen: Any = seen_only(cross, jnp.any(weights != 0, axis=0))
    known: Any = factored(seen)
    own = jnp.sum(_dot(weights, known.columns, known.inverse) * known.columns, axis=1)
    own = own + known.rest * xla.diagonal_of(weights)
    return TokenGram(0.5 * (known @ weights[seen.places].T + _dot(weights, seen.columns)), own)


def right_scale(tokens: Tokens, scale: Array) -> Tokens:
    """The matrix G_ts scale_s, scale (T, 1); of a `TokenGram` its symmetric part."""
    scaled = tokens * scale.T
    return 0.5 * (tokens * scale + scaled) if isinstance(tokens, TokenGram) else scaled


def row_sums(tokens: Tokens) -> Array:
    """The sum of each row, (T, 1)."""
    if not isinstance(tokens, TokenGram):
        return jnp.sum(tokens, axis=1, keepdims=True)
    return tokens @ jnp.ones((len(tokens.diagonal), 1), tokens.diagonal.dtype)


def total(tokens: Tokens) -> Array:
    """The sum of all entries, ()."""
    return jnp.sum(row_sums(tokens)) if isinstance(tokens, TokenGram) else jnp.sum(tokens)


def divide(tokens: Tokens, size: Array) -> Tokens:
    """G / size, and 0 where that is 0."""
    return jax.tree.map(lambda entries: safe_divide(entries, size), tokens)


def add_diagonal(tokens: Tokens, added: Array) -> Tokens:
    """G + diag(added), added (T,)."""
    if not isinstance(tokens, TokenGram):
        return tokens + xla.diagonal_matrix(added)
    here = jnp.arange(len(added))[:, None] == tokens.places[None]
    columns = tokens.columns + jnp.where(here, added[:, None], jnp.zeros((), added.dtype))
    return TokenGram(columns, tokens.diagonal + added)


def correlation(tokens: Tokens) -> Tokens:
    """`numerics.correlation_of`."""
    if not isinstance(tokens, TokenGram):
        return numerics.correlation_of(tokens)
    inverse = safe_divide(jnp.ones((), tokens.diagonal.dtype), safe_sqrt(tokens.diagonal))
    scaled: Any = inverse[:, None] * tokens * inverse[None, :]
    scaled = add_diagonal(scaled, 1 - scaled.diagonal)  # a certain token's too
    bounded = jnp.where(jnp.abs(scaled.columns) > 1, jnp.sign(scaled.columns), scaled.columns)
    return TokenGram(bounded, scaled.diagonal)


def bound(tokens: Tokens, sd: Array) -> Tokens:
    """G whose entries rounding has not lifted beyond sd_t sd_s, sd (T,); bounds count as constant."""
    sd = jax.lax.stop_gradient(1.001 * sd)
    most = sd[:, None] * jax.tree.map(jnp.ones_like, tokens) * sd[None, :]
    return jax.tree.map(lambda entries, m: jax.lax.clamp(-m, entries, m), tokens, most)


# -- what attention does ---------------------------------------------------------------------------


def seen_only(tokens: Tokens, seen: Array) -> Tokens:
    """Landmarks that are not `seen` (T,) hold nothing, and so tell others nothing."""
    if not isinstance(tokens, TokenGram):
        return tokens
    seen = seen.astype(tokens.diagonal.dtype)
    return tokens * seen[None, :] * seen[:, None]


def contrasts(keys: Tokens, seen: Array) -> Tokens:
    """Keys' Gram matrix less what all keys of a row share, f_t + f_s: softmax sees differences only.

    That is minus half the variance of each difference, or the keys less the average landmark that is
    `seen`, (S,), which stays semidefinite.
    """
    if not isinstance(keys, TokenGram):
        keys = xla.materialized(keys)
        own = xla.materialized(0.5 * xla.diagonal_of(keys))
        return keys - own[:, None] - own[None, :]
    share = seen[keys.places].astype(keys.columns.dtype)
    share = safe_divide(share, jnp.sum(share))
    shared = keys.columns @ share
    shared = shared - 0.5 * share @ shared[keys.places]
    columns = keys.columns - shared[:, None] - shared[keys.places][None, :]
    return TokenGram(columns, keys.diagonal - 2 * shared)


def contract(weights: Array, matrix: Array, less: Array, plus: Tokens, seen: Array) -> Tokens:
    """W M W^T + G less the symmetric part of X W^T, semidefinite, from columns of `seen` landmarks."""
    if not isinstance(plus, TokenGram):
        half = (weights @ matrix - less) @ weights.T
        return 0.5 * (half + half.T) + plus
    at, half = weights[plus.places], 0.5 * less
    columns = _dot(weights, _dot(matrix, at.T) - half[plus.places].T) - _dot(half, at.T)
    columns = columns + plus.columns
    known, inverse = _low_rank(columns * seen[plus.places][None, :])
    mapped = _dot(known, inverse)  # one factor twice: semidefinite, as `columns` may not be
    return product(mapped, known, count_of(plus))


def congruence(known: Array | Factored, rows: Array) -> tuple[Array, Array]:
    """G W and W^T G W, for W (T, S); of G's rest the second takes the diagonal: all would cost T S^2."""
    if not isinstance(known, Factored):
        mapped = known @ rows
        return mapped, rows.T @ mapped
    low = _dot(known.columns.T, rows)
    half = _dot(known.inverse, low)
    mapped = _dot(known.columns, half) + known.rest[:, None] * rows
    return mapped, _dot(low.T, half) + xla.diagonal_matrix(known.rest @ rows**2)


def variance_within(weights: Array, own: Array, known: Array | Factored) -> Array:
    """sum_c w_c (G_cc - (G w)_c) for each row w of weights (U, T), (U, 1), given diag(G) and G."""
    if not isinstance(known, Factored):
        return jnp.sum(weights * (own[None, :] - weights @ known), axis=1, keepdims=True)
    low = _quadratic(_dot(weights, known.columns), known.inverse)
    return (weights @ own - low - weights**2 @ known.rest)[:, None]


# -- landmarks -------------------------------------------------------------------------------------


def num_landmarks(name: str, t: int, count: int | None = None) -> int:
    """How many of T tokens are landmarks; None means all of a short sequence, 64 of a longer one."""
    if count is None:
        return t if t <= SHORT else USUAL
    whole = isinstance(count, int | np.integer) and not isinstance(count, bool)
    rule, mend = "a positive number of landmark tokens, or None", "For all tokens, use landmarks=T."
    need(name, whole and count >= 1, rule, repr(count), mend)
    return min(int(count), t)


def landmarks(t: int, count: int) -> np.ndarray:
    """Tokens with the first and the last, (r,), denser at the start; of one, the first.

    A short sequence that is padded to T tokens comes first: of 12 tokens in 512, the sd of their mean is
    .99 of the right one with 64 landmarks, and was .90 with even ones.
    """
    spaced = np.round((t - 1) * np.linspace(0, 1, count) ** 1.5).astype(int)
    return np.maximum(spaced, np.arange(count))


def at_landmarks(tokens: Tokens, count: int) -> Tokens:
    """A matrix (T, T) at this many landmarks; itself if these are all tokens, or it has them already."""
    if isinstance(tokens, TokenGram) or count >= len(tokens):
        return tokens
    return TokenGram(tokens[:, landmarks(len(tokens), count)], xla.diagonal_of(tokens))


# -- weights p of the pooled sum sum_t p_t x_t, so that masked tokens touch no others ----------------


def pool_seen(mask: Array, random: Array, *, memory: bool = False) -> Array:
    """The tokens that no query is denied by a mask (T, S), (1, S) or (H, T, S), (S,) boolean.

    With padding those are the existing tokens. With a causal mask it is the first token, so no later
    token influences an earlier one. If it is certain, and others are `random`, (S,), its covariance says
    nothing about theirs: then, and of a memory, it is all tokens that some query sees.
    """
    seen = jnp.any(mask, axis=tuple(range(mask.ndim - 1)))
    seen = seen | ~jnp.any(seen)  # if everything is masked, weigh all equally
    if memory or mask.shape[-2] != mask.shape[-1]:
        return seen
    shown = seen & _shown(mask, seen)
    unknown = jnp.any(random & seen) & ~jnp.any(random & shown)
    return jnp.where(unknown, seen, shown)


def pool_read(read: Array, mask: Array | None) -> Array:
    """The pool (T,) of a sequence of which one sum is read, with these weights (T,).

    It is nine parts what is read, and one part what that looks at, for a token that is read may be
    certain before the first attention. Tokens that no query may look at have no part in it; if these
    alone are read, all others are pooled.
    """
    looks = jnp.ones((1, len(read)), bool) if mask is None else mask
    looks = jnp.any(looks, axis=tuple(range(looks.ndim - 2)))
    seen = jnp.any(looks, axis=0)
    seen = seen | ~jnp.any(seen)  # if everything is masked, as in `pool_seen`
    read = jnp.where(seen, read, 0)
    read = jnp.where(jnp.any(read > 0), read, seen)
    around = jnp.sum(looks, axis=0) if len(looks) == 1 else read @ looks
    return 0.9 * read / jnp.sum(read) + 0.1 * around / jnp.maximum(jnp.sum(around), 1e-9)


def pool_scores(pool: Array, mask: Array | None) -> Array:
    """Weights (T,) of tokens in averages for the scores, under a mask (H, T, T) or None.

    Softmax needs differences of keys, which one token does not have. If the pool holds one token,
    average over the tokens that no query with a choice of keys is denied: two with a causal mask.
    """
    more = jnp.ones(pool.shape, bool)
    if mask is not None:
        seen = jnp.any(mask, axis=(0, 1))
        choice = jnp.sum(jnp.any(mask, axis=0), axis=1) > 1
        more = seen & _shown(mask, seen & choice)
    return jnp.where(jnp.sum(pool > 0) > 1, pool, more.astype(pool.dtype))


def _shown(mask: Array, queries: Array) -> Array:
    """The tokens (T,) that are visible to each earlier token among `queries` (T,)."""
    looks = jnp.any(mask, axis=tuple(range(mask.ndim - 2)))
    later = jnp.tril(jnp.ones(looks.shape, bool))
    return jnp.all(looks | later | ~queries[:, None], axis=0)


def _dot(*factors: Array) -> Array:
    """The product of matrices from the left."""
    return functools.reduce(dot, factors)


def _low_rank(columns: Array) -> tuple[Array, Array]:
    """Columns C of a matrix, scaled, and a symmetric inverse, (r, r), of what they hold at landmarks."""
    places = landmarks(*columns.shape)
    own = nonnegative(xla.diagonal_of(columns[places]))
    scale = safe_divide(jnp.ones((), own.dtype), safe_sqrt(own))
    columns = columns * scale[None, :]
    core = scale[:, None] * columns[places]  # approximated columns need not be symmetric
    return columns, ridge_inverse(0.5 * (core + core.T), _RIDGE)


def _quadratic(rows: Array, metric: Array) -> Array:
    """Row metric row^T of each of the rows, (T,)."""
    return jnp.sum(_dot(rows, metric) * rows, axis=1)
