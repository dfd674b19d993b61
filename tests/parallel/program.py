"""What 8 virtual devices compute, beside what one does; the test starts it as a process of its own.

Prints one JSON object: for each case the largest difference, relative to the largest entry.
"""

import json
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import moment_jax as mj

X = jax.random.normal(jax.random.key(0), (8, 5, 8))


def encoder(structure):
    """Four heads, which four devices share."""
    return mj.nn.Encoder(
        1,
        8,
        4,
        hidden_features=16,
        norm_first=True,
        structure=structure,
        relative_scale=0.3,
        dtype=jnp.float64,
        rngs=nnx.Rngs(0),
    )


def moments(model, x):
    """Mean and variance of the output."""
    mean, cov = model(x)
    return mean, jax.vmap(lambda c: c.variance())(cov)


def trained(model, optimizer, x):
    """Loss, gradients and the parameters after one update."""

    def loss(model):
        mean, variance = moments(model, x)
        return jnp.mean(mean**2) + jnp.mean(variance) + 1e-3 * model.kl()

    value, gradients = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    return value, gradients, nnx.state(model)


def difference(actual, expected):
    """The largest of all leaves."""
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    return max(
        float(np.max(np.abs(np.asarray(a) - np.asarray(b))) / max(1e-3, np.max(np.abs(b))))
        for a, b in pairs
    )


def update(structure, mesh, fsdp):
    """One update on a mesh, or without one."""
    model = encoder(structure)
    optimizer = nnx.Optimizer(model, optax.sgd(1e-2, momentum=0.9), wrt=nnx.Param)
    x = X
    if mesh is not None:
        mj.parallel.shard(model, mesh, fsdp=fsdp)
        mj.parallel.shard(optimizer, mesh, fsdp=fsdp)
        x = mj.parallel.shard_batch(X, mesh)
        leaves = jax.tree.leaves(nnx.state((model, optimizer)))
        split = sum(not leaf.sharding.is_fully_replicated for leaf in leaves)
        assert split >= 3 * 6, split  # kernels' means and scales, and the momentum of both
    return nnx.jit(trained)(model, optimizer, x)


def forward(structure, mesh):
    """Moments on a mesh, laid out before and after, or without one."""
    model, x = encoder(structure), X
    if mesh is None:
        return nnx.jit(moments)(model, x)
    mj.parallel.shard(model, mesh)

    def run(model, x):
        start = jax.vmap(lambda m: structure.zeros((m.shape[0], m.shape[1]), m.dtype))(x)
        mean, cov = mj.parallel.constrain(x, start, mesh)
        mean, cov = mj.parallel.constrain(*model(mean, cov), mesh)
        return mean, jax.vmap(lambda c: c.variance())(cov)

    return nnx.jit(run)(model, mj.parallel.shard_batch(x, mesh))


def main():
    """All cases."""
    make = mj.parallel.make_mesh
    results = {}
    alone = update(mj.Diagonal, None, True)
    results["update"] = difference(update(mj.Diagonal, make(2, 4), True), alone)
    both = partial(forward, mj.TokenCorrelated)
    results["forward"] = difference(both(make(2, 4)), both(None))
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
