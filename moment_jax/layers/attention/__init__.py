"""Multi-head attention: one file a structure, one public function."""

from moment_jax.layers.attention.multi_head import attention, cross_attention

__all__ = ["attention", "cross_attention"]
