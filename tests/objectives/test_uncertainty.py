"""Total, aleatoric and epistemic uncertainty: textbook sums, sampling, and the laws they obey."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from moment_jax.objectives import class_probabilities, log_class_probabilities, token_uncertainty
from moment_jax.objectives.cubature import gaussian_points

C, POINTS = 5, 64
MEAN = np.asarray([0.4, -1.0, 2.0, 0.1, 0.0])
FACTOR = np.random.default_rng(0).normal(size=(C, C))
COVS = {
    "variances": np.asarray([0.3, 1.0, 0.0, 2.0, 0.7]),
    "full": FACTOR @ FACTOR.T / C,
    "singular": FACTOR[:, :2] @ FACTOR[:, :2].T,
    "zero": np.zeros((C, C)),
    "zero_variances": np.zeros(C),
}
MASKED = np.where(np.arange(C) == 2, -np.inf, MEAN)
NOTHING = np.full(C, -np.inf)
every_cov = pytest.mark.parametrize("cov", COVS.values(), ids=COVS.keys())

parts = jax.jit(token_uncertainty, static_argnames="num_points")
log_probs = jax.jit(log_class_probabilities)
slopes = jax.jit(
    jax.jacrev(lambda m, c: token_uncertainty(m, c, num_points=POINTS), argnums=(0, 1))
)


def entropy(p):
    return scipy.stats.entropy(p, axis=-1)


@every_cov
@pytest.mark.parametrize("mean", [MEAN, MASKED], ids=["all", "masked"])
def test_the_textbook_over_the_points(mean, cov):
    occurs = mean > -np.inf
    points = np.asarray(gaussian_points(mean, cov, POINTS))[:, occurs]
    p = np.exp(points) / np.exp(points).sum(axis=1, keepdims=True)
    value = parts(mean, cov, num_points=POINTS)
    np.testing.assert_allclose(value.total, entropy(p.mean(axis=0)), atol=1e-10)
    np.testing.assert_allclose(value.aleatoric, entropy(p).mean(), atol=1e-10)
    divergence = scipy.stats.entropy(p, p.mean(axis=0, keepdims=True), axis=1)
    np.testing.assert_allclose(value.epistemic, divergence.mean(), atol=1e-10)


@pytest.mark.parametrize("name", ["variances", "full"])
def test_against_sampling(name):
    cov = COVS[name]
    root = np.linalg.cholesky(cov) if cov.ndim == 2 else np.diag(np.sqrt(cov))
    logits = MEAN + np.random.default_rng(1).normal(size=(1_000_000, C)) @ root.T
    weights = np.exp(logits)
    p = weights / weights.sum(axis=1, keepdims=True)
    average = p.mean(axis=0)
    surprise = -p @ np.log(average)  # whose average is the entropy of the average
    own = -np.sum(p * np.log(p), axis=1)
    value = parts(MEAN, cov, num_points=8192)
    for draws, analytic in zip((surprise, own, surprise - own), value, strict=True):
        assert abs(draws.mean() - analytic) < 4 * draws.std() / 1000


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_parts_are_in_their_bounds(dtype):
    rng = np.random.default_rng(2)
    mean = rng.normal(size=(200, C)) * 10 ** rng.uniform(-3, 2, (200, 1))
    factor = rng.normal(size=(200, C, 2)) * 10 ** rng.uniform(-5, 2, (200, 1, 1))
    cov = factor @ factor.transpose(0, 2, 1)
    value = jax.jit(jax.vmap(lambda m, c: token_uncertainty(m, c, num_points=POINTS)))(
        mean.astype(dtype), cov.astype(dtype)
    )
    rounding = 50 * np.finfo(dtype).eps
    assert value.total.dtype == dtype
    assert (np.asarray(value.epistemic) >= 0).all()
    assert (np.asarray(value.aleatoric) >= 0).all()
    assert (np.asarray(value.total) <= np.log(C) + rounding).all()
    np.testing.assert_array_equal(value.total, value.aleatoric + value.epistemic)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("mean", [MEAN, MASKED, 1e4 * MEAN], ids=["mean", "masked", "huge"])
def test_certain_logits_have_no_epistemic_part(mean, dtype):
    for cov in (COVS["zero"], COVS["zero_variances"]):
        value = parts(mean.astype(dtype), cov.astype(dtype), num_points=POINTS)
        assert value.epistemic == 0
        expected = entropy(np.exp(mean - mean.max()))
        np.testing.assert_allclose(value.total, expected, atol=20 * np.finfo(dtype).eps)


def test_noise_that_all_logits_share_is_no_uncertainty():
    value = parts(MEAN, 4.0 * np.ones((C, C)), num_points=POINTS)
    assert value.epistemic < 1e-12
    np.testing.assert_allclose(value.total, entropy(np.exp(MEAN)), atol=1e-12)


def test_a_small_covariance_in_float32():
    """To first order the epistemic part is tr(cov F) / 2, F the Fisher information of the logits."""
    p = np.exp(MEAN) / np.exp(MEAN).sum()
    fisher = np.diag(p) - np.outer(p, p)
    cov = 1e-6 * COVS["full"]
    value = parts(MEAN.astype(np.float32), cov.astype(np.float32), num_points=POINTS)
    np.testing.assert_allclose(value.epistemic, np.trace(cov @ fisher) / 2, rtol=1e-2)


@every_cov
def test_derivatives_in_the_mean_are_those_of_the_values(cov):
    direction = np.asarray([0.5, -0.2, 1.0, 0.3, -0.7])
    step = 1e-5
    up = parts(MEAN + step * direction, cov, num_points=POINTS)
    down = parts(MEAN - step * direction, cov, num_points=POINTS)
    for slope, high, low in zip(slopes(MEAN, cov), up, down, strict=True):
        np.testing.assert_allclose(slope[0] @ direction, (high - low) / (2 * step), atol=1e-8)


def test_price_derivatives_at_zero_covariance():
    """Epistemic: half the Fisher information; aleatoric: half the Hessian of the entropy."""
    p = np.exp(MEAN) / np.exp(MEAN).sum()
    fisher = np.diag(p) - np.outer(p, p)

    def entropy_of(logits):
        return -jnp.sum(jax.nn.softmax(logits) * jax.nn.log_softmax(logits))

    hessian = np.asarray(jax.jit(jax.hessian(entropy_of))(MEAN))
    full, diagonal = slopes(MEAN, COVS["zero"]), slopes(MEAN, COVS["zero_variances"])
    for value, exact in (
        (full.epistemic[1], fisher / 2),
        (full.aleatoric[1], hessian / 2),
        (diagonal.epistemic[1], np.diagonal(fisher) / 2),
        (diagonal.aleatoric[1], np.diagonal(hessian) / 2),
    ):
        np.testing.assert_allclose(value, exact, atol=1e-12)


def test_price_derivatives_are_the_slopes_of_the_values_as_points_grow():
    cov, step, count = COVS["full"], 1e-4, 4096
    given = jax.jit(
        lambda c: jax.jvp(lambda c: token_uncertainty(MEAN, c, num_points=count), (c,), (cov,))[1]
    )(cov)
    up, down = (parts(MEAN, (1 + sign * step) * cov, num_points=count) for sign in (1, -1))
    for slope, high, low in zip(given, up, down, strict=True):
        np.testing.assert_allclose(slope, (high - low) / (2 * step), atol=2e-3)


@every_cov
@pytest.mark.parametrize("mean", [MASKED, NOTHING, 1e4 * MEAN], ids=["masked", "nothing", "huge"])
def test_gradients_are_finite_and_those_of_masked_logits_are_zero(mean, cov):
    given = slopes(mean.astype(np.float32), 100 * cov.astype(np.float32))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(given))
    for slope in given:
        np.testing.assert_array_equal(slope[0][mean == -np.inf], 0)


@every_cov
def test_masked_classes_have_probability_zero(cov):
    value = class_probabilities(MASKED, cov)
    assert value[2] == 0
    assert abs(float(value.sum()) - 1) < 1e-12
    assert log_probs(MASKED, cov)[2] == -np.inf
    slope = jax.jit(jax.jacrev(log_class_probabilities, argnums=(0, 1)))(MASKED, cov)
    assert all(np.isfinite(leaf).all() for leaf in slope)
    np.testing.assert_array_equal(slope[0][2], 0)
    np.testing.assert_array_equal(slope[0][:, 2], 0)


def test_where_nothing_can_occur():
    np.testing.assert_array_equal(log_probs(NOTHING, COVS["full"]), -np.inf)
    assert parts(NOTHING, COVS["full"], num_points=POINTS) == (0, 0, 0)


def test_bad_input():
    with pytest.raises(ValueError, match=r"token_uncertainty.*jax\.vmap"):
        token_uncertainty(jnp.ones((2, 3)), jnp.ones((2, 3)))
    with pytest.raises(ValueError, match=r"\(3,\) or \(3, 3\)"):
        token_uncertainty(jnp.ones(3), jnp.ones(2))
    with pytest.raises(ValueError, match="num_points >= 12"):
        token_uncertainty(jnp.ones(3), jnp.ones(3), num_points=4)
