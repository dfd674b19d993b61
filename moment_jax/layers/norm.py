"""Layer normalisation of a random sequence, with a random gain and a random bias (Prop. 4)."""

from __future__ import annotations

from functools import singledispatch
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from moment_jax.covariance import Covariance, Diagonal, Separable, TokenCorrelated
from moment_jax.covariance.numerics import pooled, safe_divide, safe_sqrt, weighted
from moment_jax.layers.checks import check_epsilon, check_moments, check_order, check_vector
from moment_jax.layers.params import NormParams
from moment_jax.posterior import Point
from moment_jax.xla import diagonal_of, materialized_inputs, product_with_transposed

Array = jax.Array
S = TypeVar("S", bound=Covariance)


@materialized_inputs
def layer_norm(
    mean: Array, cov: S, params: NormParams, *, epsilon: float = 1e-6, order: int = 2
) -> tuple[Array, S]:
    """Moments of gain * (x - avg(x)) / sqrt(var(x) + epsilon) + bias, token by token.

    The covariance passes the full Jacobian (I - 11^T/D - n n^T/D) / sqrt(q), n the normalised mean: the
    token's own average and deviation depend on x. With order 2 the deviation is taken at the expected
    sample variance q = Var_d(E[x]) + tr(P Cov P)/D + epsilon, P = I - 11^T/D, and the mean has its
    second-order correction; with order 1 both are Taylor's first order at the mean.

    Assumes that x, the gain and the bias are independent of each other, and x Gaussian (order 2);
    with `TokenCorrelated` and `Separable`, that normalising leaves the correlation between tokens as it
    is, and with `Separable` that the scale is of rank one (its variances are scaled to fit otherwise).

    Args:
      mean: E[x], (T, D).
      cov: covariance of x, a structure of shape (T, D).
      params: beliefs about the gain (D,) and the bias (D,); each may be None.
      epsilon: added to the variance over the features, as in Flax.
      order: 1 or 2.

    Returns:
      Mean (T, D) and covariance of the output, in the structure of `cov`.

    Raises:
      ValueError: if shapes do not fit, or order is neither 1 nor 2.

    Source: Transformer derivation, section 4.5 and Prop. 4, with the standard deviation in the place
    of the variance, the full Jacobian and the expected sample variance.
    """
    out_mean, out_cov, _ = layer_norm_and_tangent(mean, cov, params, epsilon, order)
    return out_mean, out_cov


@materialized_inputs
def rms_norm(
    mean: Array, cov: S, params: NormParams, *, epsilon: float = 1e-6, order: int = 2
) -> tuple[Array, S]:
    """Moments of gain * x / sqrt(avg(x^2) + epsilon) + bias, token by token.

    Arguments, results and assumptions are those of `layer_norm`; nothing is centred.

    >>> import jax.numpy as jnp
    >>> import moment_jax as mj
    >>> mean, cov = mj.rms_norm(2 * jnp.eye(2), mj.Diagonal.zeros((2, 2)), mj.NormParams())
    >>> print(mean.round(3)[0])
    [1.414 0.   ]
    """
    out_mean, out_cov, _ = layer_norm_and_tangent(mean, cov, params, epsilon, order, centres=False)
    return out_mean, out_cov


def layer_norm_and_tangent(
    mean: Array, cov: S, params: NormParams, epsilon: float, order: int, *, centres: bool = True
) -> tuple[Array, S, NormTangent]:
    """`layer_norm` or `rms_norm`, and the map by which its covariance carries the covariance of x."""
    name = "layer_norm" if centres else "rms_norm"
    check_moments(name, mean, cov)
    check_order(name, order)
    check_epsilon(name, epsilon)
    mean, tangent = _normalize(mean, cov, epsilon, order, centres)
    cov = carry(cov, tangent)
    gain, bias = params.scale, params.bias
    parts = []
    if gain is not None:
        check_vector(name, "scale", mean.shape[1], gain)
        if not isinstance(gain, Point):
            parts.append(cov.gain_noise(mean, gain.vector_cov()))
        cov = cov.rescale(gain.mean[None, :])
        tangent = tangent._replace(scale=gain.mean[None, :])
    if bias is not None:
        check_vector(name, "bias", mean.shape[1], bias)
        if not isinstance(bias, Point):
            parts.append(type(cov).shared(mean.shape[0], bias.vector_cov()))
    mean = params.mean_output(mean)
    return mean, cov.add(*parts) if parts else cov, tangent


def _normalize(
    mean: Array, cov: Covariance, epsilon: float, order: int, centres: bool
) -> tuple[Array, NormTangent]:
    """Mean of (x - avg(x)) / sqrt(var(x) + epsilon), and its Jacobian."""
    d = mean.shape[1]
    centred = centred_rows(mean) if centres else mean
    spread = jnp.sum(centred**2, axis=1, keepdims=True) / d + epsilon
    blocks = ScaledBlocks.of(cov) if isinstance(cov, Separable) else TokenBlocks(cov)
    if order == 2:
        along = blocks.row_sums()  # Cov 1, token by token
        along = along if centres else jnp.zeros_like(along)
        common = jnp.sum(along, axis=1, keepdims=True) / d  # 1^T Cov 1 / D
        trace = jnp.sum(cov.variance(), axis=1, keepdims=True) - common
        spread = spread + jnp.maximum(trace, 0) / d
    deviation = jnp.sqrt(spread)
    normal = centred / deviation
    tangent = NormTangent(1 / deviation, normal, jnp.ones((1, d), mean.dtype), centres)
    if order == 2:
        # tr((P Cov)^2), token by token
        lost = 2 * jnp.sum(along**2, axis=1, keepdims=True) / d
        squares = blocks.square_trace() - lost + common**2
        pulled = tangent.centred(blocks.matvec(normal))
        normal = _corrected(normal, pulled, squares, spread)
    return normal, tangent


def _corrected(normal: Array, pulled: Array, squares: Array, spread: Array) -> Array:
    """Second-order mean of c / sqrt(Q), Q = |c|^2/D + epsilon, expanded about q = E[Q].

    E[c (1 - (Q - q)/(2 q) + 3 (Q - q)^2/(8 q^2))] / sqrt(q), with the Gaussian moments
    Cov[c, Q] = 2 P Cov mean / D and Var[Q] = (2 tr((P Cov)^2) + 4 mean^T Cov mean) / D^2.

    Args:
      normal: centred mean over sqrt(q), (T, D).
      pulled: Cov normal, centred where the normalisation centres, (T, D).
      squares: tr((P Cov)^2), (T, 1).
      spread: q, (T, 1).
    """
    d = normal.shape[1]
    along = jnp.sum(normal * pulled, axis=1, keepdims=True)
    relative_variance = (2 * squares / spread**2 + 4 * along / spread) / d**2
    return normal - pulled / (d * spread) + 0.375 * relative_variance * normal


class NormTangent(NamedTuple):
    """A normalisation linearised: dx -> scale * inverse * (dx - avg(dx) - normal <normal, dx> / D).

    Without the average where it does not centre (the root mean square's).
    """

    inverse: Array  # 1 / deviation, (T, 1)
    normal: Array  # the normalised mean, (T, D), every row of average 0
    scale: Array  # the mean of the random gain that follows, (1, D)
    centres: bool = True

    @property
    def gain(self) -> Array:
        """What a feature gets of itself but for the directions that are lost, (T, D)."""
        return self.inverse * self.scale

    @property
    def diagonal(self) -> Array:
        """What a feature gets of itself, (T, D)."""
        return self.gain * (1 - (self.centres + self.normal**2) / self.normal.shape[1])

    def __call__(self, change: Array) -> Array:
        """The change of the output, (T, D), with a change of the input, (T, D)."""
        inner = jnp.sum(self.normal * change, axis=1, keepdims=True) / change.shape[1]
        return self.gain * (self.centred(change) - self.normal * inner)

    def centred(self, array: Array) -> Array:
        """Every row less its average, if the normalisation takes it away."""
        return centred_rows(array) if self.centres else array

    def jacobian(self) -> Array:
        """Every token's Jacobian, input features first, (T, D, D)."""
        d = self.normal.shape[1]
        centre = self.centred(jnp.eye(d, dtype=self.normal.dtype))
        lost = self.normal[:, :, None] * self.normal[:, None, :] / d
        return (centre[None] - lost) * self.gain[:, None, :]

    def low_rank(self) -> tuple[Array, Array, Array]:
        """The arguments of `Covariance.map_low_rank`: gain (T, D), left and right (T, D, 2 or 1)."""
        d = self.normal.shape[1]
        lost = [jnp.ones_like(self.normal), self.normal] if self.centres else [self.normal]
        right = jnp.stack(lost, axis=-1) / d**0.5
        return self.gain, -right * self.gain[:, :, None], right

    def feature_cross(self, cov: Separable) -> Array:
        """Cov[sum_t x_td, sum_s y_se] of input and output, (D, D), for a scale of rank one."""
        blocks = ScaledBlocks.of(cov)
        shares = weighted(pooled(cov.token_gram(), cov.pool)[:, None] * self.inverse, cov.pool)
        lost = (shares * (self.normal @ blocks.features)).T @ self.normal
        kept = jnp.sum(shares) * self.centred(blocks.features)
        return cov.share(kept - lost / self.normal.shape[1]) * self.scale


class TokenBlocks(NamedTuple):
    """Every token's own feature covariance."""

    cov: Covariance

    def row_sums(self) -> Array:
        """Cov 1, (T, D)."""
        return self.matvec(jnp.ones(self.cov.shape, self.cov.dtype))

    def matvec(self, vectors: Array) -> Array:
        """Cov v, (T, D)."""
        return self.cov.token_matvec(vectors)

    def square_trace(self) -> Array:
        """tr(Cov^2), (T, 1)."""
        ones = jnp.ones(self.cov.shape, self.cov.dtype)
        return jnp.sum(self.cov.token_square_matvec(ones), axis=1, keepdims=True)


class ScaledBlocks(NamedTuple):
    """Every token's own feature covariance as its energy times one matrix for all, F / tr F.

    So it is where the scale of a `Separable` is of rank one; the variances stay the token's own. It
    takes a third of the products that a scale of full rank would.
    """

    energy: Array  # (T, 1)
    features: Array  # F / tr F, (D, D)

    @classmethod
    def of(cls, cov: Separable) -> ScaledBlocks:
        """Those of a covariance."""
        features = cov.feature_gram()
        total = jnp.broadcast_to(jnp.sum(diagonal_of(features)), (1, 1))
        return cls(jnp.sum(cov.variance(), axis=1, keepdims=True), safe_divide(features, total))

    def row_sums(self) -> Array:
        """Cov 1, (T, D)."""
        return self.energy * jnp.sum(self.features, axis=0)[None, :]

    def matvec(self, vectors: Array) -> Array:
        """Cov v, (T, D)."""
        return self.energy * (vectors @ self.features)

    def square_trace(self) -> Array:
        """tr(Cov^2), (T, 1)."""
        return self.energy**2 * jnp.sum(self.features**2)


@singledispatch
def carry(cov: Any, tangent: NormTangent) -> Any:
    """The covariance of the normalised array."""
    return cov.map_low_rank(*tangent.low_rank())


@carry.register
def _carry_diagonal(cov: Diagonal, tangent: NormTangent) -> Diagonal:
    return Diagonal(_carried_variance(cov.variances, tangent))


@carry.register
def _carry_token_correlated(cov: TokenCorrelated, tangent: NormTangent) -> TokenCorrelated:
    """Exact variances; the token correlation passes as it is.

    Tokens lose different directions n_t, two of D, which one correlation for all features cannot hold.
    """
    variance = _carried_variance(cov.variance(), tangent)
    sign = jnp.where(cov.scale < 0, -1, 1).astype(cov.dtype)
    return TokenCorrelated(sign * safe_sqrt(variance), cov.correlation)


@carry.register
def _carry_separable(cov: Separable, tangent: NormTangent) -> Separable:
    """Exact where the scale is of rank one; the token correlation passes as it is."""
    blocks, normal = ScaledBlocks.of(cov), tangent.normal
    d = normal.shape[1]
    features = tangent.centred(tangent.centred(blocks.features).T)
    pulled = tangent.centred(normal @ blocks.features) / d
    along = jnp.sum(normal * pulled, axis=1, keepdims=True) / d
    # The features' variances over their energy, before and after the direction `normal` is lost.
    before = diagonal_of(blocks.features)[None, :]
    after = diagonal_of(features)[None, :] - 2 * normal * pulled + along * normal**2
    # Scaled where a feature loses variance, which keeps it positive; added where it gains from others.
    kept = jnp.clip(safe_divide(after, before + jnp.zeros_like(after)), 0, 1) * cov.variance()
    variance = tangent.inverse**2 * (kept + blocks.energy * jnp.maximum(after - before, 0))
    # Pairs of tokens in the sum over them, and what is left of their covariance.
    inverse = weighted(tangent.inverse, cov.pool)
    pairs = inverse * cov.token_gram() * inverse.T
    twice = (pairs * product_with_transposed(normal / d, pulled)) @ normal
    bent = normal.T @ (0.5 * twice - jnp.sum(pairs, axis=1, keepdims=True) * pulled)
    root = safe_sqrt(safe_divide(jnp.sum(variance, axis=1, keepdims=True), blocks.energy))
    return cov.from_moments(
        variance,
        root * cov.token_gram() * root.T,
        jnp.sum(pairs) * features + bent + bent.T,
        cov.pool,
    )


def _carried_variance(variance: Array, tangent: NormTangent) -> Array:
    """The diagonal of J diag(variance) J^T, (T, D): features are uncorrelated."""
    normal = tangent.normal
    d = normal.shape[1]

    def total(array: Array) -> Array:
        return jnp.sum(array, axis=1, keepdims=True) / d

    kept = (1 - 2 * (tangent.centres + normal**2) / d) * variance
    gained = normal**2 * total(normal**2 * variance)
    if tangent.centres:
        gained = gained + total(variance) + 2 * normal * total(normal * variance)
    # A sum of squares in exact arithmetic; rounding can leave a hair below zero.
    return tangent.inverse**2 * jnp.maximum(kept + gained / d, 0)


def centred_rows(array: Array) -> Array:
    """Every row less its average."""
    return array - jnp.mean(array, axis=1, keepdims=True)
