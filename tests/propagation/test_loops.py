"""Loops over stacked weights and `jax.checkpoint` are kept; memories, random inputs and landmarks."""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moment_jax as mj
from moment_jax.propagation import blocks, propagator
from tests.builders import KERNEL_FAMILIES, assert_close, random_kernel

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


@contextlib.contextmanager
def written_out():
    """Lists of blocks are taken one by one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "FEWEST", 99)
        yield


def lengths(program):
    """Of the loops in a program's text."""
    return set(map(int, re.findall(r"\blength=(\d+)", program)))


def programs(listed, scanned, *inputs, **options):
    """Of a list of blocks one by one, as a loop, and of a scan: the text, and the results."""
    with written_out():
        one_by_one = traced(listed, *inputs, **options)
    return one_by_one, *(traced(m, *inputs, **options) for m in (listed, scanned))


@pytest.mark.parametrize(
    ("structure", "remat", "calls"),
    [
        (mj.Diagonal, False, CALLS[1:2]),
        (mj.Diagonal, True, CALLS[2:]),
        pytest.param(mj.Separable, True, CALLS[:1], marks=pytest.mark.slow),
    ],
)
def test_a_list_and_a_scan_are_one_loop(structure, remat, calls):
    listed, scanned = pair(mj.nn.Encoder, structure, remat, 3, D, 2)
    for inputs, options in calls:
        (text, truth), *loops = programs(listed, scanned, *inputs, **options)
        assert not lengths(text) & {2, 3}
        for other, found in loops:
            jax.tree.map(lambda x, y: assert_close(x, y, 1e-6), truth, found)
            assert lengths(other) & {2, 3}


@pytest.mark.slow
@pytest.mark.parametrize("remat", [False, True])
def test_gradients_pass_through_a_kept_loop(remat):
    listed, scanned = pair(mj.nn.Encoder, mj.Diagonal, remat, 3, D, 2)

    def gradient(model):
        graph, state = nnx.split(model)
        loss = lambda state: jnp.sum(nnx.merge(graph, state)(X).variance)  # noqa: E731
        return nnx.to_pure_dict(jax.jit(jax.grad(loss))(state))["weights"]

    with written_out():
        truth = stacked(gradient(listed))
    for found in (stacked(gradient(listed)), gradient(scanned)):
        jax.tree.map(lambda x, y: assert_close(x, y, 1e-6), truth, found)


@pytest.mark.slow
def test_a_decoders_memory_is_independent_in_every_block():
    listed, scanned = pair(mj.nn.Transformer, mj.Separable, False, D, 2, 3)
    y = jax.random.normal(jax.random.key(1), (2, 3, D))
    (_, truth), *loops = programs(listed, scanned, X, y)
    for text, found in loops:
        jax.tree.map(lambda x, y: assert_close(x, y, 1e-6), truth, found)
        assert lengths(text) & {2, 3}
    with written_out():
        steps = listed.explain(X, y)
    notes = [s.assumes for s in steps if s.rule == "cross_attention"]
    assert ["attended to it before" in note for note in notes] == [False, True, True]


def layer(x, w):
    return x + jax.nn.relu(x @ w)


def in_turn(x, weights, skip=0.0, scale=lambda i: 1.0):
    for i, w in enumerate(weights):
        x = scale(i) * layer(x, w) + skip
    return x


LISTS = {  # of layers of weights (D, D), and how many of them a loop takes
    "alike": (in_turn, 6),
    "two kinds in turn": (lambda x, ws: in_turn(x, ws, scale=lambda i: 1.0 + i % 2), 3),
    "numbers of their own": (lambda x, ws: in_turn(x, ws, scale=lambda i: 1.0 + i), 0),
    "other last digits": (lambda x, ws: in_turn(x, ws, scale=lambda i: 1e-3 + 1e-10 * i), 0),
    "after a certain one": (lambda x, ws: in_turn(layer(X[1], jnp.eye(D)), ws), 6),
    "with what came in": (lambda x, ws: in_turn(x, ws, skip=0.1 * x), 0),
    "a certain array for all": (lambda x, ws: in_turn(x, ws, skip=jnp.arange(4.0)), 6),
    "arrays of their own": (
        lambda x, ws: in_turn(x, [w + jnp.full((D, D), i) for i, w in enumerate(ws)]), 6
    ),
    "the last one reads the first": (lambda x, ws: in_turn(x, ws) + layer(x, ws[0]), 0),
    "a result in the midst is read": (lambda x, ws: in_turn(y := in_turn(x, ws[:3]), ws[3:]) + y, 0),
    "one weight for two": (lambda x, ws: in_turn(x, [*ws[:4], ws[3]]), 0),
    "tied": (lambda x, ws: in_turn(x, ws) @ ws[0].T, 0),
}  # fmt: skip


def list_and_loop(fn, weights):
    """The program and the moments of a list, one by one and as a loop, or their error."""

    def found():  # a new function each time, which JAX has not traced before
        pass_ = mj.propagate(lambda ws, x: fn(x @ ws[0], ws[1:]), structure=mj.Full)
        try:
            return traced(pass_, weights, X[0])
        except mj.PropagationError as error:
            return str(error), None

    with written_out():
        truth = found()
    return truth, found()


@pytest.mark.parametrize("name", LISTS)
def test_layers_in_a_list_are_a_loop_if_nothing_else_links_them(name, monkeypatch):
    fn, layers = LISTS[name]
    monkeypatch.setattr(blocks, "SMALLEST", 1)
    weights = [
        random_kernel(key, mj.posterior.Factorized, (D, D)) for key in jax.random.split(KEY, 7)
    ]
    (text, truth), (program, moments) = list_and_loop(fn, weights)
    if truth is None:
        assert program == text
        return
    jax.tree.map(lambda x, y: assert_close(x, y, 1e-6), truth, moments)
    assert lengths(program) == ({layers} if layers else set())


@pytest.mark.parametrize("family", KERNEL_FAMILIES)
def test_a_loop_takes_beliefs_of_every_family_that_are_alike(family, monkeypatch):
    monkeypatch.setattr(blocks, "SMALLEST", 1)
    keys = jax.random.split(KEY, 8)
    weights = [random_kernel(key, family, (D, D)) for key in keys[:5]]
    others = mj.posterior.FullNormal if family is not mj.posterior.FullNormal else family
    weights += [random_kernel(key, others, (D, D)) for key in keys[5:]]
    weights[0] = random_kernel(keys[0], mj.posterior.Factorized, (D, D))
    (_, truth), (program, moments) = list_and_loop(in_turn, weights)
    jax.tree.map(lambda x, y: assert_close(x, y, 1e-6), truth, moments)
    assert lengths(program) == ({7} if others is family else {4, 3})


def test_what_is_off_in_a_loop_is_named(monkeypatch):
    monkeypatch.setattr(blocks, "SMALLEST", 1)
    monkeypatch.setitem(propagator._REGISTERED, "sin", [])
    mj.propagation_rule("sin")(lambda mean, cov, **_: (jnp.sin(mean) + 1, cov))

    def sines(weights, x):
        for w in weights:
            x = jnp.sin(x @ w)
        return x

    weights = [
        random_kernel(key, mj.posterior.Factorized, (D, D)) for key in jax.random.split(KEY, 4)
    ]
    assert lengths(str(jax.make_jaxpr(mj.propagate(sines))(weights, X[0]))) == {4}
    with pytest.raises(mj.PropagationError, match="first operation that is off is `sin`"):
        mj.propagate(sines, receipt=True)(weights, X[0])


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
        found = jax.tree.map(lambda x: x[0], tuple(model(x[None])))
        return found, tuple(mj.dense(x, start, params))

    jax.tree.map(assert_close, *both(model, x))
    encoder = mj.Bayesian(mj.nn.Encoder(1, D, 2, rngs=nnx.Rngs(0)), landmarks=r)
    valid = (jnp.arange(t) < 7)[None, None, None]
    few, everywhere = (
        jax.eval_shape(model, x[None], valid).cov.tokens
        for model in (encoder, encoder.replace(landmarks=None))
    )
    assert few.columns.shape == (1, t, r)
    assert everywhere.shape == (1, t, t)
    with pytest.raises(ValueError, match="landmarks=9"):
        encoder(x[None], mask=jnp.tril(jnp.ones((t, t), bool)))
