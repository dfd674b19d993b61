"""Cov[x, z] of two random arrays, which a structure's layers carry from x to whatever z follows."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array


class Cross(NamedTuple):
    """Cov[x_td, z_se], dense: what `Full` and a user's own structure carry.

    Each method is what Cov[x, z] becomes by an operation on z. Other structures carry less, with the
    same methods; there None stands for a covariance that they cannot hold, which is zero.
    """

    cov: Array  # (T, D, S, E)

    @property
    def T(self) -> Cross:  # noqa: N802
        """Cov[z, x]."""
        return Cross(jnp.transpose(self.cov, (2, 3, 0, 1)))

    def rescale(self, gain: Array) -> Cross:
        """Cov[x, gain * z], gain (S, E) or (1, E)."""
        return Cross(self.cov * gain[None, None])

    def map_features(self, kernel: Array) -> Cross:
        """Cov[x, z @ kernel], kernel (E, O)."""
        return Cross(jnp.einsum("tdsi,io->tdso", self.cov, kernel))

    def map_each(self, kernels: Array) -> Cross:
        """Cov[x, z_s @ kernels_s], kernels (S, E, O)."""
        return Cross(jnp.einsum("tdsi,sio->tdso", self.cov, kernels))

    def map_tokens(self, weights: Array) -> Cross:
        """Cov[x, weights @ z], weights (U, S)."""
        return Cross(jnp.einsum("us,tdsi->tdui", weights, self.cov))

    def map_heads(self, weights: Array) -> Cross:
        """Cov[x, weights_h @ z_h] for each of H groups of features, weights (H, U, S)."""
        t, d, s, e = self.cov.shape
        groups = self.cov.reshape(t, d, s, len(weights), -1)
        return Cross(jnp.einsum("hus,tdshk->tduhk", weights, groups).reshape(t, d, -1, e))

    def take(self, rows: np.ndarray, columns: np.ndarray) -> Cross:
        """Cov[x, z[rows][:, columns]]; -1 stands for zeros."""
        known = (rows >= 0)[:, None] & (columns >= 0)
        return Cross(jnp.where(known, self.cov[:, :, rows][..., columns], 0))

    def entries(self, places: np.ndarray) -> Cross:
        """Cov[x, entries of z], given their places (U, O) in the flat z; -1 stands for zeros."""
        flat = self.cov.reshape(*self.cov.shape[:2], -1)
        return Cross(jnp.where(places < 0, 0, flat[..., places]))

    def add(self, other: Cross) -> Cross:
        """Cov[x, z + y], given Cov[x, y]."""
        return Cross(self.cov + other.cov)

    def own(self) -> Array:
        """Cov[x_td, z_td], (T, D), for z of the shape of x."""
        return jnp.einsum("tdtd->td", self.cov)


def plus(left: Any, right: Any) -> Any:
    """The sum of two cross-covariances, of which None is zero."""
    if left is None or right is None:
        return right if left is None else left
    return left.add(right)
