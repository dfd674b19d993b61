"""`FrozenSeparable`: `Separable`, whose correlation of the features was averaged beforehand."""

from __future__ import annotations

import dataclasses

import jax

from moment_jax.covariance.batch_separable import BatchSeparable
from moment_jax.covariance.fields import register_fields
from moment_jax.covariance.statistics import exchange

Array = jax.Array


@register_fields
@dataclasses.dataclass(frozen=True)
class FrozenSeparable(BatchSeparable):
    """`BatchSeparable` for prediction: what a batch shares is stored in the module, and read.

    `mj.nn.freeze_features` makes such modules. No product of (D, D) matrices is left for a sequence, and
    a result depends on no other sequence and, of what is stored, on no other token. Each sequence keeps
    its variances, its token correlation and the size of its sum.

    Assumes that sequences differ in the size of their noise and not in how it lies over the features.
    Outside of such a module an operation that needs the statistics raises a `ValueError`.
    """

    @staticmethod
    def share(statistic: Array) -> Array:
        """What is stored in the place of it; its mean over the batch while `freeze_features` stores."""
        return exchange(statistic, BatchSeparable.share)
