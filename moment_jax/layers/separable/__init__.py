"""Layers of `Separable`."""

from moment_jax.layers.separable.attention import attention
from moment_jax.layers.separable.feed_forward import feed_forward
from moment_jax.layers.separable.norm import norm

__all__ = ["attention", "feed_forward", "norm"]
