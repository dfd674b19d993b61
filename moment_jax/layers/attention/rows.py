"""Covariance of one head's scores, in Kronecker products."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from moment_jax.covariance.numerics import safe_divide
from moment_jax.expectations import expected_softmax
from moment_jax.layers.attention.score_noise import Products, total_of
from moment_jax.xla import materialized, product_with_transposed, rows_diagonal, rows_product

Array = jax.Array


class Term(NamedTuple):
    """A Kronecker product queries_ab keys_cf, without what all keys of a row share.

    Softmax does not see that. What is left of the keys' covariance is minus half the variance of every
    difference of two keys. So next to nothing cancels in a row with nearly all its weight on one key.
    """

    queries: Array  # (T, T)
    contrasts: Array  # of the keys, (S, S), zero on the diagonal
    variance: Array  # of the keys, (S,)

    @classmethod
    def of(cls, queries: Array, keys: Array) -> Term:
        """A product of queries (T, T) and the keys' covariance (S, S)."""
        return cls(queries, centred(keys), rows_diagonal(keys))

    def own(self) -> Array:
        """The queries' side of the covariance of a row with itself, (T, 1)."""
        return rows_diagonal(self.queries)[:, None]

    def seen(self, weights: Array) -> SeenTerm:
        """With what weights W (T, S) make of the contrasts."""
        pulled = materialized(rows_product(weights, self.contrasts))
        met = materialized(product_with_transposed(pulled, weights))
        return SeenTerm(self.queries, self.contrasts, pulled, met)


class SeenTerm(NamedTuple):
    """A `Term`, and what the weights W make of it: a `ScoreTerm`."""

    queries: Array  # (T, T)
    contrasts: Array  # (S, S)
    pulled: Array  # W times the contrasts, (T, S)
    met: Array  # and that times W^T, (T, T)

    def quadratic(self, weights: Array, products: Products) -> Array:
        """sum_cf contrasts_cf E <u_ac, u_bf> with u_ac = W_ac (v_c - A_a), multiplied out, (T, T)."""
        half = rows_product(weights, materialized(self.contrasts * products.values))
        half = materialized(half - 2 * products.crossed * self.pulled)
        half = product_with_transposed(half, weights)
        return 0.5 * (half + half.T) + products.averages * self.met


class RowCovariance(NamedTuple):
    """Cov[S_ac, S_bf], a sum of Kronecker products."""

    terms: tuple[Term, ...]
    in_softmax: tuple[Term, ...]  # what E[softmax] takes for them

    @classmethod
    def merged(cls, terms: tuple[Term, ...], sizes: tuple[Array, ...]) -> RowCovariance:
        """With one product for E[softmax], of the same total variance of contrasts in every row.

        It needs no more, for half of the products or less.

        Args:
          terms: whose queries have been divided by these sizes.
          sizes: of the contrasts of their keys.
        """
        whole = jnp.broadcast_to(total_of(sizes), (1, 1))
        pairs = zip(sizes, terms, strict=True)
        queries = safe_divide(total_of(size * term.queries for size, term in pairs), whole)
        keys = (total_of(part) for part in zip(*(term[1:] for term in terms), strict=True))
        return cls(terms, (Term(queries, *keys),))

    def expected_softmax(self, scores: Array, mask: Array | None) -> Array:
        """E[softmax] of scores of these means, (T, S)."""
        return expected_softmax(scores, _Contrasts(self.in_softmax), mask)

    def variance(self) -> Array:
        """Var[S_ac], (T, S)."""
        return total_of(term.own() * term.variance[None, :] for term in self.terms)


class _Contrasts(NamedTuple):
    """Covariance of the contrasts of every row: a `ScoreCovariance`."""

    terms: tuple[Term, ...]

    def variance(self) -> Array:
        return jnp.zeros((), self.terms[0].contrasts.dtype)

    def matvec(self, vectors: Array) -> Array:
        return total_of(term.own() * rows_product(vectors, term.contrasts) for term in self.terms)

    def square_matvec(self, vectors: Array, unit: Array) -> Array:
        return total_of(
            (1 if i == j else 2)
            * (a.own() / unit)
            * (b.own() / unit)
            * rows_product(vectors, a.contrasts * b.contrasts)
            for i, a in enumerate(self.terms)
            for j, b in enumerate(self.terms)
            if i <= j
        )


def centred(keys: Array) -> Array:
    """Minus half the variance of every difference of two of them, (S, S) from their covariance."""
    own = 0.5 * rows_diagonal(keys)
    return keys - own[:, None] - own[None, :]
