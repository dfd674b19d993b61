"""Activations by name, each as a moment transform and as a plain function."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.layers import activation, gelu, relu


class Activation(NamedTuple):
    """A nonlinearity in both forms."""

    moments: Callable[..., Any]
    plain: Callable[[Array], Array]


ACTIVATIONS = {
    "relu": Activation(relu, jax.nn.relu),
    "gelu": Activation(gelu, partial(jax.nn.gelu, approximate=False)),
    "tanh": Activation(partial(activation, fn=jnp.tanh), jnp.tanh),
    "silu": Activation(partial(activation, fn=jax.nn.silu), jax.nn.silu),
}
"""The activations that modules know by name."""


def find_activation(name: str) -> Activation:
    """The activation of this name; ValueError lists the known ones."""
    if name not in ACTIVATIONS:
        raise ValueError(
            f"A module needs an activation, one of {', '.join(ACTIVATIONS)}. Got {name!r}."
        )
    return ACTIVATIONS[name]
