"""From data to beliefs: posteriors of trained networks, and training from start to end."""

from moment_jax.inference.laplace import LaplaceReceipt, laplace

__all__ = ["LaplaceReceipt", "laplace"]
