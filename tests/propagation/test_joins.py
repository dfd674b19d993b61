"""A value and a function of it that meet again: networks as people write them, against samples."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moment_jax as mj

STRUCTURES = [mj.Full, mj.Separable, mj.Diagonal]
T, D, F = 4, 6, 8
KEYS = iter(jax.random.split(jax.random.key(0), 40))


def belief(*shape, mean=None):
    if mean is None:
        mean = drawn(next(KEYS), shape)
    mean = np.asarray(mean, float)
    return mj.posterior.Factorized(mean, np.full_like(mean, 0.15**2 * (np.mean(mean**2) + 1e-3)))


@functools.partial(jax.jit, static_argnums=1)
def drawn(key, shape):
    return jax.random.normal(key, shape) / shape[0] ** 0.5


WEIGHTS = {
    "e": belief(3, D), "b": belief(D, D), "c": belief(D, D), "up": belief(D, F), "down": belief(F, D),
    "mix": belief(T, F), "back": belief(F, T), "shift": belief(F),
    "gain": belief(D, mean=np.full(D, 0.5)), "scalar": belief(mean=1.0), "slope": belief(mean=0.25),
    "query": belief(1, D), **{n: belief(D, D) for n in "qkvo"}, "head": belief(D, 2),
}  # fmt: skip
X = jax.random.normal(next(KEYS), (T, 3))


def norm(x):
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5)


def unit(x):
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5)


def attend(p, x, memory=None, of_heads=lambda x: x):
    memory = x if memory is None else memory
    q, k, v = (
        (y @ p[n]).reshape(*y.shape[:-1], 2, -1)
        for y, n in ((x, "q"), (memory, "k"), (memory, "v"))
    )
    y = jax.nn.dot_product_attention(of_heads(q), of_heads(k), v)
    return y.reshape(*y.shape[:-2], -1) @ p["o"]


def mlp(p, x):
    return jax.nn.gelu(x @ p["up"], approximate=False) @ p["down"]


def mixed(p, x):
    y = jax.nn.gelu(norm(x).T @ p["mix"] + p["shift"][None], approximate=False)
    return x + (y @ p["back"]).T


def highway(p, x):
    gate = jax.nn.sigmoid(x @ p["c"])
    return gate * jnp.tanh(x @ p["b"]) + (1 - gate) * x


def compared(p, x):
    """Two inputs in one batch, each with its own attention."""
    y = attend(p, norm(jnp.stack([x, jnp.roll(x, 1, axis=1)])))
    return (y[0] - y[1]).mean(0, keepdims=True)


GRAPH = 0.6 * np.eye(T, dtype=float) + 0.1
JOINS = {  # functions of the weights and of h = x @ e
    "a kernel over tokens": mixed,
    "a known matrix over tokens": lambda p, h: GRAPH @ jnp.tanh(h),
    "layer scale": lambda p, h: h + p["gain"][None] * attend(p, norm(h)),
    "a scaled stream": lambda p, h: (lambda h: h + 0.5 * attend(p, norm(h)))(2 * h),
    "a parallel block": lambda p, h: (lambda y: h + attend(p, y) + mlp(p, y))(norm(h)),
    "a norm after the branch": lambda p, h: h + unit(attend(p, norm(h))),
    "pooling by a query": lambda p, h: attend(p, p["query"], norm(h)),
    "the first token looks": lambda p, h: attend(p, norm(h)[:1], norm(h)),
    "normalised queries": lambda p, h: h + attend(p, norm(h), of_heads=unit),
    "keys and values itself": lambda p, h: jax.nn.softmax(h @ h.T) @ h,
    "two inputs": compared,
    "two factors": lambda p, h: jnp.tanh(h @ p["b"])[:, ::-1] * (h @ p["b"]),
    "one minus its function": lambda p, h: h - jnp.tanh(h @ p["b"]),
    "first and last": lambda p, h: h[:1] + jnp.tanh(h @ p["b"])[-1:],
    "side by side": lambda p, h: jnp.concatenate([h @ p["head"], jnp.tanh(h) @ p["b"]], -1),
    "a skip by concatenation": lambda p, h: jnp.concatenate([h, jnp.tanh(h @ p["b"])], -1) @ (
        np.ones((2 * D, 2)) / D
    ),
    "stacked columns": lambda p, h: jnp.stack([h[:, 0], h[:, 3], h[:, 1]], -1) @ p["up"][:3],
    "squeeze and excitation": lambda p, h: h * jax.nn.sigmoid(h.mean(0, keepdims=True) @ p["b"]),
    "highway": highway,
    "a scalar gain": lambda p, h: h + p["scalar"] * jnp.tanh(h @ p["b"]),
    "gains for each token": lambda p, h: h * p["mix"][:, :D],
    "a random slope": lambda p, h: jnp.where(h > 0, h, p["slope"] * h),
    "at most a norm": lambda p, h: h * jnp.minimum(1, 2 / jnp.linalg.norm(h, axis=-1, keepdims=True)),
}  # fmt: skip
KNOWN = {"values": "v", "queries and values": "qv", "queries": "q", "the embedding": "e"}
for _name, _random in KNOWN.items():
    JOINS[f"random {_name}"] = None
BOUNDS = {  # |mean - sampled| and |sd - sampled| on average, in sampled sd
    mj.Full: (0.03, 0.05), mj.Separable: (0.08, 0.2), mj.Diagonal: (0.1, 0.25),
}  # fmt: skip
# What a structure cannot hold: how a query's noise moves all of a row, two halves of one batch.
HARD = {
    mj.Separable: {"random queries": 0.5, "highway": 0.25},
    mj.Diagonal: {"random queries": 0.9, "two inputs": 0.6, "a skip by concatenation": 0.35},
}


def networks(name):
    """The function of the weights, and the weights, of which some are known."""
    fn, known = JOINS[name], name.removeprefix("random ")
    if fn is not None:
        return (lambda p: fn(p, X @ p["e"])), WEIGHTS
    free = KNOWN[known]
    weights = {n: w if n in free else w.mean for n, w in WEIGHTS.items()}
    return (lambda p: (lambda h: h + attend(p, norm(h)))(X @ p["e"])), weights


@pytest.fixture(scope="module")
def sampled():
    """Mean and sd of every network over the same 20,000 draws of the weights, in one program."""
    sizes = []

    def outputs(drawn):
        found = []
        for name in JOINS:
            fn, weights = networks(name)
            is_random = {n: isinstance(w, mj.posterior.Factorized) for n, w in weights.items()}
            given = {n: drawn[n] if is_random[n] else w for n, w in weights.items()}
            found.append(fn(given).ravel())
        sizes[:] = [part.size for part in found]
        return jnp.concatenate(found)

    truth = jax.jit(lambda key: mj.monte_carlo(outputs, WEIGHTS, key, 20_000))(jax.random.key(7))
    ends = np.cumsum(sizes)[:-1]
    parts = (np.split(np.asarray(a), ends) for a in (truth.mean, truth.standard_deviation))
    return dict(zip(JOINS, zip(*parts, strict=True), strict=True))


def in_turn():
    """Every network in `Full`; in the slow part in the others too, in turn, but for hard ones."""
    yield from ((name, mj.Full) for name in JOINS)
    for i, name in enumerate(JOINS):
        for k, structure in enumerate(STRUCTURES[1:]):
            if i % 2 == k or name in HARD[structure]:
                yield pytest.param(name, structure, marks=pytest.mark.slow)


@pytest.mark.parametrize(("name", "structure"), [*in_turn()])
def test_networks_whose_values_meet_again(name, structure, sampled):
    fn, weights = networks(name)

    @jax.jit
    def moments(weights):
        mean, cov = mj.propagate(fn, structure=structure)(weights)
        return mean, cov.sd()

    mean, own = map(np.asarray, moments(weights))
    expected, sd = (a.reshape(mean.shape) for a in sampled[name])
    least = 0.05 * sd.max()  # entries with next to no noise are measured by the others'
    off, far = BOUNDS[structure]
    far = HARD.get(structure, {}).get(name, far)
    assert np.mean(np.abs(mean - expected)) < off * np.mean(sd)
    assert np.mean(np.abs(own - sd) / np.maximum(sd, least)) < far


def gates(p, x):
    h = x @ p["e"]
    weights = jax.nn.softmax(h @ p["b"])[:, :1]
    return (h + weights * jnp.tanh(h @ p["c"]) + jax.nn.log_softmax(h))[-1:]


@pytest.mark.parametrize("structure", STRUCTURES)
def test_single_precision_stays_where_double_is_on(structure):
    weights, x = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), (WEIGHTS, X))
    moments = jax.eval_shape(mj.propagate(gates, structure=structure), weights, x)
    assert all(a.dtype == jnp.float32 for a in jax.tree.leaves(moments))
