"""Layer normalisation of a random sequence, with a random gain and bias (Prop. 4)."""

import jax
from jax import Array

from moment_jax.layers import params as checks
from moment_jax.layers.params import NormParams, S, with_bias
from moment_jax.layers.rules import Carry, rules_of
from moment_jax.posterior import Point
from moment_jax.xla import materialized_inputs


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
    `Separable` also assumes that normalising keeps the correlation between tokens.

    Args (mean, cov, results and errors are those of `dense`):
      params: beliefs about the gain (D,) and the bias (D,); each may be None.
      epsilon: added to the variance over the features, as in Flax; not negative.
      order: 1 or 2.

    Source: Transformer derivation, section 4.5 and Prop. 4, with the standard deviation instead of the
    variance, the full Jacobian and the expected sample variance.
    """
    return norm_with_carry(mean, cov, params, epsilon, order)[:2]


@materialized_inputs
def rms_norm(
    mean: Array, cov: S, params: NormParams, *, epsilon: float = 1e-6, order: int = 2
) -> tuple[Array, S]:
    """Moments of gain * x / sqrt(avg(x^2) + epsilon) + bias, token by token.

    Arguments, results and assumptions are those of `layer_norm`; nothing is centred.

    >>> import jax.numpy as jnp, moment_jax as mj
    >>> mean, cov = mj.rms_norm(2 * jnp.eye(2), mj.Diagonal.zeros((2, 2)), mj.NormParams())
    >>> print(mean.round(3)[0])
    [1.414 0.   ]
    """
    return norm_with_carry(mean, cov, params, epsilon, order, centres=False)[:2]


def norm_with_carry(
    mean: Array, cov: S, params: NormParams, epsilon: float, order: int, *, centres: bool = True
) -> tuple[Array, S, Carry]:
    """`layer_norm` or `rms_norm`, and how it carries covariances with its input: see `rules`."""
    name = "layer_norm" if centres else "rms_norm"
    checks.check_moments(name, mean, cov)
    checks.check_order(name, order)
    if not isinstance(epsilon, jax.core.Tracer) and epsilon < 0:
        raise ValueError(
            f"`{name}` needs epsilon >= 0. Got {epsilon}. It is added to the variance; Flax uses 1e-6."
        )
    gain, d = params.scale, mean.shape[1]
    checks.check_vector(name, "scale", d, gain)
    checks.check_vector(name, "bias", d, params.bias)
    rule = rules_of(type(cov)).norm
    mean, normal, carry = rule(mean, cov, epsilon=epsilon, order=order, centres=centres)
    if gain is None:
        return params.mean_output(mean), with_bias(normal, params.bias), carry
    rows = gain.mean[None, :]
    cov = normal.rescale(rows)
    if not isinstance(gain, Point):
        cov = cov.add(normal.gain_noise(mean, gain.vector_cov()))
    cov = with_bias(cov, params.bias)
    return params.mean_output(mean), cov, lambda cross: carry(cross).rescale(rows)
