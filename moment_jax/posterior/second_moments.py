"""`from_second_moments`: a belief from what Adam has kept."""

from typing import Any

import jax
import jax.numpy as jnp

from moment_jax.posterior.independent import Factorized


def from_second_moments(
    params: Any, state: Any, *, dataset_size: int, batch_size: int, prior_precision: float = 1.0,
    decay: float = 0.999,
) -> Any:  # fmt: skip
    """A tree of `Factorized` beliefs of variance 1 / (N B nu / (1 - decay^t) + prior_precision).

    nu, Adam's second moments, averages the squared gradients of the mean loss over batches of B of the N
    examples, which at an optimum is 1/B of an example's. So N B nu estimates the diagonal of the
    empirical Fisher matrix: a rough Laplace approximation, to be used with `linearised`. `params` are
    trained, `state` is the optimiser's, with one `optax.ScaleByAdamState`, and `decay` Adam's `b2`.

    Raises:
      ValueError: if the state has no second moments of these parameters, or a number is not positive.

    >>> import optax
    >>> params = {"w": jnp.ones(2)}
    >>> adam = optax.adam(1e-3)
    >>> _, state = adam.update({"w": jnp.array([0.0, 0.1])}, adam.init(params), params)
    >>> print(from_second_moments(params, state, dataset_size=90, batch_size=10)["w"].variance)
    [1.  0.1]
    """
    kept = jax.tree.leaves(state, is_leaf=lambda node: hasattr(node, "nu"))
    found = [node for node in kept if hasattr(node, "nu") and hasattr(node, "count")]
    shapes = [jax.tree.map(jnp.shape, tree) for tree in (params, *(node.nu for node in found))]
    if min(dataset_size, batch_size, prior_precision) <= 0 or shapes != shapes[:1] * 2:
        raise ValueError(
            "`from_second_moments` needs positive sizes and prior_precision, and the state of one Adam "
            f"(ScaleByAdamState) for the same parameters. Got {dataset_size}, {batch_size}, "
            f"{prior_precision} and the shapes {shapes}."
        )
    scale = dataset_size * batch_size / (1 - decay ** jnp.maximum(found[0].count, 1))

    def belief(mean: Any, nu: Any) -> Factorized:
        return Factorized(mean, (1 / (scale * nu + prior_precision)).astype(mean.dtype))

    return jax.tree.map(belief, params, found[0].nu)
