"""Normalisations over features, softmax, its logarithm and logsumexp, recognised by their values."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from moment_jax.covariance.numerics import correlation_of, safe_sqrt
from moment_jax.expectations import softmax_expansion, softmax_jacobian
from moment_jax.layers.norm import normalized
from moment_jax.layers.params import NormParams
from moment_jax.layers.softmax import softmax
from moment_jax.propagation.branches import Branch, through_dense
from moment_jax.propagation.graph import Node
from moment_jax.propagation.moments import Axes, Moments, Sequence, as_rows, fresh
from moment_jax.propagation.primitives import VIEWS, is_known, moved
from moment_jax.propagation.propagator import Propagator, pattern
from moment_jax.propagation.regions import (
    BY_ROW,
    LINEAR,
    NORM,
    REDUCTIONS,
    SOFTMAX,
    all_uniform,
    misfit,
    probe,
    sources,
)


class Normalization(NamedTuple):
    """factor * (x - avg(x)) / sqrt(var(x) + epsilon), or without subtracting the average."""

    centres: bool
    epsilon: float
    factor: float


@pattern
def _by_row(propagator: Propagator, node: Node) -> Moments | None:
    """Functions of the features: LayerNorm, RMSNorm, softmax, averages."""
    found = _found(node)
    if found is None:
        return None
    source, rest, axes, kind = found
    m = propagator.moments(source)
    long = [i for i in axes if m.shape[i] > 1]
    if isinstance(kind, Normalization) and set(long) != set(m.natural()[1]):
        return None
    x = m.sequence(rest, axes)
    if isinstance(kind, Normalization):
        return _normalized(propagator, node, x, kind)
    if isinstance(kind, str):
        propagator.note(node, kind, "its input Gaussian")
        if kind == "softmax":
            return x.changed(*softmax(x.mean, x.cov), node.shape)
        total, total_cov, mean, cov = logsumexp(x.mean, x.cov)
        if kind == "log_softmax":
            return x.changed(mean, cov, node.shape)
        return fresh(total, total_cov, node.shape, tuple(range(node.ndim)), ())
    kernel = jnp.asarray(kind, x.mean.dtype)
    branches = through_dense(x, kernel)
    propagator.note(node, "linear map of the features")
    return x.changed(x.mean @ kernel, x.cov.map_features(kernel), node.shape, branches)


def _found(node: Node) -> tuple[Node, Axes, Axes, Any] | None:
    """The array of which `node` is a function by rows, its other and its reduced axes, and which."""
    found: Any = None
    for source, axes in _reduced_sources(node):
        rest = tuple(i for i in range(source.ndim) if i not in axes)
        rows = as_rows(np.arange(source.size).reshape(source.shape), rest, axes)

        def fn(x: np.ndarray, source: Node = source, rows: np.ndarray = rows) -> np.ndarray:
            flat = np.empty(x.size)
            flat[rows] = x
            y = probe(node, source, flat).ravel()
            return y[rows] if y.size == x.size else y

        kind = recognised_rows(fn, rows.shape, source.dtype, partial(_consists, node, source))
        if kind is None and found is None:
            continue  # such as the exponentials inside a softmax
        if kind is None or (found is not None and isinstance(kind, np.ndarray)):
            break
        found = source, rest, axes, kind
    return found


def _consists(node: Node, source: Node, operations: set[str]) -> bool:
    return misfit(node, source, operations) is None


def log_probabilities(propagator: Propagator, node: Node) -> Moments | None:
    """Moments of the logarithm of what is a softmax, or a view of one; else None."""
    if node.op in VIEWS and node.nodes:
        inner = log_probabilities(propagator, node.nodes[0])
        seen = None if inner is None else moved(node, inner.places, node.operands[1:])
        return None if inner is None or seen is None else replace(inner, places=seen[node.output])
    found = _found(node)
    if found is None or found[-1] != "softmax":
        return None
    x = propagator.moments(found[0]).sequence(*found[1:3])
    return x.changed(*logsumexp(x.mean, x.cov)[2:], node.shape)


def _normalized(propagator: Propagator, node: Node, x: Sequence, kind: Normalization) -> Moments:
    """A normalisation of the features of each token."""
    mean, cov, cross = normalized(
        x.mean, x.cov, NormParams(), kind.epsilon, 2, centres=kind.centres
    )
    if kind.factor != 1:
        factor = jnp.full((1, mean.shape[1]), kind.factor, mean.dtype)
        mean, cov = mean * factor, cov.rescale(factor)
        cross = cov.rescale_cross(cross, factor[0])
    propagator.note(node, "layer_norm" if kind.centres else "rms_norm", "its input Gaussian")
    return x.changed(mean, cov, node.shape, (Branch(x.mean, mean, cov, cross),))


def _reduced_sources(node: Node) -> Iterator[tuple[Node, Axes]]:
    """Dominators of the same shape, or reduced to it, with the axes that are reduced in between."""
    if node.op not in ("mul", "div", "sub", "add", "exp", "log"):
        return
    reduced: list[Node] = []

    def expandable(n: Node) -> bool:
        if n.op in REDUCTIONS:
            reduced.append(n)
        fixed = n.op in VIEWS and all(map(is_known, n.operands[1:]))
        return n.op in BY_ROW and (fixed or all_uniform(n))

    for source in sources(node, expandable):
        if not reduced or source.ndim < node.ndim:
            continue
        axes = {tuple(n.params["axes"]) for n in reduced}
        if len(axes) > 1 or any(n.nodes[0].shape != source.shape for n in reduced):
            return
        (over,) = axes
        left = [n for i, n in enumerate(source.shape) if i not in over]
        same = [n for n in node.shape if n > 1] == [n for n in left if n > 1]
        if source.shape == node.shape or same:
            yield source, over


def recognised_rows(
    fn: Callable[[np.ndarray], np.ndarray], shape: tuple[int, ...], dtype: jnp.dtype,
    consists: Callable[[set[str]], bool],
) -> Normalization | np.ndarray | str | None:  # fmt: skip
    """A normalisation of the rows, "softmax", the matrix of a linear map of them, or None.

    `consists` says whether the function consists of these operations alone.
    """
    if not consists(SOFTMAX) and not consists(NORM):
        return None
    precision = jnp.finfo(dtype)
    close = float(np.clip(1e3 * precision.eps, 1e-5, 0.05))
    far = 1e3 if float(precision.max) > 1e9 else 10.0

    def average(x: np.ndarray) -> np.ndarray:
        return x.mean(-1, keepdims=True)

    # Different rows at once, of many sizes; a quarter have an offset, and two are of one sign.
    sizes = np.repeat(np.geomspace(1 / far, far, 7), 4)
    sizes = np.resize(sizes, -(-len(sizes) // shape[0]) * shape[0])
    x = np.random.default_rng(0).normal(size=(len(sizes), shape[1]))
    x[1::4] += 3
    x[2::4], x[3::4] = np.abs(x[2::4]), -np.abs(x[3::4])
    x = (x * sizes[:, None]).astype(dtype).astype(float)
    y = np.concatenate([fn(rows) for rows in x.reshape(-1, *shape)]).reshape(len(x), -1)
    known = np.isfinite(y).all(1)  # others overflow
    if not known[sizes <= 1].all():
        return None
    bound = np.where(np.abs(np.log(sizes)) < 0.1, close, max(close, 0.01))

    def like(expected: np.ndarray, size: Any) -> bool:
        """Whether this is the function, for rows whose values are of this size."""
        same = y.shape == expected.shape
        return same and bool((np.abs(y - expected).max(1) <= bound * size)[known].all())

    size = np.abs(x).max(1)
    if consists(LINEAR) and y.shape == x.shape:
        first, unit = x[: shape[0]], np.eye(shape[1])[:, None]
        if np.allclose(fn(2 * first), 2 * y[: shape[0]], atol=close * size[: shape[0], None]):
            matrix = np.stack([fn(np.broadcast_to(row, shape))[0] for row in unit])
            return matrix if like(x @ matrix, size * np.abs(matrix).max()) else None
    if consists(SOFTMAX):
        highest = x.max(1, keepdims=True)
        total = highest + np.log(np.exp(x - highest).sum(1, keepdims=True))
        log = {"log_softmax": x - total, "logsumexp": total}
        if like(np.exp(x - total), 1):
            return "softmax"
        return next((name for name, z in log.items() if like(z, 1 + size)), None)
    for centres in (True, False):
        inner = x - average(x) if centres else x
        power = average(inner**2)
        if y.shape != x.shape or not power.all():
            continue
        z = (inner / np.sqrt(power))[: shape[0]]
        factor, least = (float((fn(size * z) * z).mean()) for size in (far, 1 / far))
        if not factor * least or not np.isfinite(factor * least):
            continue
        epsilon = max((factor / least) ** 2 - 1, 0.0) / far**2
        factor = 1.0 if abs(factor - 1) < close else factor
        expected = factor * inner / np.sqrt(power + epsilon)
        if like(expected, np.abs(expected).max(1) + 1e-6 * abs(factor)):
            return Normalization(centres, float(f"{epsilon:.5g}"), factor)
    return None


_POINTS, _WEIGHTS = np.polynomial.legendre.leggauss(4)


def _of_row(mean: Array, cov: Array) -> tuple[Array, Array, Array]:
    """E[L] of L = logsumexp(s), E[softmax(s)], and Var[L] beyond its linear part, of one row.

    By the heat equation E[L] = logsumexp(E[s]) + 1/2 int_0^1 tr(R E_u[J]) du, with the expected Jacobian
    J of the softmax under the covariance u R. By Stein's lemma Cov[L, s] = R E[softmax(s)]. The rest of
    the variance is the sum over k of tr(R C_k) / (k + 1), where C_k is the part of Cov[softmax] of order
    k; `softmax_expansion` has the first two. Error of E[L] in sd of L, and ratio of the sd, for 8
    independent scores: 0.03 and 1.02, 0.07 and 1.05, 0.10 and 1.13 at score sd 2, 3 and 5.
    """

    def step(total: Array, rule: tuple[Array, Array]) -> tuple[Array, None]:
        share, weight = rule
        e = softmax_expansion(mean, share * cov)
        first = jnp.sum(e.jacobian * cov)
        second = softmax_jacobian(e.mean) - e.jacobian @ (share * cov) @ e.jacobian - e.rest
        return total + weight * (first + jnp.sum(second * cov)) / 2, None

    rule = (jnp.asarray(0.5 + 0.5 * _POINTS, mean.dtype), jnp.asarray(_WEIGHTS / 2, mean.dtype))
    trace, _ = jax.lax.scan(step, jnp.zeros((), mean.dtype), rule)
    whole = softmax_expansion(mean, cov)
    first = jnp.sum(cov * (whole.jacobian @ cov @ whole.jacobian))
    rest = first / 2 + jnp.sum(cov * whole.rest) / 3
    return jax.nn.logsumexp(mean) + trace / 2, whole.mean, rest


def logsumexp(mean: Array, cov: Any) -> tuple[Array, Any, Array, Any]:
    """Moments of logsumexp, (T, 1), and of the log-softmax, (T, C), over the last axis of (T, C).

    Assumes that x is Gaussian. Between tokens, what is not linear in x correlates as the tokens squared.
    """
    total, weights, rest = jax.vmap(_of_row)(mean, cov.token_blocks())
    root = safe_sqrt(jnp.maximum(rest, 0))
    bent = root[:, None] * correlation_of(cov.token_gram()) ** 2 * root[None]
    rest = type(cov).project(bent[:, None, :, None])
    own = cov.map_each(weights[:, :, None]).add(rest)
    c = mean.shape[1]
    centred = cov.map_each(jnp.eye(c, dtype=mean.dtype)[None] - weights[:, :, None])
    centred = centred.add(rest.map_features(jnp.ones((1, c), mean.dtype)))
    return total[:, None], own, mean - total[:, None], centred
