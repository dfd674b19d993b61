"""Shardings of means and covariances between layers."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moment_jax.covariance import STRUCTURES, Covariance
from moment_jax.parallel.mesh import DATA, MODEL
from moment_jax.parallel.sequence import check_tokens
from moment_jax.xla import SEQUENCE

Array = jax.Array
S = TypeVar("S", bound=Covariance)


def moment_specs(cov: Covariance, *, batched: bool = True, sequence: bool = False) -> Covariance:
    """Partition specs of a covariance, in its structure: a batch over `data`, features over `model`.

    Args:
      cov: a covariance, with one leading axis of a batch or without.
      batched: whether there is one.
      sequence: lay rows, of tokens, over `sequence`: of a correlation of tokens (T, T) each device then
        has those of its own tokens.

    Raises:
      TypeError: if tokens cannot be apart in its structure, with `sequence`.
    """
    if sequence and not cov.token_fields:
        names = ", ".join(s.__name__ for s in STRUCTURES.values() if s.token_fields)
        raise TypeError(
            f"Tokens lie over `sequence` in the structures {names}. Got {type(cov).__name__}, whose "
            "attention needs every pair of pairs of tokens. Use Separable, or a mesh without `sequence`."
        )
    lead = (DATA,) if batched else ()

    def spec(name: str) -> PartitionSpec | None:
        leaf = getattr(cov, name)
        if leaf is None:
            return None
        axes: list[str | None] = [None] * (leaf.ndim - len(lead))
        if name in cov.feature_axes:
            axes[cov.feature_axes[name]] = MODEL
        if sequence and name in cov.token_fields:
            axes[0] = SEQUENCE
        return PartitionSpec(*lead, *axes)

    fields: Any = cov
    specs = {field.name: spec(field.name) for field in dataclasses.fields(fields)}
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
