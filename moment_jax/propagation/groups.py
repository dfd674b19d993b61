"""Normalisations over groups of tokens and features: GroupNorm, InstanceNorm."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moment_jax.covariance import Diagonal, Full
from moment_jax.layers.norm import layer_norm_and_tangent
from moment_jax.layers.params import NormParams
from moment_jax.propagation.errors import refuse
from moment_jax.propagation.graph import Node, is_random
from moment_jax.propagation.moments import Moments, as_rows, fresh, gather
from moment_jax.propagation.normalization import Normalization, recognised_rows
from moment_jax.propagation.origins import LARGEST
from moment_jax.propagation.primitives import VIEWS, is_known, uniform
from moment_jax.propagation.propagator import Propagator, pattern
from moment_jax.propagation.regions import BY_ROW, REDUCTIONS, compute, follow, sources


@pattern
def _grouped(propagator: Propagator, node: Node) -> Moments | None:
    found = _partitioned(node)
    if found is None:
        return None
    source, groups = found

    def fn(x: np.ndarray) -> np.ndarray:
        flat = np.empty(x.size)
        flat[groups] = x
        with jax.ensure_compile_time_eval():
            value = jnp.asarray(flat, source.dtype).reshape(source.shape)
            return np.asarray(compute(node, {source: value}), float).ravel()[groups]

    kind = recognised_rows(fn, groups.shape, source.dtype, (1,))
    if not isinstance(kind, Normalization):
        return None
    m = propagator.moments(source)
    cov: Any = m.cov
    if not isinstance(cov, Diagonal | Full):
        if m.mean.size**2 > LARGEST:
            raise refuse(
                f"a normalisation over {groups.shape[0]} groups of {groups.shape[1]} entries, "
                f"too many for a dense covariance of at most {LARGEST} entries",
                node.source,
                "Use structure=mj.Diagonal.",
            )
        cov = Full(cov.to_dense())
    at = m.places.ravel()[groups]
    mean, cov, _ = layer_norm_and_tangent(
        m.mean.reshape(-1)[at], gather(cov, at), NormParams(), kind.epsilon, 2, centres=kind.centres
    )
    factor = jnp.full((1, mean.shape[1]), kind.factor, mean.dtype)
    places = np.empty(groups.size, int)
    places[groups.ravel()] = np.arange(groups.size)
    tokens, features = m.natural()
    normal = Moments(mean * factor, cov.rescale(factor), places.reshape(source.shape))
    mean, cov = normal.sequence(tokens, features)
    if not isinstance(m.cov, Diagonal | Full):
        cov = propagator.structure.project(cov.to_dense())
    propagator.note(node, "group_norm", "its input Gaussian")
    return fresh(mean, cov, node.shape, tokens, features)


def _partitioned(node: Node) -> tuple[Node, np.ndarray] | None:
    """An array of the same shape that all of it is made of, and its entries by groups: (G, n)."""
    if node.op not in ("mul", "div"):
        return None
    reduced: list[Node] = []

    def expandable(n: Node) -> bool:
        if n.op in REDUCTIONS:
            reduced.append(n)
        constants = [x for x in n.operands if not is_random(x)]
        views = n.op in VIEWS and all(map(is_known, constants))
        return n.op in BY_ROW and (views or all(uniform(x) is not None for x in constants))

    found = None
    for source in sources(node, expandable):
        if reduced and source.shape == node.shape:
            found = source
    if found is None:
        return None
    partitions = [_groups(n, found) for n in reduced if n.index > found.index]
    first = partitions[0] if partitions else None
    if first is None or first.shape[1] == 1:
        return None
    if any(p is None or not np.array_equal(p, first) for p in partitions):
        return None
    return found, first


def _groups(node: Node, source: Node) -> np.ndarray | None:
    """Which entries of the source are reduced together, sorted."""
    (operand,) = node.nodes[:1]
    places = follow(operand, source)
    if places is None or places.size != source.size:
        return None
    axes = tuple(node.params["axes"])
    kept = [i for i in range(places.ndim) if i not in axes]
    rows = np.sort(as_rows(places, tuple(kept), axes), axis=1)
    rows = rows[np.argsort(rows[:, 0])]
    return rows if np.array_equal(np.sort(rows.ravel()), np.arange(rows.size)) else None
