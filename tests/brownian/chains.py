"""Chains and kernels that the tests share."""

import jax
import jax.numpy as jnp
import numpy as np

import moment_jax as mj


def sphere_tokens(count=7, features=6, seed=0, dtype=jnp.float64):
    return mj.brownian.to_sphere(jax.random.normal(jax.random.key(seed), (count, features), dtype))


def random_chain(count=6, seed=0):
    """Irreversible, with some zeros, but with every state reachable from every other."""
    weights = jax.random.uniform(jax.random.key(seed), (count, count), jnp.float64)
    weights = jnp.where(weights > 0.6, weights, 0) + 0.1 * jnp.roll(jnp.eye(count), 1, axis=1)
    return weights / jnp.sum(weights, axis=1, keepdims=True)


def stationary_by_eigenvector(transition):
    """The left eigenvector of eigenvalue one, by numpy's dense eigendecomposition."""
    values, vectors = np.linalg.eig(np.asarray(transition).T)
    vector = vectors[:, np.argmin(np.abs(values - 1))].real
    return vector / vector.sum()
