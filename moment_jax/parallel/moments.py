"""Shardings of means and covariances between layers."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moment_jax import covariance as structures
from moment_jax.covariance import Covariance
from moment_jax.parallel.mesh import DATA, MODEL
from moment_jax.parallel.sequence import check_tokens
from moment_jax.xla import SEQUENCE

Array = jax.Array
S = TypeVar("S", bound=Covariance)

# For each field the axis that belongs to features; all others stay whole.
FEATURE_AXES: dict[type[Covariance], dict[str, int | None]] = {
    structures.Diagonal: {"variances": 1},
    structures.TokenBlock: {"blocks": 1},
    structures.TokenCorrelated: {"scale": 1, "correlation": None},
    structures.Separable: {
        "scale": 1,
        "token_correlation": None,
        "feature_correlation": 0,
        "pool": None,
        "sum_variance": 0,
    },
    structures.Full: {"cov": 1},
}
FEATURE_AXES[structures.BatchSeparable] = FEATURE_AXES[structures.Separable]
FEATURE_AXES[structures.FrozenSeparable] = FEATURE_AXES[structures.Separable]

# The fields whose first axis belongs to tokens: the rows of a covariance lie where its tokens do.
BY_TOKENS: dict[type[Covariance], frozenset[str]] = {
    structures.Diagonal: frozenset({"variances"}),
    structures.TokenBlock: frozenset({"blocks"}),
    structures.TokenCorrelated: frozenset({"scale", "correlation"}),
    structures.Separable: frozenset({"scale", "token_correlation", "pool"}),
}
BY_TOKENS[structures.BatchSeparable] = BY_TOKENS[structures.Separable]
BY_TOKENS[structures.FrozenSeparable] = BY_TOKENS[structures.Separable]


def moment_specs(cov: Covariance, *, batched: bool = True, sequence: bool = False) -> Covariance:
    """Partition specs of a covariance, in its structure: a batch over `data`, features over `model`.

    Args:
      cov: a covariance, with one leading axis of a batch or without.
      batched: whether there is one.
      sequence: lay rows, of tokens, over `sequence`: of a correlation of tokens (T, T) each device then
        has those of its own tokens.

    Raises:
      TypeError: if it is of a structure that is not known here, or of `Full` with `sequence`.
    """
    if type(cov) not in FEATURE_AXES:
        names = ", ".join(structure.__name__ for structure in FEATURE_AXES)
        raise TypeError(
            f"`moment_specs` knows the structures {names}. Got {type(cov).__name__}; enter the axis of "
            "its features in FEATURE_AXES."
        )
    if sequence and type(cov) not in BY_TOKENS:
        names = ", ".join(structure.__name__ for structure in BY_TOKENS)
        raise TypeError(
            f"Tokens lie over `sequence` in the structures {names}. Got {type(cov).__name__}, whose "
            "attention needs every pair of pairs of tokens. Use Separable, or a mesh without `sequence`."
        )
    lead = (DATA,) if batched else ()

    def spec(name: str, axis: int | None) -> PartitionSpec | None:
        leaf = getattr(cov, name)
        if leaf is None:
            return None
        axes: list[str | None] = [None] * (leaf.ndim - len(lead))
        if axis is not None:
            axes[axis] = MODEL
        if sequence and name in BY_TOKENS[type(cov)]:
            axes[0] = SEQUENCE
        return PartitionSpec(*lead, *axes)

    specs = {name: spec(name, axis) for name, axis in FEATURE_AXES[type(cov)].items()}
    fields: Any = cov
    return dataclasses.replace(fields, **specs)


def constrain(mean: Array, cov: S, mesh: Mesh, *, batched: bool = True) -> tuple[Array, S]:
    """The same moments, laid out as `moment_specs` says, inside `jit`.

    Args:
      mean: (B, T, D), or (T, D) without a batch.
      cov: its covariance.
      mesh: from `make_mesh`; its axes must divide B and D, and T if it has an axis `sequence`.
      batched: whether there is a batch.

    Raises:
      ValueError: if the devices along `sequence` do not divide T.
    """
    sequence = SEQUENCE in mesh.axis_names
    if sequence:
        check_tokens("constrain", mean.shape, int(batched), mesh)
    specs = moment_specs(cov, batched=batched, sequence=sequence)
    lead, tokens = (DATA,) if batched else (), SEQUENCE if sequence else None
    mean = jax.lax.with_sharding_constraint(
        mean, NamedSharding(mesh, PartitionSpec(*lead, tokens, MODEL))
    )
    return mean, jax.tree.map(
        lambda leaf, spec: jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, spec)),
        cov,
        specs,
    )
