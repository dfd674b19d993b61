"""Normalisations over features or groups, and softmax, recognised by their values."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moment_jax.covariance import Diagonal, Full
from moment_jax.layers.norm import layer_norm_and_tangent
from moment_jax.layers.params import NormParams
from moment_jax.layers.softmax import softmax
from moment_jax.propagation.branches import Branch, through_dense
from moment_jax.propagation.dense import branches_of
from moment_jax.propagation.errors import refuse
from moment_jax.propagation.graph import Node, is_random
from moment_jax.propagation.moments import Moments, as_rows, fresh, gather
from moment_jax.propagation.origins import LARGEST
from moment_jax.propagation.primitives import VIEWS, is_known, uniform
from moment_jax.propagation.propagator import Propagator, pattern
from moment_jax.propagation.regions import BY_ROW, REDUCTIONS, compute, follow, sources

RowFunction = Callable[[np.ndarray], np.ndarray]


class Normalization(NamedTuple):
    """factor * (x - avg(x)) / sqrt(var(x) + epsilon), or without subtracting the average."""

    centres: bool
    epsilon: float
    factor: float


@pattern
def _by_row(propagator: Propagator, node: Node) -> Moments | None:
    found = None
    for source, axes in _row_functions(node):

        def fn(x: np.ndarray, source: Node = source) -> np.ndarray:
            with jax.ensure_compile_time_eval():
                value = jnp.asarray(x, source.dtype).reshape(source.shape)
                return np.asarray(compute(node, {source: value}), float)

        kind = recognised_rows(fn, source.shape, source.dtype, axes)
        if kind is None and found is None:
            continue  # such as the exponentials inside a softmax
        if kind is None or (found is not None and isinstance(kind, np.ndarray)):
            break
        found = source, axes, kind
    if found is None:
        return None
    source, axes, kind = found
    m = propagator.moments(source)
    long = {i for i in axes if m.shape[i] > 1}
    if isinstance(kind, Normalization) and long != set(m.natural()[1]):
        return None  # over groups: `_over_groups`
    tokens = tuple(i for i in range(len(m.shape)) if i not in axes)
    mean, cov = m.sequence(tokens, axes)
    if isinstance(kind, np.ndarray):
        kernel = jnp.asarray(kind, mean.dtype)
        branches = through_dense(branches_of(m, mean, tokens, axes), mean, cov, kernel)
        propagator.note(node, "linear map of the features")
        cov = cov.map_features(kernel)
        return fresh(mean @ kernel, cov, node.shape, tokens, axes, branches)
    if isinstance(kind, str):
        propagator.note(node, "softmax", "its input Gaussian")
        return fresh(*softmax(mean, cov), node.shape, tokens, axes)
    out_mean, out_cov, tangent = layer_norm_and_tangent(
        mean, cov, NormParams(), kind.epsilon, 2, centres=kind.centres
    )
    if kind.factor != 1:
        factor = jnp.full((1, mean.shape[1]), kind.factor, mean.dtype)
        out_mean, out_cov = out_mean * factor, out_cov.rescale(factor)
        tangent = tangent._replace(scale=factor)
    propagator.note(node, "layer_norm" if kind.centres else "rms_norm", "its input Gaussian")
    branch = Branch(mean, out_mean, out_cov, tangent)
    return fresh(out_mean, out_cov, node.shape, tokens, axes, (branch,))


def _row_functions(node: Node) -> Iterator[tuple[Node, tuple[int, ...]]]:
    """Dominators of the same shape, and the axes reduced in between."""
    if node.op not in ("mul", "div", "sub", "add"):
        return
    reduced: set[tuple[int, ...]] = set()

    def expandable(n: Node) -> bool:
        if n.op in REDUCTIONS:
            (operand,) = n.nodes[:1]
            if operand.ndim != node.ndim:
                return False
            reduced.add(tuple(n.params["axes"]))
        constants = (x for x in n.operands if not isinstance(x, Node))
        return n.op in BY_ROW and all(uniform(x) is not None for x in constants)

    for source in sources(node, expandable):
        if len(reduced) > 1:
            return
        if reduced and source.shape == node.shape:
            yield source, next(iter(reduced))


def recognised_rows(
    fn: RowFunction, shape: tuple[int, ...], dtype: jnp.dtype, axes: tuple[int, ...]
) -> Normalization | np.ndarray | str | None:
    """A normalisation, "softmax", the matrix of a linear map of the features, or None."""
    x = np.random.default_rng(0).normal(size=shape)
    y = fn(x)
    close = 1e3 * float(jnp.finfo(dtype).eps)
    weights = np.exp(x) / np.exp(x).sum(axes, keepdims=True)
    if np.allclose(y, weights, atol=close):
        return "softmax"
    if not np.isfinite(y).all():
        return None
    if np.allclose(fn(2 * x), 2 * y, atol=close * np.abs(y).max()):
        return _matrix(fn, x, y, axes, close)
    for centres in (True, False):
        z = x - x.mean(axes, keepdims=True) if centres else x
        z = z / np.sqrt((z**2).mean(axes, keepdims=True))
        wide, small = fn(1e3 * z), 1e-3
        factor = float((wide * z).mean())
        if factor == 0 or not np.isfinite(factor):
            continue
        others = (factor * z, fn(1e4 * z))
        if not all(np.allclose(wide, y, atol=close * abs(factor)) for y in others):
            continue
        kept = float((fn(small * z) * z).mean()) / factor
        epsilon = small**2 * max(1 / kept**2 - 1, 0.0)
        factor = 1.0 if abs(factor - 1) < close else factor
        kind = Normalization(centres, float(f"{epsilon:.5g}"), factor)
        moved = x - x.mean(axes, keepdims=True) if centres else x
        expected = factor * moved / np.sqrt((moved**2).mean(axes, keepdims=True) + epsilon)
        if np.allclose(y, expected, atol=close * abs(factor)):
            return kind
    return None


def _matrix(
    fn: RowFunction, x: np.ndarray, y: np.ndarray, axes: tuple[int, ...], close: float
) -> np.ndarray | None:
    """The matrix (D, D) of a linear map of the features, or None."""
    lead = tuple(i for i in range(x.ndim) if i not in axes)
    before, after = as_rows(x, lead, axes), as_rows(y, lead, axes)
    shape = [x.shape[i] if i in axes else 1 for i in range(x.ndim)]
    units = (np.broadcast_to(unit.reshape(shape), x.shape) for unit in np.eye(before.shape[1]))
    matrix = np.stack([as_rows(fn(unit), lead, axes)[0] for unit in units])
    fits = np.allclose(before @ matrix, after, atol=close * max(np.abs(y).max(), 1))
    return matrix if fits else None


@pattern
def _over_groups(propagator: Propagator, node: Node) -> Moments | None:
    """GroupNorm, InstanceNorm and the like."""
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
                f"which needs a dense covariance of more than {LARGEST} entries",
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
    """The dominator of the same shape, and its entries by group, (G, n)."""
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
    """The source's entries that are reduced together, sorted, (G, n)."""
    (operand,) = node.nodes[:1]
    places = follow(operand, source)
    if places is None or places.size != source.size:
        return None
    axes = tuple(node.params["axes"])
    kept = [i for i in range(places.ndim) if i not in axes]
    rows = np.sort(as_rows(places, tuple(kept), axes), axis=1)
    rows = rows[np.argsort(rows[:, 0])]
    return rows if np.array_equal(np.sort(rows.ravel()), np.arange(rows.size)) else None
