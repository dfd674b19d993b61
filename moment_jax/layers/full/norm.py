"""Normalisation of each token, in `Full`."""

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.covariance import Full
from moment_jax.covariance.numerics import nonnegative


def norm(
    mean: Array, cov: Full, *, epsilon: Array | float, order: int, centres: bool
) -> tuple[Array, Full, Array]:
    """The rule of `layer_norm` and `rms_norm`: see there."""
    d = mean.shape[1]
    centring = jnp.eye(d, dtype=mean.dtype) - centres / d
    mean = mean @ centring
    blocks = centring @ cov.token_blocks() @ centring
    spread = jnp.mean(mean**2, axis=1, keepdims=True) + epsilon
    if order == 2:
        spread = spread + nonnegative(jnp.einsum("tdd->t", blocks))[:, None] / d
    inverse = jax.lax.rsqrt(spread)
    normal = mean * inverse
    out = normal
    if order == 2:
        # E[c / sqrt(Q)] for Q = |c|^2 / D + epsilon, to second order about q = E[Q].
        small = inverse**2 / d
        pulled = jnp.einsum("tde,te->td", blocks, normal)
        along = jnp.sum(normal * pulled, axis=1, keepdims=True) / d
        squares = jnp.sum(blocks**2, axis=(1, 2))[:, None]
        out = normal * (1 + 0.75 * small * (squares * small + 2 * along)) - pulled * small
    jacobian = centring[None] - normal[:, :, None] * normal[:, None, :] / d
    jacobian = jacobian * inverse[:, :, None]
    return out, cov.map_each(jacobian), jnp.einsum("tdsi,sio->tdso", cov.cov, jacobian)
