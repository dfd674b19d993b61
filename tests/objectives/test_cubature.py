"""The cubature: exact moments, singular roots, Price's derivatives, laws of its functions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from moment_jax.objectives import cubature
from moment_jax.objectives.cubature import count_points, normal_points

C = 5
# Compiled once for every shape: most of this file's time would else be spent on tiny programs.
expected_logsumexp = jax.jit(cubature.expected_logsumexp, static_argnums=2)
log_expected_softmax = jax.jit(cubature.log_expected_softmax, static_argnums=2)
gaussian_points = jax.jit(cubature.gaussian_points, static_argnums=2)
psd_root = jax.jit(cubature.psd_root)
SLOPES = {
    fn: jax.jit(jax.jacfwd(fn, argnums=(0, 1)), static_argnums=2)
    for fn in (expected_logsumexp, log_expected_softmax)
}
every_fn = pytest.mark.parametrize("fn", SLOPES, ids=["logsumexp", "softmax"])


def random_cov(seed, rank, scale=1.0):
    factor = np.random.default_rng(seed).normal(size=(C, rank))
    return scale**2 * factor @ factor.T / rank


COVS = {
    "diagonal": np.asarray([0.3, 1.0, 0.0, 2.0, 0.7]),
    "full": random_cov(0, C),
    "singular": random_cov(1, 2),
    "zero": np.zeros((C, C)),
    "zero_diagonal": np.zeros(C),
}
MEAN = np.asarray([0.4, -1.0, 2.0, 0.1, 0.0])
every_cov = pytest.mark.parametrize("cov", COVS.values(), ids=COVS.keys())


@pytest.mark.parametrize(("num_dims", "num_points"), [(1, 8), (2, 64), (10, 128), (30, 128)])
def test_points_have_the_moments_of_the_normal_law(num_dims, num_points):
    points = normal_points(num_dims, num_points)
    assert points.shape == (num_points, num_dims)
    third = np.einsum("ki,kj,kl->ijl", points, points, points) / num_points
    np.testing.assert_allclose(points.mean(axis=0), 0, atol=1e-12)
    np.testing.assert_allclose(points.T @ points / num_points, np.eye(num_dims), atol=1e-12)
    np.testing.assert_allclose(third, 0, atol=1e-12)


def test_points_in_one_dimension_are_the_quantiles_of_the_normal_law():
    fourth = np.mean(normal_points(1, 1024) ** 4)
    assert abs(fourth - 3) < 0.05


@pytest.mark.parametrize(
    ("num_points", "num_dims", "expected"),
    [(None, 10, 128), (None, 100, 1024), (100, 10, 128), (8, 1, 8), (3, 0, 8)],
)
def test_count_points(num_points, num_dims, expected):
    assert count_points(num_points, num_dims) == expected


def test_too_few_points_raise():
    with pytest.raises(ValueError, match="num_points >= 40"):
        count_points(32, 10)


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.float32])
@pytest.mark.parametrize("name", ["full", "singular", "zero"])
def test_root_squares_to_the_covariance(name, dtype):
    cov = COVS[name].astype(dtype)
    root = psd_root(cov)
    assert root.dtype == dtype
    scale = float(np.max(np.abs(cov)))
    np.testing.assert_allclose(root @ root.T, cov, atol=50 * float(jnp.finfo(dtype).eps) * scale)
    np.testing.assert_array_equal(root, np.tril(root))


def test_root_of_a_positive_definite_covariance_is_choleskys():
    np.testing.assert_allclose(psd_root(COVS["full"]), np.linalg.cholesky(COVS["full"]), atol=1e-12)


def test_variances_and_their_diagonal_matrix_agree():
    variances = COVS["diagonal"]
    for fn in (expected_logsumexp, log_expected_softmax):
        np.testing.assert_allclose(
            fn(MEAN, variances, 64), fn(MEAN, np.diag(variances), 64), atol=1e-12
        )


@every_cov
def test_values_are_the_averages_over_the_points(cov):
    points = np.asarray(gaussian_points(MEAN, cov, 64))
    lse = np.mean(np.log(np.exp(points).sum(axis=1)))
    probabilities = np.mean(np.exp(points) / np.exp(points).sum(axis=1, keepdims=True), axis=0)
    np.testing.assert_allclose(expected_logsumexp(MEAN, cov, 64), lse, atol=1e-12)
    np.testing.assert_allclose(
        np.exp(log_expected_softmax(MEAN, cov, 64)), probabilities, atol=1e-12
    )


@every_cov
@every_fn
def test_derivative_in_the_mean_is_that_of_the_average(fn, cov):
    direction = np.asarray([0.5, -0.2, 1.0, 0.3, -0.7])
    tangent = SLOPES[fn](MEAN, cov, 64)[0] @ direction
    step = 1e-5
    difference = fn(MEAN + step * direction, cov, 64) - fn(MEAN - step * direction, cov, 64)
    np.testing.assert_allclose(tangent, difference / (2 * step), atol=1e-8)


@every_fn
def test_price_derivative_at_zero_covariance_is_half_the_hessian(fn):
    at_mean = jax.nn.logsumexp if fn is expected_logsumexp else jax.nn.softmax
    hessian = np.asarray(jax.jit(jax.hessian(at_mean))(MEAN))
    if fn is log_expected_softmax:
        hessian = hessian / scipy.special.softmax(MEAN)[:, None, None]
    full = SLOPES[fn](MEAN, COVS["zero"], 64)[1]
    diagonal = SLOPES[fn](MEAN, COVS["zero_diagonal"], 64)[1]
    np.testing.assert_allclose(full, hessian / 2, atol=1e-12)
    np.testing.assert_allclose(diagonal, np.diagonal(hessian, axis1=-2, axis2=-1) / 2, atol=1e-12)


@every_fn
def test_price_derivative_is_the_cubatures_own_slope_as_points_grow(fn):
    cov = 0.25 * (COVS["full"] + 0.5 * np.eye(C))
    direction = 0.1 * cov
    step = 1e-4

    def slopes(num_points):
        tangent = jax.jit(
            lambda c: jax.jvp(lambda c: fn(MEAN, c, num_points), (c,), (direction,))[1]
        )(cov)
        up, down = (fn(MEAN, cov + sign * step * direction, num_points) for sign in (1, -1))
        return np.asarray(tangent), np.asarray(up - down) / (2 * step)

    gaps = [np.max(np.abs(np.subtract(*slopes(num_points)))) for num_points in (64, 2048)]
    assert gaps[1] < gaps[0]
    assert gaps[1] < 0.02 * np.max(np.abs(slopes(2048)[0]))


@every_fn
def test_derivatives_are_finite_and_reverse_agrees_with_forward(fn):
    reverse = jax.jit(jax.jacrev(fn, argnums=(0, 1)), static_argnums=2)
    for cov in COVS.values():
        for back, ahead in zip(reverse(MEAN, cov, 64), SLOPES[fn](MEAN, cov, 64), strict=True):
            assert np.all(np.isfinite(back))
            np.testing.assert_allclose(back, ahead, atol=1e-12)


@every_fn
def test_second_derivatives_are_finite(fn):
    def gradient(mean, cov):
        return jax.grad(lambda m, c: jnp.sum(fn(m, c, 64) ** 2), argnums=(0, 1))(mean, cov)

    second = jax.jit(lambda m, c: jax.jvp(gradient, (m, c), (jnp.ones_like(m), jnp.ones_like(c))))
    for cov in COVS.values():
        assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(second(MEAN, cov)))


@pytest.mark.parametrize("scale", [0.0, 1e4])
def test_huge_logits_stay_finite(scale):
    dtype = np.float32
    mean = np.asarray([1e4, -1e4, 0.0, 1e4, 3.0], dtype)
    for cov in (np.full(C, scale, dtype), np.full((C, C), scale, dtype)):
        for fn in (expected_logsumexp, log_expected_softmax):
            value = fn(mean, cov, 64)
            grads = SLOPES[fn](mean, cov, 64)
            assert value.dtype == dtype
            assert all(np.all(np.isfinite(leaf)) for leaf in (value, *grads))


@every_fn
@pytest.mark.parametrize("name", ["full", "diagonal"])
def test_jit_and_vmap(fn, name):
    means, cov = np.stack([MEAN, -MEAN, 2 * MEAN]), COVS[name]
    loop = np.stack([fn(mean, cov, 64) for mean in means])
    batch = jax.jit(jax.vmap(lambda m, c: fn(m, c, 64), in_axes=(0, None)))(means, cov)
    np.testing.assert_allclose(batch, loop, atol=1e-12)
    original = {
        expected_logsumexp: cubature.expected_logsumexp,
        log_expected_softmax: cubature.log_expected_softmax,
    }[fn]
    np.testing.assert_allclose(original(MEAN, cov, 64), loop[0], atol=1e-12)


@every_fn
@every_cov
def test_float32(fn, cov):
    value = fn(MEAN.astype(np.float32), cov.astype(np.float32), 64)
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, fn(MEAN, cov, 64), atol=1e-3)


def test_a_shift_that_the_logits_share_moves_logsumexp_alone():
    shifted = expected_logsumexp(MEAN + 3.0, COVS["full"], 64)
    np.testing.assert_allclose(shifted, expected_logsumexp(MEAN, COVS["full"], 64) + 3, atol=1e-12)
    np.testing.assert_allclose(
        log_expected_softmax(MEAN + 3.0, COVS["full"], 64),
        log_expected_softmax(MEAN, COVS["full"], 64),
        atol=1e-12,
    )


def test_nan_stays_nan():
    assert np.isnan(psd_root(jnp.diag(jnp.array([1.0, jnp.nan])))[1, 1])
