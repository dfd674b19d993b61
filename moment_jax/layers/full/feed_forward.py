"""The feed-forward layer in `Full`."""

import jax.numpy as jnp
from jax import Array

from moment_jax.covariance import Full
from moment_jax.layers.dense import dense
from moment_jax.layers.params import FeedForwardParams
from moment_jax.layers.rules import Moments


def feed_forward(
    mean: Array, cov: Full, cross: Array, params: FeedForwardParams, activation: Moments
) -> tuple[Array, Full, Array]:
    """The rule of `feed_forward`: see there."""
    hidden, hidden_cov = dense(mean, cov, params.hidden)
    moments = activation(hidden, hidden_cov.variance())
    out, out_cov = dense(moments.mean, hidden_cov.elementwise(moments), params.output)
    inner = jnp.einsum("tdsi,if->tdsf", cross, params.hidden.kernel.mean) * moments.gain[None, None]
    return out, out_cov, jnp.einsum("tdsf,fo->tdso", inner, params.output.kernel.mean)
