"""Modules own parameters and call the layers: their results and settings are those of the layers."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import moment_jax as mj
from tests.builders import KERNEL_FAMILIES, assert_close, tiny_vision

FEATURES, HEADS = 4, 2
X = jax.random.normal(jax.random.key(0), (2, 3, FEATURES), jnp.float32)
MEMORY = jax.random.normal(jax.random.key(4), (2, 5, FEATURES), jnp.float32)
MATRIX = mj.posterior.MatrixNormal
IMAGES = jax.random.normal(jax.random.key(1), (2, 4, 4), jnp.float32)


MODULES = {
    "dense": lambda **s: mj.nn.Dense(FEATURES, 3, rngs=nnx.Rngs(0), **s),
    "norm": lambda **s: mj.nn.LayerNorm(FEATURES, **s),
    "attention": lambda **s: mj.nn.MultiHeadAttention(FEATURES, HEADS, rngs=nnx.Rngs(0), **s),
    "block": lambda **s: mj.nn.EncoderBlock(
        FEATURES, HEADS, hidden_features=6, rngs=nnx.Rngs(0), **s
    ),
    "encoder": lambda **s: mj.nn.Encoder(
        2, FEATURES, HEADS, hidden_features=6, norm_first=True, rngs=nnx.Rngs(0), **s
    ),
    "decoder": lambda **s: mj.nn.Decoder(
        2, FEATURES, HEADS, hidden_features=6, norm_first=True, rngs=nnx.Rngs(0), **s
    ),
    "mlp": lambda **s: mj.nn.MLP([FEATURES, 6, 2], rngs=nnx.Rngs(0), **s),
    "vision": tiny_vision,
}


def inputs(name):
    """The arguments of a module's call."""
    return {"vision": (IMAGES,), "decoder": (X, MEMORY)}.get(name, (X,))


@pytest.mark.parametrize("name", MODULES)
def test_certain_module_is_its_plain_network(name: str):
    """Point beliefs: the mean is Flax's output, nothing is uncertain, and `sample` is the mean."""
    small = name in ("dense", "norm", "attention")
    structure = mj.DEFAULT_STRUCTURE if small else mj.Diagonal  # nothing is uncertain: all are one
    module = MODULES[name](posterior=mj.posterior.Point, structure=structure)

    @nnx.jit
    def every(module, *inputs):
        with jax.numpy_rank_promotion("allow"):
            plain = module.sample(jax.random.key(2))(*inputs), module.mean_network()(*inputs)
            return module(*inputs), plain

    (mean, cov), plain = every(module, *inputs(name))
    # An empty batch gives empty moments.
    empty = jax.eval_shape(module, *(x[:0] for x in inputs(name)))
    for none, some in zip(jax.tree.leaves(empty), jax.tree.leaves((mean, cov)), strict=True):
        assert none.shape == (0, *some.shape[1:])
    for output in plain:
        assert_close(mean, output, 1e-5)
    # The square of float32 rounding is all that quadrature may leave.
    variance = cov if isinstance(cov, jax.Array) else cov.variance()
    assert variance.max() < 1e-12


# Only attention treats dependent weights differently from independent ones.
@pytest.mark.parametrize(
    ("name", "family"), [*(("dense", family) for family in KERNEL_FAMILIES), ("attention", MATRIX)]
)
@pytest.mark.slow
def test_every_family_learns(name, family):
    """One step of gradients through moments and KL is finite, and of the parameters' type."""
    module = MODULES[name](posterior=family, learn_prior=True)

    @nnx.jit
    def step(module, x):
        def loss(module):
            mean, cov = module(x)
            return jnp.mean(mean**2) + jnp.mean(cov.variance()) + 1e-3 * module.kl()

        return nnx.value_and_grad(loss)(module)

    value, gradients = step(module, X[0])
    leaves = jax.tree.leaves(gradients)
    assert jnp.isfinite(value)
    assert value.dtype == jnp.float32
    assert all(leaf.dtype == jnp.float32 and jnp.isfinite(leaf).all() for leaf in leaves)


def test_batch_equals_loop_and_functions():
    module = MODULES["block"](structure=mj.Diagonal)
    start = mj.Diagonal.zeros(X.shape[1:])

    @nnx.jit
    def both(module):
        block = partial(mj.encoder_block, params=module.params, num_heads=HEADS)
        return module(X), jax.lax.map(lambda x: block(x, start), X)

    for mine, theirs in zip(*map(jax.tree.leaves, both(module)), strict=True):
        assert_close(mine, theirs, 1e-5)
    assert jax.eval_shape(module, *jax.eval_shape(module, X))[0].shape == X.shape


def test_kl_is_the_sum_over_beliefs_and_prior_scales_learn():
    module = mj.nn.Dense(3, 2, prior_scale=0.5, rngs=nnx.Rngs(0))

    @nnx.jit
    def both(module):
        prior = mj.posterior.GaussianPrior(0.0, 0.25)
        beliefs = (module.kernel, module.bias)
        return module.kl(), sum(belief.posterior.kl(prior) for belief in beliefs)

    assert_close(*both(module), 1e-6)
    learned = mj.nn.Dense(3, 2, learn_prior=True, rngs=nnx.Rngs(0))
    gradient = nnx.jit(nnx.grad(lambda m: m.kl()))(learned)
    assert gradient["kernel"]["prior_log_scale"][...] != 0


def test_parameters_are_of_their_kinds():
    state = nnx.state(MODULES["dense"](learn_prior=True))
    kinds = {type(leaf) for _, leaf in nnx.iter_graph(state) if isinstance(leaf, nnx.Variable)}
    assert kinds >= {mj.nn.VariationalMean, mj.nn.VariationalScale, mj.nn.PriorScale}


def test_images_of_bytes_are_images_of_numbers():
    images = jax.random.randint(jax.random.key(5), (2, 4, 4), 0, 256).astype(jnp.uint8)
    cut = mj.nn.Patches(2)
    assert (cut(images) == cut(images.astype(jnp.float32))).all()
    moments = jax.eval_shape(tiny_vision(structure=mj.Diagonal), images)
    assert {leaf.dtype for leaf in moments} == {jnp.dtype("float32")}


def test_patches_are_cut_in_rows():
    image = jnp.arange(16.0).reshape(4, 4)
    tokens = mj.nn.Patches(2)(image)
    assert_close(tokens[1], jnp.array([2.0, 3.0, 6.0, 7.0]))
    with pytest.raises(ValueError, match="divisible"):
        mj.nn.Patches(3)(image)


class Scaled(nnx.Module):
    """A model with an argument that each example has of its own."""

    def __init__(self):
        self.gain = nnx.Param(jnp.ones(()))

    def __call__(self, x, row):
        return (x * row * self.gain[...]).sum(axis=1)


SCALED = mj.bayesian(Scaled(), {"gain": mj.posterior.Factorized(jnp.ones(()), jnp.ones(()))})


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: tiny_vision(structure="Full"), TypeError, "mj.Separable"),
        (lambda: tiny_vision(posterior=float), TypeError, "posterior family"),
        (lambda: tiny_vision(prior_scale=0.0), ValueError, "positive"),
        (lambda: MODULES["block"](activation="swish2"), ValueError, "gelu"),
        (lambda: mj.nn.MultiHeadAttention(4, 3, rngs=nnx.Rngs(0)), ValueError, "divide"),
        (lambda: MODULES["dense"]()(jnp.ones(4)), ValueError, r"x\[None, :\]"),
        (lambda: MODULES["dense"]()([[1.0] * 4]), TypeError, "Got list. Use jnp.asarray"),
        (lambda: MODULES["encoder"]()(X.astype(int)), TypeError, r"astype\(jnp.float32\)"),
        (lambda: MODULES["encoder"]()(X[:, :0]), ValueError, r"one token.*Got \(0, 4\)"),
        (lambda: MODULES["dense"]()(X, mj.Separable.zeros((3, 4))), ValueError, "leading axes"),
        (lambda: tiny_vision()([[1.0]]), ValueError, "Got list. Use jnp.asarray"),
        (lambda: MODULES["dense"](prior=2.0), TypeError, "`Dense` takes.*prior_scale.*Got prior"),
        (
            lambda: MODULES["block"](heads=2),
            TypeError,
            "`EncoderBlock` takes.*num_heads.*Got heads",
        ),
        (lambda: MODULES["encoder"](heads=2), TypeError, "`Encoder` takes.*num_blocks.*Got heads"),
        (lambda: tiny_vision(num_head=2), TypeError, "`VisionTransformer` takes.*Got num_head"),
        (lambda: mj.nn.total_kl(nnx.Linear(2, 2, rngs=nnx.Rngs(0))), ValueError, "mj.nn"),
        (lambda: mj.nn.Belief(jnp.ones(3), family=MATRIX), ValueError, "Factorized"),
        (lambda: mj.nn.Decoder(0, 4, 2, rngs=nnx.Rngs(0)), ValueError, "num_blocks >= 1"),
        (lambda: mj.nn.MLP([3, 0, 1], rngs=nnx.Rngs(0)), ValueError, r"positive.*Got \(3, 0\)"),
        (lambda: tiny_vision(num_classes=-1), ValueError, r"positive number.*-1\)"),
        (lambda: SCALED(X, row=X[:, :1]), ValueError, r"keyword arguments.*Got row.*by position"),
        (lambda: MODULES["decoder"]()(X, MEMORY[0]), ValueError, "same leading axes"),
        (lambda: MODULES["encoder"]()(X, valid=jnp.ones((2, 2), bool)), ValueError, "lengths"),
    ],
)
def test_messages(call, error, words):
    with pytest.raises(error, match=words):
        call()
