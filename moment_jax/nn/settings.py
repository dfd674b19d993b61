"""Settings of Bayesian modules: structure, posterior family, initial spread, prior."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, TypeVar

import jax.numpy as jnp
from flax import nnx
from jax import Array

from moment_jax import posterior as families
from moment_jax.covariance import STRUCTURES, Covariance, Separable
from moment_jax.covariance.token_gram import num_landmarks
from moment_jax.nn.belief import Belief
from moment_jax.posterior import Posterior

M = TypeVar("M", bound=nnx.Module)

DEFAULT_STRUCTURE: type[Covariance] = Separable
"""The structure of modules that name none."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of a Bayesian module; every module takes them as keyword arguments.

    Args:
      structure: the covariance structure in which moments are propagated.
      landmarks: tokens at which `Separable` keeps a long sequence's token Gram matrix, see
        `Separable.zeros`; with a causal mask, all of them.
      posterior: the family of the beliefs about weights.
      relative_scale: initial standard deviations are relative_scale / sqrt(fan_in) for a kernel, and
        relative_scale / sqrt(D) for a bias, a gain, a position or an embedding of D numbers.
      prior_scale: standard deviation of the prior N(0, prior_scale^2) of every parameter.
      learn_prior: learn one prior standard deviation per array (empirical Bayes).
      dtype: floating-point type of the parameters.

    Raises:
      TypeError: if `structure` is no covariance structure.
      ValueError: if `landmarks` is not positive.
    """

    structure: type[Covariance] = DEFAULT_STRUCTURE
    posterior: type[Posterior] = families.Factorized
    relative_scale: float = 0.1
    prior_scale: float = 1.0
    learn_prior: bool = False
    dtype: jnp.dtype | type = jnp.float32
    landmarks: int | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.structure, type) and issubclass(self.structure, Covariance)):
            raise TypeError(
                f"A module needs a covariance structure, one of {', '.join(STRUCTURES)} (the type "
                f"itself, such as mj.Separable). Got {self.structure!r}."
            )
        num_landmarks("landmarks", 1, self.landmarks)

    @classmethod
    def of(cls, module: object, options: dict[str, Any], *parts: Any) -> Settings:
        """The settings among a module's other keyword arguments, some of which its parts take."""
        known = [field.name for field in dataclasses.fields(cls)]
        own = [
            option.name
            for kind in (type(module), *parts)
            for option in [*inspect.signature(kind.__init__).parameters.values()][1:]
            if option.kind is not option.VAR_KEYWORD
        ]
        unknown = [name for name in options if name not in known + own]
        if unknown:
            raise TypeError(
                f"`{type(module).__name__}` takes {', '.join(dict.fromkeys(own))}, and the settings "
                f"{', '.join(known)}. Got {', '.join(unknown)}."
            )
        return cls(**{name: value for name, value in options.items() if name in known})

    def kernel(self, shape: tuple[int, int], rngs: nnx.Rngs) -> Belief:
        """A belief about an (in, out) kernel, its mean drawn as in Flax (LeCun normal)."""
        if min(shape) < 1:
            raise ValueError(
                f"A Bayesian layer needs a positive number of inputs and outputs. Got {shape}."
            )
        mean = nnx.initializers.lecun_normal()(rngs.params(), shape, self.dtype)
        return self._belief(mean, self.posterior, shape[0])

    def table(self, shape: tuple[int, int], rngs: nnx.Rngs) -> Belief:
        """A belief about the (V, D) rows of an embedding, its mean drawn as in Flax."""
        start = nnx.initializers.variance_scaling(1.0, "fan_in", "normal", out_axis=0)
        return self._belief(start(rngs.params(), shape, self.dtype), self.posterior, shape[1])

    def vector(self, size: int, value: float = 0.0) -> Belief:
        """A belief about a bias or gain of `size` numbers, its mean at `value`."""
        family = self.posterior if self.posterior is families.FullNormal else self._entrywise
        return self._belief(jnp.full((size,), value, self.dtype), family, size)

    def entries(self, mean: Array, fan_in: int) -> Belief:
        """An entrywise belief about an array that multiplies nothing, such as positions."""
        return self._belief(mean, self._entrywise, fan_in)

    @property
    def _entrywise(self) -> type[Posterior]:
        """The family of arrays that are no matrices, for which some families have no meaning."""
        return families.Point if self.posterior is families.Point else families.Factorized

    def _belief(self, mean: Array, family: type[Posterior], fan_in: int) -> Belief:
        return Belief(
            mean,
            family=family,
            scale=self.relative_scale / fan_in**0.5,
            prior_scale=self.prior_scale,
            learn_prior=self.learn_prior,
        )


def with_structure(module: M, structure: type[Covariance]) -> M:
    """The same module in another covariance structure, sharing its variables.

    It is a module of `mj.nn`, or your own with such modules in it, which all get the structure. So a
    network trained in `Diagonal` predicts in `Separable`, and training one trains the other.

    Raises:
      TypeError: if `structure` is no covariance structure.
    """
    copy = nnx.clone(module, variables=False)
    parts: list[Any] = [part for _, part in nnx.iter_modules(copy)]
    for part in parts:
        settings = getattr(part, "settings", None)
        if isinstance(settings, Settings):
            part.settings = dataclasses.replace(settings, structure=structure)
    return copy
