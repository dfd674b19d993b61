"""Constructors check their fields, JAX transformations skip the checks; a structure of a user's own."""

import pickle
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moment_jax as mj
from moment_jax.covariance import Diagonal, Full, Separable
from tests.builders import (
    ALL_STRUCTURES,
    Pairs,
    assert_close,
    define_pairs,
    random_block,
    random_cov,
    random_dense,
)

T, D = 4, 3
ONES, TOKENS, FEATURES = np.ones((T, D)), np.eye(T), np.eye(D)
POOL = np.ones(T)


def _dense():
    return np.einsum("td,ts,de->tdse", ONES, TOKENS, FEATURES)


# What is called, what came, and the mend.
SHAPES = [
    (lambda: Diagonal(ONES[0]), "Got (3,)", "vector[None, :]"),
    (lambda: Full(np.eye(T * D)), "Got (12, 12)", "cov.reshape"),
    (lambda: Full(ONES[:, :, None, None]), "(4, 3, 1, 1)", "Diagonal"),
    (lambda: Separable(ONES, 1.0, FEATURES, POOL), "(4, 3) and () and", "Separable.zeros"),
    (lambda: Separable(ONES, FEATURES, TOKENS, POOL), "(4, 4) and (3, 3) and (4,), by", "zeros"),
    (lambda: Separable(ONES, -TOKENS, FEATURES, POOL), "Got -1", "not negative"),
    (lambda: Separable(ONES, TOKENS, FEATURES, POOL), "Got 3.0 and 4.0", "Separable.project"),
    (lambda: Diagonal(-ONES), "Got -1", "not negative"),
    (lambda: Full(-_dense()), "Got -1", "not negative"),
    *((partial(s.zeros, (2, T, D)), "Got (2, 4, 3)", "jax.vmap") for s in ALL_STRUCTURES),
    *((partial(s.project, ONES), "(4, 3)", "(T, D, T, D)") for s in ALL_STRUCTURES),
]
TYPES = [
    (lambda: Diagonal(np.ones((T, D), int)), "int64", "astype(jnp.float32)"),
    (lambda: Diagonal([[1.0, 2.0]]), "Got list", "jnp.asarray"),
]


@pytest.mark.parametrize(
    ("call", "got", "mend", "error"),
    [(*case, ValueError) for case in SHAPES] + [(*case, TypeError) for case in TYPES],
)
def test_error(call, got, mend, error):
    with pytest.raises(error, match=re.escape(got)) as caught:
        call()
    assert mend in str(caught.value)
    assert str(caught.value).startswith("`")


@pytest.mark.parametrize("structure", ALL_STRUCTURES)
def test_transformations_may_put_anything_in_the_fields(structure):
    """`vmap` over any axis, derivatives, and `None` or axis numbers instead of arrays."""
    cov = random_cov(jax.random.key(0), structure, (T, D))
    axes = jax.tree.map(lambda _: 0, cov)
    stacked = jax.tree.map(lambda leaf: np.stack([leaf, leaf]), cov)
    for axis in (0, 1, -1):
        turned = jax.eval_shape(jax.vmap(lambda c: c, in_axes=(axes,), out_axes=axis), stacked)
        assert jax.tree.structure(turned) == jax.tree.structure(cov)
    slopes = jax.eval_shape(jax.jacfwd(lambda c: c.rescale(jnp.full((T, D), 2.0))), cov)
    assert jax.tree.map(lambda _: None, slopes) is not None
    assert jax.tree.map(lambda leaf: leaf.shape, stacked) is not None
    assert type(cov)(*jax.tree.leaves(stacked)).shape  # a batch, made by hand


def test_known_arrays_are_checked_while_tracing():
    good, bad = jnp.ones((T, D)), jnp.full((T, D), -1.0)
    assert jnp.array_equal(jax.jit(lambda: Diagonal(good).variance())(), good)
    with pytest.raises(ValueError, match="not negative"):
        jax.jit(lambda: Diagonal(bad).variance())()


@pytest.mark.parametrize("structure", ALL_STRUCTURES)
def test_rounding_below_zero_is_no_error(structure):
    dense = np.float32(_dense())
    dense[0, 0, 0, 0] = -1e-6
    assert structure.project(jnp.asarray(dense)).variance().shape == (T, D)


@pytest.mark.parametrize("structure", ALL_STRUCTURES)
def test_covariances_are_pickled(structure):
    cov = random_cov(jax.random.key(1), structure, (T, D))
    again = pickle.loads(pickle.dumps(cov))
    assert type(again) is structure
    assert_close(again.to_dense(), cov.to_dense())


# -- a user's structure, defined by its projection alone, works wherever a covariance does ------------


KEYS = jax.random.split(jax.random.key(8), 4)
BLOCK = random_block(KEYS[0], 4, 6, 0.3)
X = jax.random.normal(KEYS[1], (4, 4))
block = partial(mj.encoder_block, params=BLOCK, num_heads=2, norm_first=True, activation="gelu")


@pytest.mark.slow
def test_a_structure_that_loses_nothing_is_full():
    """Two tokens, one pair: block, gradient and batch."""
    noise = random_dense(KEYS[2], (2, 4), 0.3)

    def loss(structure, x):
        mean, cov = block(x, structure.project(noise))
        variance = cov.variance()
        return jnp.sum(mean**2) + jnp.sum(variance), (mean, cov.to_dense(), variance)

    def both(structure):
        return jax.grad(partial(loss, structure), has_aux=True)

    ours = jax.jit(jax.vmap(both(Pairs)))(X.reshape(2, 2, 4))
    full = jax.jit(both(mj.Full))(X[:2])
    for batch, alone in zip(*map(jax.tree.leaves, (ours, full)), strict=True):
        assert_close(batch[0], alone)


def test_propagate_takes_it():
    """A gated product with a residual: its operands share an input."""
    params = {"gate": BLOCK.attention.query.kernel, "value": BLOCK.attention.key.kernel}

    def fn(params, x):
        return x + jax.nn.silu(x @ params["gate"]) * (x @ params["value"])

    @jax.jit
    def both(params):
        fns = (mj.propagate(fn, structure=s) for s in (Pairs, mj.Full))
        return [moments(params, X[:2])[1].to_dense() for moments in fns]

    assert_close(*both(params))


def test_a_class_can_be_defined_again():
    """As when a notebook cell runs twice."""
    assert define_pairs() is not Pairs
