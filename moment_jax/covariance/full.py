"""`Full`: the complete covariance, T^2 D^2 numbers, by the base class's textbook formulas alone."""

import dataclasses
from typing import ClassVar, Self

from jax import Array

from moment_jax.covariance.base import Covariance
from moment_jax.covariance.fields import check_dense, check_fields, check_variances, register_fields


@register_fields
@dataclasses.dataclass(frozen=True)
class Full(Covariance):
    """The dense covariance of all entries: Cov[x_td, x_se] = C_tdse, (T, D, T, D).

    Assumes nothing. C reshaped to (T D, T D) is the covariance of the flattened array.
    """

    cov: Array

    num_axes: ClassVar[int] = 4
    exact: ClassVar[bool] = True

    def __post_init__(self) -> None:
        fix = "For variances, use Diagonal; for a matrix, cov.reshape(T, D, T, D)."
        check_fields("Full(cov)", fix, _other_shapes, self.cov)
        check_variances("Full(cov)", self.cov, "td")

    @classmethod
    def project(cls, dense: Array) -> Self:
        check_dense(dense)
        return cls.unchecked(dense)

    @classmethod
    def of(cls, cov: Covariance) -> Self:
        """The same covariance, dense."""
        return cls.unchecked(cov.to_dense())

    def to_dense(self) -> Array:
        return self.cov


def _other_shapes(cov: tuple[int, ...]) -> list[tuple[int, ...]]:
    if len(cov) < 4 or cov[-4:-2] != cov[-2:]:
        raise ValueError("needs a covariance of shape (T, D, T, D).")
    return []
