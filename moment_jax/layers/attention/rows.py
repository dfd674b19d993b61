"""Covariance of one head's scores, as Kronecker products."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from moment_jax.covariance.numerics import safe_divide
from moment_jax.expectations import expected_softmax
from moment_jax.layers.attention.score_noise import Products, total_of
from moment_jax.xla import diagonal_of, materialized


class Term(NamedTuple):
    """A Kronecker product queries_ab keys_cf, without what all keys of a row share.

    Softmax ignores a common shift. What remains of the keys' covariance is minus half the variance of
    each difference of two keys. Almost nothing then cancels in a row with nearly all its weight on one
    key.
    """

    queries: Array  # (T, T)
    contrasts: Array  # of the keys, (S, S), zero on the diagonal
    variance: Array  # of the keys, (S,)

    @classmethod
    def of(cls, queries: Array, keys: Array) -> Term:
        """The product of queries (T, T) and the keys' covariance (S, S)."""
        return cls(queries, centred(keys), diagonal_of(keys))

    def own(self) -> Array:
        """The diagonal of the queries' side, (T, 1)."""
        return diagonal_of(self.queries)[:, None]

    def seen(self, weights: Array) -> SeenTerm:
        """The term with its products with the weights W, (T, S)."""
        pulled = materialized(weights @ self.contrasts)
        met = materialized(pulled @ weights.T)
        return SeenTerm(self.queries, self.contrasts, pulled, met)


class SeenTerm(NamedTuple):
    """A `Term` with its products with the weights W."""

    queries: Array  # (T, T)
    contrasts: Array  # (S, S)
    pulled: Array  # W times the contrasts, (T, S)
    met: Array  # `pulled` times W^T, (T, T)

    def quadratic(self, weights: Array, products: Products) -> Array:
        """sum_cf contrasts_cf E <u_ac, u_bf> with u_ac = W_ac (v_c - A_a), (T, T)."""
        half = weights @ materialized(self.contrasts * products.values)
        half = materialized(half - 2 * products.crossed * self.pulled)
        half = half @ weights.T
        return 0.5 * materialized(half + half.T) + products.averages * self.met


class RowCovariance(NamedTuple):
    """Cov[S_ac, S_bf] as a sum of Kronecker products."""

    terms: tuple[Term, ...]
    in_softmax: tuple[Term, ...]  # a cheaper version for E[softmax]

    @classmethod
    def merged(cls, terms: tuple[Term, ...], sizes: tuple[Array, ...]) -> RowCovariance:
        """Merge the terms for E[softmax] into one with the same total variance of contrasts in each row.

        E[softmax] needs no more, and it halves the products. The terms' queries were divided by
        `sizes`, those of the contrasts of their keys.
        """
        whole = jnp.broadcast_to(total_of(sizes), (1, 1))
        pairs = zip(sizes, terms, strict=True)
        queries = safe_divide(total_of(size * term.queries for size, term in pairs), whole)
        keys = (total_of(part) for part in zip(*(term[1:] for term in terms), strict=True))
        return cls(terms, (Term(queries, *keys),))

    def expected_softmax(self, scores: Array, mask: Array | None) -> Array:
        """E[softmax] of scores with these means, (T, S)."""
        return expected_softmax(scores, _Contrasts(self.in_softmax), mask)

    def variance(self) -> Array:
        """Var[S_ac], (T, S)."""
        return total_of(term.own() * term.variance[None, :] for term in self.terms)


class _Contrasts(NamedTuple):
    """Covariance of each row's contrasts: a `ScoreCovariance`."""

    terms: tuple[Term, ...]

    def variance(self) -> Array:
        return jnp.zeros((), self.terms[0].contrasts.dtype)

    def matvec(self, vectors: Array) -> Array:
        return total_of(term.own() * (vectors @ term.contrasts) for term in self.terms)

    def square_matvec(self, vectors: Array, unit: Array) -> Array:
        return total_of(
            (1 if i == j else 2)
            * (a.own() / unit)
            * (b.own() / unit)
            * (vectors @ (a.contrasts * b.contrasts))
            for i, a in enumerate(self.terms)
            for j, b in enumerate(self.terms)
            if i <= j
        )


def centred(keys: Array) -> Array:
    """Minus half the variance of each difference of two keys, (S, S), from their covariance."""
    own = 0.5 * diagonal_of(keys)
    return keys - own[:, None] - own[None, :]
