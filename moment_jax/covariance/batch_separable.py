"""`BatchSeparable`: `Separable` with one feature correlation per batch."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.covariance.fields import register_fields
from moment_jax.covariance.numerics import pooled, safe_divide, weighted
from moment_jax.covariance.separable import Separable

BATCH_AXIS = "batch"


@register_fields
@dataclasses.dataclass(frozen=True)
class BatchSeparable(Separable):
    """`Separable` for training: the covariance of the sum over tokens is averaged over the batch.

    Under `jax.vmap(..., axis_name="batch")`, as in the modules of `mj.nn`, each product of (D, D)
    matrices is computed once per batch. Each sequence keeps its variances, its token correlation and
    the size of its sum. Without such an axis it equals `Separable`.

    Assumes that the sequences of a batch differ in the size of their noise but not in its pattern over
    features. A result depends on the whole batch, so predict with `Separable`, which takes the same
    parameters (`mj.nn.with_structure`).
    """

    @staticmethod
    def share(statistic: Array) -> Array:
        """The mean over the batch axis, if there is one."""
        try:
            mean: Array = jax.lax.pmean(statistic, BATCH_AXIS)
        except NameError:  # no axis has this name
            return statistic
        return mean

    @classmethod
    def own_variance(cls, variance: Array, token_gram: Array, pool: Array | None) -> Array:
        """The variance scaled by this sequence's token Gram matrix relative to the batch mean."""
        own = jnp.sum(weighted(pooled(token_gram, pool), pool))
        typical = cls.share(own)
        return variance if typical is own else variance * safe_divide(own, typical)

    def own(self) -> Separable:
        """The same covariance as a `Separable`, with features per sequence from now on.

        Before the last block it keeps most of the logits' sd over the images: see
        experiments/README.md.
        """
        return Separable(*(getattr(self, field.name) for field in dataclasses.fields(self)))
