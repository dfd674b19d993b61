"""Gumbel-max against the distribution it draws from; Gumbel-softmax against it and its derivative."""

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


@pytest.mark.usefixtures("optimized")
def test_a_million_draws_from_each_of_ten_laws():
    logits = ten_laws()
    few = DRAWS // 20

    def count(key, row):
        codes = mj.discrete.gumbel_max(key, jnp.broadcast_to(row, (few, CATEGORIES)))
        return jnp.zeros(CATEGORIES, int).at[codes].add(1)

    @jax.jit
    def counts(key, row):
        return jnp.sum(jax.lax.map(lambda k: count(k, row), jax.random.split(key, 20)), axis=0)

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
    codes = gumbel_max(jax.random.key(0), jnp.broadcast_to(logits, (40_000, 3)))
    share = float(jnp.mean(codes == 1))
    assert abs(share - 0.75) < 4 * (0.75 * 0.25 / 40_000) ** 0.5
    assert not jnp.any(codes == 2)


@pytest.mark.usefixtures("optimized")
def test_rare_events_are_as_frequent_as_they_should_be():
    """A probability of 3e-6 against all the rest."""
    logits = jnp.asarray([0.0, np.log(3e-6)], jnp.float32)

    @jax.jit
    def hits(key):
        return jnp.sum(mj.discrete.gumbel_max(key, jnp.broadcast_to(logits, (500_000, 2))))

    found = sum(int(hits(key)) for key in jax.random.split(jax.random.key(3), 4))
    assert abs(found - 6) < 4 * 6**0.5


@pytest.mark.parametrize("straight_through", [False, True])
def test_pathwise_gradient_against_finite_differences(straight_through):
    key, weights = jax.random.key(2), jnp.asarray(np.random.default_rng(1).normal(size=(6, 5)))
    logits = np.random.default_rng(2).normal(size=(6, 5))
    logits[0, 1] = logits[3] = -np.inf
    logits[3, 2] = 0.4

    def value(logits, tau, straight_through=False):
        z = mj.discrete.gumbel_softmax(key, logits, tau, straight_through=straight_through)
        return jnp.sum(weights * z)

    @jax.jit
    def both(logits, tau):
        slopes = jax.grad(value, argnums=(0, 1))(logits, tau, straight_through)
        steps = jnp.diag(jnp.full(logits.size, 1e-6)).reshape(-1, *logits.shape)
        up, down = (jax.vmap(lambda s, d=d: value(logits + d * s, tau))(steps) for d in (1, -1))
        by_tau = value(logits, tau + 1e-6) - value(logits, tau - 1e-6)
        return slopes, (up - down).reshape(logits.shape) / 2e-6, by_tau / 2e-6

    slopes, by_logits, by_tau = both(logits, 0.7)
    assert_close(slopes[0], by_logits, 1e-8)
    assert_close(slopes[1], by_tau, 1e-8)
    assert not np.asarray(slopes[0])[np.isneginf(logits)].any()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64, jnp.bfloat16])
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
    draws = np.asarray(gumbel_softmax(jax.random.key(0), np.tile(HOLE, (100, 1)), 0.5))
    assert_close(draws.sum(axis=1), np.ones(100), 1e-12)
    assert not draws[:, [1, 4]].any()
    assert (draws[:, [0, 2, 3]] > 0).all()


def test_traced_temperatures_that_are_not_positive_give_one_hot_rows():
    logits = jnp.stack([HOLE, jnp.full(5, -jnp.inf), HOLE * 1e30]).astype(jnp.float32)

    @jax.jit
    def both(logits, tau):
        def value(logits, tau):
            z = mj.discrete.gumbel_softmax(jax.random.key(0), logits, tau)
            return jnp.sum(z * jnp.arange(5.0, dtype=z.dtype)[None, :]), z

        return jax.grad(value, argnums=(0, 1), has_aux=True)(logits, tau)

    codes = gumbel_max(jax.random.key(0), logits)
    for tau in (0.0, -1.0, np.nan, 1e-44, 1e-30):
        slopes, z = both(logits, np.float32(tau))
        assert (z == jax.nn.one_hot(codes, 5)).all(), tau
        assert all(np.isfinite(slope).all() for slope in slopes), tau


@pytest.mark.parametrize("through", [False, True])
def test_a_row_without_categories_draws_nothing(through):
    nothing, key = jnp.full((2, 3), -jnp.inf), jax.random.key(0)
    assert gumbel_max(key, nothing).tolist() == [-1, -1]

    def total(x):
        draws = mj.discrete.gumbel_softmax(key, x, 1.0, straight_through=through)
        return jnp.sum(draws), draws

    slopes, draws = jax.jit(jax.grad(total, has_aux=True))(nothing)
    assert not draws.any()
    assert not slopes.any()


def test_vmap_changes_nothing():
    def draw(key, row):
        return mj.discrete.gumbel_max(key, row), mj.discrete.gumbel_softmax(key, row, 0.5)

    compiled, logits = jax.jit(draw), jnp.asarray(ten_laws(), jnp.float32)
    keys = jax.random.split(jax.random.key(4), ROWS)
    loop = [compiled(*one) for one in zip(keys, logits, strict=True)]
    mapped = jax.jit(jax.vmap(draw))(keys, logits)
    for of_map, of_loop in zip(mapped, zip(*loop, strict=True), strict=True):
        assert_close(of_map, np.stack(of_loop), 1e-5)


@pytest.mark.parametrize("logits", [1e6, -1e6, 1e37])
def test_unnormalised_logits_of_any_size(logits):
    """A constant added to a row changes no draw, but for the rounding of the row itself."""
    codes, same = (
        gumbel_max(jax.random.key(0), np.full((2000, 3), shift, np.float32))
        for shift in (logits, 0)
    )
    assert (codes == same).all()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda f, k: f.gumbel_max(k, jnp.zeros((2, 0))), r"K >= 1 categories.*\(2, 0\)"),
        (lambda f, k: f.gumbel_max(k, jnp.zeros(())), "K >= 1"),
        (lambda f, k: f.gumbel_softmax(k, jnp.zeros((2, 0)), 1.0), "K >= 1"),
        (lambda f, k: f.gumbel_softmax(k, jnp.zeros(2), 0.0), "temperature > 0.*Got 0.0"),
        (lambda f, k: f.gumbel_softmax(k, jnp.zeros(2), -1), "temperature > 0"),
        (lambda f, k: f.gumbel_softmax(k, jnp.zeros(2), float("nan")), "temperature > 0"),
        (lambda f, k: f.gumbel_softmax(k, jnp.zeros(2), jnp.float32(0)), "temperature > 0"),
        (lambda f, k: f.gumbel_softmax(k, jnp.zeros(2), jnp.ones(2)), "one temperature"),
        (lambda f, k: f.exponential_annealing(0.5, 1.0, 10), "floor <= start"),
        (lambda f, k: f.exponential_annealing(1.0, 0.0, 10), "0 < floor"),
        (lambda f, k: f.exponential_annealing(1.0, 0.5, 0), "num_steps >= 1"),
    ],
)
def test_messages(call, words):
    with pytest.raises(ValueError, match=words):
        call(mj.discrete, jax.random.key(0))


def test_annealing_falls_to_its_floor():
    schedule = mj.discrete.exponential_annealing(2.0, 0.5, 10)
    values = np.asarray([schedule(step) for step in range(25)])
    assert_close(values[:11], 2.0 * 0.25 ** (np.arange(11) / 10), 1e-6)
    assert (values[10:] == 0.5).all()
    assert float(mj.discrete.exponential_annealing(0.5, 0.5, 10)(3)) == 0.5
