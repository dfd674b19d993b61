"""Run by `test_compiler_fault` in its own process, compiled as users compile it.

Prints, as JSON, the errors of the smallest programs with the fault, and of the same once mended.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import moment_jax as mj
from moment_jax.xla import materialized

X = jax.random.normal(jax.random.key(0), (64, 64))


def error(found, expected):
    """The largest difference, relative to the largest entry of the same array."""
    pairs = zip(*(jax.tree.leaves(x) for x in (found, expected)), strict=True)
    pairs = [[np.asarray(x, float) for x in pair] for pair in pairs]
    off = [np.abs(np.where(np.isfinite(a), a, 1e99) - b).max() / np.abs(b).max() for a, b in pairs]
    return float(max(off))


def marked(mark):
    """In plain JAX, or with a marked right operand, which is known, or made of a number that is not.

    Sums over an axis, which the compiler may fuse with the product before it.
    """
    full, sums = jnp.full((64, 64), 0.01), np.full(64, np.sum(np.asarray(X, float)))
    made = jax.jit(lambda x: jnp.sum(x @ mark(jnp.full((64, 64), x[0, 0])), axis=0))(X)
    known = jax.jit(lambda x: jnp.sum(x @ mark(full), axis=0))(X)
    return [error(known, sums * float(full[0, 0])), error(made, sums * float(X[0, 0]))]


def model():
    """With its weights as constants, compiled and exported, beside those as arguments."""
    layer = mj.Bayesian(nnx.Linear(64, 64, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(layer)

    def sums(state, x):
        mean, cov = nnx.merge(graph, state)(x[None])
        return [jnp.sum(array[0], axis=0) for array in (mean, cov.variance())]

    expected, constant = jax.jit(sums)(state, X), jax.jit(lambda x: sums(state, x))
    return [
        error(found, expected) for found in (constant(X), jax.export.export(constant)(X).call(X))
    ]


if __name__ == "__main__":
    groups = {"plain": marked(lambda x: x), "materialized": marked(materialized), "model": model()}
    print(json.dumps(groups))
