"""Shardings of means and covariances."""

import dataclasses
from typing import Any, TypeVar

import jax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moment_jax.covariance import STRUCTURES, Covariance
from moment_jax.parallel.mesh import DATA, MODEL
from moment_jax.parallel.sequence import check_tokens
from moment_jax.xla import SEQUENCE

S = TypeVar("S", bound=Covariance)


def moment_specs(cov: Covariance, *, batched: bool = True, sequence: bool = False) -> Covariance:
    """Partition specs of a covariance, in its structure: batches over `data`, features over `model`.

    Args:
      cov: a covariance.
      batched: whether it has a leading batch axis.
      sequence: split tokens over `sequence`; a token correlation (T, T) is split by rows.

    Raises:
      TypeError: with `sequence`, if the structure cannot split tokens.
    """
    if sequence and not cov.token_fields:
        names = ", ".join(s.__name__ for s in STRUCTURES.values() if s.token_fields)
        raise TypeError(
            f"Only {names} can be split over `sequence`. Got {type(cov).__name__}, whose attention "
            "needs every pair of pairs of tokens. Use Separable, or a mesh without `sequence`."
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
    """The same moments with the shardings of `moment_specs`, inside `jit`.

    Args:
      mean: (B, T, D), or (T, D) without a batch.
      cov: its covariance.
      mesh: from `make_mesh`; its axes must divide B and D, and T if it has an axis `sequence`.
      batched: whether there is a batch axis.

    Raises:
      ValueError: if the number of devices along `sequence` does not divide T.
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
