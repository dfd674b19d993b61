"""The network for small tables: a linear model and a hidden layer beside it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

Array = jax.Array


class TableNetwork(nnx.Module):
    """x -> x W + b + gelu(x U + c) V; the learned prior scales keep it linear if the data are.

    With independent weights and certain inputs the hidden units are independent, so `mj.Diagonal` is
    exact for each output.

    Args:
      num_inputs: D.
      num_outputs: size of the last axis of the result.
      num_hidden: hidden units.
      rngs: Flax's.
    """

    def __init__(
        self, num_inputs: int, num_outputs: int, num_hidden: int = 32, *, rngs: nnx.Rngs
    ) -> None:
        zeros = nnx.initializers.zeros
        small = nnx.initializers.variance_scaling(1.0, "fan_in", "normal")
        self.linear = nnx.Linear(num_inputs, num_outputs, kernel_init=zeros, rngs=rngs)
        wide = nnx.initializers.normal(1.0)  # spreads where the hidden units bend
        self.hidden = nnx.Linear(num_inputs, num_hidden, bias_init=wide, rngs=rngs)
        self.head = nnx.Linear(
            num_hidden, num_outputs, use_bias=False, kernel_init=small, rngs=rngs
        )

    def __call__(self, x: Array) -> Array:
        """(N, D) -> (N, num_outputs)."""
        hidden = nnx.gelu(self.hidden(jnp.asarray(x)), approximate=False)
        return self.linear(x) + self.head(hidden)
