"""`Dense` and `LayerNorm`: the smallest Bayesian modules."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
from flax import nnx

from moment_jax.covariance import Covariance
from moment_jax.layers import DenseParams, NormParams, dense, layer_norm
from moment_jax.nn.base import BayesianModule, set_mean
from moment_jax.nn.conversion import check_bias, check_kind, check_same
from moment_jax.nn.plain import plain_linear, plain_norm
from moment_jax.nn.settings import Settings

Array = jax.Array


class Dense(BayesianModule):
    """A dense layer with a belief about its kernel and its bias.

    Args:
      in_features: number of input features.
      out_features: number of output features.
      use_bias: whether there is a bias.
      rngs: Flax random streams, for the initial mean.
      settings: keyword arguments of `Settings`.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> import moment_jax as mj
    >>> layer = mj.nn.Dense(3, 2, rngs=nnx.Rngs(0))
    >>> mean, cov = layer(jnp.ones((5, 4, 3)))
    >>> mean.shape, cov.scale.shape
    ((5, 4, 2), (5, 4, 2))
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = True,
        rngs: nnx.Rngs,
        **settings: Any,
    ) -> None:
        self.settings = Settings.of(self, settings)
        self.kernel = self.settings.kernel((in_features, out_features), rngs)
        self.bias = nnx.data(self.settings.vector(out_features) if use_bias else None)

    @classmethod
    def from_deterministic(cls, layer: nnx.Linear, **settings: Any) -> Dense:
        """A belief that starts at the weights of a trained `nnx.Linear`."""
        check_kind("Dense.from_deterministic", layer, nnx.Linear)
        in_features, out_features = layer.kernel.shape
        use_bias = layer.bias is not None
        new = cls(in_features, out_features, use_bias=use_bias, rngs=nnx.Rngs(0), **settings)
        new.load(layer)
        return new

    def load(self, layer: nnx.Linear) -> None:
        """Take the weights of an `nnx.Linear` as means; see `from_deterministic`."""
        check_kind("Dense.load", layer, nnx.Linear)
        check_bias("Dense.load", "bias", self.bias, layer.bias)
        set_mean(self.kernel, layer.kernel[...])
        if self.bias is not None and layer.bias is not None:
            set_mean(self.bias, layer.bias[...])

    @property
    def params(self) -> DenseParams:
        """Beliefs about kernel and bias."""
        bias = None if self.bias is None else self.bias.posterior
        return DenseParams(self.kernel.posterior, bias)

    def network(self, params: DenseParams) -> nnx.Linear:
        """The plain `nnx.Linear` with these arrays."""
        return plain_linear(params)

    def __call__(self, mean: Array, cov: Covariance | None = None) -> tuple[Array, Covariance]:
        """Moments of the output: (..., T, in) -> (..., T, out); cov None where x is certain."""
        params = self.params
        return self._over_batch(lambda m, c: dense(m, c, params), (mean, cov))


class LayerNorm(BayesianModule):
    """Layer normalisation with a belief about its gain and its bias.

    Args:
      num_features: D.
      epsilon: added to the variance over the features.
      settings: keyword arguments of `Settings`.
    """

    def __init__(self, num_features: int, *, epsilon: float = 1e-6, **settings: Any) -> None:
        self.settings = Settings.of(self, settings)
        self.epsilon = epsilon
        self.scale = self.settings.vector(num_features, 1.0)
        self.bias = self.settings.vector(num_features)

    @classmethod
    def from_deterministic(cls, layer: nnx.LayerNorm, **settings: Any) -> LayerNorm:
        """A belief that starts at the gain and bias of a trained `nnx.LayerNorm`."""
        check_kind("LayerNorm.from_deterministic", layer, nnx.LayerNorm)
        new = cls(layer.num_features, epsilon=layer.epsilon, **settings)
        new.load(layer)
        return new

    def load(self, layer: nnx.LayerNorm) -> None:
        """Take gain and bias of an `nnx.LayerNorm` of the same epsilon as means."""
        name = "LayerNorm.load"
        check_kind(name, layer, nnx.LayerNorm)
        check_same(name, layer, epsilon=self.epsilon, axis_name=None)
        for axes in ("reduction_axes", "feature_axes"):
            if getattr(layer, axes) != (-1,):
                check_same(name, layer, **{axes: -1})
        check_bias(name, "scale", self.scale, layer.scale, "ones")
        check_bias(name, "bias", self.bias, layer.bias)
        assert layer.scale is not None
        assert layer.bias is not None
        set_mean(self.scale, layer.scale[...])
        set_mean(self.bias, layer.bias[...])

    @property
    def params(self) -> NormParams:
        """Beliefs about gain and bias."""
        return NormParams(self.scale.posterior, self.bias.posterior)

    def network(self, params: NormParams) -> nnx.LayerNorm:
        """The plain `nnx.LayerNorm` with these arrays."""
        return plain_norm(params, self.scale.mean.shape[0], self.epsilon)

    def __call__(self, mean: Array, cov: Covariance | None = None) -> tuple[Array, Covariance]:
        """Moments of the output, (..., T, D); cov None where x is certain."""
        norm = partial(layer_norm, params=self.params, epsilon=self.epsilon)
        return self._over_batch(norm, (mean, cov))
