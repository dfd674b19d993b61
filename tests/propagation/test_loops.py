"""Loops over stacked weights and `jax.checkpoint` are kept; memories, random inputs and landmarks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moment_jax as mj
from tests.builders import assert_close

pytestmark = pytest.mark.usefixtures("ranks_of_a_user")

KEY, T, D = jax.random.key(0), 4, 4
X = jax.random.normal(KEY, (2, T, D))
CAUSAL = jnp.tril(jnp.ones((T, T), bool))
VALID = (jnp.arange(T) < jnp.array([[3], [4]]))[:, None, None, :]


def stacked(tree):
    """Beliefs of a list of blocks as those of a scanned stack."""
    if not isinstance(tree, dict):
        return tree
    if 0 in tree:
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *(tree[i] for i in range(len(tree))))
    return {name: stacked(part) for name, part in tree.items()}


def pair(kind, structure, remat, *sizes):
    """A network with a list of blocks, and one with a scan over the same weights."""
    networks = (
        kind(*sizes, norm_first=True, scan=scan, remat=remat, rngs=nnx.Rngs(0))
        for scan in (False, True)
    )
    plain, scanned = networks
    listed = mj.Bayesian(plain, structure=structure)
    return listed, mj.Bayesian(scanned, beliefs=stacked(listed.beliefs), structure=structure)


def traced(model, *inputs, **options):
    """The program's text, and its results."""
    program = jax.jit(lambda *x: tuple(model(*x, **options))).trace(*inputs)
    return str(program.jaxpr), program.lower().compile()(*inputs)


CALLS = [((X,), {}), ((X,), {"mask": CAUSAL}), ((X, VALID), {})]


@pytest.mark.parametrize(
    ("structure", "remat", "calls"),
    [
        (mj.Diagonal, False, CALLS[1:2]),
        (mj.Diagonal, True, CALLS[2:]),
        pytest.param(mj.Separable, True, CALLS[:1], marks=pytest.mark.slow),
    ],
)
def test_a_scan_is_the_loop_over_its_blocks(structure, remat, calls):
    listed, scanned = pair(mj.nn.Encoder, structure, remat, 3, D, 2)
    for inputs, options in calls:
        (text, a), (other, b) = (traced(m, *inputs, **options) for m in (scanned, listed))
        jax.tree.map(lambda x, y: assert_close(x, y, 1e-6), a, b)
        assert all(("checkpoint" in each or "remat" in each) == remat for each in (text, other))
        assert len(text) < 0.85 * len(other)  # two blocks for three


@pytest.mark.slow
def test_gradients_pass_through_a_kept_loop():
    listed, scanned = pair(mj.nn.Encoder, mj.Diagonal, True, 3, D, 2)

    def gradient(model):
        graph, state = nnx.split(model)
        loss = lambda state: jnp.sum(nnx.merge(graph, state)(X).variance)  # noqa: E731
        return nnx.to_pure_dict(jax.jit(jax.grad(loss))(state))["weights"]

    a, b = stacked(gradient(listed)), gradient(scanned)
    jax.tree.map(lambda x, y: assert_close(x, y, 1e-6), a, b)


@pytest.mark.slow
def test_a_decoders_memory_is_independent_in_every_block():
    listed, scanned = pair(mj.nn.Transformer, mj.Separable, False, D, 2, 1, 3)
    y = jax.random.normal(jax.random.key(1), (2, 3, D))
    (text, a), (other, b) = (traced(m, X, y) for m in (scanned, listed))
    jax.tree.map(lambda x, y: assert_close(x, y, 1e-6), a, b)
    assert len(text) < 0.85 * len(other)  # two decoder blocks for three
    notes = [s.assumes for s in listed.explain(X, y) if s.rule == "cross_attention"]
    assert ["attended to it before" in note for note in notes] == [False, True, True]


def test_queries_that_are_a_part_of_the_memory_share_its_noise():
    """A class token that looks at all: the first row of self-attention."""

    class ClassAttention(nnx.Module):
        def __init__(self, count):
            self.count = count
            self.embed = nnx.Linear(D, D, rngs=nnx.Rngs(0))
            self.attention = nnx.MultiHeadAttention(2, D, decode=False, rngs=nnx.Rngs(1))

        def __call__(self, x):
            x = self.embed(x)
            return self.attention(x[:, : self.count], x, x)

    def moments(count):
        model = mj.Bayesian(ClassAttention(count), structure=mj.Full, batch_axes=0)
        found = nnx.jit(lambda model, x: model(x))(model, X[:1])
        return found.mean[0], found.cov.cov

    (mean, cov), (first, of_first) = moments(T), moments(1)
    assert jnp.allclose(first, mean[:1], rtol=1e-5)
    assert jnp.allclose(of_first, cov[:1, :, :1], rtol=1e-4, atol=1e-7)


def test_random_inputs_and_their_functions_share_their_noise():
    """X + f(x) of a random x, through a layer norm and a dense layer: sampled truth."""
    kernel = mj.posterior.Factorized(jnp.eye(D), jnp.full((D, D), 0.01))
    mean = jax.random.normal(KEY, (1, D))
    variance = jnp.full((1, D), 0.04)
    cov = mj.Full.independent(variance)

    def fn(w, x):
        centred = x - x.mean(axis=-1, keepdims=True)
        return x + (centred / jnp.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-6)) @ w

    found, out = mj.propagate(fn, structure=mj.Full)(kernel, (mean, cov))
    beliefs = {"w": kernel, "x": mj.posterior.Factorized(mean, variance)}
    truth = mj.monte_carlo(lambda p: fn(p["w"], p["x"]), beliefs, KEY, 20_000)
    np.testing.assert_allclose(out.sd(), jnp.sqrt(truth.variance), rtol=0.05)
    assert (jnp.abs(found - truth.mean) < 0.1 * out.sd()).all()
    with pytest.raises(ValueError, match="in Separable of shape"):
        mj.propagate(fn)(kernel, (mean, cov))


@pytest.mark.slow
def test_landmarks_are_those_of_the_layers():
    t, r = 9, 3
    x = jax.random.normal(KEY, (t, D))
    model = mj.Bayesian(nnx.Linear(D, D, rngs=nnx.Rngs(0)), landmarks=r)

    @nnx.jit
    def both(model, x):
        params = mj.DenseParams(model.beliefs["kernel"], model.beliefs["bias"])
        start = mj.Separable.zeros(x.shape, x.dtype, landmarks=r)
        return jax.tree.map(lambda x: x[0], tuple(model(x[None]))), tuple(
            mj.dense(x, start, params)
        )

    jax.tree.map(assert_close, *both(model, x))
    encoder = mj.Bayesian(mj.nn.Encoder(1, D, 2, rngs=nnx.Rngs(0)), landmarks=r)
    valid = (jnp.arange(t) < 7)[None, None, None]
    padded, other = (jax.jit(encoder)(y[None], valid) for y in (x, x.at[7:].set(5.0)))
    assert_close(padded.sd[:, :7], other.sd[:, :7])
    assert padded.cov.tokens.columns.shape == (1, t, r)
    everywhere = jax.eval_shape(encoder.replace(landmarks=None), x[None], valid)
    assert everywhere.cov.tokens.shape == (1, t, t)
    with pytest.raises(ValueError, match="landmarks=9"):
        encoder(x[None], mask=jnp.tril(jnp.ones((t, t), bool)))
