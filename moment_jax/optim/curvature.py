"""Factors of the curvature F of layers, and solutions of (F + damping I) x = grad with them.

A factor holds averages over a batch, as an operator that can be averaged. L counts the layers of a stack
(1 for a single layer), N the examples; tokens are rows as examples are, so that a and g are (rows, in)
and (rows, out). `weight` is 1 for new factors and 0 where none were taken.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax import linalg
from moment_jax.xla import diagonal_of, on_diagonal

LEAST_RELATIVE_DAMPING = 8  # rounding units of the trace, which a Cholesky factorisation needs


class KroneckerFactor(NamedTuple):
    """F = inputs (x) outputs, of a dense layer: theta of Algorithm 1 over all pairs of rows."""

    inputs: Array  # (L, rows, rows): the average of a a^T, with a one appended to a for the bias
    outputs: Array  # (L, columns, columns): the sum of g g^T over all rows, divided by N
    weight: Array  # ()


class EmbeddingFactor(NamedTuple):
    """F = diag(frequencies) (x) outputs, of a table whose inputs are one-hot."""

    frequencies: Array  # (L, rows): shares of all rows, over the root of their number in an example
    outputs: Array  # (L, columns, columns)
    weight: Array  # ()


class DiagonalFactor(NamedTuple):
    """The diagonal of F, of a normalisation."""

    squares: Array  # (L, rows, columns)
    weight: Array  # ()


Factor = KroneckerFactor | EmbeddingFactor | DiagonalFactor
Factors = dict[str, Factor]


def apply_curvature(factor: Factor, matrix: Array) -> Array:
    """F V, (L, rows, columns), without forming F: Algorithm 1's function FV, but for its damping."""
    if isinstance(factor, KroneckerFactor):
        return jnp.matmul(jnp.matmul(factor.inputs, matrix), factor.outputs)
    if isinstance(factor, EmbeddingFactor):
        return factor.frequencies[:, :, None] * jnp.matmul(matrix, factor.outputs)
    return factor.squares * matrix


def quadratic_form(factor: Factor, matrix: Array) -> Array:
    """<V, F V>, summed over the layers of a stack."""
    if isinstance(factor, KroneckerFactor):
        # <A V, V G>: XLA for CPU would fuse the last product of A V G into the sum, six times as slow.
        return jnp.sum(jnp.matmul(factor.inputs, matrix) * jnp.matmul(matrix, factor.outputs))
    return jnp.sum(matrix * apply_curvature(factor, matrix))


def any_weight(factors: Any) -> Array:
    """Whether any factor of a tree has a weight."""
    leaves = jax.tree.leaves(factors, is_leaf=lambda leaf: isinstance(leaf, Factor))
    return jnp.asarray(sum(leaf.weight for leaf in leaves if isinstance(leaf, Factor))) > 0


def averaged(averages: Factors, new: Factors, kept: Array, finite: Array) -> Factors:
    """The exponential averages, `kept` to that share, with one more factor each that has a weight.

    They are bias-corrected: an average is divided by the sum of the weights so far, kept as its weight.
    """

    def one(average: Factor, new: Factor) -> Factor:
        take = (new.weight > 0) & finite
        share = jnp.where(take, 1 - kept, 0).astype(average.weight.dtype)
        weight = average.weight + share * (1 - average.weight)
        step = share / jnp.where(weight > 0, weight, 1)

        def mix(old: Array, new: Array) -> Array:
            # `where`, because a factor that is not taken may hold NaN.
            mixed = old + step.astype(old.dtype) * (new.astype(old.dtype) - old)
            return jnp.where(take, mixed, old)

        mixed: Any = jax.tree.map(mix, average, new)
        return mixed._replace(weight=weight)

    return {key: one(averages[key], each) for key, each in new.items()}


# -- solutions, by stored inverses and by iterations ---------------------------------------------------


class InversePair(NamedTuple):
    """(A + a I)^-1 and (G + g I)^-1 of L layers; of a table's frequencies as they are, a diagonal."""

    inputs: Array
    outputs: Array


Inverses = dict[str, InversePair]  # by group of layers


def no_inverses(averages: Factors) -> Inverses:
    """The state before the first inversion: zeros, so that steps are zero."""
    pairs = {}
    for key, factor in averages.items():
        if not isinstance(factor, DiagonalFactor):
            pairs[key] = InversePair(*map(jnp.zeros_like, factor[:-1]))
    return pairs


def packed(factors: Factors, inverses: Inverses) -> tuple[Factors, Inverses]:
    """What is kept of both: of symmetric matrices one triangle each, in the place of one of them.

    A factor is below the diagonal and on it, its inverse above; the diagonal of the inverse is apart.
    """
    factors, inverses = dict(factors), dict(inverses)
    for key, pair in inverses.items():
        if isinstance(factor := factors[key], KroneckerFactor):
            kept = zip(factor[:-1], pair, strict=True)
            inputs, outputs = (jnp.where(_is_lower(f), f, inverse) for f, inverse in kept)
            factors[key] = factor._replace(inputs=inputs, outputs=outputs)
            inverses[key] = InversePair(*map(diagonal_of, pair))
    return factors, inverses


def unpacked(factors: Factors, inverses: Inverses) -> tuple[Factors, Inverses]:
    """The factors and inverses of what is kept."""
    factors, inverses = dict(factors), dict(inverses)
    for key, pair in inverses.items():
        if isinstance(kept := factors[key], KroneckerFactor):
            turned = [(x, jnp.swapaxes(x, 1, 2), _is_lower(x)) for x in kept[:-1]]
            inputs, outputs = (jnp.where(lower, x, y) for x, y, lower in turned)
            factors[key] = kept._replace(inputs=inputs, outputs=outputs)
            others = zip((jnp.where(lower, y, x) for x, y, lower in turned), pair, strict=True)
            whole = (jnp.where(on_diagonal(x.shape), d[..., None], x) for x, d in others)
            inverses[key] = InversePair(*whole)
    return factors, inverses


def _is_lower(matrix: Array) -> Array:
    """Which entries are on the diagonal or below it, (n, n)."""
    return jnp.tri(matrix.shape[-1], dtype=bool)


def inverted(factor: Factor, damping: Array, old: InversePair) -> InversePair:
    """The inverses of a group; the old ones of layers where new ones are not finite."""
    new = damped_inverses(factor[0], factor[1], damping)

    @jax.vmap
    def choose(new: InversePair, old: InversePair) -> InversePair:
        good = jnp.isfinite(sum(map(jnp.sum, new)))
        return jax.tree.map(lambda x, y: jnp.where(good, x, y).astype(y.dtype), new, old)

    return choose(new, old)


def damped_inverses(inputs: Array, outputs: Array, damping: Array) -> InversePair:
    """Inverses of A + pi sqrt(gamma) I and G + sqrt(gamma) / pi I, (L, n, n).

    pi^2 = (tr A / dim A) / (tr G / dim G). At least a few rounding units of the trace are added, so that
    float32 factors of any condition number can be inverted. Frequencies f, (L, n), in the place of A: of
    max(f, m) and G + gamma / m, m their mean, so that F + gamma is right for a row of frequency m and no
    row is damped by less: a tied table has gradients of rows that no lookup saw.
    """
    a = jnp.mean(diagonal_of(inputs) if inputs.ndim == 3 else inputs, axis=-1)
    g, tiny = jnp.mean(diagonal_of(outputs), axis=-1), jnp.finfo(a.dtype).tiny

    def inverse(factor: Array, damping: Array) -> Array:
        trace = jnp.sum(diagonal_of(factor), axis=-1)
        least = LEAST_RELATIVE_DAMPING * jnp.finfo(trace.dtype).eps * trace
        added = jnp.maximum(damping.astype(trace.dtype), jnp.where(trace > 0, least, 1))
        damped = factor + jnp.where(on_diagonal(factor.shape), added[:, None, None], 0)
        root = jax.vmap(linalg.inverse_root)(damped)
        return jnp.matmul(jnp.swapaxes(root, 1, 2), root)

    if inputs.ndim == 2:
        a = jnp.maximum(a, tiny)
        return InversePair(1 / jnp.maximum(inputs, a[:, None]), inverse(outputs, damping / a))
    pi = jnp.sqrt(jnp.maximum(a, tiny) / jnp.maximum(g, tiny))
    pi, root = jnp.where((a > tiny) & (g > tiny), pi, 1), jnp.sqrt(damping)
    return InversePair(inverse(inputs, pi * root), inverse(outputs, root / pi))


def apply_inverse(pair: InversePair | None, factor: Factor, grad: Array, *_: Any) -> Array:
    """(F + damping I)^-1 applied to a gradient (L, rows, columns), by a group's inverse.

    It is damped as of its last refresh; without a pair it is the gradient.
    """
    if pair is None:
        return grad
    if isinstance(factor, EmbeddingFactor):
        return jnp.matmul(pair.inputs[:, :, None] * grad, pair.outputs)
    return jnp.matmul(jnp.matmul(pair.inputs, grad), pair.outputs)


def iterated(
    pair: InversePair | None, factor: Factor, grad: Array, damping: Array, *,
    max_iterations: int | Array, tolerance: float | Array,
) -> Array:  # fmt: skip
    """(F + damping I)^-1 grad of a group, by conjugate gradients, preconditioned by a pair.

    Brownian document, Algorithm 1, with alpha_k in the updates of x and r. A layer stops when its
    residual is at most `tolerance` times |grad|, or at a direction without positive finite curvature,
    by which `jax.scipy.sparse.linalg.cg` would divide.
    """

    def dot(left: Array, right: Array) -> Array:
        return jnp.sum(left * right, axis=(1, 2), keepdims=True)

    def unfinished(state: Any) -> Array:
        return (state[0] < max_iterations) & jnp.any(state[-1])

    def iterate(state: Any) -> Any:
        step, x, residual, direction, rho, active = state
        pushed = apply_curvature(factor, direction) + damping * direction
        curvature = dot(direction, pushed)
        active &= (curvature > 0) & jnp.isfinite(curvature) & jnp.isfinite(rho)
        alpha = rho / jnp.where(active, curvature, 1)
        x = jnp.where(active, x + alpha * direction, x)
        residual = jnp.where(active, residual - alpha * pushed, residual)
        scaled = apply_inverse(pair, factor, residual, damping)
        new = dot(residual, scaled)
        beta = new / jnp.where(rho == 0, 1, rho)
        direction = jnp.where(active, scaled + beta * direction, direction)
        active &= dot(residual, residual) > limit
        return step + 1, x, residual, direction, new, active

    limit = jnp.asarray(tolerance, grad.dtype) ** 2 * dot(grad, grad)
    direction = apply_inverse(pair, factor, grad, damping)
    first = jnp.int32(0), jnp.zeros_like(grad), grad, direction, dot(grad, direction)
    return jax.lax.while_loop(unfinished, iterate, (*first, dot(grad, grad) > limit))[1]
