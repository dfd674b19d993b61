"""Whether inputs that a function does not take lack a batch axis, or have one too many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def takes(fn: Callable[..., Any], *inputs: Any) -> bool:
    """Whether the function can be traced with inputs of these shapes."""
    try:
        jax.eval_shape(fn, *inputs)
    except Exception:
        return False
    return True


def shapes(inputs: Any) -> str:
    """Shapes of the inputs, as messages say them."""
    return ", ".join(str(tuple(jnp.shape(x))) for x in jax.tree.leaves(inputs))


def with_axes(inputs: Any, axes: int) -> Any:
    """The inputs with so many leading axes of length one."""
    return jax.tree.map(lambda x: jnp.expand_dims(x, tuple(range(axes))), inputs)


def explain(
    name: str, fn: Callable[..., Any], params: Any, inputs: tuple[Any, ...], error: Exception
) -> None:
    """Say what is wrong with the batch of inputs that `fn(params, *inputs)` failed on, if that is it.

    Raises:
      ValueError: if fn takes them with one more leading axis, or one entry of their first axis.
    """
    got = f"Got inputs of shape {shapes(inputs)}"
    rule = f"`{name}(fn)` calls fn with the inputs as they are"
    if takes(lambda x: fn(params, *with_axes(x, 1)), inputs):
        raise ValueError(
            f"{rule}, and this fn needs a batch axis before theirs. {got}. For one input, use x[None]."
        ) from error
    if takes(lambda x: jax.vmap(lambda one: fn(params, *one))(x), inputs):
        raise ValueError(
            f"{rule}, and this fn takes one entry of their first axis. {got}. Use "
            f"jax.vmap(mj.{name}(fn), (None, 0))(params, x)."
        ) from error
