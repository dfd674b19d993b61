"""Elementwise nonlinearities of a random sequence, and the feed-forward layer."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax import expectations
from moment_jax.covariance import Covariance, Diagonal
from moment_jax.layers.checks import check_kernel, check_moments, takes
from moment_jax.layers.dense import dense
from moment_jax.layers.params import FeedForwardParams, S
from moment_jax.layers.rules import Carry, Moments, rules_of
from moment_jax.xla import materialized_inputs

Activation = Callable[[Array, S], tuple[Array, S]]


@materialized_inputs
def relu(mean: Array, cov: S) -> tuple[Array, S]:
    """Moments of max(x, 0): exact means and variances in closed form.

    Covariances keep the first two terms of the Hermite expansion, by Price's theorem E[relu'] E[relu']
    Cov + ..., instead of the derivation's first-order Taylor at the mean.

    Assumes that x is Gaussian.

    Args:
      mean: E[x], (T, D).
      cov: covariance of x, a structure of shape (T, D).

    Returns:
      Mean (T, D) and covariance of relu(x), in the structure of `cov`.

    Raises:
      ValueError: if shapes do not fit.

    Source: Transformer derivation, section 4.6; rectified-Gaussian moments.
    """
    check_moments("relu", mean, cov)
    return _elementwise(mean, cov, expectations.rectified)


@materialized_inputs
def gelu(mean: Array, cov: S) -> tuple[Array, S]:
    """Moments of x Phi(x), the exact GELU; arguments, results and assumptions as in `relu`."""
    check_moments("gelu", mean, cov)
    return _elementwise(mean, cov, expectations.gelu)


@materialized_inputs
def activation(mean: Array, cov: S, fn: Callable[[Array], Array]) -> tuple[Array, S]:
    """Moments of `fn(x)` for any smooth scalar function, by Gauss-Hermite quadrature.

    `fn` is a JAX function of a scalar, such as `jnp.tanh` (static, so hashable); the rest is as in
    `relu`. `relu` and `gelu` are exact.

    Raises:
      TypeError: if `fn` is not a function of a scalar.
    """
    check_moments("activation", mean, cov)
    if not takes(fn, 1):
        raise TypeError(
            f"`activation(mean, cov, fn)` needs a function of a scalar. Got {fn!r}. Use one such as "
            "jnp.tanh; mj.relu(mean, cov) and mj.gelu(mean, cov) transform moments themselves."
        )
    return _elementwise(mean, cov, functools.partial(expectations.elementwise, fn))


def _elementwise(mean: Array, cov: S, moments: Moments) -> tuple[Array, S]:
    found = moments(mean, cov.variance())
    return found.mean, cov.elementwise(found)


@materialized_inputs
def feed_forward(
    mean: Array, cov: S, params: FeedForwardParams, *, activation: Activation
) -> tuple[Array, S]:
    """Moments of `activation(x @ hidden) @ output`, each dense layer with its bias.

    Assumes that x and the four parameters are mutually independent.

    Args:
      mean: E[x], (T, D).
      cov: covariance of x, a structure of shape (T, D).
      params: beliefs about the two dense layers, (D, F) and (F, D).
      activation: an elementwise transform such as `mj.relu`.

    Returns:
      Mean (T, D) and covariance of the output, in the structure of `cov`.

    Raises:
      ValueError: if shapes do not fit.
      TypeError: if `activation` does not transform moments.

    Source: Transformer derivation, section 4.6.
    """
    return fed_forward(mean, cov, params, activation)[:2]


def fed_forward(
    mean: Array, cov: S, params: FeedForwardParams, activation: Activation
) -> tuple[Array, S, Carry]:
    """`feed_forward`, and how it carries covariances with its input: see `rules`."""
    check_moments("feed_forward", mean, cov)
    check_kernel("feed_forward", mean.shape[1], params.hidden.kernel)
    check_kernel("feed_forward", params.hidden.kernel.shape[1], params.output.kernel)
    rule = rules_of(type(cov)).feed_forward or _layer_by_layer
    return rule(mean, cov, params, moments_of(activation))


def _layer_by_layer(
    mean: Array, cov: S, params: FeedForwardParams, activation: Moments
) -> tuple[Array, S, Carry]:
    """The rule of structures without one of their own: `dense`, the activation, `dense`."""
    hidden, hidden_cov = dense(mean, cov, params.hidden)
    moments = activation(hidden, hidden_cov.variance())
    out, out_cov = dense(moments.mean, hidden_cov.elementwise(moments), params.output)

    def carry(cross: Any) -> Any:
        cross = cross.map_features(params.hidden.kernel.mean).rescale(moments.gain)
        return cross.map_features(params.output.kernel.mean)

    return out, out_cov, carry


def moments_of(transform: Activation) -> Moments:
    """The function (mean, variance) -> moments behind an activation of moments."""
    if transform is relu:
        return expectations.rectified
    if transform is gelu:
        return expectations.gelu
    if isinstance(transform, functools.partial) and transform.func is activation:
        fn = transform.keywords.get("fn")
        if callable(fn) and not transform.args and takes(fn, 1):
            return functools.partial(expectations.elementwise, fn)
    return functools.partial(_of_users, transform)


def _of_users(
    transform: Callable[..., Any], mean: Array, variance: Array
) -> expectations.ElementwiseMoments:
    """Moments by a user's transform of independent entries; by Price's theorem E[f'] is dE[f]/dm."""
    given = Diagonal.unchecked(variance)

    def out(mean: Array) -> tuple[Array, Any]:
        found: Any = None
        # A JAX function would mistake the covariance for an option.
        plain = str(getattr(transform, "__module__", "")).split(".")[0] == "jax"
        if takes(transform, 2) and not plain:
            found = transform(mean, given)
        known = isinstance(found, tuple) and len(found) == 2
        if not (known and isinstance(found[1], Covariance)):
            raise TypeError(
                "`feed_forward` needs an activation of moments, (mean, cov) -> (mean, cov). Got "
                f"{getattr(transform, '__name__', repr(transform))}. Use mj.gelu or mj.relu; for a "
                "plain function, functools.partial(mj.activation, fn=jnp.tanh)."
            )
        return found[0], found[1]

    (value, cov), (gain, _) = jax.jvp(out, (mean,), (jnp.ones_like(mean),))
    variance = cov.variance()
    return expectations.ElementwiseMoments(value, variance, gain, jnp.zeros_like(mean))
