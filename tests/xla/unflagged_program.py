"""Run by `test_compiler_fault` in its own process, compiled as users compile it.

Prints, as JSON, the errors of results with constant parameters. Every result is summed over an axis,
which the compiler may fuse with the product before it.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import moment_jax as mj
from moment_jax.covariance import Covariance, Separable
from moment_jax.posterior import Factorized, Point, Posterior
from moment_jax.xla import materialized
from tests.builders import ALL_STRUCTURES, decoder_of
from tests.transforms import LAYERS, Given

X = jax.random.normal(jax.random.key(0), (64, 64))
FULL = jnp.full((64, 64), 0.01)
# Fusions have at least 4,096 numbers, of shape (T, O), (T, O, O) or (T, O, T, O).
SHAPES = {"Full": (8, 8)}
STRUCTURES = {of.__name__: of for of in ALL_STRUCTURES}
HEADS = {"num_heads": 2}


def parameters(
    of: type[Covariance],
    shape: tuple[int, int],
    family: Callable[[tuple[int, ...], float], Posterior] | None = None,
) -> dict[str, Any]:
    """Constant parameters, and constant covariances of an input of this shape."""
    make = family or (lambda shape, mean: Factorized(jnp.full(shape, mean), jnp.full(shape, 0.01)))
    d = shape[1]

    def dense(d: int, o: int) -> mj.DenseParams:
        return mj.DenseParams(make((d, o), 0.01), Factorized(jnp.zeros(o), jnp.full(o, 0.01)))

    attention = mj.AttentionParams(*(dense(d, d) for _ in range(4)))
    norm = mj.NormParams(*(Factorized(jnp.full(d, m), jnp.full(d, 0.01)) for m in (1.0, 0.0)))
    feed_forward = mj.FeedForwardParams(dense(d, 2 * d), dense(2 * d, d))
    return {
        "certain": of.zeros(shape),
        "noisy": of.independent(jnp.full(shape, 0.01)),
        "square": of.zeros((d, d)),
        "table": make((d, d), 0.01),
        "dense": dense(d, d),
        "encoder_block": mj.EncoderBlockParams(attention, norm, feed_forward, norm),
    }


def transforms(of: type[Covariance]) -> dict[str, Callable[[Any, Any], Any]]:
    """Every public transform of a sequence x and the parameters above."""

    def layer(name: str, x: Any, p: Any) -> Any:
        cov = p["certain" if name in ("dense", "cross_attention") else "noisy"]
        other, memory = (p["table"].mean, p["square"]), (x, p["certain"])
        return LAYERS[name](x, cov, Given(p["encoder_block"], other, memory))

    return {
        **{name: functools.partial(layer, name) for name in LAYERS},
        "embedding": lambda x, p: mj.embedding(jnp.arange(len(x)) % x.shape[1], p["table"], of),
        "encoder_block": lambda x, p: mj.encoder_block(
            x, p["certain"], p["encoder_block"], **HEADS
        ),
        "decoder_block": lambda x, p: mj.decoder_block(
            x, p["certain"], x, p["certain"], decoder_of(p["encoder_block"]), **HEADS
        ),
    }


# Blocks, and transforms like these, would compile for minutes; `one_number` checks them.
COMPILED = [
    "dense",
    "matmul",
    "softmax",
    "gelu",
    "layer_norm",
    "mean_pool",
    "embedding",
    "attention",
]


def sums(moments: Any) -> Any:
    """Sums of mean and variance, one each: a result that is read twice is not fused."""
    mean, cov = moments
    return [jnp.sum(array, axis=0) for array in (mean, cov.variance())]


def error(found: Any, expected: Any) -> float:
    """The largest difference, relative to the largest entry of the same array."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, float), np.asarray(b, float)
        difference = np.abs(np.where(np.isfinite(a), a, 1e99) - b)
        worst = max(worst, np.max(difference) / max(np.max(np.abs(b)), 1e-30))
    return float(worst)


def plain(mark: Callable[[Any], Any]) -> dict[str, float]:
    """The smallest programs, in plain JAX or with a `materialized` right operand."""
    constant = np.sum(np.asarray(X, float), axis=1).sum() * float(FULL[0, 0]) * np.ones(64)
    made = constant / float(FULL[0, 0]) * float(X[0, 0])
    return {
        "constant": error(jax.jit(lambda x: jnp.sum(x @ mark(FULL), axis=0))(X), constant),
        "made": error(
            jax.jit(lambda x: jnp.sum(x @ mark(jnp.full((64, 64), x[0, 0])), axis=0))(X), made
        ),
    }


def of_arguments(fn: Callable[[Any, Any], Any], x: Any, params: Callable[[], Any]) -> float:
    """The error of parameters that are constants or made inside `jit`, against arguments."""
    given = params()

    def mixed() -> Any:
        leaves = enumerate(zip(jax.tree.leaves(given), jax.tree.leaves(params()), strict=True))
        return jax.tree.unflatten(jax.tree.structure(given), [pair[i % 2] for i, pair in leaves])

    return error(jax.jit(lambda x: fn(x, mixed()))(x), jax.jit(fn)(x, given))


def second_derivative(structure: Any) -> float:
    """The Hessian by the constant mean and variance of a kernel's weights."""

    def total(theta: Any, x: Any, one: Any) -> Any:
        params = mj.DenseParams(Factorized(one * theta[0], one * theta[1]))
        mean, cov = mj.dense(x, structure.zeros(x.shape), params)
        return jnp.sum(mean) ** 2 + jnp.sum(cov.variance() ** 2)

    theta = jnp.array([0.1, 0.01])
    found = jax.jit(lambda theta, x: jax.hessian(total)(theta, x, jnp.ones((64, 64))))(theta, X)
    return error(found, jax.jit(jax.hessian(total))(theta, X, jnp.ones((64, 64))))


def ways_in() -> dict[str, float]:
    """Modules, exported programs, batches, and a loss of the result."""
    layer = mj.nn.Dense(64, 64, rngs=nnx.Rngs(0))
    graph, state = nnx.split(layer)

    def call(state: Any, x: Any) -> Any:
        return sums(nnx.merge(graph, state)(x))

    expected = jax.jit(call)(state, X)
    exported = jax.export.export(jax.jit(lambda x: call(state, x)))(X)
    random = Factorized(jnp.full((64, 64), 0.01), jnp.full((64, 64), 0.01))
    point = Point(jnp.full((64, 64), 0.1))
    one_random = mj.AttentionParams(*(mj.DenseParams(k) for k in (point, point, random, point)))

    def attention(x: Any, params: Any) -> Any:
        def one(x: Any) -> Any:
            return sums(mj.attention(x, Separable.zeros(x.shape), params, **HEADS))

        return jax.vmap(one)(jnp.stack([x, 2 * x]))

    def expected_log_likelihood(x: Any, params: Any) -> Any:
        moments = mj.dense(x, Separable.zeros(x.shape), params)
        return mj.objectives.expected_log_likelihood(mj.objectives.Gaussian(0.5), x, *moments)

    return {
        "nnx.jit": error(nnx.jit(lambda x: sums(layer(x)))(X), expected),
        "jax.export": error(exported.call(X), expected),
        "vmap of attention, values random alone": of_arguments(attention, X, lambda: one_random),
        "expected_log_likelihood": of_arguments(
            expected_log_likelihood, X, lambda: parameters(Separable, X.shape)["dense"]
        ),
    }


def every_transform(of: type[Covariance]) -> dict[str, float]:
    """Errors of the transforms with one structure."""
    shape = SHAPES.get(of.__name__, X.shape)
    x = X[: shape[0], : shape[1]]

    def wrong(transform: Callable[[Any, Any], Any]) -> float:
        return of_arguments(lambda x, p: sums(transform(x, p)), x, lambda: parameters(of, shape))

    every = transforms(of)
    return {name: wrong(every[name]) for name in COMPILED}


def main(names: list[str]) -> None:
    """Print these groups or all, as {group: {name: error}}."""
    groups = {
        "plain": lambda: plain(lambda x: x),
        "materialized": lambda: plain(materialized),
        "ways in": ways_in,
        "hessian": lambda: {s.__name__: second_derivative(s) for s in (mj.Diagonal, Separable)},
        **{name: functools.partial(every_transform, of) for name, of in STRUCTURES.items()},
    }
    print(json.dumps({name: groups[name]() for name in names or groups}))


if __name__ == "__main__":
    main(sys.argv[1:])
