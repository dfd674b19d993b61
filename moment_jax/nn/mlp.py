"""`MLP`: dense layers with an activation between them."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Self

from flax import nnx
from jax import Array

from moment_jax.covariance import Covariance
from moment_jax.layers import DenseParams, dense
from moment_jax.nn.activations import Activation, find_activation
from moment_jax.nn.base import BayesianModule, Moments, Stage
from moment_jax.nn.conversion import activation_name, check_loaded
from moment_jax.nn.layers import Dense
from moment_jax.nn.plain import PlainMLP, plain_linear
from moment_jax.nn.settings import Settings


class MLP(BayesianModule):
    """A multilayer perceptron with beliefs about all its weights.

    Rows of the input are tokens of the structure: `Separable` and `Full` keep the covariance between
    rows, which share their weights. For single rows, each with the full covariance of its outputs, make
    every row a sequence of one token, in `Full`.

    Args:
      features: widths, from the input's to the output's.
      activation: "relu", "gelu", "tanh" or "silu".

    >>> import jax.numpy as jnp, moment_jax as mj
    >>> from flax import nnx
    >>> mlp = mj.nn.MLP([8, 16, 2], structure=mj.Full, rngs=nnx.Rngs(0))
    >>> mean, cov = mlp(jnp.ones((10, 1, 8)))
    >>> mean.shape, cov.cov.shape
    ((10, 1, 2), (10, 1, 2, 1, 2))
    """

    parts = ("layers",)
    params_type = staticmethod(lambda layers: layers)

    def __init__(
        self, features: Sequence[int], *, activation: str = "relu", rngs: nnx.Rngs, **settings: Any
    ) -> None:
        if len(features) < 2:
            raise ValueError(
                "`MLP` needs the widths of its input and its output at least, such as [8, 50, 1]. Got "
                f"{list(features)}."
            )
        self.settings = Settings.of(self, settings)
        self.activation = activation
        find_activation(activation)
        self.layers = nnx.List(Dense(a, b, rngs=rngs, **settings) for a, b in pairwise(features))

    @classmethod
    def from_deterministic(cls, network: PlainMLP, **settings: Any) -> Self:
        """See `BayesianModule`; each layer of the network, an nnx.Linear, may have a bias or not."""
        name = "MLP.from_deterministic"
        activation = activation_name(name, network, settings.pop("activation", None))
        layers = nnx.List(Dense.from_deterministic(layer, **settings) for layer in network.layers)
        widths = [layer.in_features for layer in network.layers]
        widths.append(network.layers[-1].out_features)
        new = cls(widths, activation=activation, rngs=nnx.Rngs(0), **settings)
        new.layers = layers
        check_loaded(name, new, network)
        return new

    def load(self, network: PlainMLP) -> None:
        activation_name("MLP.load", network, self.activation)
        super().load(network)

    def network(self, params: list[DenseParams]) -> PlainMLP:
        plain = find_activation(self.activation).plain
        return PlainMLP([plain_linear(layer) for layer in params], plain)

    @property
    def stages(self) -> list[Stage]:
        """Each layer with its activation."""
        activations = [find_activation(self.activation)] * (len(self.layers) - 1)

        def stage(i: int, layer: Dense, activation: Activation) -> Stage:
            def moments(mean: Array, cov: Covariance) -> Moments:
                return activation.moments(*layer(mean, cov))

            def draw(key: Array, x: Array) -> Array:
                return activation.plain(layer.sample(key)(x))

            return Stage(f"layer {i}", moments, draw)

        none = Activation(lambda mean, cov: (mean, cov), lambda x: x)
        pairs = zip(self.layers, [*activations, none], strict=True)
        return [stage(i, *pair) for i, pair in enumerate(pairs)]

    def __call__(self, mean: Array, cov: Covariance | None = None) -> Moments:
        """Moments of the output: (..., T, in) -> (..., T, out); cov None where x is certain."""
        *hidden, last = self.params
        activation = find_activation(self.activation).moments

        def moments(mean: Array, cov: Covariance) -> Moments:
            for layer in hidden:
                mean, cov = activation(*dense(mean, self._begun(cov, layer), layer))
            return dense(mean, self._begun(cov, last), last)

        return self._over_batch(moments, (mean, cov))
