"""`MultiHeadAttention` with beliefs about its four matrices."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
from flax import nnx

from moment_jax.covariance import Covariance
from moment_jax.layers import AttentionParams, attention
from moment_jax.layers.checks import check_heads
from moment_jax.nn.base import BayesianModule
from moment_jax.nn.conversion import check_bias, check_kind, check_loaded, check_same, set_mean
from moment_jax.nn.dense import Dense
from moment_jax.nn.plain import plain_attention
from moment_jax.nn.settings import Settings

Array = jax.Array


class MultiHeadAttention(BayesianModule):
    """Multi-head self-attention with beliefs about its four matrices.

    Args:
      num_features: D.
      num_heads: H, a divisor of D.
      use_bias: whether the four projections have biases.
      rngs: Flax random streams.
      settings: keyword arguments of `Settings`.

    Raises:
      ValueError: if the heads do not divide the features.
    """

    parts = ("query", "key", "value", "out")
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
        """See `BayesianModule`."""
        sizes = {"num_features": network.in_features, "num_heads": network.num_heads}
        use_bias = network.query.bias is not None
        return {**sizes, "use_bias": use_bias, "rngs": nnx.Rngs(0), **settings}

    def load(self, network: nnx.MultiHeadAttention) -> None:
        """Take the weights of an `nnx.MultiHeadAttention` of the same sizes as means."""
        name = "MultiHeadAttention.load"
        check_kind(MultiHeadAttention, network)
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
            check_bias(name, "bias", mine.bias, theirs.bias)
            set_mean(mine.kernel, theirs.kernel[...].reshape(mine.kernel.mean.shape))
            if mine.bias is not None:
                set_mean(mine.bias, theirs.bias[...].reshape(mine.bias.mean.shape))
        check_loaded(name, self, network)

    @property
    def params(self) -> AttentionParams:
        """Beliefs about the four projections."""
        return AttentionParams(*(getattr(self, part).params for part in self.parts))

    def network(self, params: AttentionParams) -> nnx.MultiHeadAttention:
        """The plain `nnx.MultiHeadAttention` with these arrays."""
        return plain_attention(params, self.num_heads)

    def __call__(
        self, mean: Array, cov: Covariance | None = None, mask: Array | None = None
    ) -> tuple[Array, Covariance]:
        """Moments of the output, (..., T, D); mask (T, T) or (H, T, T), the same for the batch."""
        attend = partial(attention, params=self.params, num_heads=self.num_heads, mask=mask)
        return self._over_batch(attend, (mean, cov))
