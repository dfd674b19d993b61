"""What the networks of the zoo have in common: a module, inputs, layers."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

import moment_jax as mj

D, T, H = 16, 8, 2  # features, tokens, heads
draws = np.random.default_rng(5)
real = lambda *shape: jnp.asarray(draws.normal(size=(2, *shape)), jnp.float32)  # noqa: E731
REAL, IMAGE = real(T, 6), real(8, 8, 3)
IDS = jnp.asarray(draws.integers(0, 11, (2, T)), jnp.int32)
EDGES = jnp.asarray((draws.random((2, T, T)) < 0.3) | np.eye(T, dtype=bool))

PLACE = jnp.arange(T)
APART = PLACE[:, None] - PLACE[None]
CAUSAL, NEAR = APART >= 0, jnp.abs(APART) <= 2
WITH_FIRST = (PLACE[:, None] == 0) | (PLACE[None] == 0)


class Network(nn.Module):
    """A function of the inputs as a module."""

    forward: Callable[..., Any]

    @nn.compact
    def __call__(self, *inputs):
        return self.forward(*inputs)


class Case(NamedTuple):
    """A network, its inputs, what of its output is an array, and the refusal, if it is refused."""

    forward: Callable[..., Any]
    inputs: tuple[jax.Array, ...]
    output: Callable[[Any], jax.Array]
    refused: str | None

    def network(self):
        """The module with random weights, bound."""
        module, random = Network(self.forward), np.random.default_rng(0)

        def drawn(path, like):
            z, name = random.normal(size=like.shape), path[-1].key
            if name == "kernel":
                z = z / np.sqrt(np.prod(like.shape[:-1]))
            elif name != "embedding":
                z = 0.5 * z + (name == "scale")
            return jnp.asarray(z, jnp.float32)

        shapes = jax.eval_shape(module.init, jax.random.key(0), *self.inputs)
        return module.bind(jax.tree_util.tree_map_with_path(drawn, shapes))

    def model(self):
        """In the default structure; weights have a tenth of their size as sd."""
        options = {} if self.output is whole else {"output": self.output}
        return mj.Bayesian(self.network(), relative_scale=0.1, **options)


ZOO: dict[str, Case] = {}


def whole(output):
    return output


def network(*inputs, output=whole, refused=None):
    """Add the function that follows; `refused` is what the pass must say if it cannot take it."""

    def add(forward):
        ZOO[forward.__name__] = Case(forward, inputs or (REAL,), output, refused)
        return forward

    return add


class Weight(nn.Module):
    """An array of weights of this shape."""

    shape: tuple[int, ...]

    @nn.compact
    def __call__(self):
        return self.param("weight", nn.initializers.zeros, self.shape)


def weight(*shape):
    return Weight(shape)()


def dense(features, x, **options):
    return nn.Dense(features, **options)(x)


def norm(x, **options):
    return nn.LayerNorm(**options)(x)


def rms(x):
    return nn.RMSNorm()(x)


def mlp(x, act=nn.gelu):
    return dense(x.shape[-1], act(dense(2 * x.shape[-1], x)))


def glu(x, act):
    return dense(x.shape[-1], act(dense(2 * D, x)) * dense(2 * D, x))


def heads(x, count=H):
    return x.reshape(*x.shape[:-1], count, -1)


def attend(q, k, v, *, mask=None, bias=None, cap=None):
    """Attention of q (B, T, H, K) over k and v (B, S, H, K); (B, T, H K)."""
    scores = jnp.einsum("bqhk,bshk->bhqs", q, k) * q.shape[-1] ** -0.5
    if bias is not None:
        scores = scores + bias
    if cap is not None:
        scores = cap * jnp.tanh(scores / cap)
    if mask is not None:
        scores = jnp.where(mask, scores, -1e9)
    out = jnp.einsum("bhqs,bshk->bqhk", nn.softmax(scores), v)
    return out.reshape(*out.shape[:2], -1)


def attention(x, memory=None, **options):
    memory = x if memory is None else memory
    q, k, v = (heads(dense(D, each)) for each in (x, memory, memory))
    return dense(D, attend(q, k, v, **options))


def block(x, **options):
    x = x + attention(norm(x), **options)
    return x + mlp(norm(x))


def attended(x, memory):
    """Set Transformer's MAB without its norms."""
    x = x + attention(x, memory)
    return x + mlp(x)


def rotated(x):
    """Rotary positions, in halves."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None] / 100 ** (jnp.arange(half)[None] / half)
    angle = angle.astype(jnp.float32)[None, :, None]
    a, b = jnp.split(x, 2, axis=-1)
    c, s = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([a * c - b * s, b * c + a * s], axis=-1)


def repeated(x, batch):
    """The same rows for each example."""
    return jnp.broadcast_to(x, (batch, *x.shape))
