"""The cubature, and what it averages: logsumexp, class probabilities, and the parts of uncertainty."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats

from moment_jax.objectives.cubature import (
    expected_logsumexp,
    gaussian_points,
    normal_points,
    probabilities_with_uncertainty,
)

C, POINTS, MANY = 5, 64, 2048


def uncertainty(mean, cov, num_points):
    """Total, aleatoric and epistemic, (3,)."""
    return jnp.stack(probabilities_with_uncertainty(mean, cov, num_points=num_points)[1])


def log_softmax(mean, cov, num_points):
    return probabilities_with_uncertainty(mean, cov, num_points=num_points)[0]


FUNCTIONS = {"logsumexp": expected_logsumexp, "softmax": log_softmax, "uncertainty": uncertainty}


# Compiled once per shape; otherwise compiling tiny programs would dominate this file's time.
@partial(jax.jit, static_argnums=2)
def everything(mean, cov, num_points=POINTS):
    """The points, and of each function the value and its slopes in the mean and the covariance."""
    results = {
        name: (fn(mean, cov, num_points), *jax.jacfwd(fn, (0, 1))(mean, cov, num_points))
        for name, fn in FUNCTIONS.items()
    }
    return {"points": gaussian_points(mean, cov, num_points), **results}


@jax.jit
def in_reverse(mean, cov):
    """Of each function: slopes in reverse mode; of the first two, second derivatives of the square."""

    def curvature(fn):
        def gradient(m, c):
            return jax.grad(lambda m, c: jnp.sum(fn(m, c, POINTS) ** 2), argnums=(0, 1))(m, c)

        return jax.jvp(gradient, (mean, cov), (jnp.ones_like(mean), jnp.ones_like(cov)))

    slopes = {k: jax.jacrev(fn, argnums=(0, 1))(mean, cov, POINTS) for k, fn in FUNCTIONS.items()}
    return slopes, [curvature(FUNCTIONS[name]) for name in ("logsumexp", "softmax")]


@jax.jit
@jax.vmap
def batched(mean, cov):
    return {name: fn(mean, cov, POINTS) for name, fn in FUNCTIONS.items()}


def random_cov(seed, rank):
    factor = np.random.default_rng(seed).normal(size=(C, rank))
    return factor @ factor.T / rank


COVS = {
    "diagonal": np.asarray([0.3, 1.0, 0.0, 2.0, 0.7]),
    "full": random_cov(0, C),
    "singular": random_cov(1, 2),
    "zero": np.zeros((C, C)),
    "zero_diagonal": np.zeros(C),
}
MEAN = np.asarray([0.4, -1.0, 2.0, 0.1, 0.0])
MEANS = {
    "mean": MEAN,
    "masked": np.where(np.arange(C) == 2, -np.inf, MEAN),
    "huge": 1e4 * MEAN,
    "nothing": np.full(C, -np.inf),
}
DIRECTION = np.asarray([0.5, -0.2, 1.0, 0.3, -0.7])
P = scipy.special.softmax(MEAN)
FISHER = np.diag(P) - np.outer(P, P)
every_cov = pytest.mark.parametrize("cov", COVS.values(), ids=COVS.keys())


def entropy(p):
    return scipy.stats.entropy(p, axis=-1)


# -- the points ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_dims", "num_points"), [(1, 1024), (2, 64), (10, 128), (30, 128), (80, 128)]
)
def test_points_have_the_moments_of_the_normal_law(num_dims, num_points):
    """All second moments from four points per dimension on, else each dimension's own alone."""
    points = normal_points(num_dims, num_points)
    if num_points < 4 * num_dims:
        products = points.T @ points / num_points
        np.testing.assert_allclose(np.diagonal(products), 1, atol=1e-12)
        assert np.max(np.abs(products - np.eye(num_dims))) < 0.9
        return
    assert points.shape == (num_points, num_dims)
    third = np.einsum("ki,kj,kl->ijl", points, points, points, optimize=True) / num_points
    np.testing.assert_allclose(points.mean(axis=0), 0, atol=1e-12)
    np.testing.assert_allclose(points.T @ points / num_points, np.eye(num_dims), atol=1e-12)
    np.testing.assert_allclose(third, 0, atol=1e-12)
    if num_dims == 1:  # the quantiles of the normal law
        assert abs(np.mean(points**4) - 3) < 0.05


# -- values -------------------------------------------------------------------------------------------


@every_cov
@pytest.mark.parametrize("mean", ["mean", "masked"])
def test_values_are_the_averages_over_the_points(mean, cov):
    results, possible = everything(MEANS[mean], cov), MEANS[mean] > -np.inf
    points = np.asarray(results["points"])[:, possible]
    p = scipy.special.softmax(points, axis=1)
    average = p.mean(axis=0)
    lse = np.mean(scipy.special.logsumexp(points, axis=1))
    np.testing.assert_allclose(results["logsumexp"][0], lse, atol=1e-12)
    np.testing.assert_allclose(np.exp(results["softmax"][0])[possible], average, atol=1e-12)
    divergence = scipy.stats.entropy(p, average[None], axis=1).mean()
    parts = entropy(average), entropy(p).mean(), divergence
    np.testing.assert_allclose(results["uncertainty"][0], parts, atol=1e-10)


def test_variances_agree_with_their_matrix_and_a_shared_shift_moves_logsumexp_alone():
    variance, full, shifted = (
        everything(MEAN, COVS["diagonal"]),
        everything(MEAN, np.diag(COVS["diagonal"])),
        everything(MEAN + 3.0, COVS["diagonal"]),
    )
    for fn in FUNCTIONS:
        np.testing.assert_allclose(full[fn][0], variance[fn][0], atol=1e-12)
        expected = variance[fn][0] + 3 * (fn == "logsumexp")
        np.testing.assert_allclose(shifted[fn][0], expected, atol=1e-12)


def test_uncertainty_against_sampling():
    draws = np.random.default_rng(1).normal(size=(200_000, C))
    for cov in (COVS["full"], np.diag(COVS["diagonal"] + 0.1)):
        logits = MEAN + draws @ np.linalg.cholesky(cov).T
        p = scipy.special.softmax(logits, axis=1)
        surprise = -p @ np.log(p.mean(axis=0))  # whose average is the entropy of the average
        own = scipy.special.logsumexp(logits, axis=1) - np.einsum("nc,nc->n", p, logits)
        analytic = everything(MEAN, cov, MANY)["uncertainty"][0]
        for samples, part in zip((surprise, own, surprise - own), analytic, strict=True):
            assert abs(samples.mean() - part) < 4 * samples.std() / len(draws) ** 0.5


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_vmap_and_the_bounds_of_uncertainty(dtype):
    rng = np.random.default_rng(2)
    mean = rng.normal(size=(200, C)) * 10 ** rng.uniform(-3, 2, (200, 1))
    factor = rng.normal(size=(200, C, 2)) * 10 ** rng.uniform(-5, 2, (200, 1, 1))
    mean, cov = mean.astype(dtype), (factor @ factor.transpose(0, 2, 1)).astype(dtype)
    values = batched(mean, cov)
    total, aleatoric, epistemic = np.asarray(values["uncertainty"]).T
    assert total.dtype == dtype
    assert (epistemic >= 0).all()
    assert (aleatoric >= 0).all()
    assert (total <= np.log(C) + 50 * np.finfo(dtype).eps).all()
    np.testing.assert_array_equal(total, aleatoric + epistemic)
    if dtype == np.float64:
        for fn in FUNCTIONS:
            loop = [everything(*one)[fn][0] for one in zip(mean[:3], cov[:3], strict=True)]
            np.testing.assert_allclose(values[fn][:3], np.stack(loop), atol=1e-12)


def test_what_is_certain_has_no_epistemic_part():
    """Logits without noise, noise that all of them share, and no possible class at all."""
    for mean in (MEANS["mean"], MEANS["masked"], MEANS["huge"]):
        for cov in (COVS["zero"], COVS["zero_diagonal"]):
            value = everything(mean.astype(np.float32), cov.astype(np.float32))["uncertainty"][0]
            assert value[2] == 0
            expected = entropy(np.exp(mean - mean.max()))
            np.testing.assert_allclose(value[0], expected, atol=20 * np.finfo(np.float32).eps)
    value = everything(MEAN, 4.0 * np.ones((C, C)))["uncertainty"][0]
    assert value[2] < 1e-12
    np.testing.assert_allclose(value[0], entropy(P), atol=1e-12)
    nothing = everything(MEANS["nothing"], COVS["full"])["uncertainty"][0]
    np.testing.assert_array_equal(nothing, 0)


# -- derivatives --------------------------------------------------------------------------------------


@every_cov
def test_derivatives_forward_in_reverse_and_second_ones(cov):
    """In the mean they are those of the average."""
    step = 1e-5
    here, up, down = (everything(MEAN + k * step * DIRECTION, cov) for k in (0, 1, -1))
    for fn in FUNCTIONS:
        difference = (up[fn][0] - down[fn][0]) / (2 * step)
        np.testing.assert_allclose(here[fn][1] @ DIRECTION, difference, atol=1e-8)
    backward, second = in_reverse(MEAN, cov)
    for fn, slopes in backward.items():
        for back, ahead in zip(slopes, here[fn][1:], strict=True):
            np.testing.assert_allclose(back, ahead, atol=1e-12)
    chex.assert_tree_all_finite(second)


def hessians():
    """By the logits, of what each function averages; the epistemic part's is the Fisher information."""

    def entropy_of(logits):
        return -jnp.sum(jax.nn.softmax(logits) * jax.nn.log_softmax(logits))

    functions = jax.nn.logsumexp, jax.nn.softmax, entropy_of
    lse, softmax, own = jax.jit(lambda m: [jax.hessian(fn)(m) for fn in functions])(MEAN)
    parts = np.stack([own + FISHER, own, FISHER])
    return {"logsumexp": lse, "softmax": softmax / P[:, None, None], "uncertainty": parts}


def test_price_derivatives_at_zero_covariance_are_half_the_hessian():
    full, diagonal = (everything(MEAN, COVS[name]) for name in ("zero", "zero_diagonal"))
    for fn, hessian in hessians().items():
        np.testing.assert_allclose(full[fn][2], hessian / 2, atol=1e-12)
        expected = np.diagonal(hessian, axis1=-2, axis2=-1) / 2
        np.testing.assert_allclose(diagonal[fn][2], expected, atol=1e-12)


def test_price_derivative_is_the_cubatures_own_slope_as_points_grow():
    cov = 0.25 * (COVS["full"] + 0.5 * np.eye(C))
    direction, step = 0.1 * cov, 1e-4
    few, many = (
        [everything(MEAN, cov + k * step * direction, count) for k in (0, 1, -1)]
        for count in (POINTS, MANY)
    )
    for fn in FUNCTIONS:
        gaps = []
        for here, up, down in (few, many):
            tangent = np.tensordot(here[fn][2], direction, axes=2)
            gaps.append(np.max(np.abs(tangent - (up[fn][0] - down[fn][0]) / (2 * step))))
        assert gaps[1] < gaps[0]
        assert gaps[1] < 0.02 * np.max(np.abs(tangent))


@every_cov
@pytest.mark.parametrize("mean", MEANS)
def test_float32_slopes_are_finite_and_zero_for_masked_logits(mean, cov):
    """With 10^4 times the noise too; probabilities sum to one, values are those of float64.

    To first order the epistemic part is tr(cov F) / 2, F the Fisher information of the logits.
    """
    if mean == "mean":
        narrow = everything(MEAN.astype(np.float32), cov.astype(np.float32))
        wide = everything(MEAN, cov)
        small = everything(MEAN.astype(np.float32), (1e-6 * cov).astype(np.float32))
        for fn in FUNCTIONS:
            assert narrow[fn][0].dtype == np.float32
            np.testing.assert_allclose(narrow[fn][0], wide[fn][0], atol=1e-3)
        first = np.sum((cov if cov.ndim == 2 else np.diag(cov)) * FISHER) / 2e6
        np.testing.assert_allclose(small["uncertainty"][0][2], first, rtol=1e-2)
    mean = MEANS[mean].astype(np.float32)
    masked = mean == -np.inf
    for scale in (1, 100, 1e4):
        results = everything(mean, scale * cov.astype(np.float32))
        for fn in ("softmax", "uncertainty") if masked.any() else FUNCTIONS:
            _, *slopes = results[fn]
            chex.assert_tree_all_finite(slopes)
            np.testing.assert_array_equal(slopes[0][..., masked], 0)
        log_probs, by_mean, _ = map(np.asarray, results["softmax"])
        assert by_mean.dtype == np.float32
        np.testing.assert_array_equal(log_probs == -np.inf, masked)
        np.testing.assert_array_equal(by_mean[masked], 0)
        if not masked.all():
            assert abs(np.exp(log_probs).sum() - 1) < 100 * np.finfo(np.float32).eps
