"""The one registry: a structure, and how its layers compute.

A rule takes the mean (T, D) of a layer's input and its covariance, and returns those of its output and
`carry`: the layer linearised, as the function that makes Cov[u, output] of Cov[u, input] for any array
u, in the structure's own form (`Covariance.with_itself`). So a residual sum is
`cov.add_branch(branch, carry(cov.with_itself()))`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from jax import Array

from moment_jax.covariance import Covariance, Full
from moment_jax.expectations import ElementwiseMoments

Moments = Callable[[Array, Array], ElementwiseMoments]
"""(mean, variance) -> moments of an elementwise function."""


Carry = Callable[..., Any]
"""(Cov[u, input]) -> Cov[u, output]; attention to a memory also takes Cov[u, memory]; None is zero."""


class Attending(NamedTuple):
    """Settings of attention."""

    num_heads: int
    mask: Array | None  # (H, T, S) boolean, True where a query may look
    order: int
    turns: tuple[Array | None, Array | None] = (None, None)
    """Rotary positions: (T, K, K) matrices that multiply each query, and each key."""


class Rules(NamedTuple):
    """How the layers of one structure compute."""

    norm: Callable[..., tuple[Array, Any, Carry]]
    """(mean, cov, *, epsilon, order, centres)."""
    attention: Callable[..., tuple[Array, Any, Carry]]
    """(mean, cov, memory, params, attending); memory is None, or a pair (mean, cov)."""
    feed_forward: Callable[..., tuple[Array, Any, Carry]] | None = None
    """(mean, cov, params, moments of the activation); None for one layer after the other."""


RULES: dict[type[Covariance], Rules] = {}


def rules_of(structure: type[Covariance]) -> Rules:
    """The rules of a structure; those of `Full`, projected, for one of a user's own."""
    for base in structure.__mro__:
        if base in RULES:
            return RULES[base]
    norm, attention, _ = RULES[Full]
    return Rules(_by_projection(norm), _by_projection(attention))


def _by_projection(rule: Callable[..., tuple[Array, Full, Carry]]) -> Callable[..., Any]:
    def projected(mean: Array, cov: Covariance, *rest: Any, **options: Any) -> Any:
        # A memory is a pair (mean, cov).
        dense = ((x[0], x[1].full()) if type(x) is tuple else x for x in rest)
        out, full, carry = rule(mean, cov.full(), *dense, **options)
        return out, cov.projected(full.cov), carry

    return projected
