"""Choices by Gumbel noise, and relaxed ones."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats

import moment_jax as mj
from tests.builders import assert_close

CATEGORIES, ROWS, DRAWS = 5, 10, 1_000_000
HOLE = jnp.asarray([0.3, -jnp.inf, -1.0, 2.0, -jnp.inf])
KEY = jax.random.key(0)
gumbel_max = jax.jit(mj.discrete.gumbel_max)
gumbel_softmax = jax.jit(mj.discrete.gumbel_softmax, static_argnames="straight_through")


@pytest.fixture
def optimized():
    """XLA's optimisations, where draws cost more than compilation."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


def ten_laws():
    """Log-probabilities, unnormalised: dense ones, with masked, and with entries of 1e-30 and less."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(ROWS, CATEGORIES)) * rng.uniform(0.2, 3, size=(ROWS, 1))
    logits[2:7][rng.random((5, CATEGORIES)) < 0.3] = -np.inf
    logits[5:, 0] = np.log(1e-30)
    logits[7:, 1] = -1e5
    logits[:, -1] = 0.0
    return logits + rng.normal(size=(ROWS, 1)) * 50


def chi_square(counts, probs):
    """The p-value; categories with less than ten expected draws count as the likeliest one."""
    expected = probs * counts.sum()
    common = expected >= 10
    group = np.where(common, np.arange(probs.size), probs.argmax())
    seen, wanted = (np.bincount(group, x, probs.size)[common] for x in (counts, expected))
    return scipy.stats.chisquare(seen, wanted).pvalue


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
def test_a_million_draws_from_each_of_ten_laws():
    logits = ten_laws()

    @jax.jit
    def counts(key, row):
        def count(key):
            codes = mj.discrete.gumbel_max(key, jnp.broadcast_to(row, (DRAWS // 20, CATEGORIES)))
            return jnp.zeros(CATEGORIES, int).at[codes].add(1)

        return jnp.sum(jax.lax.map(count, jax.random.split(key, 20)), axis=0)

    given = jnp.asarray(logits, jnp.float32)
    probs = scipy.special.softmax(np.asarray(given, float), axis=1)
    pvalues = []
    for row in range(ROWS):
        seen = np.asarray(counts(jax.random.fold_in(jax.random.key(1), row), given[row]))
        assert seen.sum() == DRAWS
        assert not seen[np.isneginf(logits[row])].any()
        assert not seen[probs[row] < 1e-20].any()
        pvalues.append(chi_square(seen, probs[row]))
    assert min(pvalues) > 0.01 / ROWS, pvalues  # Bonferroni
    assert scipy.stats.kstest(pvalues, "uniform").pvalue > 1e-3


def test_a_choice_between_improbable_categories_is_exact():
    """Both at 1e-30 of a row whose other entries cannot occur: their ratio counts, not their size."""
    logits = jnp.log(jnp.asarray([1e-30, 3e-30, 0.0])) - 500
    codes = gumbel_max(KEY, jnp.broadcast_to(logits, (40_000, 3)))
    share = float(jnp.mean(codes == 1))
    assert abs(share - 0.75) < 4 * (0.75 * 0.25 / 40_000) ** 0.5
    assert not jnp.any(codes == 2)


@pytest.mark.parametrize("straight_through", [False, True])
def test_pathwise_gradient_against_finite_differences(straight_through):
    key, weights = jax.random.key(2), jnp.asarray(np.random.default_rng(1).normal(size=(6, 5)))
    logits = np.random.default_rng(2).normal(size=(6, 5))
    logits[0, 1] = logits[3] = -np.inf
    logits[3, 2] = 0.4

    def value(logits, tau, straight_through=False):
        z = mj.discrete.gumbel_softmax(key, logits, tau, straight_through=straight_through)
        return jnp.sum(weights * z)

    values = jax.jit(jax.vmap(value))
    gradient = jax.jit(jax.grad(value, argnums=(0, 1)), static_argnums=2)
    slopes = gradient(logits, 0.7, straight_through)
    steps = 1e-6 * np.eye(logits.size + 1)  # the last is that of the temperature
    up, down = (
        values(logits + s * steps[:, :-1].reshape(-1, *logits.shape), 0.7 + s * steps[:, -1])
        for s in (1, -1)
    )
    difference = (np.asarray(up) - down) / 2e-6
    assert_close(slopes[0], difference[:-1].reshape(logits.shape), 1e-8)
    assert_close(slopes[1], difference[-1], 1e-8)
    assert not np.asarray(slopes[0])[np.isneginf(logits)].any()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_cold_limit_is_gumbel_max_on_the_same_noise(dtype):
    logits = jnp.asarray(ten_laws() / 4, dtype)
    logits = jnp.concatenate([logits, jnp.full((1, CATEGORIES), -jnp.inf, dtype)])
    for seed in range(5):
        key = jax.random.key(seed)
        hard = jax.nn.one_hot(gumbel_max(key, logits), CATEGORIES, dtype=dtype)
        cold = gumbel_softmax(key, logits, 1e-12)  # far below any gap of two scores
        through = gumbel_softmax(key, logits, 1.0, straight_through=True)
        assert cold.dtype == through.dtype == dtype
        assert (cold == hard).all()
        assert (through == hard).all()


def test_relaxed_draws_are_distributions_and_respect_masks():
    draws = np.asarray(gumbel_softmax(KEY, np.tile(HOLE, (100, 1)), 0.5))
    assert not gumbel_softmax(KEY, np.full((100, 5), -np.inf), 0.5).any()
    assert_close(draws.sum(axis=1), np.ones(100), 1e-12)
    assert not draws[:, [1, 4]].any()
    assert (draws[:, [0, 2, 3]] > 0).all()


def test_traced_temperatures_that_are_not_positive_give_one_hot_rows():
    logits = jnp.stack([HOLE, jnp.full(5, -jnp.inf), HOLE * 1e30]).astype(jnp.float32)

    @jax.jit
    def both(logits, tau):
        def value(logits, tau):
            z = mj.discrete.gumbel_softmax(KEY, logits, tau)
            return jnp.sum(z * jnp.arange(5.0, dtype=z.dtype)[None, :]), z

        return jax.grad(value, argnums=(0, 1), has_aux=True)(logits, tau)

    codes = gumbel_max(KEY, logits)
    assert codes[1] == -1  # nothing can be drawn
    for tau in (0.0, -1.0, np.nan, 1e-44, 1e-30):
        slopes, z = both(logits, np.float32(tau))
        assert (z == jax.nn.one_hot(codes, 5)).all(), tau
        chex.assert_tree_all_finite(slopes)


def test_unnormalised_logits_of_any_size():
    """A constant added to a row changes no draw, but for the rounding of the row itself."""
    shifts = (0, 1e6, -1e6, 1e37)
    codes = [gumbel_max(KEY, np.full((2000, 3), shift, np.float32)) for shift in shifts]
    np.testing.assert_array_equal(codes[1:], [codes[0]] * 3)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda f: f.gumbel_max(KEY, jnp.zeros((2, 0))), ValueError, r"K >= 1 cat.*\(2, 0\)"),
        (lambda f: f.gumbel_softmax(KEY, jnp.zeros(()), 1.0), ValueError, "K >= 1"),
        (lambda f: f.gumbel_softmax(KEY, jnp.zeros(2), 0.0), ValueError, "ture > 0.*Got 0.0"),
        (lambda f: f.gumbel_softmax(KEY, jnp.zeros(2), float("nan")), ValueError, "ture > 0"),
        (lambda f: f.gumbel_softmax(KEY, jnp.zeros(2), jnp.ones(2)), ValueError, "one temp"),
    ],
)
def test_messages(call, error, words):
    with pytest.raises(error, match=words):
        call(mj.discrete)
