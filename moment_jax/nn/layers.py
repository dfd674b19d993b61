"""`Dense`, `LayerNorm` and `MultiHeadAttention`: the modules that Flax has a plain layer for."""

from functools import partial
from typing import Any

from flax import nnx
from jax import Array

from moment_jax.covariance import Covariance
from moment_jax.layers import AttentionParams, DenseParams, NormParams, attention, dense, layer_norm
from moment_jax.layers.checks import check_heads
from moment_jax.nn.base import BayesianModule, Moments
from moment_jax.nn.conversion import check_kind, check_loaded, check_same, load_part, set_mean
from moment_jax.nn.plain import plain_attention, plain_linear, plain_norm
from moment_jax.nn.settings import Settings


class Dense(BayesianModule):
    """A dense layer with a belief about its kernel and its bias.

    Args:
      in_features: number of input features.
      out_features: number of output features.
      use_bias: whether there is a bias.

    >>> import jax.numpy as jnp, moment_jax as mj
    >>> from flax import nnx
    >>> layer = mj.nn.Dense(3, 2, rngs=nnx.Rngs(0))
    >>> mean, cov = layer(jnp.ones((5, 4, 3)))
    >>> mean.shape, cov.shape
    ((5, 4, 2), (5, 4, 2))
    """

    parts = ("kernel", "bias")
    params_type = DenseParams
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
        in_features, out_features = network.kernel.shape
        sizes = {"in_features": in_features, "out_features": out_features}
        return {**sizes, "use_bias": network.bias is not None}

    def network(self, params: DenseParams) -> nnx.Linear:
        return plain_linear(params)

    def __call__(self, mean: Array, cov: Covariance | None = None) -> Moments:
        """Moments of the output: (..., T, in) -> (..., T, out); cov None where x is certain."""
        params = self.params
        return self._over_batch(lambda m, c: dense(m, self._begun(c, params), params), (mean, cov))


class LayerNorm(BayesianModule):
    """Layer normalisation with a belief about its gain and its bias.

    Args:
      num_features: D.
      epsilon: added to the variance over the features.
      rngs: not needed; accepted as by the other modules.
    """

    parts = ("scale", "bias")
    params_type = NormParams
    flax_type = nnx.LayerNorm

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        rngs: nnx.Rngs | None = None,
        **settings: Any,
    ) -> None:
        self.settings = Settings.of(self, settings)
        self.epsilon = epsilon
        self.scale = self.settings.vector(num_features, 1.0)
        self.bias = self.settings.vector(num_features)

    @classmethod
    def options_of(cls, network: nnx.LayerNorm, settings: dict[str, Any]) -> dict[str, Any]:
        return {"num_features": network.num_features, "epsilon": network.epsilon}

    @property
    def compared(self) -> dict[str, Any]:
        axes = {"axis_name": None, "reduction_axes": -1, "feature_axes": -1}
        return {"epsilon": self.epsilon, **axes}

    def network(self, params: NormParams) -> nnx.LayerNorm:
        return plain_norm(params, self.scale.mean.shape[0], self.epsilon)

    def __call__(self, mean: Array, cov: Covariance | None = None) -> Moments:
        """Moments of the output, (..., T, D); cov None where x is certain."""
        params = self.params

        def norm(mean: Array, cov: Covariance) -> Moments:
            return layer_norm(mean, self._begun(cov, params), params, epsilon=self.epsilon)

        return self._over_batch(norm, (mean, cov))


class MultiHeadAttention(BayesianModule):
    """Multi-head self-attention with beliefs about its four matrices.

    Args:
      num_features: D.
      num_heads: H, a divisor of D.
      use_bias: whether the four projections have biases.

    Raises:
      ValueError: if the heads do not divide the features.
    """

    parts = ("query", "key", "value", "out")
    params_type = AttentionParams
    flax_type = nnx.MultiHeadAttention
    query: Dense
    key: Dense
    value: Dense
    out: Dense

    def __init__(
        self,
        num_features: int,
        num_heads: int,
        *,
        use_bias: bool = True,
        rngs: nnx.Rngs,
        **settings: Any,
    ) -> None:
        check_heads("MultiHeadAttention", num_heads, num_features)
        self.settings = Settings.of(self, settings)
        self.num_heads = num_heads
        for part in self.parts:
            layer = Dense(num_features, num_features, use_bias=use_bias, rngs=rngs, **settings)
            setattr(self, part, layer)

    @classmethod
    def options_of(
        cls, network: nnx.MultiHeadAttention, settings: dict[str, Any]
    ) -> dict[str, Any]:
        sizes = {"num_features": network.in_features, "num_heads": network.num_heads}
        return {**sizes, "use_bias": network.query.bias is not None}

    def load(self, network: nnx.MultiHeadAttention) -> None:
        name = "MultiHeadAttention.load"
        check_kind(type(self), network)
        features, width = self.query.kernel.mean.shape
        check_same(
            name,
            network,
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            in_features=features,
            in_kv_features=features,
            qkv_features=width,
            out_features=self.out.kernel.mean.shape[1],
            normalize_qk=False,
            attention_fn=nnx.dot_product_attention,
        )
        for part in self.parts:
            mine, theirs = getattr(self, part), getattr(network, part)
            set_mean(mine.kernel, theirs.kernel[...].reshape(mine.kernel.mean.shape))
            bias = None if theirs.bias is None else theirs.bias[...].reshape(-1)
            load_part(name, "bias", mine.bias, bias)
        check_loaded(name, self, network)

    def network(self, params: AttentionParams) -> nnx.MultiHeadAttention:
        return plain_attention(params, self.num_heads)

    def __call__(
        self, mean: Array, cov: Covariance | None = None, mask: Array | None = None
    ) -> Moments:
        """Moments of the output, (..., T, D); mask (T, T) or (H, T, T), the same for the batch."""
        params = self.params
        attend = partial(attention, params=params, num_heads=self.num_heads, mask=mask)
        return self._over_batch(lambda m, c: attend(m, self._begun(c, params)), (mean, cov))
