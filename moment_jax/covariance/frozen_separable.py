"""`FrozenSeparable`: `Separable` with a feature correlation averaged beforehand."""

import dataclasses

from jax import Array

from moment_jax.covariance.batch_separable import BatchSeparable
from moment_jax.covariance.fields import register_fields
from moment_jax.covariance.statistics import exchange


@register_fields
@dataclasses.dataclass(frozen=True)
class FrozenSeparable(BatchSeparable):
    """`BatchSeparable` for prediction: the batch statistics are read from the module.

    `mj.nn.freeze_features` makes such modules. No products of (D, D) matrices remain per sequence. A
    result depends on no other sequence, and the stored statistics on no other token. Each sequence
    keeps its variances, its token correlation and the size of its sum.

    Assumes that sequences differ in the size of their noise but not in its pattern over features.
    Outside such a module, operations that need the statistics raise a `ValueError`.
    """

    @staticmethod
    def share(statistic: Array) -> Array:
        """The stored statistic; while `freeze_features` runs, the batch mean, which it stores."""
        return exchange(statistic, BatchSeparable.share)
