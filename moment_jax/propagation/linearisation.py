"""`linearised`: the predictive distribution of the network linearised in its weights."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax import posterior as families
from moment_jax.covariance import Diagonal, Full
from moment_jax.posterior import Posterior
from moment_jax.propagation.errors import explain

LARGEST = 2**28  # most entries of a `Full` covariance, 1 GiB in float32


def linearised(
    fn: Callable[..., Array], *, structure: type[Full] | type[Diagonal] = Full
) -> Callable[..., tuple[Array, Any]]:
    """Mean and covariance of fn(mean) + J (w - mean), the function linearised in its weights.

    A Laplace approximation is a posterior of the linearised network, so this is its predictive
    distribution; that of the network itself is too wide. For posteriors trained by the ELBO, use
    `propagate`. Costs one backward pass per output. `Full` has the square of the output's size: for 64
    tokens of 1,000 logits 4e9 numbers. `Diagonal` keeps the variances alone, from 64 outputs at a time.

    Assumes that weight arrays are independent of each other.

    Args:
      fn: `fn(params, *inputs)`, differentiable in `params`, returning one array.
      structure: of the covariance, `mj.Full` or `mj.Diagonal`.

    Returns:
      A function of `params`, a pytree with a `Posterior` for each random array, and of the inputs. It
      returns fn at the means as a sequence (T, D), with D the last axis, and its covariance.

    Raises:
      ValueError: if a `Full` covariance would have more than 2^28 entries.

    >>> import jax.numpy as jnp, moment_jax as mj
    >>> belief = mj.posterior.Factorized(jnp.ones((2, 1)), jnp.full((2, 1), 0.5))
    >>> mean, cov = mj.linearised(lambda w, x: x @ w)(belief, jnp.ones(2))
    >>> print(mean, cov.variance())
    [[2.]] [[1.]]
    """
    if not callable(fn):
        raise TypeError(
            f"`linearised(fn)` needs a function fn(params, x). Got {type(fn).__name__}."
        )
    if structure not in (Full, Diagonal):
        raise TypeError(f"`linearised` keeps mj.Full or mj.Diagonal. Got {structure!r}.")

    def predict(params: Any, *inputs: Any) -> tuple[Array, Any]:
        leaves, treedef = jax.tree.flatten(params, is_leaf=lambda x: isinstance(x, Posterior))
        beliefs = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Posterior)}
        means = {i: belief.mean for i, belief in beliefs.items()}

        def filled(means: dict[int, Array]) -> Any:
            return jax.tree.unflatten(treedef, [means.get(i, x) for i, x in enumerate(leaves)])

        try:
            mean = fn(filled(means), *inputs)
        except Exception as error:
            explain("linearised", fn, filled(means), inputs, error)
            raise
        shape = (-1, mean.shape[-1]) if mean.ndim else (1, 1)
        if structure is Diagonal:
            _, backward = jax.vjp(lambda at: fn(filled(at), *inputs).ravel(), means)

            def variance(i: Array) -> Array:
                (rows,) = backward(jax.nn.one_hot(i, mean.size, dtype=mean.dtype))
                parts = (carried(beliefs[k], row.reshape(1, -1)) for k, row in rows.items())
                return sum((part.reshape(()) for part in parts), jnp.zeros((), mean.dtype))

            variances = jax.lax.map(variance, jnp.arange(mean.size), batch_size=64)
            return mean.reshape(shape), Diagonal(variances.reshape(shape))
        if mean.size**2 > LARGEST:
            raise ValueError(
                "`linearised` keeps the covariance of all outputs, at most 2^28 numbers. Got "
                f"{mean.size} outputs {mean.shape}, so {mean.size}^2 numbers. Use "
                "structure=mj.Diagonal for their variances, or a function of fewer outputs."
            )
        total = jnp.zeros((mean.size, mean.size), mean.dtype)
        for i, jacobian in jax.jacrev(lambda at: fn(filled(at), *inputs))(means).items():
            total = total + carried(beliefs[i], jacobian.reshape(mean.size, -1))
        mean = mean.reshape(shape)
        return mean, Full(total.reshape(*mean.shape, *mean.shape))

    return predict


def carried(belief: Posterior, jacobian: Array) -> Array:
    """J Cov J^T of one weight array, for J of shape (N, size of the array)."""
    if isinstance(belief, families.Point):
        return jnp.zeros((), jacobian.dtype)
    return covariance_with(belief, jacobian) @ jacobian.T


def covariance_with(belief: Posterior, jacobian: Array) -> Array:
    """J Cov, the covariance of J w and w, (N, size of the array)."""
    if isinstance(belief, families.FullNormal):
        n = belief.mean.size
        return jacobian @ belief.cov.reshape(n, n)
    if isinstance(belief, families.KroneckerEigen):
        u, w = belief.in_basis, belief.out_basis
        turned = jnp.einsum("nio,ia,ob->nab", jacobian.reshape(-1, *belief.matrix.shape), u, w)
        found = jnp.einsum("nab,ia,ob->nio", turned * belief.variance[None], u, w)
        return found.reshape(jacobian.shape)
    return jacobian * belief.marginal_variance().reshape(1, -1)
