"""Log-probabilities, divergences and usage beside the textbook's formulas."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats

import moment_jax as mj
from tests.builders import assert_close

LOGITS = np.random.default_rng(0).normal(size=(7, 5)) * 3
HOLES = np.where(np.random.default_rng(1).random((7, 5)) < 0.3, -np.inf, LOGITS)
HOLES[0] = [-np.inf, 0.2, -np.inf, -np.inf, -np.inf]


log_probabilities = jax.jit(mj.discrete.log_probabilities)
categorical_kl = jax.jit(mj.discrete.categorical_kl)
perplexity = jax.jit(mj.discrete.perplexity)


def test_log_probabilities_are_exact_to_minus_infinity():
    found = log_probabilities(HOLES)
    assert_close(np.exp(found), scipy.special.softmax(HOLES, axis=1))
    row = np.asarray([0.0, -745.0, -1e30, -np.inf, -1e300])
    assert log_probabilities(row).tolist() == row.tolist()
    assert (log_probabilities(np.full((7, 5), -np.inf)) == -np.inf).all()


def test_kl_is_that_of_the_textbook():
    p, q = scipy.special.softmax(HOLES, axis=1), scipy.special.softmax(LOGITS[::-1], axis=1)
    entropy = scipy.stats.entropy(p, axis=1)
    assert_close(categorical_kl(HOLES, LOGITS[::-1]), scipy.stats.entropy(p, q, axis=1))
    uniform = categorical_kl(HOLES + 17.0)
    assert_close(uniform, np.log(5) - entropy)
    assert_close(uniform[0], np.log(5.0))
    assert_close(jax.jit(mj.discrete.categorical_entropy)(HOLES), entropy)


def test_kl_where_the_prior_has_nothing():
    some, other = np.asarray([0.0, -np.inf]), np.asarray([-np.inf, 0.0])
    assert categorical_kl(some, other) == np.inf
    assert categorical_kl(some, some) == 0
    assert categorical_kl(np.full((7, 5), -np.inf)).tolist() == [0] * 7


def test_gradients_are_finite_and_zero_where_nothing_can_occur():
    rows = np.concatenate([HOLES, np.full((1, 5), -np.inf), [[0, -1e30, -800, -np.inf, 1]]])
    names = ("categorical_kl", "categorical_entropy", "perplexity")

    @jax.jit
    def every(rows):
        return [
            jax.value_and_grad(lambda x, f=name: jnp.sum(getattr(mj.discrete, f)(x)))(rows)
            for name in names
        ]

    for dtype in (np.float32, np.float64):
        for name, (value, slope) in zip(names, every(rows.astype(dtype)), strict=True):
            chex.assert_tree_all_finite((value, slope))
            assert not np.asarray(slope)[np.isneginf(rows)].any(), name


def test_gradient_of_kl_against_finite_differences():
    value_and_grad = jax.jit(jax.vmap(jax.value_and_grad(mj.discrete.categorical_kl, (0, 1))))
    pair, steps = LOGITS[:2], 1e-6 * np.eye(10).reshape(10, 2, 5)
    up, down = (value_and_grad(*np.moveaxis(pair + s * steps, 1, 0))[0] for s in (1, -1))
    slopes = [slope[0] for slope in value_and_grad(*pair[:, None].repeat(10, axis=1))[1]]
    assert_close(np.stack(slopes), (np.asarray(up) - down).reshape(2, 5) / 2e-6, 1e-8)


def test_usage_and_perplexity():
    code_usage = jax.jit(mj.discrete.code_usage, static_argnums=1)
    usage = code_usage(np.asarray([[0, 1], [1, 3], [-1, 9]]), 4)
    assert_close(usage, np.asarray([0.25, 0.5, 0.0, 0.25]), 1e-6)
    expected = np.exp(scipy.stats.entropy(np.asarray(usage)))
    with np.errstate(divide="ignore"):
        assert_close(perplexity(np.log(usage)), expected, 1e-6)
    assert not code_usage(np.full((3, 2), -1), 4).any()
    assert_close(perplexity(np.zeros(8)), 8.0, 1e-12)


@pytest.mark.parametrize("fn", [mj.discrete.categorical_kl, mj.discrete.log_probabilities])
def test_jit_and_vmap_change_nothing(fn):
    compiled = jax.jit(fn)
    loop = np.stack([compiled(row) for row in HOLES])
    finite = np.isfinite(loop)
    # In one piece, each row by itself, and without the compiler.
    for got in (compiled(HOLES), jax.jit(jax.vmap(fn))(HOLES), fn(jnp.asarray(HOLES))):
        assert (np.isfinite(got) == finite).all()
        assert_close(np.where(finite, got, 0), np.where(finite, loop, 0), 1e-13)
