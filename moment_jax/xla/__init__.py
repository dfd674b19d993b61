"""What has to be said to the compiler; no maths."""

from moment_jax.xla.materialize import materialized

__all__ = ["materialized"]
