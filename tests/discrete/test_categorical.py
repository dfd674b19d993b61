"""Log-probabilities, divergences and usage beside the textbook's formulas."""

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


def test_log_probabilities_are_exact_to_minus_infinity():
    with np.errstate(divide="ignore"):
        assert_close(
            jnp.exp(mj.discrete.log_probabilities(jnp.asarray(HOLES))),
            scipy.special.softmax(HOLES, axis=1),
        )
    row = jnp.asarray([0.0, -745.0, -1e30, -jnp.inf, -1e300])
    assert mj.discrete.log_probabilities(row).tolist() == row.tolist()
    masked = mj.discrete.log_probabilities(jnp.asarray(LOGITS), jnp.asarray(-np.inf < HOLES))
    assert (masked == mj.discrete.log_probabilities(jnp.asarray(HOLES))).all()
    nothing = jnp.full((2, 3), -jnp.inf)
    assert (mj.discrete.log_probabilities(nothing) == -jnp.inf).all()


def test_kl_is_that_of_the_textbook():
    p, q = scipy.special.softmax(HOLES, axis=1), scipy.special.softmax(LOGITS[::-1], axis=1)
    kl = mj.discrete.categorical_kl(jnp.asarray(HOLES), jnp.asarray(LOGITS[::-1]))
    assert_close(kl, scipy.stats.entropy(p, q, axis=1))
    uniform = mj.discrete.categorical_kl(jnp.asarray(HOLES) + 17.0)
    assert_close(uniform, np.log(5) - scipy.stats.entropy(p, axis=1))
    assert_close(uniform[0], jnp.log(5.0))
    assert_close(
        mj.discrete.categorical_entropy(jnp.asarray(HOLES)), scipy.stats.entropy(p, axis=1)
    )


def test_kl_where_the_prior_has_nothing():
    some, other = jnp.asarray([0.0, -jnp.inf]), jnp.asarray([-jnp.inf, 0.0])
    assert mj.discrete.categorical_kl(some, other) == jnp.inf
    assert mj.discrete.categorical_kl(some, some) == 0
    assert mj.discrete.categorical_kl(other * 0 + jnp.asarray([-jnp.inf, -jnp.inf])) == 0


@pytest.mark.parametrize("fn", ["categorical_kl", "categorical_entropy", "perplexity"])
def test_gradients_are_finite_and_zero_where_nothing_can_occur(fn):
    for dtype in (jnp.float32, jnp.float64):
        rows = np.concatenate([HOLES, np.full((1, 5), -np.inf), [[0, -1e30, -800, -np.inf, 1]]])
        rows = jnp.asarray(rows, dtype)
        value, slope = jax.value_and_grad(lambda x: jnp.sum(getattr(mj.discrete, fn)(x)))(rows)
        assert jnp.isfinite(value)
        assert jnp.isfinite(slope).all()
        assert not np.asarray(slope)[np.isneginf(np.asarray(rows))].any()


def test_gradient_of_kl_against_finite_differences():
    x, prior = jnp.asarray(LOGITS[0]), jnp.asarray(LOGITS[1])
    slopes = jax.grad(mj.discrete.categorical_kl, argnums=(0, 1))(x, prior)
    for index, slope in enumerate(slopes):
        for k in range(5):
            step = jnp.zeros(5).at[k].set(1e-6)
            up, down = (
                mj.discrete.categorical_kl(*((x + s, prior) if index == 0 else (x, prior + s)))
                for s in (step, -step)
            )
            assert_close(slope[k], (up - down) / 2e-6, 1e-8)


def test_usage_and_perplexity():
    codes = jnp.asarray([[0, 1], [1, 3], [-1, 9]])
    usage = mj.discrete.code_usage(codes, 4)
    assert_close(usage, jnp.asarray([0.25, 0.5, 0.0, 0.25]), 1e-6)
    expected = np.exp(scipy.stats.entropy(np.asarray(usage)))
    assert_close(mj.discrete.perplexity(jnp.log(usage)), expected, 1e-6)
    assert not mj.discrete.code_usage(jnp.asarray([-1]), 3).any()
    assert_close(mj.discrete.perplexity(jnp.zeros(8)), 8.0, 1e-12)


def test_jit_and_vmap_change_nothing():
    rows = jnp.asarray(HOLES)
    for fn in (mj.discrete.categorical_kl, mj.discrete.log_probabilities):
        whole = jax.jit(fn)(rows)
        loop = jnp.stack([fn(row) for row in rows])
        finite = jnp.isfinite(loop)
        assert (jnp.isfinite(whole) == finite).all()
        assert_close(jnp.where(finite, whole, 0), jnp.where(finite, loop, 0), 1e-13)
        assert_close(jnp.where(finite, jax.vmap(fn)(rows), 0), jnp.where(finite, whole, 0), 1e-13)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda f: f.categorical_kl(jnp.zeros((2, 0))), ValueError, "K >= 1"),
        (lambda f: f.categorical_kl(jnp.zeros(3), jnp.zeros(2)), ValueError, "as many"),
        (lambda f: f.code_usage(jnp.zeros(3), 2), TypeError, "integer"),
        (lambda f: f.code_usage(jnp.zeros(3, int), 0), ValueError, "num_codes >= 1"),
    ],
)
def test_messages(call, error, words):
    with pytest.raises(error, match=words):
        call(mj.discrete)
