"""Moments of any JAX function of random weights."""

from moment_jax.propagation import (  # importing them registers their rules
    attention,
    dense,
    elementwise,
    joins,
    loops,
    normalization,
    tied,
)
from moment_jax.propagation.errors import PropagationError, Step
from moment_jax.propagation.propagator import propagate, propagation_rule
from moment_jax.propagation.weights import linearised
