"""Layers of `Full`."""

from moment_jax.layers.full.attention import attention
from moment_jax.layers.full.feed_forward import feed_forward
from moment_jax.layers.full.norm import norm
