"""Base classes of Bayesian modules: KL divergence, plain networks, sublayers, leading batch axes.

Modules accept any number of leading axes; layers take one sequence.
"""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from moment_jax.covariance import Certain, Covariance
from moment_jax.covariance.fields import check_array
from moment_jax.covariance.separable import started
from moment_jax.layers.checks import described, is_boolean
from moment_jax.nn.belief import Belief, total_kl
from moment_jax.nn.conversion import check_kind, check_loaded, check_same, load_part
from moment_jax.nn.settings import Settings
from moment_jax.posterior import Point, Posterior, sample_params

Moments = tuple[Array, Covariance]


class Stage(NamedTuple):
    """One sublayer of a network, from one point of its residual stream to the next.

    Weights of different stages are independent.
    """

    name: str
    moments: Callable[[Array, Any], tuple[Array, Any]]  # of one sequence, mean and covariance
    draw: Callable[[Array, Array], Array]  # (key, x) -> the output of one drawn network


class BayesianModule(nnx.Module):
    """A module that owns beliefs about its weights.

    Subclasses name their beliefs and the modules in them in `parts`, as these are called in the plain
    network too, and the type of their parameters, which takes those of the parts in this order. They
    define `network(params)`, the plain Flax network with arrays in place of the beliefs.
    """

    settings: Settings
    parts: ClassVar[tuple[str, ...]] = ()
    params_type: ClassVar[Any]
    flax_type: ClassVar[type | None] = None  # the only type of layer to convert from; None for any

    @property
    def params(self) -> Any:
        """The parameter group of the layer that is called, with a `Posterior` for every array."""
        return type(self).params_type(*(_params_of(getattr(self, part)) for part in self.parts))

    def network(self, params: Any) -> nnx.Module:
        """The plain Flax network with these arrays, a group like `params`."""
        raise AttributeError(f"{type(self).__name__} has to define `network`.")

    @classmethod
    def from_deterministic(cls, network: Any, **settings: Any) -> Self:
        """A module whose means are the weights of a trained plain network, without dropout.

        Args:
          network: as `mean_network` returns one, or another with the same attributes.
          settings: keyword arguments of `Settings`. Modules with an activation also take its name,
            `activation`, which is needed if the network has no attribute `activation`.

        Raises:
          TypeError: if a layer is of another type.
          ValueError: if part of the network has no moments here, or would be lost or invented.
        """
        check_kind(cls, network)
        new = cls(**{"rngs": nnx.Rngs(0), **cls.options_of(network, settings), **settings})
        new.load(network)
        return new

    @classmethod
    def options_of(cls, network: Any, settings: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a module like this plain network, which the settings then override."""
        raise AttributeError(f"{cls.__name__} has to define `options_of`, or use `load`.")

    @property
    def compared(self) -> dict[str, Any]:
        """Attributes in which a plain network has to agree, so that its weights can be taken."""
        return {}

    def load(self, network: Any) -> None:
        """Take the weights of a plain network of the same sizes as means."""
        name = f"{type(self).__name__}.load"
        check_kind(type(self), network)
        check_same(name, network, **self.compared)
        if not self.parts:
            raise AttributeError(f"{type(self).__name__} has to define `parts` or `load`.")
        for part in self.parts:
            load_part(name, part, getattr(self, part), getattr(network, part))
        check_loaded(name, self, network)

    def kl(self) -> Array:
        """KL(posterior || prior) of all weights, a scalar in nats: the complexity loss (Eq. 12)."""
        return total_kl(self)

    def sample(self, key: Array) -> nnx.Module:
        """The plain Flax network of one draw of the weights."""
        return self.network(sample_params(self.params, key))

    def mean_network(self) -> nnx.Module:
        """The plain Flax network at the means of the weights."""
        params, is_belief = self.params, lambda x: isinstance(x, Posterior)
        return self.network(jax.tree.map(lambda belief: belief.mean, params, is_leaf=is_belief))

    @property
    def stages(self) -> list[Stage]:
        """The sublayers, as `reference.closure_report` takes them; by default the whole module."""
        return [self.stage(type(self).__name__)]

    def stage(self, name: str) -> Stage:
        """The whole module as one stage."""
        return Stage(name, self, lambda key, x: self.sample(key)(x))

    def sequence(self, x: Array) -> Array:
        """One input as the sequence (T, D) that the first stage takes."""
        return x

    def _over_batch(self, layer: Callable[..., Any], *sequences: tuple[Any, ...]) -> Any:
        """`layer` of every sequence in a batch, together with its memory and padding mask.

        Sequences are (mean, cov) or (mean, cov, valid), all with the same leading axes: a mean (..., T,
        D); its covariance, None where it is certain, which then is `Certain`; (..., T) boolean, False
        for padding, None for none. The layer takes their contents in order.
        """
        num_axes = _check_batch(*sequences)

        def one(sequences: Any) -> Any:
            given = []
            for mean, cov, *valid in sequences:
                known = Certain.zeros(mean.shape, mean.dtype) if cov is None else cov
                given += [mean, known, *valid]
            return layer(*given)

        for _ in range(num_axes):
            one = jax.vmap(one)
        return one(sequences)

    def _begun(self, cov: Covariance, *params: Any) -> Covariance:
        """The covariance, in the module's structure from the first random one of these beliefs on."""
        beliefs = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, Posterior))
        if isinstance(cov, Certain) and not all(isinstance(b, Point) for b in beliefs):
            return self._started(self.settings.structure, cov)
        return cov

    def _started(self, structure: type[Covariance], certain: Covariance) -> Covariance:
        """A covariance of that structure in the place of `Certain`."""
        return started(structure, certain.shape, certain.dtype, self.settings.landmarks)


def _params_of(part: Any) -> Any:
    """The beliefs in a part of a module, each in its place."""
    if isinstance(part, nnx.List):
        return [_params_of(one) for one in part]
    if part is None:
        return None
    return part.posterior if isinstance(part, Belief) else part.params


class Composite(BayesianModule):
    """A module made of others: beliefs, plain networks and weights are those of its `parts` by name.

    Subclasses name their parts, in the order in which `plain_type` takes the parts' plain networks.
    """

    plain_type: ClassVar[Any]

    @property
    def params(self) -> dict[str, Any]:
        """Beliefs about the weights of every part."""
        return {name: getattr(self, name).params for name in self.parts}

    def network(self, params: dict[str, Any]) -> Any:
        return self.plain_type(*(getattr(self, name).network(params[name]) for name in self.parts))


def check_sequences(mean: Array, cov: Covariance | None = None) -> None:
    """Raise unless these are the moments of sequences (..., T, D)."""
    check_array("module(mean, cov)", mean)
    if mean.ndim < 2:
        raise ValueError(
            f"A module needs an input of shape (..., T, D). Got {tuple(mean.shape)}. For a single "
            "row, use x[None, :]."
        )
    batch = tuple(mean.shape[:-2])
    fields = [tuple(jnp.shape(leaf)) for leaf in jax.tree.leaves(cov)]
    if any(shape[: len(batch)] != batch for shape in fields):
        raise ValueError(
            f"A module needs a covariance with the leading axes of its mean, {batch}. Got fields "
            f"{', '.join(map(str, fields))}. For one covariance of the whole batch, broadcast every "
            f"leaf to ({', '.join(map(str, batch))}, *leaf.shape)."
        )


def _check_batch(*sequences: Any) -> int:
    """The number of leading axes of sequences (mean, cov) or (mean, cov, valid), which have to agree."""
    for mean, cov, *valid in sequences:
        check_sequences(mean, cov)
        if not all(v is None or is_boolean(v, tuple(mean.shape[:-1])) for v in valid):
            raise ValueError(
                "`valid` needs one boolean per token, (..., T), False for padding; for a mean of shape "
                f"{tuple(mean.shape)}, {tuple(mean.shape[:-1])}. Got {described(valid[0])}. For "
                "lengths, use jnp.arange(T) < lengths[..., None]."
            )
    shapes = [tuple(mean.shape) for mean, *_ in sequences]
    if len({shape[:-2] for shape in shapes}) > 1:
        raise ValueError(
            "A decoder needs a sequence (..., T, D) and a memory (..., S, E) with the same leading "
            f"axes. Got {' and '.join(map(str, shapes))}. For a single row, use x[None, :]; for one "
            "memory of a whole batch, broadcast it."
        )
    return len(shapes[0]) - 2
