"""Base classes of Bayesian modules: KL divergence, plain networks, sublayers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, TypeVar

import jax
from flax import nnx

from moment_jax.covariance import Covariance
from moment_jax.nn.batching import over_batch
from moment_jax.nn.belief import Belief, total_kl
from moment_jax.nn.freezing import over_statistics
from moment_jax.nn.settings import Settings
from moment_jax.posterior import Posterior, sample_params

Array = jax.Array
M = TypeVar("M", bound=nnx.Module)


class Stage(NamedTuple):
    """One sublayer of a network, from one point of its residual stream to the next.

    Weights of different stages are independent.
    """

    name: str
    moments: Callable[[Array, Any], tuple[Array, Any]]  # of one sequence, mean and covariance
    draw: Callable[[Array, Array], Array]  # (key, x) -> the output of one drawn network


class BayesianModule(nnx.Module):
    """A module that owns beliefs about its weights.

    Subclasses give `params`, the parameter group of the layer they call, and `network(params)`, the
    plain Flax network with arrays in place of the beliefs.
    """

    settings: Settings

    @property
    def params(self) -> Any:
        """The parameter group with a `Posterior` for every array."""
        raise AttributeError(f"{type(self).__name__} has to define `params`.")

    def network(self, params: Any) -> nnx.Module:
        """The plain Flax network with these arrays, a group like `params`."""
        raise AttributeError(f"{type(self).__name__} has to define `network`.")

    def kl(self) -> Array:
        """KL(posterior || prior) of all weights, a scalar in nats: the complexity loss (Eq. 12)."""
        return total_kl(self)

    def sample(self, key: Array) -> nnx.Module:
        """The plain Flax network of one draw of the weights."""
        return self.network(sample_params(self.params, key))

    @property
    def stages(self) -> list[Stage]:
        """The sublayers, as `reference.closure_report` takes them; here the module as a whole."""

        def draw(key: Array, x: Array) -> Array:
            return self.sample(key)(x)

        return [Stage(type(self).__name__, self, draw)]

    def sequence(self, x: Array) -> Array:
        """One input as the sequence (T, D) that the first stage takes."""
        return x

    def _over_batch(
        self, layer: Callable[..., Any], *sequences: tuple[Any, ...], cache: Any = None
    ) -> Any:
        """`over_batch`, where inputs that are certain start in the module's structure."""
        structure = self.settings.structure

        def run(layer: Callable[..., Any]) -> Any:
            return over_batch(layer, structure, *sequences, cache=cache)

        num_axes = getattr(sequences[0][0], "ndim", 2) - 2  # what is no array `over_batch` refuses
        return over_statistics(self, layer, run, num_axes)

    def mean_network(self) -> nnx.Module:
        """The plain Flax network at the means of the weights."""
        means = jax.tree.map(
            lambda belief: belief.mean, self.params, is_leaf=lambda x: isinstance(x, Posterior)
        )
        return self.network(means)


class Composite(BayesianModule):
    """A module made of others: beliefs, plain networks and weights are those of its `parts` by name.

    Subclasses name their parts, in the order in which `plain_type` takes the parts' plain networks.
    """

    parts: ClassVar[tuple[str, ...]]
    plain_type: ClassVar[Any]

    @property
    def params(self) -> dict[str, Any]:
        """Beliefs about the weights of every part."""
        return {name: getattr(self, name).params for name in self.parts}

    def network(self, params: dict[str, Any]) -> Any:
        """The plain network with these arrays."""
        return self.plain_type(*(getattr(self, name).network(params[name]) for name in self.parts))

    def load(self, network: Any) -> None:
        """Take the weights of a plain network of the same sizes as means."""
        for name in self.parts:
            getattr(self, name).load(getattr(network, name))


def set_mean(belief: Belief, value: Array) -> None:
    """Start a belief at another mean, for instance a trained weight."""
    if value.shape != belief.mean.shape:
        raise ValueError(
            f"A belief about an array of shape {tuple(belief.mean.shape)} needs a mean of that "
            f"shape. Got {tuple(value.shape)}."
        )
    belief.mean.set_value(value.astype(belief.mean.dtype))


def with_structure(module: M, structure: type[Covariance]) -> M:
    """The same module in another covariance structure, on the same variables.

    So a network that trains in `BatchSeparable` predicts in `Separable`, and what one call trains the
    other sees.

    Args:
      module: a module of `mj.nn`, or of your own with such modules in it.
      structure: of every one of them.

    Raises:
      TypeError: if `structure` is none.
    """
    copy = nnx.clone(module, variables=False)
    parts: list[Any] = [part for _, part in nnx.iter_modules(copy)]
    for part in parts:
        settings = getattr(part, "settings", None)
        if isinstance(settings, Settings):
            part.settings = dataclasses.replace(settings, structure=structure)
    return copy
