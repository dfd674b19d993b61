"""Normalisations over features, softmax, its logarithm and logsumexp, recognised by their values."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from moment_jax.covariance.numerics import correlation_of, safe_sqrt
from moment_jax.expectations import softmax_expansion, softmax_jacobian
from moment_jax.layers.ends import softmax
from moment_jax.layers.params import NormParams
from moment_jax.layers.sublayers import norm_with_carry
from moment_jax.posterior import Point
from moment_jax.propagation import arrays, primitives, regions
from moment_jax.propagation.arrays import Axes, Base, Moments, Sequence
from moment_jax.propagation.graph import Node
from moment_jax.propagation.joins import combined
from moment_jax.propagation.propagator import Propagator, pattern


class Normalization(NamedTuple):
    """factor * (x - avg(x)) / sqrt(var(x) + epsilon), or without subtracting the average."""

    centres: bool
    epsilon: float
    factor: float


@pattern
def _by_row(propagator: Propagator, node: Node) -> Moments | None:
    """Functions of the features: LayerNorm, RMSNorm, softmax."""
    found = _found(node)
    if found is None:
        return None
    source, rest, axes, kind = found
    m = propagator.moments(source)
    if isinstance(kind, Normalization):
        return _normalized(propagator, node, m, axes, kind)
    propagator.note(node, kind, "its input Gaussian")
    return _of_rows(m.sequence(rest, axes), node, kind)


def _found(node: Node) -> tuple[Node, Axes, Axes, Any] | None:
    """The array of which `node` is a function by rows, its other and its reduced axes, and which."""
    found: Any = None
    for source, axes in _reduced_sources(node):
        rest = tuple(i for i in range(source.ndim) if i not in axes)
        rows = arrays.as_rows(np.arange(source.size).reshape(source.shape), rest, axes)

        def fn(x: np.ndarray, source: Node = source, rows: np.ndarray = rows) -> np.ndarray:
            flat = np.empty(x.size)
            flat[rows] = x
            y = regions.probe(node, source, flat).ravel()
            return y[rows] if y.size == x.size else y

        def consists(operations: set[str], source: Node = source) -> bool:
            return regions.misfit(node, source, operations) is None

        kind = recognised_rows(fn, rows.shape, regions.precise(source.dtype), consists)
        if kind is not None:
            found = source, rest, axes, kind
        elif found is not None:
            break
    return found


def _of_rows(x: Sequence, node: Node, kind: str) -> Moments:
    """The softmax of the rows, its logarithm, or their logsumexp."""

    def compute() -> tuple[Any, ...]:
        if kind == "softmax":
            mean, cov = softmax(x.mean, x.cov)
            eye = jnp.eye(mean.shape[1], dtype=mean.dtype)
            slope = mean[:, :, None] * (eye[None] - mean[:, None, :])
        else:
            mean, cov, slope = _logarithm(x.mean, x.cov, summed=kind == "logsumexp")
        return mean, cov, lambda cross: cross.map_each(slope)

    if kind == "logsumexp":
        return arrays.made(compute, (len(x.order), 1), arrays.numbered(node.shape), x)
    return x.made(compute, node.shape)


def log_probabilities(propagator: Propagator, node: Node) -> Moments | None:
    """Moments of the logarithm of what is a softmax, or a view of one; else None."""

    def of_softmax(n: Node) -> Moments | None:
        found = _found(n)
        if found is None or found[-1] != "softmax":
            return None
        return _of_rows(propagator.moments(found[0]).sequence(*found[1:3]), n, "log_softmax")

    found: Moments | None = regions.through_views(node, of_softmax)
    return found


def _normalized(
    propagator: Propagator, node: Node, m: Moments, axes: Axes, kind: Normalization
) -> Moments | None:
    """A normalisation over the features of each token, or over each of some groups of them."""
    tokens, features = m.natural()
    long = {i for i in axes if m.shape[i] > 1}
    if not long <= set(features):
        return None
    within = tuple(i for i in features if i not in long)  # such as heads
    groups = within, tokens, tuple(i for i in features if i in long)  # (G, T, K)
    whole, shape = arrays.ordered(m.shape, tokens, features), m.sequence(tokens, features).shape
    placed = []
    for order, places in zip(*(arrays.as_rows(p, *groups) for p in (m.places, whole)), strict=True):
        x = m.base.at(order)

        def compute(x: Sequence = x) -> tuple[Any, ...]:
            factor = Point(jnp.full(x.mean.shape[1], kind.factor, x.mean.dtype))
            params = NormParams(None if kind.factor == 1 else factor)
            return norm_with_carry(x.mean, x.cov, params, kind.epsilon, centres=kind.centres)

        own = Base(x.shape, compute, (x,), node, propagator.finished)
        back = np.full(m.places.size, -1)
        back[places] = arrays.numbered(places.shape)
        placed.append(own.at(back.reshape(shape)))
    propagator.note(node, "layer_norm" if kind.centres else "rms_norm", "its input Gaussian")
    places = whole.reshape(node.shape)
    if len(placed) == 1:
        return Moments(placed[0].base, places)
    return Moments(combined(propagator, node, placed)[0], places)


def _reduced_sources(node: Node) -> Iterator[tuple[Node, Axes]]:
    """Sources of the same shape, or reduced to it, with the axes that are reduced in between."""
    if node.op not in ("mul", "div", "sub", "add", "exp", "log"):
        return
    reduced: list[Node] = []

    def expandable(n: Node) -> bool:
        if n.op in regions.REDUCTIONS:
            reduced.append(n)
        fixed = n.op in primitives.VIEWS and all(map(primitives.is_known, n.operands[1:]))
        return n.op in regions.BY_ROW and (fixed or regions.all_uniform(n))

    for source in regions.sources(node, expandable):
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
) -> Normalization | str | None:  # fmt: skip
    """A normalisation of the rows, "softmax", or None.

    `consists` says whether the function consists of these operations alone.
    """
    if not consists(regions.SOFTMAX) and not consists(regions.NORM):
        return None
    close, far = max(1e3 * float(jnp.finfo(dtype).eps), 1e-5), 1e3

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
    if consists(regions.SOFTMAX):
        total = np.logaddexp.reduce(x, axis=1, keepdims=True)
        log, large = x - total, 1 + size
        kinds = {
            "softmax": (np.exp(log), 1),
            "log_softmax": (log, large),
            "logsumexp": (total, large),
        }
        return next((kind for kind, expected in kinds.items() if like(*expected)), None)
    for centres in (True, False):
        inner = x - x.mean(-1, keepdims=True) if centres else x
        power = (inner**2).mean(-1, keepdims=True)
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


def _logarithm(mean: Array, cov: Any, *, summed: bool) -> tuple[Array, Any, Array]:
    """Moments and expected derivative, by token, of logsumexp, (T, 1), or of the log-softmax, (T, C).

    Assumes that x, (T, C), is Gaussian. Between tokens, what is not linear in x correlates as the tokens
    squared.
    """
    total, weights, rest = jax.vmap(_of_row)(mean, cov.token_blocks())
    root = safe_sqrt(jnp.maximum(rest, 0))
    bent = root[:, None] * correlation_of(cov.token_gram()) ** 2 * root[None]
    rest = type(cov).project(bent[:, None, :, None])
    out, slope = total[:, None], weights[:, :, None]
    if not summed:
        c = mean.shape[1]
        rest = rest.map_features(jnp.ones((1, c), mean.dtype))
        out, slope = mean - out, jnp.eye(c, dtype=mean.dtype)[None] - slope
    return out, cov.map_each(slope).add(rest), slope
