"""Shardings of means and covariances."""

import dataclasses
from functools import partial
from typing import Any, TypeVar

import jax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moment_jax.covariance import Covariance
from moment_jax.parallel.mesh import DATA, MODEL

S = TypeVar("S", bound=Covariance)


def moment_specs(cov: Covariance, *, batched: bool = True) -> Covariance:
    """Partition specs of a covariance, in its structure: batches over `data`, features over `model`.

    Args:
      cov: a covariance.
      batched: whether it has a leading batch axis.
    """
    lead = (DATA,) if batched else ()

    def spec(name: str, leaf: Array) -> PartitionSpec:
        axes: list[str | None] = [None] * (leaf.ndim - len(lead))
        if name in cov.feature_axes:
            axes[cov.feature_axes[name]] = MODEL
        return PartitionSpec(*lead, *axes)

    fields: Any = cov
    specs = {  # a field is an array, or holds some
        field.name: jax.tree.map(partial(spec, field.name), getattr(cov, field.name))
        for field in dataclasses.fields(fields)
    }
    return dataclasses.replace(fields, **specs)


def constrain(mean: Array, cov: S, mesh: Mesh, *, batched: bool = True) -> tuple[Array, S]:
    """The same moments with the shardings of `moment_specs`, inside `jit`.

    Args:
      mean: (B, T, D), or (T, D) without a batch.
      cov: its covariance.
      mesh: from `make_mesh`; its axes must divide B and D.
      batched: whether there is a batch axis.
    """
    lead = (DATA,) if batched else ()
    specs = PartitionSpec(*lead, None, MODEL), moment_specs(cov, batched=batched)
    constrained: tuple[Array, S] = jax.tree.map(
        lambda leaf, spec: jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, spec)),
        (mean, cov),
        specs,
    )
    return constrained
