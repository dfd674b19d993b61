"""Cov[x, z] of two random arrays, which a structure's layers carry from x to whatever z follows."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from moment_jax.covariance import token_gram as tg
from moment_jax.covariance.numerics import safe_divide, safe_sqrt


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


class SeparableCross(NamedTuple):
    """Cov[x_td, z_se] = P_ts F_de."""

    tokens: tg.Tokens  # P, (T, S)
    features: Array  # F, (D, E)
    pools: tuple[Array, Array]  # of x, (T,), and of z, (S,), for averages over tokens

    @property
    def T(self) -> SeparableCross:  # noqa: N802
        return SeparableCross(self.tokens.T, self.features.T, self.pools[::-1])

    def shares(self) -> Array:
        """Each token's covariance with the pooled sum of x, in an average over tokens of z, (S,)."""
        shares = self.pools[1] * jnp.abs(tg.vecmat(self.pools[0], self.tokens))
        return safe_divide(shares, jnp.sum(shares))

    def rescale(self, gain: Array) -> SeparableCross:
        gain = gain[0] if len(gain) == 1 else self.shares() @ gain
        return self._replace(features=self.features * gain[None, :])

    def map_features(self, kernel: Array) -> SeparableCross:
        return self._replace(features=self.features @ kernel)

    def map_each(self, kernels: Array) -> SeparableCross:
        return self.map_features(jnp.tensordot(self.shares(), kernels, 1))

    def map_tokens(self, weights: Array) -> SeparableCross:
        pools = self.pools[0], jnp.ones(len(weights), weights.dtype)
        return SeparableCross(tg.whole(self.tokens) @ weights.T, self.features, pools)

    def map_heads(self, weights: Array) -> SeparableCross:
        """One pattern for all heads; each keeps its own share of the pooled sum."""
        reached = tg.vecmat(self.pools[0], self.tokens) @ jnp.sum(weights, axis=1).T
        own = jnp.repeat(
            safe_divide(reached, jnp.mean(reached)), self.features.shape[1] // len(reached)
        )
        return self.map_tokens(jnp.mean(weights, axis=0)).rescale(own[None])

    def take(self, rows: np.ndarray, columns: np.ndarray) -> SeparableCross:
        tokens, features, (pool, other) = self
        if not np.array_equal(rows, np.arange(len(other))):
            tokens = jnp.where(rows < 0, 0, tg.whole(tokens)[:, rows])
            other = jnp.where(rows < 0, 0, other[rows])
        if not np.array_equal(columns, np.arange(features.shape[1])):
            features = jnp.where(columns < 0, 0, features[:, columns])
        return SeparableCross(tokens, features, (pool, other))

    def add(self, other: SeparableCross) -> SeparableCross:
        """That of the pooled sums is exact; the pattern is an average of both."""
        if self.tokens is other.tokens:
            return self._replace(features=self.features + other.features)
        left, right = (jnp.sum(x.pools[1] * tg.vecmat(x.pools[0], x.tokens)) for x in (self, other))
        features = left * self.features + right * other.features
        # A pattern and its features may both be negative.
        size, more = (
            jnp.sign(n) * safe_sqrt(jnp.sum(f**2))
            for n, f in ((left, self.features), (right, other.features))
        )
        tokens = size * self.tokens + more * other.tokens
        return SeparableCross(tg.divide(tokens, size * left + more * right), features, self.pools)

    def own(self) -> Array:
        return tg.diagonal_of(self.tokens)[:, None] * tg.diagonal_of(self.features)[None, :]


class DiagonalCross(NamedTuple):
    """Cov[x_td, z_te] within each token, as the chain of gains and kernels that leads from x to z.

    That is g0_td sum_f K1_df g1_tf K2_fe g2_te for two kernels, exact where only x's own entry of z is
    asked for. Longer chains are shortened by averaging a gain over tokens.
    """

    gains: tuple[Array, ...]  # (T, D_i), or (1, D_i) of all tokens
    kernels: tuple[Array, ...]  # one fewer, (D_i, D_{i+1}); at most two
    left: np.ndarray  # the token of each row of x, -1 for none
    right: np.ndarray  # that of each row of z

    @property
    def T(self) -> DiagonalCross:  # noqa: N802
        kernels = tuple(kernel.T for kernel in reversed(self.kernels))
        return DiagonalCross(self.gains[::-1], kernels, self.right, self.left)

    def rescale(self, gain: Array) -> DiagonalCross:
        if len(gain) > 1 and not np.array_equal(self.right, np.arange(len(self.right))):
            count = max(map(len, self.gains))
            gain = jnp.ones((count, gain.shape[1]), gain.dtype).at[self.right].set(gain)
        return self._replace(gains=(*self.gains[:-1], self.gains[-1] * gain))

    def map_features(self, kernel: Array) -> DiagonalCross:
        gains, kernels = self.gains, self.kernels
        if len(kernels) == 2:
            gains, short = self._short()
            kernels = (short,)
        unit = jnp.ones((1, kernel.shape[1]), kernel.dtype)
        return self._replace(gains=(*gains, unit), kernels=(*kernels, kernel))

    def map_each(self, kernels: Array) -> DiagonalCross:
        return self.map_features(jnp.mean(kernels, axis=0))

    def map_tokens(self, weights: Array) -> DiagonalCross | None:
        """What other tokens tell is not held."""
        if weights.shape[0] != weights.shape[1]:
            return None
        return self.rescale(jnp.broadcast_to(jnp.diagonal(weights)[:, None], self._shape))

    def map_heads(self, weights: Array) -> DiagonalCross | None:
        if weights.shape[1] != weights.shape[2]:
            return None
        own = jnp.diagonal(weights, axis1=1, axis2=2).T
        return self.rescale(jnp.repeat(own, self._shape[1] // len(weights), axis=1))

    def take(self, rows: np.ndarray, columns: np.ndarray) -> DiagonalCross:
        right = np.where(rows < 0, -1, self.right[rows])
        found = self._replace(right=right)
        if np.array_equal(columns, np.arange(self._shape[1])):
            return found
        return found.map_features(
            jax.nn.one_hot(columns, self._shape[1]).T.astype(self.gains[0].dtype)
        )

    def add(self, other: DiagonalCross) -> DiagonalCross:
        """Of two ways from x to z; each is first shortened to one kernel, unless neither has any."""
        if not self.kernels and not other.kernels:
            return self._replace(gains=(self.gains[0] + other.gains[0],))
        gains, kernel = self._short()
        others, another = other._short()
        # One gain for the entries of x in both.
        kernel = kernel * jnp.mean(gains[1], axis=0, keepdims=True)
        another = another * jnp.mean(others[1], axis=0, keepdims=True)
        ratio = safe_divide(jnp.mean(others[0], axis=0), jnp.mean(gains[0], axis=0))
        unit = jnp.ones((1, kernel.shape[1]), kernel.dtype)
        return self._replace(gains=(gains[0], unit), kernels=(kernel + ratio[:, None] * another,))

    def own(self) -> Array:
        if not self.kernels:
            found = self.gains[0]
        elif len(self.kernels) == 1:
            found = self.gains[0] * self.gains[1] * jnp.diagonal(self.kernels[0])[None]
        else:
            first, middle, last = self.gains
            found = first * (middle @ (self.kernels[0].T * self.kernels[1])) * last
        here = (self.left == self.right) & (self.left >= 0)
        if here.all() and np.array_equal(self.left, np.arange(len(found))):
            return found
        return jnp.where(here[:, None], found[self.left] if len(found) > 1 else found, 0)

    @property
    def _shape(self) -> tuple[int, int]:
        return len(self.right), self.gains[-1].shape[1]

    def _short(self) -> tuple[tuple[Array, Array], Array]:
        """The chain with one kernel: its two gains, and the kernel."""
        if not self.kernels:
            gain = self.gains[0]
            unit = jnp.eye(gain.shape[1], dtype=gain.dtype)
            return (gain, jnp.ones((1, len(unit)), gain.dtype)), unit
        if len(self.kernels) == 1:
            return (self.gains[0], self.gains[1]), self.kernels[0]
        gain = jnp.mean(self.gains[1], axis=0, keepdims=True)
        return (self.gains[0], self.gains[2]), (self.kernels[0] * gain) @ self.kernels[1]


def plus(left: Any, right: Any) -> Any:
    """The sum of two cross-covariances, of which None is zero."""
    if left is None or right is None:
        return right if left is None else left
    return left.add(right)
