"""`BatchSeparable`: `Separable`, whose correlation of the features is the batch's."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from moment_jax.covariance.fields import register_fields
from moment_jax.covariance.numerics import pooled, safe_divide, weighted
from moment_jax.covariance.separable import Separable

Array = jax.Array
BATCH_AXIS = "batch"


@register_fields
@dataclasses.dataclass(frozen=True)
class BatchSeparable(Separable):
    """`Separable` for training: the covariance of the sum over the tokens is averaged over the batch.

    Under `jax.vmap(..., axis_name="batch")`, as the modules of `mj.nn` map, every product of (D, D)
    matrices is formed once a batch and not once a sequence. Each sequence keeps its variances, its
    token correlation and the size of its sum. Without such an axis it is `Separable`.

    Assumes that the sequences of a batch differ in the size of their noise and not in how it lies over
    the features. A result depends on the whole batch: predict with `Separable`, which takes the same
    parameters (`mj.nn.with_structure`).
    """

    @staticmethod
    def share(statistic: Array) -> Array:
        """Its mean over the batch, where there is one."""
        try:
            mean: Array = jax.lax.pmean(statistic, BATCH_AXIS)
        except NameError:  # what JAX raises where no axis has this name
            return statistic
        return mean

    @classmethod
    def own_variance(cls, variance: Array, token_gram: Array, pool: Array | None) -> Array:
        """Scaled as this sequence's token Gram matrix is to the mean one."""
        own = jnp.sum(weighted(pooled(token_gram, pool), pool))
        typical = cls.share(own)
        return variance if typical is own else variance * safe_divide(own, typical)

    def own(self) -> Separable:
        """The same covariance, whose features are from now on each sequence's own.

        Before the last block it keeps most of the logits' sd over the images: see experiments/README.md.
        """
        return Separable(*(getattr(self, field.name) for field in dataclasses.fields(self)))
