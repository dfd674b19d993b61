"""Tokens on several devices: sequence parallelism of attention, and so of whole encoders."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moment_jax.parallel.mesh import DATA
from moment_jax.xla import SEQUENCE

F = TypeVar("F", bound=Callable[..., Any])


def by_sequence(fn: F, mesh: Mesh) -> F:
    """The function itself, compiled so that the tokens of its sequences lie over the axis `sequence`.

    To be traced by `jit` (or `nnx.jit`), with inputs that `shard_sequences` has placed; gradients may be
    taken inside of it or outside. `with jax.set_mesh(mesh):` around the compiled call does the same.

    Every layer works on its own T / S tokens, S the devices along `sequence`. In attention the queries
    stay. Sent, for each sequence and layer:

      keys and values: their means and, of `Diagonal`, their variances are gathered, T K numbers a head
        each; of `TokenBlock` their covariances go round in a ring, T K^2 for each pair of heads;
      `TokenCorrelated`, `Separable`: scales are gathered, T D numbers; whatever has a row and a column
        for each token (correlations, weights, Gram matrices) lies by rows, (T / S, T) on a device, and
        goes round in a ring where another device's rows are needed: (S - 1) / S T^2 numbers sent by
        each device for each product of two of them. Their transposes take one all-to-all of T^2 / S;
      what is summed over the tokens (feature Gram matrices, gradients of parameters) is all-reduced.

    No device holds an array of all tokens by all tokens, in the backward pass neither. `Full` is not
    laid out by tokens: its attention needs every pair of pairs of them; `constrain` raises a TypeError.

    Sequences whose length the devices do not divide (one pooled token, say) are left to the compiler.
    Derivatives are those of reverse mode alone: `jax.jvp` of attention raises a TypeError.

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
    """The arrays of a batch of sequences, split over `data` and, by their tokens, over `sequence`.

    Args:
      batch: a pytree of arrays (B, T, ...): inputs (B, T, D), tokens or what is valid of them (B, T).
      mesh: from `make_mesh(..., sequence=S)`.

    Raises:
      ValueError: if the mesh has no axis `sequence`, or its devices do not divide B and T.
    """
    _check_mesh("shard_sequences", mesh)
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        where = jax.tree_util.keystr(path) or "batch"
        check_tokens(f"shard_sequences` at `{where}", leaf.shape, 1, mesh)
        if leaf.shape[0] % mesh.shape[DATA]:
            raise ValueError(
                f"`shard_sequences` needs a leading axis that the {mesh.shape[DATA]} devices along data "
                f"divide. Got {tuple(leaf.shape)} at {where}."
            )
    return jax.device_put(batch, NamedSharding(mesh, PartitionSpec(DATA, SEQUENCE)))


def check_tokens(name: str, shape: tuple[int, ...], axis: int, mesh: Mesh) -> None:
    """Raise unless the devices along `sequence` divide the axis of the tokens."""
    count = mesh.shape[SEQUENCE]
    if len(shape) <= axis or shape[axis] % count:
        raise ValueError(
            f"`{name}` needs a number of tokens T, on axis {axis}, that the {count} devices along "
            f"sequence divide. Got {tuple(shape)}. Pad to a multiple of {count} and say by valid= which "
            "tokens exist, or take fewer devices along sequence."
        )


def _check_mesh(name: str, mesh: Mesh) -> None:
    if SEQUENCE not in mesh.axis_names:
        raise ValueError(
            f"`{name}` needs a mesh with an axis `sequence`. Got {mesh.axis_names}. Use "
            "make_mesh(data, model, sequence=...)."
        )
