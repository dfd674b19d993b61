"""Sequences on 8 virtual devices beside one device; the test starts it as a process of its own.

Prints one JSON object: for each case the largest difference, relative to the largest entry. With the
argument `all`, every structure on every mesh, which takes minutes.
"""

import json
import sys

import jax
import jax.numpy as jnp
from flax import nnx

import moment_jax as mj
from tests.parallel.program import difference

BATCH, TOKENS, FEATURES, HEADS = 2, 8, 8, 2
KEYS = jax.random.split(jax.random.key(1), 3)
DTYPE = jnp.float64 if jax.config.jax_enable_x64 else jnp.float32
X = jax.random.normal(KEYS[0], (BATCH, TOKENS, FEATURES), DTYPE)
NOISE = 0.1 * jax.random.uniform(KEYS[1], X.shape, DTYPE)
CAUSAL = jnp.tril(jnp.ones((TOKENS, TOKENS), bool))
VALID = jnp.arange(TOKENS)[None, :] < jnp.array([[TOKENS], [TOKENS - 3]])
MESHES = {"sequence": (1, 1, 8), "data x sequence": (2, 1, 4), "sequence x model": (1, 2, 4)}
OPTIONS = {"hidden_features": 12, "relative_scale": 0.3, "dtype": DTYPE}


def block(structure):
    """An encoder block with a causal mask: model, and its moments for an input that is random."""
    model = mj.nn.EncoderBlock(
        FEATURES, HEADS, structure=structure, rngs=nnx.Rngs(0), norm_first=True, **OPTIONS
    )
    return model, lambda model, x, noise, valid: model(x, _random(structure, noise), CAUSAL)


def encoder(structure):
    """Two blocks and a final normalisation, with padding: model, and moments for a certain input."""
    model = mj.nn.Encoder(
        2, FEATURES, HEADS, structure=structure, rngs=nnx.Rngs(0), norm_first=True, **OPTIONS
    )
    return model, lambda model, x, noise, valid: model(x, None, None, valid)


def _random(structure, noise):
    """Noise of each entry, and some that all tokens share."""

    def one(variance):
        shared = structure.shared(TOKENS, jnp.full(FEATURES, 0.05, variance.dtype))
        return structure.independent(variance).add(shared)

    return jax.vmap(one)(noise)


def results(make, structure, mesh):
    """Moments, loss and gradients by parameters and input, on a mesh or without one."""
    model, moments = make(structure)
    inputs = (X, NOISE, VALID)

    def loss(model, x, noise, valid):
        mean, cov = moments(model, x, noise, valid)
        variance = jax.vmap(lambda c: c.variance())(cov)
        weights = jnp.cos(jnp.arange(mean.size, dtype=mean.dtype)).reshape(mean.shape)
        if mesh is not None:
            mean, cov = mj.parallel.constrain(mean, cov, mesh)
        value = jnp.sum(weights * mean) + jnp.sum((1 + weights) * variance) + 1e-3 * model.kl()
        return value, (mean, cov)

    if mesh is not None:
        loss = mj.parallel.by_sequence(loss, mesh)
        mj.parallel.shard(model, mesh)
        inputs = mj.parallel.shard_sequences(inputs, mesh)
    arguments = (0, 1, 2) if make is block else (0, 1)
    return nnx.jit(nnx.value_and_grad(loss, argnums=arguments, has_aux=True))(model, *inputs)


LEAN = [
    (block, mj.Separable, "data x sequence"),
    (block, mj.TokenBlock, "sequence"),
    (encoder, mj.TokenCorrelated, "sequence x model"),
    (encoder, mj.Diagonal, "data x sequence"),
]


def main(names):
    """The cases of the test, or all."""
    cases = LEAN
    if names:
        structures = [getattr(mj, name) for name in names]
        cases = [(m, s, mesh) for s in structures for m in (block, encoder) for mesh in MESHES]
    differences, alone = {}, {}
    for make, structure, name in cases:
        data, model, sequence = MESHES[name]
        mesh = mj.parallel.make_mesh(data, model, sequence=sequence)
        if (make, structure) not in alone:
            alone[make, structure] = results(make, structure, None)
        key = f"{make.__name__} {structure.__name__} {name}"
        differences[key] = difference(results(make, structure, mesh), alone[make, structure])
        print(key, differences[key], file=sys.stderr, flush=True)
    json.dump(differences, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
