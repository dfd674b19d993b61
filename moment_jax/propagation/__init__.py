"""Moments of any JAX function of random weights."""

from moment_jax.propagation import attention, dense, elementwise, normalization, views, windows  # noqa: F401
from moment_jax.propagation.errors import PropagationError
from moment_jax.propagation.propagate import Step, propagate, propagation_rule

__all__ = ["PropagationError", "Step", "propagate", "propagation_rule"]
