"""`Separable`: variances, one token Gram matrix and one feature Gram matrix."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from moment_jax.covariance import fields, numerics
from moment_jax.covariance import token_gram as tg
from moment_jax.covariance.base import Covariance, RandomKernel
from moment_jax.covariance.numerics import nonnegative, safe_divide, safe_sqrt, vector_cov
from moment_jax.xla import diagonal_matrix, diagonal_of

NARROW = 12  # up to this many features `add_branch` restores positive semidefiniteness


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
        size = jnp.sign(left) * safe_sqrt(jnp.sum(self.features**2))
        more = jnp.sign(right) * safe_sqrt(jnp.sum(other.features**2))
        tokens = size * self.tokens + more * other.tokens
        return SeparableCross(tg.divide(tokens, size * left + more * right), features, self.pools)

    def own(self) -> Array:
        return tg.diagonal_of(self.tokens)[:, None] * tg.diagonal_of(self.features)[None, :]


@fields.register_fields
@dataclasses.dataclass(frozen=True)
class Separable(Covariance):
    """Tokens and features correlate separately: Cov[x_td, x_se] = G_ts C_de / tr C.

    The projection keeps the variances, the token Gram matrix G and the covariance C of the pooled sum
    sum_t p_t x_t. All three add over independent terms. An average over tokens sees what they have in
    common, so C serves what is read off them together (logits of a pooled read-out lose 3 to 5 % of
    their sd), and single tokens lose little. The law of all structures holds exactly for members of the
    family: any G and C with tr C = p^T G p, and variances G_tt C_dd / tr C. Variances may be sharper
    than that, as norms and elementwise functions leave them; `to_dense` then means these variances with
    the correlations of G and C.

    Assumes that all pairs of features have the same token correlation.

    Args:
      variances: Var[x_td], (T, D).
      tokens: G_ts = sum_d Cov[x_td, x_sd], (T, T), or a `TokenGram` that knows it at landmark tokens.
      features: C_de = Cov[sum_t p_t x_td, sum_t p_t x_te], (D, D).
      pool: p, (T,), nonnegative; ones, unless some tokens must not influence others (see `pooled`), or
        only some are read: `mj.propagate` takes what the output reads.

    Raises:
      ValueError: if shapes do not fit, a variance is negative, or tr C is not p^T G p.
    """

    variances: Array
    tokens: tg.Tokens
    features: Array
    pool: Array

    pools: ClassVar[bool] = True

    def __post_init__(self) -> None:
        call = "Separable(variances, tokens, features, pool)"
        given = self.variances, self.tokens, self.features, self.pool
        fix = "For a certain x, use Separable.zeros((T, D))."
        fields.check_fields(call, fix, _other_shapes, *given)
        for array, axes in zip(given, ("", "t", "d"), strict=False):
            fields.check_variances(call, array, axes)
        known = [fields.known_values(field) for field in given]
        if any(field is None or field.ndim == 0 for field in known):
            return
        _, tokens, features, pool = known
        trace = jnp.einsum("...dd->...", features)
        expected = jnp.einsum("...t,...ts,...s->...", pool, tokens, pool)
        rule = "tr(features) == pool @ tokens @ pool, both the total variance of the pooled sum"
        mend = "Rescale the features, or use Separable.project(dense)."
        right = not jnp.any(jnp.abs(trace - expected) > 0.1 * jnp.maximum(trace, expected))
        fields.need(call, right, rule, f"{trace} and {expected}", mend)

    @classmethod
    def zeros(cls, shape: fields.Shape, dtype: Any = jnp.float32, landmarks: Any = None) -> Self:
        """Covariance of a constant array of this (T, D) shape.

        Its token Gram matrices are kept at `landmarks` tokens, denser at the start (at all, if there
        are no more), and on the diagonal, which makes attention cost T^2 in place of T^3. None means
        all of up to 256 tokens, and 64 of more. A mask that is not the same for all queries, such as a
        causal one, needs all, for a later landmark tells about earlier tokens: landmarks=T.
        """
        t, d = fields.sequence_shape(cls, shape)
        count = tg.num_landmarks(f"{cls.__name__}.zeros", t, landmarks)
        columns, features = jnp.zeros((t, count), dtype), jnp.zeros((d, d), dtype)
        tokens = columns if count == t else tg.TokenGram(columns, jnp.zeros(t, dtype))
        return cls.unchecked(jnp.zeros((t, d), dtype), tokens, features, jnp.ones(t, dtype))

    @classmethod
    def project(cls, dense: Array, pool: Array | None = None) -> Self:
        fields.check_dense(dense)
        pool = jnp.ones(dense.shape[0], dense.dtype) if pool is None else pool
        return cls.unchecked(
            jnp.einsum("tdtd->td", dense),
            jnp.einsum("tdsd->ts", dense),
            jnp.einsum("t,tdse,s->de", pool, dense, pool),
            pool,
        )

    def projected(self, dense: Array) -> Self:
        variances, tokens, *rest = jax.tree.leaves(self.project(dense, self.pool))
        return self.unchecked(variances, tg.at_landmarks(tokens, tg.count_of(self.tokens)), *rest)

    @classmethod
    def independent(cls, variance: Array) -> Self:
        rows, columns = jnp.sum(variance, axis=1), jnp.sum(variance, axis=0)
        tokens, features = diagonal_matrix(rows), diagonal_matrix(columns)
        return cls.unchecked(variance, tokens, features, jnp.ones_like(rows))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.variances.shape

    def variance(self) -> Array:
        return self.variances

    def total(self) -> Array:
        """p^T G p, the total variance of the pooled sum, ()."""
        return tg.vecmat(self.pool, self.tokens) @ self.pool

    def pattern(self) -> tg.Tokens:
        """P = G / p^T G p, (T, T), so that Cov[x_ti, x_sj] = P_ts C_ij."""
        return tg.divide(self.tokens, self.total())

    def energy(self) -> Array:
        """The trace of C, ()."""
        return jnp.sum(diagonal_of(self.features))

    def shares(self) -> Array:
        """Each feature's share of C, diag(C) / tr C, (D,)."""
        own = diagonal_of(self.features)
        return safe_divide(own, jnp.sum(own))

    def to_dense(self) -> Array:
        scale, tokens = safe_sqrt(self.variances), tg.whole(tg.correlation(self.tokens))
        features = numerics.correlation_of(self.features)
        return jnp.einsum("td,se,ts,de->tdse", scale, scale, tokens, features)

    def token_gram(self) -> Array:
        return tg.whole(self.tokens)

    def at_landmarks(self, count: int | None) -> Self:
        """The token Gram matrix at this many landmarks, as for `zeros`, unless it has them already."""
        count = tg.num_landmarks(type(self).__name__, self.shape[0], count)
        tokens = tg.at_landmarks(self.tokens, count)
        return self.unchecked(self.variances, tokens, self.features, self.pool)

    def pooled(self, pool: Array) -> Self:
        if pool is self.pool:
            return self
        pool = pool.astype(self.dtype)
        total = tg.vecmat(pool, self.tokens) @ pool
        return self.unchecked(self.variances, self.tokens, self._features_of(pool, total), pool)

    def seen_by(self, mask: Array | None, *, memory: bool = False) -> Self:
        if mask is None or getattr(mask, "shape", ())[-1:] != self.shape[:1]:
            return self  # attention raises an error for a wrong shape
        return self.pooled(tg.pool_seen(mask, tg.diagonal_of(self.tokens) > 0, memory=memory))

    def check_mask(self, call: str, mask: Array) -> None:
        t, count = self.shape[0], tg.count_of(self.tokens)
        rule = "all tokens as landmarks where a mask is not the same for all queries"
        came = f"{count} of {t} and a mask {mask.shape}: later landmarks tell about earlier tokens"
        mend = f"Use a mask (1, {t}), or Separable.zeros(shape, landmarks={t}), as in modules."
        fields.need(call, mask.shape[-2] == 1 or count == t, rule, came, mend)

    def _features_of(self, pool: Array, total: Array) -> Array:
        """The feature Gram matrix of another sum over tokens, of this total variance.

        Its correlations stay; its variances change as the tokens' own under the squared weights do.
        """
        before, after = (weights**2 @ self.variances for weights in (self.pool, pool))
        gain = safe_sqrt(safe_divide(after, before))
        features = gain[:, None] * self.features * gain[None, :]
        size = safe_divide(self.energy(), jnp.sum(diagonal_of(features)))
        return features * (size * safe_divide(total, self.total()))

    def rescale(self, factor: Array) -> Self:
        variances = self.variances * factor**2
        if factor.shape[0] == 1:
            gain = factor[0]
            tokens = self.tokens * (gain**2 @ self.shares())
            features = gain[:, None] * self.features * gain[None, :]
        else:
            rows, shares = self.pool[:, None] * factor, self.shares()
            tokens = self.tokens * tg.gram(factor, shares, tg.count_of(self.tokens))
            inverse = safe_divide(jnp.ones((), self.dtype), self.energy())
            features = self.features * inverse * tg.quadratic(rows.T, self.tokens)
        return self.unchecked(variances, tokens, features, self.pool)

    def map_features(self, kernel: Array) -> Self:
        features = numerics.gram(kernel.T, self.features)
        own = diagonal_of(features)
        tokens = self.tokens * safe_divide(jnp.sum(own), self.energy())
        variances = numerics.outer_by_share(tg.diagonal_of(tokens), own)
        return self.unchecked(variances, tokens, features, self.pool)

    def map_tokens(self, weights: Array) -> Self:
        if isinstance(self.tokens, tg.TokenGram):
            shown = self.pool > 0  # others, such as padding, tell nothing
            mapped = tg.vecmat(weights, self.tokens, shown)
            tokens = tg.product(mapped, weights, tg.count_of(self.tokens))
        else:
            tokens = numerics.gram(weights, self.tokens)
        shares = weights**2 @ self.variances
        shares = safe_divide(shares, jnp.sum(shares, axis=1, keepdims=True))
        features = self._features_of(jnp.sum(weights, axis=0), tg.total(tokens))
        variances = tg.diagonal_of(tokens)[:, None] * shares
        if len(weights) == 1:  # a sum over tokens is what C holds
            variances = diagonal_of(features)[None]
            tokens = jnp.sum(variances, keepdims=True)
        return self.unchecked(variances, tokens, features, jnp.ones(len(weights), self.dtype))

    def map_each(self, kernels: Array) -> Self:
        inverse = safe_divide(jnp.ones((), self.dtype), self.energy())
        mapped = jnp.einsum("ij,tjo->tio", self.features * inverse, kernels)
        tokens = self.tokens * jnp.einsum("tio,sio->ts", mapped, kernels)
        own = jnp.sum(mapped * kernels, axis=1) * tg.diagonal_of(self.tokens)[:, None]
        pairs = tg.whole(self.pool[:, None] * self.tokens * self.pool[None, :])
        features = jnp.einsum("tio,tip->op", mapped, jnp.einsum("ts,sip->tip", pairs, kernels))
        return self.unchecked(nonnegative(own), tokens, features, self.pool)

    def add(self, other: Self) -> Self:
        tokens = self.tokens + other.tokens
        features = self.features + other.pooled(self.pool).features
        return self.unchecked(self.variances + other.variances, tokens, features, self.pool)

    def weight_noise(self, mean: Array, weights: RandomKernel) -> Self:
        metric, pooled = weights.input_metric(), numerics.weighted_sum(self.pool, mean)
        by_noise = numerics.kernel_noise(weights, self.features, jnp.zeros_like(mean[:1]))
        variances = weights.noise_variance(mean, jnp.zeros_like(mean))
        own, energy = numerics.vector_variance(by_noise), self.energy()
        size = safe_divide(jnp.sum(self.features * vector_cov(metric)), energy)
        shares = safe_divide(own, energy)[None]
        variances = variances + tg.diagonal_of(self.tokens)[:, None] * shares
        features = vector_cov(by_noise + numerics.kernel_noise(weights, None, pooled[None]))
        tokens = self.tokens * size + tg.gram(mean, metric, tg.count_of(self.tokens))
        return self.unchecked(variances, tokens, features, self.pool)

    def token_noise(self, mean: Array, weights: RandomKernel) -> Self:
        """Kernels over tokens of independent entries; others by the dense covariance."""
        if not weights.uncorrelated:
            return super().token_noise(mean, weights)
        variances = weights.noise_variance(mean.T, self.variances.T).T
        u = len(variances)
        # Cov[W_tu, W_su] summed over u: the share of each token of x in the pooled sum.
        share = weights.input_metric()
        features = self.features * (share @ tg.diagonal_of(self.pattern()))
        features = features + numerics.gram(mean.T, share)
        tokens, pool = diagonal_matrix(jnp.sum(variances, axis=1)), jnp.ones(u, self.dtype)
        return self.unchecked(variances, tokens, agreeing(features, tokens, pool), pool)

    def gain_noise(self, mean: Array, gain_cov: Array) -> Self:
        metric, pooled = numerics.vector_variance(gain_cov), numerics.weighted_sum(self.pool, mean)
        own = diagonal_of(self.features)
        size = safe_divide(own @ metric, jnp.sum(own))
        variances = (self.variances + mean**2) * metric[None, :]
        tokens = self.tokens * size + tg.gram(mean, metric, tg.count_of(self.tokens))
        if gain_cov.ndim == 1:
            features = diagonal_matrix((own + pooled**2) * gain_cov)
        else:
            features = (self.features + pooled[:, None] * pooled[None, :]) * gain_cov
        return self.unchecked(variances, tokens, features, self.pool)

    def bias_noise(self, bias_cov: Array) -> Self:
        own, t = numerics.vector_variance(bias_cov), self.shape[0]
        return self.unchecked(
            jnp.broadcast_to(own, (t, len(own))),
            tg.at_landmarks(jnp.broadcast_to(jnp.sum(own), (t, t)), tg.count_of(self.tokens)),
            jnp.sum(self.pool) ** 2 * vector_cov(bias_cov),
            self.pool,
        )

    def elementwise(self, moments: Any) -> Self:
        tokens, features = tg.correlation(self.tokens), numerics.correlation_of(self.features)
        count = tg.count_of(tokens)
        first, second = safe_sqrt(self.variances) * moments.gain, moments.second
        rest = nonnegative(moments.variance - first**2 - second**2)
        p = self.pool[:, None]
        twice = features**2 * tg.quadratic((p * second).T, tokens**2)
        features = features * tg.quadratic((p * first).T, tokens) + twice
        features = features + diagonal_matrix(numerics.weighted_sum(self.pool**2, rest))
        tokens = tokens * tg.gram(first, None, count) + tokens**2 * tg.gram(second, None, count)
        tokens = tg.add_diagonal(tokens, jnp.sum(rest, axis=1))
        return self.unchecked(moments.variance, tokens, features, self.pool)

    def with_itself(self) -> SeparableCross:
        return SeparableCross(self.pattern(), self.features, (self.pool, self.pool))

    def add_branch(self, branch: Self, cross: SeparableCross | None) -> Self:
        """Exact sums; the cross term's own entries are spread as its two matrices say, and bounded.

        Its averages over tokens and features can leave the sums indefinite where features are few, and
        are then corrected.
        """
        if cross is None:
            return self.add(branch)
        self = self.pooled(branch.pool)  # excludes masked tokens
        bound = safe_sqrt(self.variances * branch.variances)
        shared = jax.lax.clamp(-bound, cross.own(), bound)
        variances = self.variances + branch.variances + 2 * shared
        by_token = cross.tokens * jnp.sum(diagonal_of(cross.features))
        if not isinstance(by_token, tg.TokenGram):
            # Where heads cancel in the pooled sum, what single tokens get of it has lost its scale.
            own, other = (jnp.sum(x.variances, axis=1) for x in (self, branch))
            most = jax.lax.stop_gradient(safe_sqrt(own[:, None] * other[None, :]))
            by_token = jax.lax.clamp(-most, by_token, most)
        both = tg.at_landmarks(by_token + by_token.T, tg.count_of(self.tokens))
        tokens = self.tokens + branch.tokens + both
        by_feature = cross.features * jnp.sum(tg.vecmat(self.pool, cross.tokens) * self.pool)
        features = self.features + branch.features + by_feature + by_feature.T
        if self.shape[1] <= NARROW:
            features = numerics.definite(features)
            tokens = tokens if isinstance(tokens, tg.TokenGram) else numerics.definite(tokens)
        return self.unchecked(variances, tokens, features, self.pool)

    def hadamard(self, other: Self, cross: SeparableCross | None) -> Self:
        del cross  # of second order in both, and small beside the rest
        tokens = self.tokens * other.tokens * jnp.sum(self.shares() * other.shares())
        features = agreeing(self.features * other.features, tokens, self.pool)
        return self.unchecked(self.variances * other.variances, tokens, features, self.pool)


def agreeing(features: Array, tokens: tg.Tokens, pool: Array) -> Array:
    """C with the trace that the token Gram matrix says, p^T G p."""
    return features * safe_divide(tg.vecmat(pool, tokens) @ pool, jnp.sum(diagonal_of(features)))


def _other_shapes(variances: tuple[int, ...]) -> list[tuple[int, ...]]:
    if len(variances) < 2:
        raise ValueError("needs variances of shape (T, D).")
    *batch, t, d = variances
    return [(*batch, t, t), (*batch, d, d), (*batch, t)]
