"""`Dense` and `LayerNorm`: the smallest Bayesian modules."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
from flax import nnx

from moment_jax.covariance import Covariance
from moment_jax.layers import DenseParams, NormParams, dense, layer_norm
from moment_jax.nn.base import BayesianModule
from moment_jax.nn.conversion import check_bias, check_kind, check_same, set_mean
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

    flax_type = nnx.Linear

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
    def options_of(cls, network: nnx.Linear, settings: dict[str, Any]) -> dict[str, Any]:
        """See `BayesianModule`."""
        in_features, out_features = network.kernel.shape
        sizes = {"in_features": in_features, "out_features": out_features}
        return {**sizes, "use_bias": network.bias is not None, "rngs": nnx.Rngs(0), **settings}

    def load(self, network: nnx.Linear) -> None:
        """Take the weights of an `nnx.Linear` of the same sizes as means."""
        check_kind(Dense, network)
        check_bias("Dense.load", "bias", self.bias, network.bias)
        set_mean(self.kernel, network.kernel[...])
        if self.bias is not None and network.bias is not None:
            set_mean(self.bias, network.bias[...])

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

    flax_type = nnx.LayerNorm

    def __init__(self, num_features: int, *, epsilon: float = 1e-6, **settings: Any) -> None:
        self.settings = Settings.of(self, settings)
        self.epsilon = epsilon
        self.scale = self.settings.vector(num_features, 1.0)
        self.bias = self.settings.vector(num_features)

    @classmethod
    def options_of(cls, network: nnx.LayerNorm, settings: dict[str, Any]) -> dict[str, Any]:
        """See `BayesianModule`."""
        return {"num_features": network.num_features, "epsilon": network.epsilon, **settings}

    def load(self, network: nnx.LayerNorm) -> None:
        """Take gain and bias of an `nnx.LayerNorm` of the same epsilon as means."""
        name = "LayerNorm.load"
        check_kind(LayerNorm, network)
        check_same(name, network, epsilon=self.epsilon, axis_name=None)
        for axes in ("reduction_axes", "feature_axes"):
            if getattr(network, axes) != (-1,):
                check_same(name, network, **{axes: -1})
        check_bias(name, "scale", self.scale, network.scale, "ones")
        check_bias(name, "bias", self.bias, network.bias)
        assert network.scale is not None
        assert network.bias is not None
        set_mean(self.scale, network.scale[...])
        set_mean(self.bias, network.bias[...])

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
