"""The networks of the regression: moments of their outputs, and their outputs at given weights."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

import moment_jax as mj
from experiments.draws import Arrays

Params = dict[str, Any]
"""`beliefs`, the state of the Bayesian module, and `log_noise`, of the noise variance."""

HIDDEN = 50
TOKEN_SIZES: dict[str, Any] = {"num_features": 16, "num_heads": 4, "hidden_features": 32}
RELATIVE_SCALE = 0.03  # spreads begin small, or units are pruned before they have learned anything
START_LOG_NOISE = -1.0


@dataclasses.dataclass(frozen=True)
class Network(abc.ABC):
    """A module without its parameters, and what may be asked of it."""

    num_features: int  # D
    num_outputs: int  # O: 1, the mean, or 2, the mean and the logarithm of the noise variance

    @abc.abstractmethod
    def build(self, key: Array) -> Any:
        """A new module."""

    @abc.abstractmethod
    def moments(self, module: Any, x: Array) -> tuple[Array, Array]:
        """Rows (N, D) -> mean (N, O) and covariance (N, O, O) of the outputs."""

    def outputs(self, module: Any) -> Callable[[Arrays, Array], Array]:
        """(weights, x (N, D)) -> outputs (N, O)."""
        return lambda arrays, x: jnp.asarray(module.network(arrays)(x))

    def start(self, key: Array) -> Params:
        """The parameters before the first update."""
        beliefs = nnx.split(self.build(key))[1]
        return {"beliefs": beliefs, "log_noise": jnp.asarray(START_LOG_NOISE)}

    def module(self, params: Params) -> Any:
        """The Bayesian module with these parameters."""
        graph = nnx.split(nnx.eval_shape(lambda: self.build(jax.random.key(0))))[0]
        return nnx.merge(graph, params["beliefs"])


class Perceptron(Network):
    """One hidden layer of 50 ReLU units: the protocol's."""

    def build(self, key: Array) -> mj.nn.MLP:
        """A new module."""
        sizes = [self.num_features, HIDDEN, self.num_outputs]
        return mj.nn.MLP(
            sizes, structure=mj.Diagonal, relative_scale=RELATIVE_SCALE, rngs=nnx.Rngs(key)
        )

    def moments(self, module: mj.nn.MLP, x: Array) -> tuple[Array, Array]:
        """Hidden units are independent where the input is certain, so this drops nothing."""
        first, last = module.params
        hidden, cov = mj.relu(*mj.dense(x, mj.Diagonal.zeros((len(x), self.num_features)), first))
        mean, own = mj.dense(hidden, cov, last)
        shared = jnp.einsum("nh,ho,hp->nop", cov.variance(), last.kernel.mean, last.kernel.mean)
        same = jnp.eye(mean.shape[1], dtype=bool)
        return mean, jnp.where(same, own.variance()[:, :, None], shared)


class FeatureTransformer(Network):
    """Every feature is a token, its value times a vector plus another (Gorishniy et al., 2021).

    One block, and the mean over the tokens of a linear head, in `Separable`.
    """

    def build(self, key: Array) -> mj.nn.TokenTransformer:
        """A new module."""
        return mj.nn.TokenTransformer(
            self.num_features, self.num_features, self.num_outputs, **TOKEN_SIZES,
            structure=mj.Separable, relative_scale=RELATIVE_SCALE, rngs=nnx.Rngs(key),
        )  # fmt: skip

    def moments(self, module: mj.nn.TokenTransformer, x: Array) -> tuple[Array, Array]:
        """Rows (N, D) -> mean (N, O) and covariance (N, O, O) of the outputs."""
        mean, cov = jax.vmap(mj.mean_pool)(*module(self._tokens(x)))
        return mean[:, 0], jax.vmap(lambda c: c.token_blocks()[0])(cov)

    def outputs(self, module: mj.nn.TokenTransformer) -> Callable[[Arrays, Array], Array]:
        """(weights, x (N, D)) -> outputs (N, O)."""
        return lambda arrays, x: module.network(arrays)(self._tokens(x)).mean(axis=1)

    def _tokens(self, x: Array) -> Array:
        """(N, D) -> (N, D, D): token d is x_d times the d-th unit vector."""
        return x[:, :, None] * jnp.eye(self.num_features, dtype=x.dtype)


NETWORKS: dict[str, Callable[[int, int], Network]] = {
    "perceptron": Perceptron,
    "transformer": FeatureTransformer,
}
"""By the names that the command line takes."""
