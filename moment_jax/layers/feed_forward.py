"""Elementwise nonlinearities of a random sequence, and the feed-forward layer."""

from collections.abc import Callable
from typing import Any

from jax import Array

from moment_jax import expectations
from moment_jax.expectations.activations import Formula
from moment_jax.layers.checks import check_kernel, check_moments
from moment_jax.layers.dense import dense
from moment_jax.layers.params import FeedForwardParams, S
from moment_jax.layers.rules import Carry, rules_of
from moment_jax.xla import materialized_inputs

Activation = str | Callable[[Array], Array]
"""A name or a function of a scalar, see `expectations.of`."""


@materialized_inputs
def relu(mean: Array, cov: S) -> tuple[Array, S]:
    """Moments of max(x, 0): exact means and variances in closed form.

    Covariances keep the first two terms of the Hermite expansion, by Price's theorem E[relu'] E[relu']
    Cov + ..., instead of the derivation's first-order Taylor at the mean.

    Assumes that x is Gaussian. Arguments, results and errors are those of `dense`.

    Source: Transformer derivation, section 4.6; rectified-Gaussian moments.
    """
    check_moments("relu", mean, cov)
    return _elementwise(mean, cov, "relu")


@materialized_inputs
def gelu(mean: Array, cov: S) -> tuple[Array, S]:
    """Moments of x Phi(x), the exact GELU; arguments, results and assumptions as in `relu`."""
    check_moments("gelu", mean, cov)
    return _elementwise(mean, cov, "gelu")


@materialized_inputs
def activation(mean: Array, cov: S, fn: Activation) -> tuple[Array, S]:
    """Moments of `fn(x)` for any smooth scalar function, by Gauss-Hermite quadrature.

    `fn` is a JAX function of a scalar, such as `jnp.tanh` (static, so hashable), or "relu" or "gelu",
    which are exact; the rest is as in `relu`.

    Raises:
      TypeError: if `fn` is not a function of a scalar.
    """
    check_moments("activation", mean, cov)
    return _elementwise(mean, cov, fn)


def _elementwise(mean: Array, cov: S, fn: Activation) -> tuple[Array, S]:
    found = expectations.of(fn)(mean, cov.variance())
    return found.mean, cov.elementwise(found)


@materialized_inputs
def feed_forward(
    mean: Array, cov: S, params: FeedForwardParams, *, activation: Activation
) -> tuple[Array, S]:
    """Moments of `activation(x @ hidden) @ output`, each dense layer with its bias.

    Assumes that x and the four parameters are mutually independent.

    Args (mean, cov, results and errors are those of `dense`):
      params: beliefs about the two dense layers, (D, F) and (F, D).
      activation: "relu", "gelu", or a JAX function of a scalar, such as `jnp.tanh`; or TypeError.

    Source: Transformer derivation, section 4.6.
    """
    return feed_forward_with_carry(mean, cov, params, activation)[:2]


def feed_forward_with_carry(
    mean: Array, cov: S, params: FeedForwardParams, activation: Activation
) -> tuple[Array, S, Carry]:
    """`feed_forward`, and how it carries covariances with its input: see `rules`."""
    check_moments("feed_forward", mean, cov)
    check_kernel("feed_forward", mean.shape[1], params.hidden.kernel)
    check_kernel("feed_forward", params.hidden.kernel.shape[1], params.output.kernel)
    rule = rules_of(type(cov)).feed_forward or _layer_by_layer
    return rule(mean, cov, params, expectations.of(activation))


def _layer_by_layer(
    mean: Array, cov: S, params: FeedForwardParams, activation: Formula
) -> tuple[Array, S, Carry]:
    """The rule of structures without one of their own: `dense`, the activation, `dense`."""
    hidden, hidden_cov = dense(mean, cov, params.hidden)
    moments = activation(hidden, hidden_cov.variance())
    out, out_cov = dense(moments.mean, hidden_cov.elementwise(moments), params.output)

    def carry(cross: Any) -> Any:
        cross = cross.map_features(params.hidden.kernel.mean).rescale(moments.gain)
        return cross.map_features(params.output.kernel.mean)

    return out, out_cov, carry
