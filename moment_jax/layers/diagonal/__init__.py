"""Layers of `Diagonal`."""

from moment_jax.layers.diagonal.attention import attention
from moment_jax.layers.diagonal.feed_forward import feed_forward
from moment_jax.layers.diagonal.norm import norm
