"""`Reshaped`: a belief about a matrix, presented as an array of another shape."""

import dataclasses
import math
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.covariance.fields import rebuilt
from moment_jax.posterior.base import Posterior
from moment_jax.posterior.prior import GaussianPrior


@dataclasses.dataclass(frozen=True)
class Reshaped(Posterior):
    """The weights of `belief`, in the same order, as an array of another shape.

    For kernels that a model stores with more than two axes, such as (D, heads, D / heads) or those of
    convolutions, while `KroneckerEigen` describes a matrix. Methods for kernels
    (`noise_variance` and the like) raise a ValueError: call those of `belief`.

    Args:
      belief: the belief about a matrix.
      new_shape: the shape of the array, of as many weights.

    Raises:
      ValueError: if the numbers of weights differ.

    >>> import moment_jax as mj
    >>> matrix = mj.posterior.OutputShared(jnp.zeros((4, 6)), jnp.ones(6))
    >>> Reshaped(matrix, (4, 2, 3)).mean.shape
    (4, 2, 3)
    """

    belief: Posterior
    new_shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.belief.mean.size != math.prod(self.new_shape):
            raise ValueError(
                "`Reshaped(belief, new_shape)` needs as many weights in both. Got "
                f"{tuple(self.belief.mean.shape)} and {self.new_shape}."
            )

    @property
    def mean(self) -> Array:
        """The mean in the new shape."""
        return self.belief.mean.reshape(self.new_shape)

    @property
    def uncorrelated(self) -> bool:
        """As for the belief."""
        return self.belief.uncorrelated

    def sample(self, key: Array) -> Array:
        return self.belief.sample(key).reshape(self.new_shape)

    def marginal_variance(self) -> Array:
        return self.belief.marginal_variance().reshape(self.new_shape)

    def kl(self, prior: GaussianPrior) -> Array:
        """KL(belief || prior); the prior's mean and variance may have the new shape."""
        old = self.belief.shape

        def moved(x: Array | float) -> Array | float:
            return jnp.reshape(x, old) if jnp.shape(x) == self.new_shape else x

        return self.belief.kl(GaussianPrior(moved(prior.mean), moved(prior.variance)))

    def _refuse(self, *called: Any, **_: Any) -> NoReturn:
        """Refuse every method for kernels; `_check_kernel` is called first, with its name."""
        raise ValueError(
            f"`Reshaped.{called[0]}` needs a belief about a matrix. Got one of shape {self.new_shape}. "
            f"Use its `belief`, whose shape is {tuple(self.belief.shape)}."
        )

    _check_kernel = _refuse
    _noise_variance = _noise_block = _input_metric = _rows = _transpose = _refuse


jax.tree_util.register_pytree_with_keys(
    Reshaped,
    lambda x: (((jax.tree_util.GetAttrKey("belief"), x.belief),), x.new_shape),
    # Without checks: tree transforms stack beliefs, and put other things in their place.
    lambda new_shape, children: rebuilt(Reshaped, (*children, new_shape)),
)
