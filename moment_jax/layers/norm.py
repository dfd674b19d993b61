"""Layer normalisation of a random sequence, with a random gain and a random bias (Prop. 4)."""

from __future__ import annotations

from functools import singledispatch
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from moment_jax.covariance import Covariance, TokenCorrelated
from moment_jax.covariance.diagonal import low_rank_variance
from moment_jax.covariance.numerics import safe_sqrt
from moment_jax.layers.checks import check_moments, check_order, check_vector
from moment_jax.layers.params import NormParams
from moment_jax.posterior import Point

Array = jax.Array
S = TypeVar("S", bound=Covariance)


class NormTangent(NamedTuple):
    """A normalisation linearised: x_t -> gain_t * x_t + left_t (right_t^T x_t)."""

    gain: Array  # (T, D)
    left: Array  # (T, D, k)
    right: Array  # (T, D, k)

    def __call__(self, change: Array) -> Array:
        """The change of the output, (T, D), with a change of the input, (T, D)."""
        inner = jnp.einsum("tjk,tj->tk", self.right, change)
        return self.gain * change + jnp.einsum("tik,tk->ti", self.left, inner)

    def rescaled(self, gain: Array) -> NormTangent:
        """The same normalisation followed by a (D,) gain."""
        return NormTangent(self.gain * gain[None, :], self.left * gain[None, :, None], self.right)

    def jacobian(self) -> Array:
        """Every token's Jacobian, input features first, (T, D, D)."""
        own = self.gain[:, :, None] * jnp.eye(self.gain.shape[1], dtype=self.gain.dtype)[None]
        return own + jnp.einsum("tik,tjk->tij", self.right, self.left)


def layer_norm(
    mean: Array, cov: S, params: NormParams, *, epsilon: float = 1e-6, order: int = 2
) -> tuple[Array, S]:
    """Moments of gain * (x - avg(x)) / sqrt(var(x) + epsilon) + bias, token by token.

    The covariance passes the full Jacobian (I - 11^T/D - n n^T/D) / sqrt(q), n the normalised mean: the
    token's own average and deviation depend on x. With order 2 the deviation is taken at the expected
    sample variance q = Var_d(E[x]) + tr(P Cov P)/D + epsilon, P = I - 11^T/D, and the mean has its
    second-order correction; with order 1 both are Taylor's first order at the mean.

    Assumes that x, the gain and the bias are independent of each other, and x Gaussian (order 2);
    with `TokenCorrelated`, that normalising leaves the correlation between tokens as it is.

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


def layer_norm_and_tangent(
    mean: Array, cov: S, params: NormParams, epsilon: float, order: int
) -> tuple[Array, S, NormTangent]:
    """`layer_norm`, and the linear map by which its covariance carries the covariance of x."""
    check_moments("layer_norm", mean, cov)
    check_order("layer_norm", order)
    mean, tangent = _normalize(mean, cov, epsilon, order)
    cov = _carry(cov, tangent)
    gain, bias = params.scale, params.bias
    parts = []
    if gain is not None:
        check_vector("layer_norm", "scale", mean.shape[1], gain)
        if not isinstance(gain, Point):
            parts.append(cov.gain_noise(mean, gain.vector_cov()))
        mean = mean * gain.mean[None, :]
        cov = cov.rescale(gain.mean[None, :])
        tangent = tangent.rescaled(gain.mean)
    if bias is not None:
        check_vector("layer_norm", "bias", mean.shape[1], bias)
        mean = mean + bias.mean[None, :]
        if not isinstance(bias, Point):
            parts.append(type(cov).shared(mean.shape[0], bias.vector_cov()))
    return mean, cov.add(*parts) if parts else cov, tangent


def _normalize(
    mean: Array, cov: Covariance, epsilon: float, order: int
) -> tuple[Array, NormTangent]:
    """Mean of (x - avg(x)) / sqrt(var(x) + epsilon), and its Jacobian."""
    d = mean.shape[1]
    centred = mean - jnp.mean(mean, axis=1, keepdims=True)
    spread = jnp.sum(centred**2, axis=1, keepdims=True) / d + epsilon
    if order == 2:
        along = cov.token_matvec(jnp.ones_like(mean))  # Cov 1, token by token
        common = jnp.sum(along, axis=1, keepdims=True) / d  # 1^T Cov 1 / D
        trace = jnp.sum(cov.variance(), axis=1, keepdims=True) - common
        spread = spread + jnp.maximum(trace, 0) / d
    deviation = jnp.sqrt(spread)
    normal = centred / deviation
    directions = jnp.stack([jnp.ones_like(mean), normal], axis=-1) / d**0.5
    inverse = jnp.broadcast_to(1 / deviation, mean.shape)
    tangent = NormTangent(inverse, -directions * inverse[:, :, None], directions)
    if order == 2:
        # tr((P Cov)^2), token by token
        squares = (
            jnp.sum(cov.token_square_matvec(jnp.ones_like(mean)), axis=1, keepdims=True)
            - 2 * jnp.sum(along**2, axis=1, keepdims=True) / d
            + common**2
        )
        normal = _corrected(normal, cov.token_matvec(normal), squares, spread)
    return normal, tangent


@singledispatch
def _carry(cov: Any, tangent: NormTangent) -> Any:
    """The covariance of the normalised array."""
    return cov.map_low_rank(*tangent)


@_carry.register
def _carry_token_correlated(cov: TokenCorrelated, tangent: NormTangent) -> TokenCorrelated:
    """Exact variances; the token correlation passes as it is.

    Tokens lose different directions n_t, which would leave one correlation for all features a matter of
    the scales' pattern, and no longer surely positive semidefinite. The directions are two of D.
    """
    variance = low_rank_variance(cov.variance(), *tangent)
    sign = jnp.where(cov.scale < 0, -1, 1).astype(cov.dtype)
    return TokenCorrelated(sign * safe_sqrt(variance), cov.correlation)


def _corrected(normal: Array, pulled: Array, squares: Array, spread: Array) -> Array:
    """Second-order mean of c / sqrt(Q), Q = |c|^2/D + epsilon, expanded about q = E[Q].

    E[c (1 - (Q - q)/(2 q) + 3 (Q - q)^2/(8 q^2))] / sqrt(q), with the Gaussian moments
    Cov[c, Q] = 2 P Cov mean / D and Var[Q] = (2 tr((P Cov)^2) + 4 mean^T Cov mean) / D^2.

    Args:
      normal: centred mean over sqrt(q), (T, D).
      pulled: Cov normal, (T, D).
      squares: tr((P Cov)^2), (T, 1).
      spread: q, (T, 1).
    """
    d = normal.shape[1]
    centred = pulled - jnp.mean(pulled, axis=1, keepdims=True)
    along = jnp.sum(normal * pulled, axis=1, keepdims=True)
    relative_variance = (2 * squares / spread**2 + 4 * along / spread) / d**2
    return normal - centred / (d * spread) + 0.375 * relative_variance * normal
