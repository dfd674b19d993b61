"""Checks of shapes, made while tracing: the invariant, what came, and the mend."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

Shape = tuple[int, ...]


def check_fields(
    call: str, mend: str, shape_of: Callable[[Shape], list[Shape]], *leaves: object
) -> None:
    """Raise unless the fields of a belief fit its mean, which comes first.

    Beliefs with something else in the place of arrays (None, axis numbers for `vmap`, shapes) are
    let pass, and so are leading axes that all fields share, for they are a stack of beliefs.

    Args:
      call: how the belief is made, as `Family(mean, ...)`.
      mend: what to do instead.
      shape_of: from the mean's shape, the shapes of the other fields; ValueError if there are none.
      *leaves: the fields.
    """
    shapes = [_array_shape(leaf) for leaf in leaves]
    known = [shape for shape in shapes if shape is not None]
    if len(known) < len(shapes) or not any(known):
        return
    mean, *others = known
    try:
        expected = shape_of(mean)
    except ValueError as error:
        raise ValueError(f"`{call}` {error} Got {_listed(known)}. {mend}") from None
    if others != expected:
        raise ValueError(
            f"`{call}` needs fields of shapes {_listed([mean, *expected])} for this mean. "
            f"Got {_listed(known)}. {mend}"
        )


def check_kernel(call: str, shape: Shape) -> None:
    """Raise unless the belief is about one kernel (in, out)."""
    if len(shape) != 2:
        raise ValueError(
            f"`{call}` needs a belief about a kernel of shape (in, out). Got {tuple(shape)}. "
            "For a stack of kernels, use jax.vmap over the belief."
        )


def check_vector(call: str, shape: Shape) -> None:
    """Raise unless the belief is about one bias or gain (D,)."""
    if len(shape) != 1:
        raise ValueError(
            f"`{call}` needs a belief about a bias or a gain of shape (D,). Got {tuple(shape)}. "
            "For a stack of vectors, use jax.vmap over the belief."
        )


def check_inputs(family: str, shape: Shape, mean: Shape, variance: Shape) -> None:
    """Raise unless `noise_variance` got the moments (..., in) of the input of one kernel."""
    check_kernel(f"{family}.noise_variance", shape)
    if mean[-1:] != shape[:1] or variance != mean:
        raise ValueError(
            f"`{family}.noise_variance(mean, variance)` needs two arrays of one shape (..., in) "
            f"with in == {shape[0]}. Got {tuple(mean)} and {tuple(variance)}. To give each mean "
            "its variance, use jnp.broadcast_to or jnp.zeros_like(mean)."
        )


def check_moment(family: str, shape: Shape, moment: Shape) -> None:
    """Raise unless `noise_block` got the second moment (..., in, in) of the input of one kernel."""
    check_kernel(f"{family}.noise_block", shape)
    if moment[-2:] != (shape[0], shape[0]):
        raise ValueError(
            f"`{family}.noise_block(moment)` needs a moment of shape (..., in, in) with "
            f"in == {shape[0]}. Got {tuple(moment)}. Move the two feature axes last."
        )


def _array_shape(leaf: object) -> Shape | None:
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        return tuple(leaf.shape)
    is_number = isinstance(leaf, (int, float)) and not isinstance(leaf, bool)
    return () if is_number else None


def _listed(shapes: list[Shape]) -> str:
    return " and ".join(str(shape) for shape in shapes)
