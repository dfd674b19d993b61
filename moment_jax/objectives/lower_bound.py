"""The evidence lower bound on a mini-batch, its warm-up, and the sampled data term."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from moment_jax.covariance.fields import check_array, known_values


def elbo(
    expected_log_likelihoods: Array,
    kl: Array | float,
    *,
    dataset_size: int,
    kl_weight: Array | float = 1.0,
) -> Array:
    """The ELBO of the whole data set, |D|/N sum_n E_q[log p(y_n | f_n)] - kl_weight KL, in nats.

    Its average over all mini-batches of equal size is the full ELBO. As printed, Eq. 6 and 13 count the
    KL once for every data point, or leave the data term of a mini-batch unscaled. Divide the result by
    `dataset_size` for the ELBO per example, which is of order one.

    Args:
      expected_log_likelihoods: (N,), one per example of the mini-batch.
      kl: KL(q || p) of all parameters, a scalar.
      dataset_size: |D|, the number of examples in the data set.
      kl_weight: 1 for the bound itself; below 1 for warm-up (`kl_warmup`) or a cold posterior.

    Raises:
      ValueError: if `expected_log_likelihoods` is not a non-empty vector, dataset_size is smaller than
        the mini-batch, kl or kl_weight is not a scalar, or a known kl_weight is negative.

    Source: Transformer derivation, Eq. 5, 6 and 13.

    >>> import jax.numpy as jnp
    >>> float(elbo(jnp.array([-1.0, -3.0]), 5.0, dataset_size=10))
    -25.0
    """
    check_array("elbo", expected_log_likelihoods)
    shape = tuple(expected_log_likelihoods.shape)
    if len(shape) != 1 or shape[0] == 0:
        raise ValueError(
            "`elbo` needs expected_log_likelihoods of shape (N,), one per example. Got "
            f"{shape}. Use jax.vmap(expected_log_likelihood) for a batch."
        )
    if dataset_size < 1:
        raise ValueError(
            f"`elbo` needs dataset_size >= 1, the examples in the data set. Got {dataset_size}."
        )
    if dataset_size < shape[0]:
        raise ValueError(
            f"`elbo` needs dataset_size of at least the {shape[0]} examples of the mini-batch. Got "
            f"{dataset_size}. It is the number of examples in the whole data set."
        )
    if jnp.ndim(kl) or jnp.ndim(kl_weight):
        raise ValueError(
            f"`elbo` needs kl and kl_weight as scalars. Got {jnp.shape(kl)} and {jnp.shape(kl_weight)}. "
            "Sum the divergences, as model.kl() does."
        )
    check_weight("elbo", "kl_weight", kl_weight)
    kl = jnp.asarray(kl, expected_log_likelihoods.dtype)
    return dataset_size * jnp.mean(expected_log_likelihoods) - jnp.asarray(kl_weight, kl.dtype) * kl


def check_weight(name: str, argument: str, value: Array | float) -> None:
    """Raise if a weight is known and negative."""
    known = known_values(value)
    if known is not None and (known < 0).any():
        raise ValueError(
            f"`{name}` needs {argument} >= 0. Got {known}. Use 1 for the ELBO, or less "
            "for a cold posterior."
        )


def kl_warmup(step: Array | int, num_steps: int, final: float = 1.0) -> Array:
    """Weight of the KL at a step: rises linearly from 0 to `final` in `num_steps` steps.

    Args:
      step: the number of updates made so far.
      num_steps: the length of the warm-up; 0 for none.
      final: the weight afterwards.

    Raises:
      ValueError: if num_steps or final is negative.
    """
    if num_steps < 0:
        raise ValueError(f"`kl_warmup` needs num_steps >= 0. Got {num_steps}.")
    check_weight("kl_warmup", "final", final)
    if num_steps == 0:
        return jnp.asarray(final)
    return jnp.asarray(optax.linear_schedule(0.0, final, num_steps)(step))


def monte_carlo_expected_log_likelihood(
    log_likelihood_fn: Callable[[Any], Array],
    posterior_sampler: Callable[[Array], Any],
    key: Array,
    num_samples: int,
    *,
    batch_size: int = 16,
) -> tuple[Array, Array]:
    """1/M sum_m log p(y | X, w_m), w_m ~ q, and its standard error.

    Args:
      log_likelihood_fn: sampled parameters -> log-likelihood, a scalar or an array such as (N,).
      posterior_sampler: key -> parameters drawn from the posterior.
      key: a JAX random key.
      num_samples: M, at least 2.
      batch_size: draws evaluated at once; larger is faster but needs more memory.

    Returns:
      Mean and standard error (sample sd over sqrt(M)), each of the shape of the log-likelihood.

    Raises:
      ValueError: if num_samples is below 2.

    Source: Transformer derivation, Eq. 7.
    """
    if num_samples < 2:
        raise ValueError(
            "`monte_carlo_expected_log_likelihood` needs num_samples >= 2 for a standard error. "
            f"Got {num_samples}."
        )
    keys, size = jax.random.split(key, num_samples), min(batch_size, num_samples)
    values = jax.lax.map(lambda k: log_likelihood_fn(posterior_sampler(k)), keys, batch_size=size)
    return jnp.mean(values, axis=0), jnp.std(values, axis=0, ddof=1) / num_samples**0.5
