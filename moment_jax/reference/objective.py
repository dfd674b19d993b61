"""The derivation's objective: complexity loss (Eq. 12) and evidence lower bound (Eq. 13)."""

import math
from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array


def complexity_loss(means: Sequence[Array], variances: Sequence[Array]) -> Array:
    """KL(q || N(0, I)) of matrices with one variance for each output unit, in nats: a scalar.

    1/2 sum_p sum_r ( n_c v_pr + |mu_pr|^2 - n_c - n_c log v_pr ), with the derivation's rows r the
    columns of our (in, out) kernels and its number of columns n_c our `in`.

    Args:
      means: mean of each matrix, (in, out); a gain or a bias counts as one output unit, (D, 1).
      variances: v of each matrix, (out,), positive.

    Source: Transformer derivation, section 5, Eq. 12.
    """
    terms = []
    for mean, variance in zip(means, variances, strict=True):
        num_columns, num_rows = mean.shape
        for r in range(num_rows):
            v, squared_norm = variance[r], jnp.sum(mean[:, r] ** 2)
            terms.append(num_columns * v + squared_norm - num_columns - num_columns * jnp.log(v))
    return jnp.sum(jnp.stack(terms)) / 2


def log_marginal(
    target: Array, mean: Array, cov: Array, noise_variance: float | Array = 0.0
) -> Array:
    """Log of N(vec(Y); vec(M), Sigma + noise), the data term of Eq. 13 for one datapoint: a scalar.

    Args:
      target: Y, (T, D).
      mean: M, the propagated mean, (T, D).
      cov: Sigma, the propagated covariance, (T, D, T, D).
      noise_variance: variance of independent observation noise, a scalar. Eq. 13 has none; its Sigma
        alone can be singular.

    Source: Transformer derivation, section 5, Eq. 13.
    """
    size = target.size
    total = cov.reshape(size, size) + noise_variance * jnp.eye(size, dtype=cov.dtype)
    difference = (target - mean).reshape(size)
    _, log_determinant = jnp.linalg.slogdet(total)
    square = difference @ jnp.linalg.solve(total, difference)
    return -(size * math.log(2 * math.pi) + log_determinant + square) / 2


def elbo(
    targets: Array,
    means: Array,
    covs: Array,
    complexity: Array | float,
    *,
    noise_variance: float | Array = 0.0,
    dataset_size: int | None = None,
) -> Array:
    """Eq. 13 on a mini-batch of N datapoints, in nats of the whole dataset: a scalar.

    |D|/N sum_n log N(Y_n; M_n, Sigma_n + noise) - complexity.

    Args:
      targets: Y_n, (N, T, D).
      means: M_n, (N, T, D).
      covs: Sigma_n, (N, T, D, T, D).
      complexity: KL(q || prior), such as `complexity_loss` gives.
      noise_variance: variance of independent observation noise.
      dataset_size: |D|; None if the batch is the whole dataset, as in Eq. 13.

    Source: Transformer derivation, Eq. 6 and 13, with the scale |D|/N that a mini-batch needs.
    """
    batch_size = targets.shape[0]
    terms = [
        log_marginal(target, mean, cov, noise_variance)
        for target, mean, cov in zip(targets, means, covs, strict=True)
    ]
    size = batch_size if dataset_size is None else dataset_size
    return size / batch_size * jnp.sum(jnp.stack(terms)) - complexity
