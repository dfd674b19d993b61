"""Layer normalisation of a random sequence, with a random gain and bias (Prop. 4)."""

from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.covariance import Covariance
from moment_jax.covariance.numerics import nonnegative
from moment_jax.layers.checks import check_epsilon, check_moments, check_order, check_vector
from moment_jax.layers.norm_noise import SharedNoise, centred_rows, input_noise
from moment_jax.layers.norm_tangent import NormTangent, carry
from moment_jax.layers.params import NormParams
from moment_jax.posterior import Point
from moment_jax.xla import materialized, materialized_inputs

S = TypeVar("S", bound=Covariance)


@materialized_inputs
def layer_norm(
    mean: Array, cov: S, params: NormParams, *, epsilon: float = 1e-6, order: int = 2
) -> tuple[Array, S]:
    """Moments of gain * (x - avg(x)) / sqrt(var(x) + epsilon) + bias, token by token.

    The covariance passes through the full Jacobian (I - 11^T/D - n n^T/D) / sqrt(q), n the normalised
    mean, because a token's average and deviation depend on x. With order 2 the deviation is taken at
    the expected sample variance q = Var_d(E[x]) + tr(P Cov P)/D + epsilon, P = I - 11^T/D, and the mean
    has its second-order correction. With order 1 both are first-order Taylor at the mean.

    Assumes that x, the gain and the bias are mutually independent, and x Gaussian (order 2).
    `Separable` also assumes that normalising keeps the correlation between tokens, and a scale of rank
    one (otherwise its variances are rescaled to fit).

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

    Source: Transformer derivation, section 4.5 and Prop. 4, with the standard deviation instead of the
    variance, the full Jacobian and the expected sample variance.
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
    """`layer_norm` or `rms_norm`, with its linearisation."""
    name = "layer_norm" if centres else "rms_norm"
    check_moments(name, mean, cov)
    check_order(name, order)
    check_epsilon(name, epsilon)
    mean, tangent = materialized(_normalize(mean, cov, epsilon, order, centres))
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
    mean = materialized(params.mean_output(mean))
    return mean, cov.add(*parts) if parts else cov, tangent


def _normalize(
    mean: Array, cov: Covariance, epsilon: float, order: int, centres: bool
) -> tuple[Array, NormTangent]:
    """Mean of (x - avg(x)) / sqrt(var(x) + epsilon), and its linearisation."""
    d = mean.shape[1]
    centred = centred_rows(mean) if centres else mean
    spread = jnp.sum(centred**2, axis=1, keepdims=True) / d + epsilon
    noise = input_noise(cov, centres)
    if order == 2:
        spread = spread + nonnegative(noise.trace()) / d
    inverse = jax.lax.rsqrt(spread)
    normal = centred * inverse
    unit = jnp.ones((1, d), mean.dtype)
    tangent = NormTangent(inverse, normal, unit, centres)
    if isinstance(noise, SharedNoise):
        tangent = tangent._replace(noise=noise, linked=normal @ noise.features)
        pulled = noise.energy * tangent.centred_linked()
    else:
        pulled = noise.pulled(normal)
    if order == 2:
        normal = _corrected(normal, pulled, noise.squares(), inverse**2)
    return normal, tangent


def _corrected(normal: Array, pulled: Array, squares: Array, precision: Array) -> Array:
    """Second-order mean of c / sqrt(Q), Q = |c|^2/D + epsilon, expanded about q = E[Q].

    E[c (1 - (Q - q)/(2 q) + 3 (Q - q)^2/(8 q^2))] / sqrt(q), with the Gaussian moments Cov[c, Q] = 2 P
    Cov mean / D and Var[Q] = (2 tr((P Cov)^2) + 4 mean^T Cov mean) / D^2. Takes `normal`, the centred
    mean over sqrt(q), (T, D); `pulled`, P Cov normal, (T, D); `squares`, tr((P Cov)^2), (T, 1); and
    `precision`, 1 / q, (T, 1).
    """
    small = precision / normal.shape[1]
    along = jnp.sum(normal * pulled, axis=1, keepdims=True)
    relative = 0.75 * (squares * small + 2 * along / normal.shape[1]) * small
    return normal * (1 + relative) - pulled * small
