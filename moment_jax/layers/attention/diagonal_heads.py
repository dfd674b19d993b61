"""Attention for `Diagonal`, all heads, as plain JAX; see `diagonal_rows`."""

from typing import Any, NamedTuple

from jax import Array

from moment_jax.layers.attention.diagonal_rows import Part, Rows, Shared, shared_mean
from moment_jax.layers.attention.mix import each_head, mix
from moment_jax.layers.attention.places import at_own, own_entries


class Heads(NamedTuple):
    """Moments of H heads of width K."""

    query: Part  # (H, T, K)
    key: Part  # (H, S, K)
    value: Part  # (H, S, K)
    shared: Shared  # (1, S) for all heads, and (H, K, K)
    noise: Array | None
    """sum_d Cov[q_ad, k_ad] of each query's own token, (H, T, 1); None if queries come from another
    sequence."""
    mask: Array | None  # (H, T, S)


def mix_by_compiler(
    heads: Heads, places: Array | None, order: int
) -> tuple[Array, Array, Array | None]:
    """Mean and variance (H, T, K), and own weights (H, T) or None.

    `places` are the positions of the queries' own tokens among the keys; None if they coincide.
    """
    energy = heads.shared.energy

    def mix_one(head: Any) -> tuple[Array, Array, Array | None]:
        q, k, v, link, noise, mask = head
        return _head(q, k, v, Shared(energy, link), noise, mask, places, order)

    num_scores = heads.query.mean[..., 0].size * heads.key.mean.shape[1]
    each = heads.query, heads.key, heads.value, heads.shared.link, heads.noise, heads.mask
    return each_head(mix_one, each, num_scores)


def _head(
    q: Part,
    k: Part,
    v: Part,
    shared: Shared,
    noise: Array | None,
    mask: Array | None,
    places: Array | None,
    order: int,
) -> tuple[Array, Array, Array | None]:
    """Mean (T, K), variance (T, K) and own weights (T,) of one head."""
    by_own = None if noise is None else at_own(noise[:, 0], places, k.mean.shape[0])
    mean, variance, mixing = mix(Rows(q, k, v, by_own), mask, order)
    if order == 2:
        assert mixing.gain is not None
        mean = mean + mixing.gain * shared_mean(q, mixing.weights, shared)
    return mean, variance, None if noise is None else own_entries(mixing.weights, places)
