"""Gaussian draws with the covariance that a structure keeps of given draws."""

from __future__ import annotations

from functools import singledispatch

import jax
import jax.numpy as jnp

from moment_jax import covariance as structures
from moment_jax.covariance import Covariance

Array = jax.Array


def kept_covariance(structure: type[Covariance], draws: Array) -> Covariance:
    """The projection of the covariance of draws (N, T, D), without forming it where T D is large."""
    centred = draws - jnp.mean(draws, axis=0, keepdims=True)
    n, t, d = draws.shape
    variance = jnp.mean(centred**2, axis=0)
    if structure is structures.Diagonal:
        return structures.Diagonal(variance)
    if structure is structures.TokenBlock:
        return structures.TokenBlock(jnp.einsum("ntd,nte->tde", centred, centred) / n)
    tokens = jnp.einsum("ntd,nsd->ts", centred, centred) / n
    if structure is structures.TokenCorrelated:
        return structures.TokenCorrelated.from_moments(variance, tokens)
    if issubclass(structure, structures.Separable):
        total = jnp.sum(centred, axis=1)
        features = total.T @ total / n
        return structure.from_moments(variance, tokens, features)
    flat = centred.reshape(n, t * d)
    return structure.project((flat.T @ flat / n).reshape(t, d, t, d))


@singledispatch
def gaussian_draws(cov: Covariance, key: Array, num_draws: int) -> Array:
    """Draws (N, T, D) from N(0, cov)."""
    return gaussian_draws(structures.Full(cov.to_dense()), key, num_draws)


def _noise(cov: Covariance, key: Array, num_draws: int) -> Array:
    return jax.random.normal(key, (num_draws, *cov.shape), cov.dtype)


def _root(matrix: Array) -> Array:
    """The symmetric square root of the nearest positive semidefinite matrix."""
    values, vectors = jnp.linalg.eigh(matrix)
    return (vectors * jnp.sqrt(jnp.maximum(values, 0))[..., None, :]) @ jnp.swapaxes(
        vectors, -1, -2
    )


@gaussian_draws.register
def _diagonal(cov: structures.Diagonal, key: Array, num_draws: int) -> Array:
    return jnp.sqrt(cov.variances)[None] * _noise(cov, key, num_draws)


@gaussian_draws.register
def _token_block(cov: structures.TokenBlock, key: Array, num_draws: int) -> Array:
    return jnp.einsum("tde,nte->ntd", _root(cov.blocks), _noise(cov, key, num_draws))


@gaussian_draws.register
def _token_correlated(cov: structures.TokenCorrelated, key: Array, num_draws: int) -> Array:
    mixed = jnp.einsum("ts,nsd->ntd", _root(cov.correlation), _noise(cov, key, num_draws))
    return cov.scale[None] * mixed


@gaussian_draws.register
def _separable(cov: structures.Separable, key: Array, num_draws: int) -> Array:
    tokens, features = _root(cov.token_correlation), _root(cov.feature_correlation)
    noise = _noise(cov, key, num_draws)
    return cov.scale[None] * jnp.einsum("ts,nse,ed->ntd", tokens, noise, features)


@gaussian_draws.register
def _full(cov: structures.Full, key: Array, num_draws: int) -> Array:
    t, d = cov.shape
    root = _root(cov.cov.reshape(t * d, t * d))
    noise = _noise(cov, key, num_draws).reshape(num_draws, t * d)
    return (noise @ root).reshape(num_draws, t, d)
