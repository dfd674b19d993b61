"""Language models, vision, diffusion, two towers; sets, series, tables and graphs; experts, gates."""

import jax.numpy as jnp
from flax import linen as nn

from tests.propagation.zoo.parts import (
    CAUSAL,
    EDGES,
    IDS,
    IMAGE,
    NEAR,
    REAL,
    WITH_FIRST,
    D,
    H,
    T,
    attend,
    attended,
    attention,
    block,
    dense,
    draws,
    glu,
    heads,
    mlp,
    network,
    norm,
    real,
    repeated,
    rms,
    rotated,
    weight,
)


@network()
def modern_bert(x):
    """GeGLU, rotary positions; attention to all, then to neighbours."""
    x = norm(dense(D, x))
    for mask in (None, NEAR):
        q, k, v = (heads(each) for each in jnp.split(dense(3 * D, norm(x)), 3, axis=-1))
        x = x + dense(D, attend(rotated(q), rotated(k), v, mask=mask))
        x = x + glu(norm(x), nn.gelu)
    return dense(3, x[:, 0])


@network()
def longformer(x):
    """Neighbours, and a global token that sees all and is seen by all."""
    x = dense(D, x)
    for _ in range(2):
        x = block(x, mask=NEAR | WITH_FIRST)
    return dense(3, x[:, 0])


@network()
def qwen3(x):
    """Normalised queries and keys, two key heads for four, SwiGLU."""
    x = dense(D, x)
    y = rms(x)
    q, k, v = heads(dense(D, y), 4), heads(dense(8, y)), heads(dense(8, y))
    k, v = (jnp.repeat(each, 2, axis=2) for each in (rotated(rms(k)), v))
    x = x + dense(D, attend(rotated(rms(q)), k, v, mask=CAUSAL))
    return dense(3, rms(x + glu(rms(x), nn.silu))[:, -1])


@network(IDS)
def gemma2(ids):
    """Caps of the scores and logits, norms before and after, the embedding is the head."""
    embed = nn.Embed(11, D)
    x = embed(ids)
    q, k, v = (heads(each) for each in jnp.split(dense(3 * D, rms(x)), 3, axis=-1))
    y = attend(rotated(q), rotated(k), v, mask=CAUSAL & NEAR, cap=5.0)
    x = x + rms(dense(D, y))
    x = rms(x + rms(glu(rms(x), nn.gelu)))
    return 30 * jnp.tanh(embed.attend(x[:, -1]) / 30)


@network(refused="both use the same weights")
def differential_attention(x):
    """The difference of two attentions to the same values."""
    x = dense(D, x)
    y = rms(x)
    v = heads(dense(D, y))
    one, two = (attend(heads(dense(D, y)), heads(dense(D, y)), v) for _ in range(2))
    return dense(3, (x + dense(D, one - 0.3 * two)).mean(1))


@network()
def reversible(x):
    """Each half is changed by a function of the other."""
    a, b = jnp.split(dense(2 * D, x), 2, axis=-1)
    a = a + block(b)
    b = b + mlp(a)
    return dense(3, jnp.concatenate([a, b], axis=-1).mean(1))


@network(IMAGE, output=lambda out: out[0])
def big_vision(image):
    """A ViT that returns its logits and a dictionary, and pools by attention of a probe."""
    x = nn.Conv(D, (4, 4), (4, 4), padding="VALID")(image).reshape(-1, 4, D) + weight(4, D)
    y = norm(x)
    x = x + nn.MultiHeadDotProductAttention(H)(y, y)
    x = encoded = norm(x + mlp(norm(x)))
    x = nn.MultiHeadDotProductAttention(H)(repeated(weight(1, D), len(image)), x)
    x = (x + mlp(norm(x)))[:, 0]
    return dense(3, x), {"encoded": encoded, "pre_logits": x}


@network()
def deit(x):
    """A class token and a distillation token, each with its head."""
    x = jnp.concatenate([repeated(weight(2, D), len(x)), dense(D, x)], axis=1) + weight(T + 2, D)
    x = norm(block(x))
    return (dense(3, x[:, 0]) + dense(3, x[:, 1])) / 2


def in_windows(x, shift, **options):
    """Attention within windows of two by two tokens of (B, 4, 4, D), moved by `shift`."""
    y = jnp.roll(norm(x), (-shift, -shift), (1, 2)).reshape(-1, 2, 2, 2, 2, D)
    y = jnp.swapaxes(y, 2, 3).reshape(-1, 4, D)
    y = attention(y, **options).reshape(-1, 2, 2, 2, 2, D)
    return jnp.roll(jnp.swapaxes(y, 2, 3).reshape(x.shape), (shift, shift), (1, 2))


@network(IMAGE)
def swin(image):
    """Windows of an image with a table of relative biases; a mask of -100 where they are moved."""
    x = nn.Conv(D, (2, 2), (2, 2), padding="VALID")(image)
    row, column = jnp.arange(4) // 2, jnp.arange(4) % 2
    place = 3 * (row[:, None] - row[None] + 1) + column[:, None] - column[None] + 1
    region = jnp.kron(jnp.arange(4).reshape(2, 2), jnp.ones((2, 2), int))
    window = jnp.swapaxes(jnp.roll(region, (-1, -1), (0, 1)).reshape(2, 2, 2, 2), 1, 2).reshape(
        4, 4
    )
    hidden = jnp.where(window[:, :, None] == window[:, None], 0.0, -100.0).astype(jnp.float32)
    for shift in (0, 1):
        bias = jnp.moveaxis(weight(9, H)[place], -1, 0)[None]
        if shift:
            bias = bias + jnp.tile(hidden, (len(image), 1, 1))[:, None]
        x = x + in_windows(x, shift, bias=bias)
        x = x + mlp(norm(x))
    return dense(3, x.mean((1, 2)))


@network(IMAGE)
def convnext_of_patches(image):
    """Patches, mixing of features, a scale of each."""
    x = nn.Conv(D, (4, 4), (4, 4), padding="VALID")(image).reshape(-1, 4, D)
    return dense(3, (x + weight(D) * mlp(norm(x))).mean(1))


@network(real(T, 6), jnp.array([0.1, 0.7], jnp.float32), jnp.array([1, 3], jnp.int32))
def dit(x, time, label):
    """Diffusion: time and label move, scale and gate every sublayer (adaLN-zero)."""
    angle = time[:, None] * jnp.array([1.0, 3.0, 9.0], jnp.float32)[None]
    condition = mlp(dense(D, jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], -1)), nn.silu)
    condition = nn.silu(condition + nn.Embed(5, D)(label))

    def modulated(x, shift, scale):
        return norm(x, use_bias=False, use_scale=False) * (1 + scale) + shift

    x = dense(D, x) + weight(T, D)
    parts = jnp.split(dense(6 * D, condition)[:, None], 6, axis=-1)
    x = x + parts[2] * attention(modulated(x, *parts[:2]))
    x = x + parts[5] * mlp(modulated(x, *parts[3:5]))
    return dense(3, modulated(x, *jnp.split(dense(2 * D, condition)[:, None], 2, axis=-1)))


@network()
def clip(x):
    """Two towers and the cosine of their outputs."""
    a, b = (dense(8, block(dense(D, part)).mean(1)) for part in jnp.split(x, 2, axis=-1))
    a, b = (part / jnp.linalg.norm(part, axis=-1, keepdims=True) for part in (a, b))
    return jnp.exp(weight()) * (a * b).sum(-1, keepdims=True)


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
