"""Multi-head attention; one file per structure."""

from moment_jax.layers.attention.multi_head import attention, cross_attention

__all__ = ["attention", "cross_attention"]
