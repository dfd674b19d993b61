"""Total, aleatoric and epistemic uncertainty: textbook sums, sampling, and the laws they obey."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from moment_jax.objectives import log_class_probabilities, token_uncertainty
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


# Compiled once for each form of the covariance.
@jax.jit
def everything(mean, cov):
    """The three parts, their slopes, the points, and log probabilities with theirs."""

    def parts_and_logs(m, c):
        return token_uncertainty(m, c, num_points=POINTS), log_class_probabilities(m, c)

    value, pull = jax.vjp(parts_and_logs, mean, cov)
    rows = jax.vmap(pull)(_identity_like(value))
    return (*value, gaussian_points(mean, cov, POINTS), rows)


def _identity_like(value):
    """Every unit cotangent of (three scalars, a vector), stacked."""
    size = 3 + value[1].size
    eye = jnp.eye(size, dtype=value[1].dtype)
    return type(value[0])(*(eye[:, i] for i in range(3))), eye[:, 3:]


many_points = jax.jit(lambda m, c: token_uncertainty(m, c, num_points=8192))


def parts(mean, cov):
    return everything(mean, cov)[0]


def slopes(mean, cov):
    """Of total, aleatoric and epistemic: in the mean, in the covariance."""
    by_mean, by_cov = everything(mean, cov)[-1]
    return [(by_mean[i], by_cov[i]) for i in range(3)]


def entropy(p):
    return scipy.stats.entropy(p, axis=-1)


@every_cov
@pytest.mark.parametrize("mean", [MEAN, MASKED], ids=["all", "masked"])
def test_the_textbook_over_the_points(mean, cov):
    value, _, points, *_ = everything(mean, cov)
    p = scipy.special.softmax(np.asarray(points)[:, mean > -np.inf], axis=1)
    np.testing.assert_allclose(value.total, entropy(p.mean(axis=0)), atol=1e-10)
    np.testing.assert_allclose(value.aleatoric, entropy(p).mean(), atol=1e-10)
    divergence = scipy.stats.entropy(p, p.mean(axis=0, keepdims=True), axis=1)
    np.testing.assert_allclose(value.epistemic, divergence.mean(), atol=1e-10)


def test_against_sampling():
    draws = np.random.default_rng(1).normal(size=(500_000, C))
    for name in ("variances", "full"):
        cov = COVS[name]
        root = np.linalg.cholesky(cov) if cov.ndim == 2 else np.diag(np.sqrt(cov))
        logits = MEAN + draws @ root.T
        weights = np.exp(logits)
        total = weights.sum(axis=1)
        p = weights / total[:, None]
        surprise = -p @ np.log(p.mean(axis=0))  # whose average is the entropy of the average
        own = np.log(total) - np.einsum("nc,nc->n", p, logits)
        value = many_points(MEAN, cov)
        for samples, analytic in zip((surprise, own, surprise - own), value, strict=True):
            assert abs(samples.mean() - analytic) < 4 * samples.std() / len(draws) ** 0.5


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_parts_are_in_their_bounds(dtype):
    rng = np.random.default_rng(2)
    mean = rng.normal(size=(200, C)) * 10 ** rng.uniform(-3, 2, (200, 1))
    factor = rng.normal(size=(200, C, 2)) * 10 ** rng.uniform(-5, 2, (200, 1, 1))
    cov = factor @ factor.transpose(0, 2, 1)
    value = jax.jit(jax.vmap(lambda m, c: token_uncertainty(m, c, num_points=POINTS)))(
        mean.astype(dtype), cov.astype(dtype)
    )
    total, aleatoric, epistemic = map(np.asarray, value)
    assert total.dtype == dtype
    assert (epistemic >= 0).all()
    assert (aleatoric >= 0).all()
    assert (total <= np.log(C) + 50 * np.finfo(dtype).eps).all()
    np.testing.assert_array_equal(total, aleatoric + epistemic)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("mean", [MEAN, MASKED, 1e4 * MEAN], ids=["mean", "masked", "huge"])
def test_certain_logits_have_no_epistemic_part(mean, dtype):
    for cov in (COVS["zero"], COVS["zero_variances"]):
        value = parts(mean.astype(dtype), cov.astype(dtype))
        assert value.epistemic == 0
        expected = entropy(np.exp(mean - mean.max()))
        np.testing.assert_allclose(value.total, expected, atol=20 * np.finfo(dtype).eps)


def test_noise_that_all_logits_share_is_no_uncertainty():
    value = parts(MEAN, 4.0 * np.ones((C, C)))
    assert value.epistemic < 1e-12
    np.testing.assert_allclose(value.total, entropy(np.exp(MEAN)), atol=1e-12)


P = scipy.special.softmax(MEAN)
FISHER = np.diag(P) - np.outer(P, P)


def test_a_small_covariance_in_float32():
    """To first order the epistemic part is tr(cov F) / 2, F the Fisher information of the logits."""
    cov = 1e-6 * COVS["full"]
    value = parts(MEAN.astype(np.float32), cov.astype(np.float32))
    np.testing.assert_allclose(value.epistemic, np.trace(cov @ FISHER) / 2, rtol=1e-2)


@every_cov
def test_derivatives_in_the_mean_are_those_of_the_values(cov):
    direction = np.asarray([0.5, -0.2, 1.0, 0.3, -0.7])
    step = 1e-5
    up, down = (parts(MEAN + k * step * direction, cov) for k in (1, -1))
    for slope, high, low in zip(slopes(MEAN, cov), up, down, strict=True):
        np.testing.assert_allclose(slope[0] @ direction, (high - low) / (2 * step), atol=1e-8)


def test_price_derivatives_at_zero_covariance():
    """Epistemic: half the Fisher information; aleatoric: half the Hessian of the entropy."""

    def entropy_of(logits):
        return -jnp.sum(jax.nn.softmax(logits) * jax.nn.log_softmax(logits))

    hessian = np.asarray(jax.jit(jax.hessian(entropy_of))(MEAN))
    for name, take in (("zero", np.asarray), ("zero_variances", np.diagonal)):
        _, aleatoric, epistemic = slopes(MEAN, COVS[name])
        np.testing.assert_allclose(epistemic[1], take(FISHER) / 2, atol=1e-12)
        np.testing.assert_allclose(aleatoric[1], take(hessian) / 2, atol=1e-12)


def test_price_derivatives_are_the_slopes_of_the_values_as_points_grow():
    cov, step = COVS["full"], 1e-4
    given = jax.jit(lambda c: jax.jvp(lambda c: many_points(MEAN, c), (c,), (c,))[1])(cov)
    up, down = (many_points(MEAN, (1 + sign * step) * cov) for sign in (1, -1))
    for slope, high, low in zip(given, up, down, strict=True):
        np.testing.assert_allclose(slope, (high - low) / (2 * step), atol=2e-3)


@every_cov
@pytest.mark.parametrize("mean", [MASKED, NOTHING, 1e4 * MEAN], ids=["masked", "nothing", "huge"])
def test_gradients_are_finite_and_those_of_masked_logits_are_zero(mean, cov):
    given = slopes(mean.astype(np.float32), 100 * cov.astype(np.float32))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(given))
    for by_mean, _ in given:
        np.testing.assert_array_equal(by_mean[mean == -np.inf], 0)


@every_cov
def test_masked_classes_have_probability_zero(cov):
    _, log_probs, _, (by_mean, by_cov) = everything(MASKED, cov)
    value = np.exp(log_probs)  # `class_probabilities`
    assert value[2] == 0
    assert abs(float(value.sum()) - 1) < 1e-12
    assert log_probs[2] == -np.inf
    assert np.isfinite(by_mean).all()
    assert np.isfinite(by_cov).all()
    of_logs = by_mean[3:]
    np.testing.assert_array_equal(of_logs[2], 0)
    np.testing.assert_array_equal(of_logs[:, 2], 0)


def test_where_nothing_can_occur():
    value, log_probs, *_ = everything(NOTHING, COVS["full"])
    np.testing.assert_array_equal(log_probs, -np.inf)
    assert value == (0, 0, 0)


def test_bad_input():
    with pytest.raises(ValueError, match=r"token_uncertainty.*jax\.vmap"):
        token_uncertainty(np.ones((2, 3)), np.ones((2, 3)))
    with pytest.raises(ValueError, match=r"\(3,\) or \(3, 3\)"):
        token_uncertainty(np.ones(3), np.ones(2))
    with pytest.raises(ValueError, match="num_points >= 12"):
        token_uncertainty(np.ones(3), np.ones(3), num_points=4)
