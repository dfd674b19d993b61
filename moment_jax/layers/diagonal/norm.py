"""Normalisation of each token, in `Diagonal`."""

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.covariance import Diagonal
from moment_jax.covariance.numerics import nonnegative


def norm(
    mean: Array, cov: Diagonal, *, epsilon: Array | float, order: int, centres: bool
) -> tuple[Array, Diagonal, Array]:
    """The rule of `layer_norm` and `rms_norm`: see there."""
    variance, d = cov.variances, mean.shape[1]

    def average(array: Array) -> Array:
        return jnp.mean(array, axis=1, keepdims=True)

    if centres:
        mean = mean - average(mean)
    spread, noise = average(mean**2) + epsilon, average(variance)
    if order == 2:
        spread = spread + noise * (1 - centres / d)
    inverse = jax.lax.rsqrt(spread)
    normal = mean * inverse
    linked = variance * normal
    pulled = linked - average(linked) if centres else linked
    along = average(normal * linked)
    out = normal
    if order == 2:
        # E[c / sqrt(Q)] for Q = |c|^2 / D + epsilon, to second order about q = E[Q].
        small = inverse**2 / d
        squares = (d - 2 * centres) * average(variance**2) + centres * noise**2
        out = normal * (1 + 0.75 * small * (squares * small + 2 * along)) - pulled * small
    # The diagonal of J diag(v) J^T, J = (P - n n^T / D) / sqrt(q): a sum of squares, up to rounding.
    kept = (1 - 2 * (centres + normal**2) / d) * variance
    gained = normal**2 * average(normal * linked)
    if centres:
        gained = gained + noise + 2 * normal * average(linked)
    carried = inverse**2 * nonnegative(kept + gained / d)
    cross = variance * inverse * (1 - (centres + normal**2) / d)
    return out, Diagonal.unchecked(carried), cross
