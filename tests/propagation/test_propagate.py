"""Functions as users write them: moments of the library's layers, and of sampled networks."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moment_jax as mj
from moment_jax.propagation.propagator import Propagator
from tests.builders import param_tree, random_block

STRUCTURES = [mj.Diagonal, mj.Separable, mj.Full]


def belief(seed: int, *shape: int, scale: float = 0.1) -> mj.posterior.Factorized:
    return drawn(seed, shape, scale)


@partial(jax.jit, static_argnums=1)
def drawn(seed, shape, scale):
    mean_key, key = jax.random.split(jax.random.key(seed))
    mean = jax.random.normal(mean_key, shape) / shape[0] ** 0.5
    return mj.posterior.Factorized(mean, scale**2 * jax.random.uniform(key, shape))


def assert_same(found, expected):
    (mean, cov), (other, other_cov) = found, expected
    assert jnp.allclose(mean, other, atol=1e-5)
    assert jnp.allclose(cov.to_dense(), other_cov.to_dense(), atol=1e-6)


@pytest.mark.parametrize(
    ("structure", "written", "transform"),
    [
        (mj.Diagonal, lambda x: jnp.where(x > 0, x, 0.0), lambda m, c: mj.activation(m, c, "relu")),
        (mj.Separable, jnp.tanh, lambda m, c: mj.activation(m, c, jnp.tanh)),
        (mj.Full, jax.nn.softmax, mj.softmax),
    ],
)
def test_a_perceptron_is_the_composition_of_its_layers(structure, written, transform):
    weights = {"w": belief(0, 3, 8), "b": belief(1, 8), "v": belief(2, 8, 2)}
    x = jax.random.normal(jax.random.key(3), (4, 3))
    fn = mj.propagate(lambda p, x: written(x @ p["w"] + p["b"][None]) @ p["v"], structure=structure)

    @jax.jit
    def both(p):
        moments = mj.dense(x, structure.zeros(x.shape), mj.DenseParams(p["w"], p["b"]))
        return fn(p, x), mj.dense(*transform(*moments), mj.DenseParams(p["v"]))

    assert_same(*both(weights))


@pytest.mark.parametrize("centred", [True, False])
def test_normalisations_are_known_by_their_values(centred):
    def written(p, x):
        y = x @ p["w"]
        y = y - y.mean(-1, keepdims=True) if centred else y
        return y / jnp.sqrt(jnp.mean(y**2, axis=-1, keepdims=True) + 1e-3) * p["g"][None]

    weights = {"w": belief(0, 3, 6), "g": belief(1, 6)}
    x = jax.random.normal(jax.random.key(3), (4, 3))
    norm = partial(mj.layer_norm, epsilon=1e-3, centres=centred)

    @jax.jit
    def both(p):
        moments = mj.dense(x, mj.Separable.zeros(x.shape), mj.DenseParams(p["w"]))
        return mj.propagate(written)(p, x), norm(*moments, mj.NormParams(p["g"]))

    assert_same(*both(weights))


@pytest.mark.parametrize(
    ("norm_first", "structure"),
    [pytest.param(True, mj.Separable, marks=pytest.mark.slow), (False, mj.Diagonal)],
)
def test_flax_blocks_have_the_moments_of_the_library(norm_first, structure):
    params, options = random_block(jax.random.key(0), 4, 6, 0.3), {"norm_first": norm_first}
    sizes = {"hidden_features": 6, "activation": "gelu", "rngs": nnx.Rngs(0)}
    network = mj.nn.EncoderBlock(4, 2, **sizes, **options)
    beliefs = param_tree(params, 2)
    predict = mj.Bayesian(network, beliefs=beliefs, structure=structure)
    x = jax.random.normal(jax.random.key(1), (3, 4))
    options |= {"num_heads": 2, "mask": jnp.tril(jnp.ones((3, 3), bool)), "activation": "gelu"}

    @jax.jit
    def both(x):
        own = mj.encoder_block(x, structure.zeros(x.shape, x.dtype), params, **options)
        return jax.tree.map(lambda x: x[0], tuple(predict(x[None], mask=options["mask"]))), own

    assert_same(*both(x))
    jax.tree.map(np.testing.assert_allclose, predict.beliefs, beliefs)


@pytest.mark.slow
def test_a_module_of_nnx_against_sampled_networks():
    """The mean without noise is the model, and the sd is that of sampled networks."""
    rngs, x = nnx.Rngs(0), jax.random.normal(jax.random.key(1), (2, 3), jnp.float32)
    first, second, head = (nnx.Linear(*size, rngs=rngs) for size in ((3, 16), (16, 16), (16, 2)))
    norm, dropout = nnx.BatchNorm(16, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)
    model = nnx.Sequential(first, norm, nnx.relu, dropout, second, nnx.silu, head)
    model.eval()
    predict = mj.Bayesian(model, relative_scale=0.1)
    assert abs(predict.check(x, samples=4000).sd_ratio - 1) < 0.05
    np.testing.assert_allclose(predict.scaled(1e-5)(x).mean, nnx.jit(model)(x), atol=1e-5)


def propagated_and_sampled(fns, weights, key):
    """Moments of several functions of the same weights in `Full`, and sampled ones: one program.

    Returns a dictionary of (mean, standard deviation, sampled mean, its error, sampled sd).
    """

    @jax.jit
    def moments(weights):
        found = {n: mj.propagate(fn, structure=mj.Full)(weights) for n, fn in fns.items()}
        truth = mj.monte_carlo(
            lambda w: jnp.concatenate([fn(w).ravel() for fn in fns.values()]), weights, key, 20_000
        )
        ends = np.cumsum([mean.size for mean, _ in found.values()])[:-1]
        parts = (truth.mean, truth.mean_error, truth.standard_deviation)
        parts = zip(*(jnp.split(part, ends) for part in parts), strict=True)
        return {
            name: (mean, jnp.sqrt(cov.variance()), *(x.reshape(mean.shape) for x in sampled))
            for (name, (mean, cov)), sampled in zip(found.items(), parts, strict=True)
        }

    return moments(weights)


def gated(p, x):
    y = x @ p["w"]
    return jax.nn.silu(y @ p["gate"]) * (y @ p["up"])


def perceptrons(p, x):
    x = x @ p["w"]
    return x + jnp.tanh(x @ p["up"]) @ p["down"]


def shared_keys(p, x, heads=3, mask=None, fill=-1e9):
    """Heads of width one with one key and value, summed."""
    q, k, v = ((x @ p[name])[:, :, None] for name in ("w", "key", "value"))
    q = q[:, :heads]
    k, v = jnp.repeat(k, heads, axis=1), jnp.repeat(v, heads, axis=1)
    scores = jnp.einsum("thk,shk->hts", q, k)
    scores = scores if mask is None else scores + jnp.where(mask, 0.0, fill)[None]
    return jnp.einsum("hts,shk->thk", jax.nn.softmax(scores), v).sum(1)


def standardized(x):
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-3)


def tied_decoder(p, x):
    """Embedding, attention and the transposed embedding."""
    x = p["table"][jnp.array([1, 4, 1])]
    x = x + jax.nn.softmax(x @ p["q"] @ (x @ p["k"]).T) @ (x @ p["v"])
    return x @ p["table"].T


def norm(z):
    return jnp.linalg.norm(z, axis=-1, keepdims=True)


def rms(z, epsilon):
    return z * jax.lax.rsqrt(jnp.mean(z * z, axis=-1, keepdims=True) + epsilon)


ROWS = {  # normalisations as users write them
    "L2": lambda z: z / norm(z),
    "L2, guarded": lambda z: z / jnp.maximum(norm(z), 1e-12),
    "L2, safe": lambda z: z / jnp.where(norm(z) == 0, 1.0, norm(z)),
    "RMS": lambda z: rms(z, 1e-12),
    "RMS of little": lambda z: rms(1e-3 * z, 1e-6),
    "RMS, large epsilon": lambda z: rms(z, 0.1),
    "standard": lambda z: jax.nn.standardize(z),
    "clip after": lambda z: jnp.clip(jax.nn.standardize(z), -0.5, 0.5),
}


def logits_of(p):
    return 0.4 * p["logits"][:4] - 3 * jnp.arange(4.0)


FIRST_MASKED = np.tril(np.ones((2, 2), bool)) & np.array([[False], [True]])
WEIGHTS = {
    "w": belief(0, 3, 4, scale=0.4), "up": belief(1, 4, 5), "down": belief(2, 5, 4),
    "gate": belief(3, 4, 5), "bias": mj.posterior.Factorized(jnp.full(4, -1.28), jnp.full(4, 0.49)),
    "logits": mj.posterior.Factorized(jnp.linspace(-1, 1, 8), jnp.full(8, 4.0)),
    "key": belief(4, 3, 1, scale=0.4), "value": belief(5, 3, 1, scale=0.4),
    "table": belief(6, 6, 4, scale=0.4), **{n: belief(7 + i, 4, 4) for i, n in enumerate("qkv")},
}  # fmt: skip
MEANS = jax.tree.map(lambda b: b.mean, WEIGHTS, is_leaf=lambda b: hasattr(b, "mean"))
NOISY = {
    "gated product": gated,
    "residual sum": perceptrons,  # also where its input is no argument
    "gate of its input": lambda p, x: (x @ p["w"]) * jax.nn.sigmoid(x @ p["w"] @ p["q"]),
    **{  # of weights alone
        f.__name__: lambda p, x, f=f: f(p["bias"] + 0 * x[0, 0]) for f in (jax.nn.silu, jax.nn.gelu)
    },
    "silu of a gain": lambda p, x: jax.nn.silu((x @ p["w"]) * p["q"][:1]),
    "silu of a certain gain": lambda p, x: jax.nn.silu(p["bias"][:2, None] * x),
    "log softmax": lambda p, x: jax.nn.log_softmax(p["logits"]),
    "log softmax of layers": lambda p, x: jax.nn.log_softmax(jnp.tanh(x @ p["w"]) @ p["q"]),
    "logsumexp": lambda p, x: jax.nn.logsumexp(2 * x @ p["w"], axis=-1, keepdims=True),
    "logsumexp by hand": lambda p, x: -jnp.log(jnp.exp(x @ p["w"]).sum(0)),
    "where": lambda p, x: jnp.where(x[:, :1] > 0, x @ p["w"], p["bias"][None]),
    "step": lambda p, x: (x @ p["w"] > 0.1).astype(float),
    "step down and line": lambda p, x: jnp.where(x @ p["w"] > 0.2, x @ p["w"], 1.0),
    "sign": lambda p, x: jnp.sign(x @ p["w"]),
    "layer norm": lambda p, x: standardized(x[:, :1] + p["down"][:2]),
    # What looks like something simpler, or like nothing, at a few numbers.
    "softmax of a clip": lambda p, x: jax.nn.softmax(jnp.clip(0.3 * x @ p["w"] + 9, 8.9, 9.1)),
    "narrow step": lambda p, x: jnp.where(x @ p["w"] > 0.05, x @ p["w"], 0.0),
    "narrow hat": lambda p, x: jnp.maximum(0.0, 1 - jnp.abs(x @ p["w"] - 0.31) / 0.05),
    "few levels": lambda p, x: jnp.round(4 * jnp.clip(x @ p["w"], -1, 1)) / 4,
    "log of a clipped softmax": lambda p, x: jnp.log(
        jnp.clip(jax.nn.softmax(logits_of(p)), 1e-4, 1)
    ),
    "log of a probability": lambda p, x: jnp.log(jax.nn.softmax(logits_of(p))[None, 2] + 1e-6),
    "exp of log softmax": lambda p, x: jnp.exp(jax.nn.log_softmax(logits_of(p))),
    **{f"one row: {name}": lambda p, x, f=f: f(x[:1] @ p["w"])[0] for name, f in ROWS.items()},
    "shared keys": shared_keys,
    "masked row": partial(shared_keys, mask=FIRST_MASKED),
    "masked row, lowest": partial(shared_keys, mask=FIRST_MASKED, fill=np.finfo("float32").min),
    "tied": tied_decoder,
}


def of_inputs(fns, num_tokens):
    x = jax.random.normal(jax.random.key(0), (num_tokens, 3))
    return {name: partial(fn, x=x) for name, fn in fns.items()}


@pytest.fixture(scope="module")
def noisy():
    return propagated_and_sampled(of_inputs(NOISY, 2), WEIGHTS, jax.random.key(4))


@pytest.mark.slow
@pytest.mark.parametrize("name", NOISY)
def test_functions_of_noisy_weights_against_samples(name, noisy):
    mean, sd, sampled_mean, _, sampled_sd = noisy[name]
    assert jnp.all(jnp.abs(mean - sampled_mean) < 0.1 * sampled_sd.max())
    assert jnp.all(jnp.abs(sd - sampled_sd) < 0.1 * sampled_sd.max())
    exact = {"gated product": 0.1, "residual sum": 0.03, "silu of a certain gain": 0.05}.get(name)
    if exact:
        assert jnp.all(jnp.abs(mean - sampled_mean) < 0.05 * sampled_sd)
        assert jnp.all(jnp.abs(sd / sampled_sd - 1) < exact)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_row_without_a_key_is_undefined_and_no_other(structure):
    x = jax.random.normal(jax.random.key(0), (2, 3))

    @jax.jit
    def moments(mask):
        fn = partial(shared_keys, mask=mask, fill=-jnp.inf)
        (mean, cov), expected = mj.propagate(fn, structure=structure)(WEIGHTS, x), fn(MEANS, x)
        return jnp.isnan(mean) == jnp.isnan(expected), cov.variance()

    same, variance = moments(FIRST_MASKED)
    assert jnp.all(same)
    assert jnp.all(variance[1] > 0)


PADDING, CAUSAL = jnp.arange(5)[None] < 3, jnp.tril(jnp.ones((5, 5), bool))
ATTENDING = {n: WEIGHTS[n] for n in ("w", *"qkv")}


def looking(p, h, mask=None):
    scores = h @ p["q"] @ (h @ p["k"]).T
    weights = jax.nn.softmax(scores if mask is None else jnp.where(mask, scores, -jnp.inf))
    return h + weights @ (h @ p["v"])


READ = {  # the mask, the read-out, and which tokens have nine tenths of the pool
    "class token": (None, lambda h: h[0], [1, 0, 0, 0, 0]),
    "two tokens": (None, lambda h: h[:2], [1, 1, 0, 0, 0]),
    "a known mean": (None, lambda h: jnp.mean(h, 0, where=PADDING.T), [1, 1, 1, 0, 0]),
    "normalised": (None, lambda h: standardized(h)[None, 3] @ jnp.ones((4, 2)), [0, 0, 0, 1, 0]),
    "mean": (None, lambda h: h.mean(0), None),
    "all": (None, lambda h: h, None),
    "last of causal": (CAUSAL, lambda h: h[-1], [0, 0, 0, 0, 1]),
    "all of causal": (CAUSAL, lambda h: h, None),
    "padded": (PADDING, lambda h: h.mean(0), [1, 1, 1, 0, 0]),
}


@pytest.mark.parametrize("name", READ)
def test_the_pool_is_what_the_output_reads(name, monkeypatch):
    mask, read, expected = READ[name]
    own = Propagator.find_pool

    class Found(Exception):  # noqa: N818
        pass

    def found(self, *args):
        own(self, *args)
        raise Found(self.pool if self.reading else None)  # before anything else is computed

    monkeypatch.setattr(Propagator, "find_pool", found)
    x = jax.random.normal(jax.random.key(0), (5, 3))
    with pytest.raises(Found) as stop:
        mj.propagate(lambda p, x: read(looking(p, x @ p["w"], mask)))(ATTENDING, x)
    (pool,) = stop.value.args
    if expected is None:
        assert pool is None
    else:
        assert jnp.abs(pool - jnp.asarray(expected) / sum(expected)).sum() < 0.2 + 1e-6
        assert jnp.isclose(pool.sum(), 1)


def test_a_class_token_has_its_own_covariance():
    """Sampled networks in which its features' sds are others than those of all other tokens.

    Beside the same read of the moments of all tokens, whose covariance is that of their sum.
    """

    def errors(key):
        keys = jax.random.split(key, 6)
        own, others = jax.random.uniform(keys[0], (2, 1, 4), minval=0.02, maxval=0.2)
        sd = jnp.concatenate([own, jnp.tile(others, (8, 1))])
        mean, chosen = jax.random.normal(keys[1], (9, 4)), jax.random.normal(keys[2], (4, 3))
        kernels = {n: ATTENDING[n] for n in "qkv"}
        truth = mj.monte_carlo(
            lambda p: looking(p, p["x"])[0] @ chosen,
            {**kernels, "x": mj.posterior.Factorized(mean, sd**2)},
            keys[3],
            5_000,
        )
        x = mean, mj.Separable.independent(sd**2)
        read = mj.propagate(lambda p, x: looking(p, x)[0] @ chosen)(kernels, x)[1]
        whole = mj.propagate(looking)(kernels, x)[1]
        summed = whole.map_tokens(jnp.eye(9)[:1]).map_features(chosen)
        ratios = [jnp.sqrt(cov.variance()[0]) / truth.standard_deviation for cov in (read, summed)]
        return [jnp.mean(jnp.abs(ratio - 1)) for ratio in ratios]

    keys = jax.random.split(jax.random.key(0), 12)
    read, summed = (each.mean() for each in jax.jit(lambda k: jax.lax.map(errors, k))(keys))
    assert read < 0.7 * summed, (read, summed)


@pytest.mark.parametrize("mask", [CAUSAL, PADDING], ids=["causal", "padding"])
def test_tokens_hidden_from_the_one_that_is_read_have_no_influence(mask):
    x = jax.random.normal(jax.random.key(0), (5, 3))
    fn = jax.jit(mj.propagate(lambda p, x: looking(p, x @ p["w"], mask)[2]))
    first, second = fn(ATTENDING, x), fn(ATTENDING, x.at[3:].set(7.0))
    assert all(jax.tree.leaves(jax.tree.map(jnp.array_equal, first, second)))


def test_a_receipt_tells_rule_and_line():
    weights, x = {"w": belief(0, 3, 8), "v": belief(1, 8, 5)}, jnp.ones((4, 3))
    options = {"structure": mj.Diagonal, "receipt": True}
    fn = mj.propagate(lambda p, x: jax.nn.gelu(x @ p["w"]) @ p["v"], **options)
    *_, steps = fn(weights, x)
    assert [step.rule for step in steps] == ["dense", "quadrature", "dense"]
    assert all("test_propagate.py" in step.where for step in steps)


def recurrent(p, x):
    return jax.lax.scan(lambda c, row: (jnp.tanh(c @ p[:2] + row), None), jnp.ones(2), x @ p)[0]


def rows_added(p, x):
    return jax.lax.scan(lambda c, row: (c + row, None), x, p)[0]


NO_RULE = r"test_propagate.py.*propagation_rule.*mj.linearised"
SHARED = r"random array in common.*test_propagate.py.*mj.linearised"
TIED = r"a weight on which another depends.*test_propagate.py.*mj.linearised"
CONVOLUTION = nnx.Conv(2, 2, (3,), use_bias=False, rngs=nnx.Rngs(0))
REFUSED = {  # functions of (3, 2) weights and of (2, 3) inputs
    "no rule": (lambda p, x: jnp.sort(x @ p, axis=-1), r"sort.*" + NO_RULE),
    "a branch": (lambda p, x: jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x @ p), "cond.*" + NO_RULE),
    "an index": (lambda p, x: x[jnp.sum(x @ p).astype(int)], r"random index.*test_propagate.py"),
    "a choice": (lambda p, x: jax.nn.one_hot(jnp.argmax(x @ p, -1), 2) @ (x @ p), NO_RULE),
    "logsumexp of a choice": (lambda p, x: jnp.logaddexp((x @ p)[:, 0], (x @ p)[:, 1]), NO_RULE),
    "a function that jumps": (lambda p, x: jnp.floor(x @ p), r"jumps.*" + NO_RULE),
    "many steps": (lambda p, x: jnp.round(16 * (x @ p)) / 16, r"jumps.*" + NO_RULE),
    "random condition": (lambda p, x: jnp.where((x @ p[:, :1]) > 0, x @ p[:, 1:], 1.0), NO_RULE),
    "a comparison of two": (lambda p, x: (x @ p > x @ p[::-1]) * 1.0, r"gt.*" + NO_RULE),
    "the larger of two": (lambda p, x: jnp.maximum(x @ p, x[:, :2]), r"max.*" + NO_RULE),
    "the largest": (lambda p, x: (x @ p).max(0), r"reduce_max.*" + NO_RULE),
    "cumulative sum": (lambda p, x: jnp.cumsum(x @ p, axis=0), r"cumsum.*" + NO_RULE),
    "scattered": (lambda p, x: (x @ p).at[1].set(2.0), r"scatter.*" + NO_RULE),
    "recurrent": (recurrent, r"same random weights at every step.*test_propagate.py.*linearised"),
    "convolution": (
        lambda p, x: CONVOLUTION((x @ p)[None]),
        r"conv_general_dilated.*" + NO_RULE,
    ),
    "dropout": (lambda p, x: nnx.Dropout(0.1, rngs=nnx.Rngs(0))(x @ p), r"propagate.py.*model.eval"),
    "maximum of windows": (
        lambda p, x: jax.lax.reduce_window(x @ p, -jnp.inf, jax.lax.max, (2, 1), (2, 1), "VALID"),
        r"reduce_window_max.*" + NO_RULE,
    ),
    "a quotient": (lambda p, x: x @ p[:, :1] / (x @ p[:, 1:]), r"`div`.*" + NO_RULE),
    "a random divisor": (lambda p, x: x @ p[:, :1] / p[0, 1], r"`div`.*" + NO_RULE),
    "a kernel made of weights": (
        lambda p, x: x[:, :2] @ p[:2] @ jnp.exp(p[2:]).T, r"dot_general.*" + NO_RULE,
    ),
    "shifted": (lambda p, x: x @ p - x @ (p - 1.0), SHARED),
    "multiple beside it": (lambda p, x: x @ p + x @ (2 * p), SHARED),
    "multiple under it": (lambda p, x: jnp.tanh(x @ p) @ (2 * p).T, TIED),
    "a row beside all": (lambda p, x: x @ p + p[:1], SHARED),
    "rows and whole": (lambda p, x: rows_added(p, x[0, :2]) + p.sum(0), SHARED),
    "scanned over twice": (lambda p, x: rows_added(p, rows_added(p, x[0, :2])), SHARED),
    "large and tied": (
        lambda p, x: jnp.tanh(jnp.tile(x, (2000, 1)) @ p) @ p.T, r"more than 16777216 entries.*linear",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_random_is_named_with_its_line(name):
    fn, words = REFUSED[name]
    with pytest.raises(mj.PropagationError, match=words):
        jax.eval_shape(mj.propagate(fn), belief(0, 3, 2), jnp.ones((2, 3)))


def test_the_scale_of_attention_is_read_in_low_precision():
    """Scores without 1 / sqrt(K)."""

    def written(p, x, dtype):
        q, k, v = ((x @ p[name]).astype(dtype) for name in "qkv")
        return (jax.nn.softmax(q @ k.T) @ v).astype(jnp.float32)

    weights = {name: belief(i, 3, 9) for i, name in enumerate("qkv")}
    x = 2 * jax.random.normal(jax.random.key(3), (4, 3))

    @jax.jit
    def moments(weights):
        dtypes = jnp.bfloat16, jnp.float32
        return [mj.propagate(partial(written, dtype=dtype))(weights, x) for dtype in dtypes]

    low, high = moments(weights)
    assert jnp.allclose(low[0], high[0], atol=0.03)
    assert jnp.allclose(low[1].variance(), high[1].variance(), rtol=0.05)


def test_a_shape_cannot_be_random():
    with pytest.raises(jax.errors.ConcretizationTypeError):
        mj.propagate(lambda p, x: jnp.zeros(int(jnp.sum(x @ p))))(belief(0, 3, 2), jnp.ones((2, 3)))


class Strict(nnx.Module):
    """Takes (N, 4) and nothing else."""

    def __init__(self, rngs):
        self.layer = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x):
        _, _ = x.shape
        return self.layer(x)


@pytest.mark.parametrize("linearised", [False, True])
def test_a_model_called_with_other_batch_axes_is_told_so(linearised):
    model = Strict(nnx.Rngs(0))
    of = mj.Bayesian(model, linearised=linearised, structure=mj.Diagonal)
    words = r"has all of theirs.*\(4,\)\. For one input, use x\[None\]"
    with pytest.raises(ValueError, match=words):
        of(jnp.ones(4, jnp.float32))
    with pytest.raises(ValueError, match=r"one axis less.*\(2, 3, 4\)\. Make one of"):
        of(jnp.ones((2, 3, 4), jnp.float32))


def test_loops_and_recomputation_are_entered():
    layers = [belief(i, 3, 3) for i in range(2)]
    stack = jax.tree.map(lambda *a: jnp.stack(a), *layers)
    x = jax.random.normal(jax.random.key(3), (2, 3))

    def loop(layers, x):
        for w in layers:
            x = jax.nn.relu(x @ w)
        return x

    def scanned(stack, x):
        return jax.lax.scan(lambda c, w: (jax.nn.relu(c @ w), None), x, stack)[0]

    integers = jnp.arange(6).reshape(2, 3)  # inputs like others

    @jax.jit
    def moments(layers, stack):
        fns = (loop, jax.jit(loop), jax.checkpoint(loop))
        same = [mj.propagate(scanned)(stack, x), *(mj.propagate(fn)(layers, x) for fn in fns)]
        return same, [mj.propagate(loop)(layers, y) for y in (integers, integers.astype(float))]

    for first, *others in moments(layers, stack):
        for other in others:
            assert_same(other, first)


def halves(w, x):
    y = x @ w
    return jnp.tanh(y[:, :1]) * y[:, 1:]


def patches(w, x):
    """A convolution of patches, each of two rows."""
    y = jnp.tanh(jnp.concatenate([x, x**2]) @ w[:, :1])[None]
    kernel = w[:2, 1:].reshape(2, 1, 2)
    numbers = ("NHC", "HIO", "NHC")
    return jax.lax.conv_general_dilated(y, kernel, (2,), "VALID", dimension_numbers=numbers)[0]


REPEATED = {  # weights that are used twice, each entry in one way
    "tied": lambda w, x: jnp.tanh(x @ w) @ w.T,
    "a layer twice": lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w),
    "the same product": lambda w, x: jnp.tanh(x @ w) * (x @ w),
    "other rows": lambda w, x: jnp.tanh(x[:, :2] @ w[:2]) * w[2:],
    "other columns": halves,
    "row by row": lambda w, x: rows_added(w, x[0])[None],
    "map": lambda w, x: jax.lax.map(lambda row: jnp.tanh(row @ w), x),
    "patches": patches,
    "a batch of layers": lambda w, x: jax.vmap(lambda a, b: jnp.tanh(x[:, :1] @ a) @ b)(
        w[:, None, :1], w[:, None, 1:]
    ),
}


@pytest.fixture(scope="module")
def repeated():
    w = mj.posterior.Factorized(jnp.eye(3) + 0.3, jnp.full((3, 3), 1e-4))
    return propagated_and_sampled(of_inputs(REPEATED, 2), w, jax.random.key(1))


@pytest.mark.parametrize("name", REPEATED)
def test_a_weight_is_one_weight_however_it_is_used(name, repeated):
    _, sd, *_, sampled_sd = repeated[name]
    assert jnp.allclose(sd, sampled_sd, rtol=0.03, atol=1e-6)


def test_variances_are_not_negative_where_factors_cancel():
    w = {"w": belief(0, 4, 4), "gate": belief(1, 4, 3, scale=1e-3)}
    w["other"] = jax.tree.map(jnp.copy, w["gate"])  # nearly the same kernel

    def fn(p):
        y = jnp.eye(5, 4) @ p["w"]
        return (1 + y @ p["gate"]) * (1 - y @ p["other"])

    @jax.jit
    def lowest(w):
        return [jnp.min(mj.propagate(fn, structure=s)(w)[1].variance()) for s in STRUCTURES]

    assert min(lowest(w)) >= 0


def test_a_registered_rule_meets_its_input_by_its_carry():
    p, x = belief(0, 3, 3), jax.random.normal(jax.random.key(1), (2, 3))

    def fn(p, x):
        return x @ p + jnp.arcsinh(x @ p)

    def rule(mean, cov):
        return mj.activation(mean, cov, jnp.arcsinh)

    mj.propagation_rule("asinh")(rule)
    with pytest.raises(mj.PropagationError, match=r"test_propagate.py.*carry=.*mj.linearised"):
        jax.eval_shape(mj.propagate(fn), p, x)
    mj.propagation_rule("asinh", carry=lambda cross, m, cov: cross.rescale(1 / jnp.sqrt(1 + m**2)))(
        rule
    )
    cov, first = (jax.jit(f(fn, structure=mj.Full))(p, x)[1] for f in (mj.propagate, mj.linearised))
    assert jnp.allclose(cov.sd(), first.sd(), rtol=0.01)
