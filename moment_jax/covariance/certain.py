"""`Certain`: nothing is random; no numbers at all."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, NoReturn, Self

import jax.numpy as jnp
from jax import Array

from moment_jax.covariance.base import Covariance, check_dense
from moment_jax.covariance.fields import check_fields, register_fields, sequence_shape


@register_fields
@dataclasses.dataclass(frozen=True)
class Certain(Covariance):
    """No covariance: x is known, and so is what layers make of it.

    A layer whose input is `Certain` is the plain layer, at the plain layer's price. Its parameters must
    be certain too (`mj.posterior.Point`): their noise has no place here, and a layer raises rather than
    dropping it. `mj.at_means(params)` drops it by name; any other structure's `zeros` starts a
    covariance.

    Args:
      nothing: an empty array (T, D, 0), so that `vmap` adds batch axes as to any other structure.
    """

    nothing: Array

    num_axes: ClassVar[int] = 3
    feature_axes: ClassVar[Mapping[str, int]] = {"nothing": 1}
    token_fields: ClassVar[frozenset[str]] = frozenset({"nothing"})

    def __post_init__(self) -> None:
        call, fix = "Certain(nothing)", "Use Certain.zeros((T, D))."
        check_fields(call, fix, _no_others, self.nothing)

    @classmethod
    def zeros(cls, shape: tuple[int, int], dtype: jnp.dtype | type = jnp.float32) -> Self:
        return cls.unchecked(jnp.zeros((*sequence_shape(cls, shape), 0), dtype))

    @classmethod
    def project(cls, dense: Array) -> Self:
        check_dense(dense)
        t, d = dense.shape[:2]
        return cls.zeros((t, d), dense.dtype)

    @property
    def shape(self) -> Any:
        return self.nothing.shape[:-1]

    def variance(self) -> Array:
        return jnp.zeros(self.shape, self.dtype)

    def to_dense(self) -> Array:
        return jnp.zeros(self.shape + self.shape[-2:], self.dtype)

    def map_features(self, kernel: Array) -> Self:
        return self.zeros((self.shape[0], kernel.shape[1]), self.dtype)

    def map_tokens(self, weights: Array) -> Self:
        return self.zeros((weights.shape[0], self.shape[1]), self.dtype)

    def map_each(self, kernels: Array) -> Self:
        return self.zeros((self.shape[0], kernels.shape[2]), self.dtype)

    def _itself(self, *_: Any, **named: Any) -> Self:
        return self

    rescale = add = elementwise = add_branch = _itself

    def _refuse(self, *noise: Any, **named: Any) -> NoReturn:
        came = [*noise, *named.values()][-1]
        raise TypeError(
            "`Certain` holds no covariance, so that parameters have to be certain too. Got "
            f"{type(came).__name__}. Start a covariance with mj.Separable.zeros(mean.shape), or "
            "ask for the plain network with mj.at_means(params)."
        )

    weight_noise = gain_noise = bias_noise = _refuse

    @classmethod
    def independent(cls, variance: Array) -> NoReturn:
        cls.zeros((1, 1))._refuse(variance)

    def with_itself(self) -> None:
        return None

    def rescale_cross(self, cross: None, gain: Array) -> None:
        return None


def _no_others(nothing: tuple[int, ...]) -> list[tuple[int, ...]]:
    if len(nothing) < 3 or nothing[-1]:
        raise ValueError("needs an empty array of shape (T, D, 0).")
    return []
