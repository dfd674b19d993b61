"""Elementwise nonlinearities of a random sequence, and the feed-forward layer."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax import expectations
from moment_jax.covariance import Covariance, Diagonal, Separable
from moment_jax.covariance.separable_noise import average_gain
from moment_jax.layers.checks import check_moments, takes
from moment_jax.layers.dense import dense
from moment_jax.layers.params import FeedForwardParams
from moment_jax.xla import materialized_inputs

S = TypeVar("S", bound=Covariance)
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
    moments = expectations.rectified(mean, cov.variance())
    return moments.mean, cov.elementwise(moments)


@materialized_inputs
def gelu(mean: Array, cov: S) -> tuple[Array, S]:
    """Moments of x Phi(x), the exact GELU; arguments, results and assumptions as in `relu`."""
    check_moments("gelu", mean, cov)
    moments = expectations.gelu(mean, cov.variance())
    return moments.mean, cov.elementwise(moments)


@materialized_inputs
def activation(mean: Array, cov: S, fn: Callable[[Array], Array]) -> tuple[Array, S]:
    """Moments of `fn(x)` for any smooth scalar function, by Gauss-Hermite quadrature.

    Args:
      mean: E[x], (T, D).
      cov: covariance of x, a structure of shape (T, D).
      fn: a smooth JAX function of a scalar, such as `jnp.tanh` (static, so hashable). `relu` and `gelu`
        are exact.

    Returns:
      Mean (T, D) and covariance of fn(x), in the structure of `cov`.

    Raises:
      ValueError: if shapes do not fit.
      TypeError: if `fn` is not a function of a scalar.
    """
    check_moments("activation", mean, cov)
    if not takes(fn, 1):
        raise TypeError(
            f"`activation(mean, cov, fn)` needs a function of a scalar. Got {fn!r}. Use one such as "
            "jnp.tanh; mj.relu(mean, cov) and mj.gelu(mean, cov) transform moments themselves."
        )
    moments = expectations.elementwise(fn, mean, cov.variance())
    return moments.mean, cov.elementwise(moments)


def moments_of(
    transform: Callable[..., Any],
) -> Callable[[Array, Array], expectations.ElementwiseMoments] | None:
    """The function (mean, variance) -> moments behind an activation transform.

    Known for `relu`, `gelu` and `functools.partial(activation, fn=fn)`; None otherwise.
    """
    if transform is relu:
        return expectations.rectified
    if transform is gelu:
        return expectations.gelu
    if isinstance(transform, functools.partial) and transform.func is activation:
        fn = transform.keywords.get("fn")
        if callable(fn) and not transform.args and takes(fn, 1):
            return functools.partial(expectations.elementwise, fn)
    return None


class FeedForwardTangent(NamedTuple):
    """The linearised feed-forward layer, with the expected gain of its activation."""

    hidden_kernel: Array  # (D, F)
    gain: Array  # E[f'] at every hidden unit, (T, F)
    output_kernel: Array  # (F, D)
    input_cov: Covariance  # of the layer's input
    average_jacobian: Array | None = None  # with token-averaged gains, (D, D); for `Separable`
    pulled: Array | None = None  # the input's feature Gram matrix times `hidden_kernel`, if known

    def __call__(self, change: Array) -> Array:
        """The change (T, D) of the output for a change (T, D) of the input."""
        return ((change @ self.hidden_kernel) * self.gain) @ self.output_kernel

    def diagonal(self) -> Array:
        """The Jacobian's diagonal, (T, D)."""
        return self.gain @ (self.hidden_kernel.T * self.output_kernel)


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
    check_moments("feed_forward", mean, cov)
    out_mean, out_cov, _ = feed_forward_and_tangent(mean, cov, params, activation)
    return out_mean, out_cov


def feed_forward_and_tangent(
    mean: Array, cov: S, params: FeedForwardParams, activation: Activation
) -> tuple[Array, S, FeedForwardTangent]:
    """`feed_forward`, with its linearisation."""
    hidden, hidden_cov = dense(mean, cov, params.hidden)
    (active, active_cov), gain = _with_gain(hidden, hidden_cov, activation)
    out_mean, out_cov = dense(active, active_cov, params.output)
    kernels = params.hidden.kernel.mean, params.output.kernel.mean
    tangent = FeedForwardTangent(kernels[0], gain, kernels[1], cov)
    average = average_kernel(kernels[0], gain, hidden_cov, active_cov)
    if average is not None and isinstance(hidden_cov, Separable) and isinstance(out_cov, Separable):
        # Reuse the products of the two dense layers.
        jacobian = out_cov.features().reached
        jacobian = average @ kernels[1] if jacobian is None else jacobian
        basis = hidden_cov.features().basis
        pulled = None if basis is None else basis.pulled
        tangent = tangent._replace(average_jacobian=jacobian, pulled=pulled)
    return out_mean, out_cov, tangent


def average_kernel(
    kernel: Array, gain: Array, before: Covariance, after: Covariance
) -> Array | None:
    """A kernel times each unit's token-averaged gain, (D, F), for `Separable`; None for others."""
    if not (isinstance(before, Separable) and isinstance(after, Separable)):
        return None
    basis = after.features().basis
    if basis is not None:  # the basis holds this product
        return basis.rows
    return kernel * average_gain(before, gain)[None, :]


def _with_gain(mean: Array, cov: S, activation: Activation) -> tuple[tuple[Array, S], Array]:
    """The activation's moments, and its expected derivative at each entry, (T, F)."""
    elementwise = moments_of(activation)
    if elementwise is not None:
        moments = elementwise(mean, cov.variance())
        return (moments.mean, cov.elementwise(moments)), moments.gain
    active = activation(mean, cov) if takes(activation, 2) and not _is_plain(activation) else None
    if not (isinstance(active, tuple) and len(active) == 2 and isinstance(active[1], Covariance)):
        raise TypeError(
            "`feed_forward` needs an activation of moments, (mean, cov) -> (mean, cov). Got "
            f"{getattr(activation, '__name__', repr(activation))}. Use mj.gelu or mj.relu; for a plain "
            "function, functools.partial(mj.activation, fn=jnp.tanh)."
        )
    # A user's transform: by Price's theorem E[f'] is the derivative of E[f], which needs variances only.
    variances = Diagonal(cov.variance())
    _, gain = jax.jvp(lambda m: activation(m, variances)[0], (mean,), (jnp.ones_like(mean),))
    return active, gain


def _is_plain(activation: Activation) -> bool:
    """Whether this is a JAX function, which would mistake a covariance for an option."""
    return str(getattr(activation, "__module__", "")).split(".")[0] == "jax"
