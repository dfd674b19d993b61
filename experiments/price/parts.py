"""The programs of `price`: an encoder block and its layers, plain, sampled, and as moments."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

import moment_jax as mj

PLAIN, SAMPLED = "plain", "sampled"
NETWORKS = 32  # that one call of SAMPLED draws


class Shape(NamedTuple):
    """Tokens and features of each of `batch` sequences; the feed-forward layer has 4 D hidden units."""

    tokens: int
    features: int
    heads: int
    batch: int

    def __str__(self) -> str:
        return f"T {self.tokens}, D {self.features}, {self.heads} heads, batch {self.batch}"


Part = Callable[[Shape, nnx.Rngs], nnx.Module]
"""A plain network (batch, T, D) -> (batch, T, D)."""

PARTS: dict[str, Part] = {
    "block": lambda shape, rngs: mj.nn.EncoderBlock(
        shape.features, shape.heads, norm_first=True, activation="gelu", rngs=rngs
    ),
    "attention": lambda shape, rngs: nnx.MultiHeadAttention(
        shape.heads, shape.features, decode=False, rngs=rngs
    ),
    "feed-forward": lambda shape, rngs: mj.nn.MLP(
        [shape.features, 4 * shape.features, shape.features], activation="gelu", rngs=rngs
    ),
    "layer norm": lambda shape, rngs: nnx.LayerNorm(
        shape.features, use_fast_variance=False, rngs=rngs
    ),
    "dense": lambda shape, rngs: nnx.Linear(shape.features, shape.features, rngs=rngs),
}


def model_of(name: str, part: Part, shape: Shape) -> Any:
    """The plain network, or `mj.Bayesian` of it, in the structure of this name."""
    network = part(shape, nnx.Rngs(0))
    if name == PLAIN:
        return network
    return mj.Bayesian(network, structure=mj.STRUCTURES.get(name, mj.Separable))


def forward_of(name: str, part: Part, shape: Shape) -> Callable[..., Any]:
    """Outputs, or mean and covariance, of a batch: a function of what `arguments_of` gives.

    `name` is a structure's, `PLAIN`, or `SAMPLED`: `NETWORKS` plain networks drawn from the beliefs.
    """
    graph, _ = nnx.split(nnx.eval_shape(lambda: model_of(name, part, shape)))

    def forward(params: Any, *inputs: Any) -> Any:
        model = nnx.merge(graph, params)
        if name != SAMPLED:
            return model(inputs if len(inputs) > 1 else inputs[0])
        keys = jax.random.split(jax.random.key(0), NETWORKS)
        return jax.lax.map(lambda key: model.sample(key)(*inputs), keys, batch_size=8)

    return forward


def gradient_of(forward: Callable[..., Any]) -> Callable[..., Any]:
    """By parameters and inputs, as in a stack, of the mean squares of all that `forward` gives."""

    def loss(arguments: tuple[Any, ...]) -> Array:
        squares = [jnp.mean(y**2) for y in jax.tree.leaves(forward(*arguments))]
        return jnp.stack(squares).sum()

    return lambda *arguments: jax.grad(loss)(arguments)


def arguments_of(name: str, part: Part, shape: Shape) -> tuple[Any, ...]:
    """Parameters (`Factorized`) and inputs (batch, T, D); for a structure their covariance too.

    That is what a dense layer leaves.
    """
    params = nnx.state(model_of(name, part, shape))
    x = jax.random.normal(jax.random.key(1), (shape.batch, shape.tokens, shape.features))
    if name in (PLAIN, SAMPLED):
        return params, x
    return params, x, nnx.jit(model_of(name, PARTS["dense"], shape))(x).cov
