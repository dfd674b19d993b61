"""Models on 8 virtual devices beside one device; the test starts it as a process of its own.

Prints one JSON object: for each case the largest difference, relative to the largest entry.
"""

import json
import re
import sys

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import moment_jax as mj
from moment_jax.xla import (
    product_of_transposed,
    product_with_transposed,
    rows_diagonal,
    rows_product,
)

BATCH, TOKENS, FEATURES, HEADS = 2, 16, 8, 2
KEYS = jax.random.split(jax.random.key(1), 3)
DTYPE = jnp.float64 if jax.config.jax_enable_x64 else jnp.float32
X = jax.random.normal(KEYS[0], (BATCH, TOKENS, FEATURES), DTYPE)
NOISE = 0.1 * jax.random.uniform(KEYS[1], X.shape, DTYPE)
CAUSAL = jnp.tril(jnp.ones((TOKENS, TOKENS), bool))
VALID = jnp.arange(TOKENS)[None, :] < jnp.array([[TOKENS], [TOKENS - 3]])
# With Adam's usual epsilon of 1e-8 only the sign of a gradient matters, also of one that is rounding.
ADAM = optax.adam(1e-2, eps=1e-3)
OPTIONS = {"relative_scale": 0.3, "dtype": DTYPE}


def difference(actual, expected):
    """The largest of all leaves, relative to the leaf's largest entry."""
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    return max(float(jnp.max(jnp.abs(a - b)) / max(1e-3, jnp.max(jnp.abs(b)))) for a, b in pairs)


def _random(structure, noise):
    """Noise of each entry, and some that all tokens share."""

    def one(variance):
        shared = structure.shared(TOKENS, jnp.full(FEATURES, 0.05, variance.dtype))
        return structure.independent(variance).add(shared)

    return jax.vmap(one)(noise)


def attend(structure):
    """Attention with a causal mask: model, and its moments for an input that is random."""
    model = mj.nn.MultiHeadAttention(
        FEATURES, HEADS, structure=structure, rngs=nnx.Rngs(0), **OPTIONS
    )
    return model, lambda model, x, noise: model(x, _random(structure, noise), CAUSAL)


def step(mesh):
    """Moments, loss, gradients by parameters and input, and an update, on a mesh or without one."""
    model, moments = attend(mj.Diagonal)
    optimizer = nnx.Optimizer(model, ADAM, wrt=nnx.Param)
    inputs = (X, NOISE)

    def loss(model, x, noise):
        mean, cov = moments(model, x, noise)
        variance = jax.vmap(lambda c: c.variance())(cov)
        weights = jnp.cos(jnp.arange(mean.size, dtype=mean.dtype)).reshape(mean.shape)
        if mesh is not None:
            mean, cov = mj.parallel.constrain(mean, cov, mesh)
        value = jnp.sum(weights * mean) + jnp.sum((1 + weights) * variance) + 1e-3 * model.kl()
        return value, (mean, cov)

    if mesh is not None:
        mj.parallel.shard(model, mesh)
        mj.parallel.shard(optimizer, mesh)
        leaves = jax.tree.leaves(nnx.state((model, optimizer)))
        split = sum(not leaf.sharding.is_fully_replicated for leaf in leaves)
        assert split >= 3 * 8, split  # means and scales of four kernels, and Adam's two moments
        if "sequence" in mesh.axis_names:
            loss = mj.parallel.by_sequence(loss, mesh)
            inputs = mj.parallel.shard_sequences(inputs, mesh)
        else:
            inputs = mj.parallel.shard_batch(inputs, mesh)

    @nnx.jit
    def update(model, optimizer, *inputs):
        compute = nnx.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)
        values, gradients = compute(model, *inputs)
        optimizer.update(model, gradients[0])
        return values, gradients, nnx.state((model, optimizer))

    return update(model, optimizer, *inputs)


def products(mesh):
    """The products by rows and the diagonal, one after another: value and gradients."""

    def one(a, b, c):
        inner = product_of_transposed(jnp.sin(product_with_transposed(rows_product(a, b), c)), a)
        return jnp.sum(inner**2) + jnp.sum(jnp.cos(rows_diagonal(a @ b @ c.T)))

    def total(a, b, c):
        return jnp.sum(jax.vmap(one)(a, b, c))

    shapes = ((BATCH, TOKENS, 8), (BATCH, 8, 12), (BATCH, TOKENS, 12))
    inputs = tuple(jax.random.normal(k, s) for k, s in zip(KEYS, shapes, strict=True))
    if mesh is not None:
        total = mj.parallel.by_sequence(total, mesh)
        inputs = mj.parallel.shard_sequences(inputs, mesh)
    return jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2)))(*inputs)


def attention(mesh):
    """Moments of attention, and how many of its arrays have an entry for each pair of tokens."""
    structure, inputs = mj.TokenCorrelated, (X, NOISE)
    model, moments = attend(structure)
    graph, state = nnx.split(model)

    def run(x, noise):
        mean, cov = moments(nnx.merge(graph, state), x, noise)
        return (mean, cov) if mesh is None else mj.parallel.constrain(mean, cov, mesh)

    if mesh is not None:
        run = mj.parallel.by_sequence(run, mesh)
        inputs = mj.parallel.shard_sequences(inputs, mesh)
    compiled = jax.jit(run).lower(*inputs).compile()
    return compiled(*inputs), whole_arrays(compiled.as_text())


def whole_arrays(program):
    """Instructions whose result is of numbers, and has an entry for each pair of tokens."""
    shapes = re.findall(r"= f(?:32|64)\[([0-9,]+)\]", program)
    return sum(shape.split(",").count(str(TOKENS)) >= 2 for shape in shapes)


def encoder(mesh):
    """Moments of an encoder of one block, with padding, as `Diagonal` has them."""
    settings = {"structure": mj.Diagonal, "norm_first": True, "hidden_features": 12, **OPTIONS}
    model = mj.nn.Encoder(1, FEATURES, HEADS, rngs=nnx.Rngs(0), **settings)
    inputs = (X, VALID)

    def moments(model, x, valid):
        return model(x, None, None, valid)

    if mesh is not None:
        moments = mj.parallel.by_sequence(moments, mesh)
        mj.parallel.shard(model, mesh)
        inputs = mj.parallel.shard_sequences(inputs, mesh)
    return nnx.jit(moments)(model, *inputs)


def main():
    """Print what the test asks for."""
    both = mj.parallel.make_mesh(2, 1, sequence=4)
    heads = mj.parallel.make_mesh(1, 2, sequence=4)
    plain = mj.parallel.make_mesh(2, 2, devices=jax.devices()[:4])
    alone, count_alone = attention(None)
    sharded, count = attention(heads)
    one = step(None)
    results = {
        "products": difference(products(both), products(None)),
        "step": difference(step(both), one),
        "step without sequence": difference(step(plain), one),
        "attention": difference(sharded, alone),
        "encoder": difference(encoder(both), encoder(None)),
        "whole arrays alone": count_alone,
        "whole arrays": count,
    }
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
