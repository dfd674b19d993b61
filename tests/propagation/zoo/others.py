"""Sets, series, tables and graphs; experts, gates and weights made by networks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn

from tests.propagation.zoo.parts import (
    EDGES,
    PLACE,
    REAL,
    D,
    H,
    T,
    attended,
    attention,
    block,
    dense,
    draws,
    heads,
    mlp,
    network,
    norm,
    real,
    repeated,
    weight,
)


@network()
def perceiver(x):
    """Latents that attend to the input, then to each other."""
    latents = repeated(weight(3, D), len(x))
    latents = block(latents + attention(norm(latents), norm(dense(D, x))))
    return dense(3, latents.mean(1))


@network()
def perceiver_io(x):
    """Queries of the output that attend to the latents."""
    latents = repeated(weight(3, D), len(x))
    latents = block(latents + attention(norm(latents), norm(dense(D, x))))
    queries = repeated(weight(4, D), len(x))
    queries = queries + attention(norm(queries), norm(latents))
    return dense(3, queries + mlp(norm(queries)))


@network()
def set_transformer(x):
    """Induced points, and a seed that pools."""
    x = dense(D, x)
    x = attended(x, attended(repeated(weight(3, D), len(x)), x))
    return dense(3, attended(repeated(weight(1, D), len(x)), x)[:, 0])


@network(real(16, 3))
def patchtst(x):
    """Channels of a series apart, in patches."""
    batch, length, channels = x.shape
    x = jnp.swapaxes(x, 1, 2).reshape(-1, length // 4, 4)
    x = block(dense(D, x) + weight(4, D))
    return jnp.swapaxes(dense(2, x.reshape(batch, channels, -1)), 1, 2)


@network(jnp.asarray(draws.integers(0, 5, (2, 4)), jnp.int32), real(3))
def tab_transformer(codes, numbers):
    """Columns of a table are tokens; numbers join at the end."""
    x = block(nn.Embed(20, D)(codes + 5 * jnp.arange(4)))
    x = jnp.concatenate([x.reshape(len(x), -1), norm(numbers)], axis=-1)
    return dense(3, nn.gelu(dense(2 * D, x)))


@network(real(4, 1), real(4, 3), real(4, 2))
def decision_transformer(returns, states, actions):
    """Returns, states and actions in turns; the action is read at the last state."""
    x = jnp.stack([dense(D, each) for each in (returns, states, actions)], axis=2)
    x = norm((x + weight(4, D)[:, None]).reshape(-1, 12, D))
    x = block(x, mask=jnp.tril(jnp.ones((12, 12), bool)))
    return jnp.tanh(dense(2, norm(x)[:, -2]))


@network(REAL, EDGES, refused="`dot_general`")
def graph_attention(x, edges):
    """The scores are sums of a part of each end, under a leaky ReLU; the graph is an input."""
    x = heads(dense(D, x))
    ends = [(x * weight(H, D // H)).sum(-1).swapaxes(1, 2) for _ in range(2)]
    scores = nn.leaky_relu(ends[0][..., :, None] + ends[1][..., None, :], 0.2)
    weights = nn.softmax(jnp.where(edges[:, None], scores, -1e9))
    x = jnp.einsum("bhqs,bshk->bqhk", weights, x).reshape(-1, T, D)
    return dense(3, nn.elu(x).mean(1))


@network(refused="`scatter-add`")
def message_passing(x):
    """Messages along a ring of nodes are summed where they arrive."""
    x = dense(D, x)
    senders, receivers = jnp.concatenate([PLACE, PLACE]), jnp.concatenate([PLACE + 1, PLACE - 1])
    message = nn.relu(dense(D, jnp.concatenate([x[:, senders], x[:, receivers % T]], axis=-1)))
    arrived = jax.vmap(lambda each: jax.ops.segment_sum(each, receivers % T, T))(message)
    x = x + mlp(jnp.concatenate([x, arrived], axis=-1))[..., :D]
    return dense(3, x.mean(1))


@network(refused="`dot_general`")
def soft_moe(x):
    """Experts work on mixtures of tokens."""
    x = dense(D, x)
    y = norm(x)
    scores = jnp.einsum("btd,dep->btep", y, weight(D, 2, 2))
    combine = nn.softmax(scores.reshape(*x.shape[:2], -1)).reshape(scores.shape)
    slots = jnp.einsum("btd,btep->bepd", y, nn.softmax(scores, axis=1))
    out = jnp.stack([mlp(slots[:, i]) for i in range(2)], axis=1)
    return dense(3, (x + jnp.einsum("bepd,btep->btd", out, combine)).mean(1))


@network(refused="`eq`")
def top_1_experts(x):
    """The expert with the largest probability, times it."""
    x = dense(D, x)
    probability = nn.softmax(dense(2, x))
    gate = probability * jax.nn.one_hot(jnp.argmax(probability, -1), 2, dtype=x.dtype)
    return dense(3, (x + sum(gate[..., i : i + 1] * mlp(x) for i in range(2))).mean(1))


@network()
def all_experts(x):
    """All experts, weighted by their probabilities."""
    x = dense(D, x)
    gate = nn.softmax(dense(2, x))
    return dense(3, (x + sum(gate[..., i : i + 1] * mlp(x) for i in range(2))).mean(1))


@network()
def gmlp(x):
    """Half of the features gates the other, through a matrix over tokens."""
    x = dense(D, x)
    u, v = jnp.split(nn.gelu(dense(2 * D, norm(x))), 2, axis=-1)
    v = jnp.swapaxes(dense(T, jnp.swapaxes(norm(v), 1, 2)), 1, 2)
    return dense(3, (x + dense(D, u * v)).mean(1))


@network()
def hypernetwork(x):
    """The first token makes the weights for all."""
    kernel = dense(24, nn.gelu(dense(D, x[:, 0]))).reshape(-1, 6, 4)
    return dense(3, jnp.tanh(jnp.einsum("bti,bio->bto", x, kernel)).mean(1))


@network(refused="both use the same weights")
def tasks_that_share_a_head(x):
    """Three tasks, each with a vector of its own before one head."""
    x, head, task = block(dense(D, x)).mean(1), nn.Dense(2), weight(3, D)
    return jnp.stack([head(x + task[i]) for i in range(3)], axis=1)
