"""Shape checks, made while tracing; errors state the rule, the value and the fix."""

from __future__ import annotations

Shape = tuple[int, ...]


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
