"""Moments of any JAX function of random weights."""

from moment_jax.propagation import (  # importing them registers their rules
    attention,
    dense,
    elementwise,
    feed_forward,
    loops,
    normalization,
    products,
    tied,
    views,
)
from moment_jax.propagation.errors import PropagationError
from moment_jax.propagation.linearisation import linearised
from moment_jax.propagation.propagator import propagate, propagation_rule
from moment_jax.propagation.receipt import Receipt, Step
