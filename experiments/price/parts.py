"""The programs of `price`: an encoder block and its layers, plain, sampled, and as moments."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

import moment_jax as mj
from experiments import draws

PLAIN, SAMPLED = "plain", "sampled"
NETWORKS = 32  # that one call of SAMPLED draws
GELU = mj.nn.find_activation("gelu").plain
EPSILON = 1e-6  # of the normalisations: the layers' default


class Shape(NamedTuple):
    """Tokens and features of each of `batch` sequences; the feed-forward layer has 4 D hidden units."""

    tokens: int
    features: int
    heads: int
    batch: int

    def __str__(self) -> str:
        return f"T {self.tokens}, D {self.features}, {self.heads} heads, batch {self.batch}"


class Part(NamedTuple):
    """A block or a layer."""

    params: Callable[[Any], Any]  # its beliefs, of a block's
    moments: Callable[[Array, Any, Any, int], tuple[Array, Any]]
    """(mean, cov, beliefs, heads) of one sequence -> (mean, cov)."""
    plain: Callable[[Any, int], nnx.Module]
    """(Arrays in place of the beliefs, heads) -> a Flax module, of a batch."""


PARTS = {
    "block": Part(
        lambda block: block,
        lambda mean, cov, p, heads: mj.encoder_block(
            mean, cov, p, num_heads=heads, norm_first=True, activation=mj.gelu
        ),
        lambda p, heads: mj.nn.PlainEncoderBlock(
            p, num_heads=heads, norm_first=True, activation=GELU, epsilon=EPSILON
        ),
    ),
    "attention": Part(
        attrgetter("attention"),
        lambda mean, cov, p, heads: mj.attention(mean, cov, p, num_heads=heads),
        mj.nn.plain_attention,
    ),
    "feed-forward": Part(
        attrgetter("feed_forward"),
        lambda mean, cov, p, heads: mj.feed_forward(mean, cov, p, activation=mj.gelu),
        lambda p, heads: mj.nn.PlainMLP([*map(mj.nn.plain_linear, (p.hidden, p.output))], GELU),
    ),
    "layer norm": Part(
        attrgetter("norm1"),
        lambda mean, cov, p, heads: mj.layer_norm(mean, cov, p),
        lambda p, heads: mj.nn.plain_norm(p, p.scale.size, EPSILON),
    ),
    "dense": Part(
        attrgetter("attention.query"),
        lambda mean, cov, p, heads: mj.dense(mean, cov, p),
        lambda p, heads: mj.nn.plain_linear(p),
    ),
}


def forward_of(name: str, part: Part, heads: int) -> Callable[..., Any]:
    """Outputs, or mean and covariance, of a batch: a function of what `arguments_of` gives.

    `name` is a structure's, `PLAIN`, or `SAMPLED`: `NETWORKS` plain networks drawn from the beliefs.
    """

    def plain(arrays: Any, x: Array) -> Array:
        module: Any = part.plain(arrays, heads)
        return module(x)

    def sampled(params: Any, x: Array) -> Array:
        return draws.many(plain, draws.weights(params), jax.random.key(0), x, NETWORKS)

    def moments(params: Any, mean: Array, cov: Any) -> Any:
        return jax.vmap(lambda mean, cov: part.moments(mean, cov, params, heads))(mean, cov)

    return {PLAIN: plain, SAMPLED: sampled}.get(name, moments)


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
    block = mj.nn.EncoderBlock(shape.features, shape.heads, rngs=nnx.Rngs(0)).params
    params = part.params(block)
    x = jax.random.normal(jax.random.key(1), (shape.batch, shape.tokens, shape.features))
    if name in (PLAIN, SAMPLED):
        return draws.means(params) if name == PLAIN else params, x
    structure = mj.STRUCTURES[name]

    @jax.jit
    def inputs(layer: mj.DenseParams, x: Array) -> mj.Covariance:
        return jax.vmap(lambda x: mj.dense(x, structure.zeros(x.shape), layer)[1])(x)

    return params, x, inputs(block.attention.query, x)
