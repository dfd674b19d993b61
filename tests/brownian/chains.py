"""Chains and kernels that the tests share."""

import numpy as np

import moment_jax as mj


def sphere_tokens(count=7, features=6, seed=0):
    x = np.random.default_rng(seed).normal(size=(count, features))
    return np.asarray(mj.brownian.to_sphere(x))


def random_chain(count=6, seed=0):
    """Irreversible, with some zeros, but with every state reachable from every other."""
    weights = np.random.default_rng(seed).uniform(size=(count, count))
    weights = np.where(weights > 0.6, weights, 0) + 0.1 * np.roll(np.eye(count), 1, axis=1)
    return weights / np.sum(weights, axis=1, keepdims=True)


def stationary_by_eigenvector(transition):
    """The left eigenvector of eigenvalue one, by numpy's dense eigendecomposition."""
    values, vectors = np.linalg.eig(np.asarray(transition).T)
    vector = vectors[:, np.argmin(np.abs(values - 1))].real
    return vector / vector.sum()
