"""Sequence parallelism: the tokens of attention, and hence of whole encoders, on several devices."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moment_jax.parallel.mesh import DATA, check_batch
from moment_jax.xla import SEQUENCE

F = TypeVar("F", bound=Callable[..., Any])


def by_sequence(fn: F, mesh: Mesh) -> F:
    """The same function, compiled with the tokens of its sequences split over the axis `sequence`.

    Trace it by `jit` or `nnx.jit`, with inputs from `shard_sequences`; gradients may be taken inside or
    outside. `with jax.set_mesh(mesh):` around the compiled call does the same.

    Every device works on its own T / S tokens, with S devices along `sequence`. In attention the queries
    stay. Communication per sequence and layer:

      keys and values: means, and variances of `Diagonal`, are gathered: T K numbers per head each.
        Covariances of `TokenBlock` go round in a ring: T K^2 per pair of heads.
      `TokenCorrelated`, `Separable`: scales are gathered, T D numbers. Token-by-token arrays
        (correlations, weights, Gram matrices) are split by rows, (T / S, T) per device. A product of two
        of them goes round in a ring, (S - 1) / S T^2 numbers sent per device; a transpose is one
        all-to-all of T^2 / S.
      sums over tokens (feature Gram matrices, gradients of parameters): all-reduced.

    No device holds a whole token-by-token array, in the backward pass either. `Full` cannot be split by
    tokens, because its attention needs every pair of pairs of them; `constrain` raises a TypeError.

    Sequences whose length S does not divide (such as one pooled token) are left to the compiler. Only
    reverse mode is supported: `jax.jvp` of attention raises a TypeError.

    Args:
      fn: a function of arrays and modules.
      mesh: from `make_mesh(..., sequence=S)`.

    Raises:
      ValueError: if the mesh has no axis `sequence`.
    """
    _check_mesh("by_sequence", mesh)

    @functools.wraps(fn)
    def placed(*args: Any, **kwargs: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return fn(*args, **kwargs)

    return cast(F, placed)


def shard_sequences(batch: Any, mesh: Mesh) -> Any:
    """The arrays (B, T, ...) of a pytree, split over `data` by examples and over `sequence` by tokens.

    Raises:
      ValueError: if the mesh has no axis `sequence`, or its axes do not divide B and T.
    """
    _check_mesh("shard_sequences", mesh)
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        where = jax.tree_util.keystr(path) or "batch"
        check_tokens(f"shard_sequences` at `{where}", leaf.shape, 1, mesh)
    check_batch("shard_sequences", batch, mesh)
    return jax.device_put(batch, NamedSharding(mesh, PartitionSpec(DATA, SEQUENCE)))


def check_tokens(name: str, shape: tuple[int, ...], axis: int, mesh: Mesh) -> None:
    """Raise unless the number of devices along `sequence` divides the token axis."""
    count = mesh.shape[SEQUENCE]
    if len(shape) <= axis or shape[axis] % count:
        raise ValueError(
            f"`{name}` needs a number of tokens T, on axis {axis}, that the {count} devices along "
            f"sequence divide. Got {tuple(shape)}. Pad to a multiple of {count} and mark the real "
            "tokens by valid=, or use fewer devices along sequence."
        )


def _check_mesh(name: str, mesh: Mesh) -> None:
    if SEQUENCE not in mesh.axis_names:
        raise ValueError(
            f"`{name}` needs a mesh with an axis `sequence`. Got {mesh.axis_names}. Use "
            "make_mesh(data, model, sequence=...)."
        )
