"""Beliefs from the second moments of a training run."""

from typing import Any

import jax
import jax.numpy as jnp

from moment_jax.posterior.independent import Factorized


def from_second_moments(
    params: Any,
    state: Any,
    *,
    dataset_size: int,
    batch_size: int,
    prior_precision: float = 1.0,
    decay: float = 0.999,
) -> Any:
    """A belief from Adam's second moments: variance 1 / (N B nu / (1 - decay^t) + prior_precision).

    nu averages the squared gradients of the mean loss over batches of B examples. At an optimum that is
    1/B of the average squared gradient of one example, so N B nu estimates the diagonal of the
    empirical Fisher matrix of N examples. The result is a rough Laplace approximation, to be used with
    `linearised`.

    Args:
      params: the trained parameters.
      state: the optimiser's state, which contains optax's `ScaleByAdamState`.
      dataset_size: N.
      batch_size: B.
      prior_precision: of N(0, 1 / prior_precision), the prior of each weight.
      decay: `b2` of Adam.

    Returns:
      The tree of `params` with a `Factorized` belief in place of each array.

    Raises:
      ValueError: if the state has no second moments, or those of another tree.

    >>> import optax
    >>> params = {"w": jnp.ones(2)}
    >>> adam = optax.adam(1e-3)
    >>> _, state = adam.update({"w": jnp.array([0.0, 0.1])}, adam.init(params), params)
    >>> belief = from_second_moments(params, state, dataset_size=90, batch_size=10)
    >>> print(belief["w"].variance)
    [1.  0.1]
    """
    if min(dataset_size, batch_size) < 1 or prior_precision <= 0:
        raise ValueError(
            "`from_second_moments` needs dataset_size and batch_size >= 1 and prior_precision > 0. "
            f"Got {dataset_size}, {batch_size} and {prior_precision}."
        )
    found = [s for s in jax.tree.leaves(state, is_leaf=_has_moments) if _has_moments(s)]
    if len(found) != 1:
        raise ValueError(
            "`from_second_moments` needs a state with one ScaleByAdamState, such as that of "
            f"optax.adam. Got {len(found)}."
        )
    scale = dataset_size * batch_size / (1 - decay ** jnp.maximum(found[0].count, 1))
    arrays, treedef = jax.tree.flatten(params)
    moments = jax.tree.leaves(found[0].nu)
    if [jnp.shape(a) for a in arrays] != [jnp.shape(m) for m in moments]:
        raise ValueError(
            "`from_second_moments` needs the optimiser state of the same parameters. Got "
            f"{[jnp.shape(a) for a in arrays]} and moments {[jnp.shape(m) for m in moments]}."
        )
    beliefs = [
        Factorized(a, (1 / (scale * m + prior_precision)).astype(a.dtype))
        for a, m in zip(arrays, moments, strict=True)
    ]
    return jax.tree.unflatten(treedef, beliefs)


def _has_moments(node: object) -> bool:
    return hasattr(node, "nu") and hasattr(node, "count")
