"""The feed-forward layer in `Diagonal`."""

from jax import Array

from moment_jax.covariance import Diagonal
from moment_jax.layers.dense import dense
from moment_jax.layers.params import FeedForwardParams
from moment_jax.layers.rules import Moments


def feed_forward(
    mean: Array, cov: Diagonal, cross: Array, params: FeedForwardParams, activation: Moments
) -> tuple[Array, Diagonal, Array]:
    """The rule of `feed_forward`: see there."""
    hidden, hidden_cov = dense(mean, cov, params.hidden)
    moments = activation(hidden, hidden_cov.variances)
    out, out_cov = dense(moments.mean, hidden_cov.elementwise(moments), params.output)
    cross = cross * (moments.gain @ (params.hidden.kernel.mean.T * params.output.kernel.mean))
    return out, out_cov, cross
