"""Mean and dense covariance of every family of beliefs."""

from __future__ import annotations

from functools import singledispatch
from typing import NamedTuple

import jax
import jax.numpy as jnp

from moment_jax import posterior
from moment_jax.posterior import Posterior

Array = jax.Array


class DenseMoments(NamedTuple):
    """Mean of a random array, and its covariance: `cov.shape == (*mean.shape, *mean.shape)`."""

    mean: Array
    cov: Array


def dense_moments(belief: Posterior) -> DenseMoments:
    """Mean and dense covariance of a belief: (in, out, in, out) for a kernel, (D, D) for a vector.

    This is the derivation's covariance of the vectorised parameter, in the library's index order.

    Raises:
      TypeError: if the family has no dense form here.

    Source: Transformer derivation, sections 2 and 5 (which print standard deviations in the diagonal
    blocks, where variances are meant).
    """
    return DenseMoments(belief.mean, _dense_cov(belief))


@singledispatch
def _dense_cov(belief: object) -> Array:
    raise TypeError(
        f"`dense_moments` knows no family {type(belief).__name__}. Register one with `_dense_cov`."
    )


@_dense_cov.register
def _point(belief: posterior.Point) -> Array:
    return jnp.zeros((*belief.shape, *belief.shape), belief.mean.dtype)


@_dense_cov.register
def _factorized(belief: posterior.Factorized) -> Array:
    return jnp.diag(belief.variance.ravel()).reshape(*belief.shape, *belief.shape)


@_dense_cov.register
def _output_shared(belief: posterior.OutputShared) -> Array:
    every_entry = jnp.broadcast_to(belief.variance[None, :], belief.shape)
    return jnp.diag(every_entry.ravel()).reshape(*belief.shape, *belief.shape)


@_dense_cov.register
def _matrix_normal(belief: posterior.MatrixNormal) -> Array:
    return jnp.einsum("ij,op->iojp", belief.in_cov, belief.out_cov)


@_dense_cov.register
def _full_normal(belief: posterior.FullNormal) -> Array:
    return belief.cov
