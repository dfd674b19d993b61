"""The cubature: exact moments, singular roots, Price's derivatives, laws of its functions."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from moment_jax.objectives.cubature import (
    count_points,
    expected_logsumexp,
    gaussian_points,
    log_expected_softmax,
    normal_points,
    psd_root,
)

C = 5
FUNCTIONS = {"logsumexp": expected_logsumexp, "softmax": log_expected_softmax}
every_fn = pytest.mark.parametrize("fn", FUNCTIONS)


# Compiled once per shape; otherwise compiling tiny programs would dominate this file's time.
@partial(jax.jit, static_argnums=2)
def everything(mean, cov, num_points=64):
    """The points, and of each function the value and its slopes in the mean and the covariance."""
    results = {"points": gaussian_points(mean, cov, num_points)}
    for name, fn in FUNCTIONS.items():

        def twice(m, c, fn=fn):
            value = fn(m, c, num_points)
            return value, value

        slopes, value = jax.jacfwd(twice, argnums=(0, 1), has_aux=True)(mean, cov)
        results[name] = value, *slopes
    return results


@jax.jit
def in_reverse(mean, cov):
    """Of each function: slopes in reverse mode, and second derivatives of its square."""

    def of(fn):
        def gradient(m, c):
            return jax.grad(lambda m, c: jnp.sum(fn(m, c, 64) ** 2), argnums=(0, 1))(m, c)

        ones = jnp.ones_like(mean), jnp.ones_like(cov)
        first = jax.jacrev(fn, argnums=(0, 1))(mean, cov, 64)
        return first, jax.jvp(gradient, (mean, cov), ones)

    return {name: of(fn) for name, fn in FUNCTIONS.items()}


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
    third = np.einsum("ki,kj,kl->ijl", points, points, points, optimize=True) / num_points
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


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_root_squares_to_the_covariance(dtype):
    compiled = jax.jit(psd_root)
    for name in ("full", "singular", "zero"):
        cov = COVS[name].astype(dtype)
        root = np.asarray(compiled(cov))
        assert root.dtype == dtype
        rounding = 50 * np.finfo(dtype).eps * np.max(np.abs(cov))
        np.testing.assert_allclose(root @ root.T, cov, atol=rounding)
        np.testing.assert_array_equal(root, np.tril(root))
    if dtype == np.float64:  # of a positive definite covariance, Cholesky's; NaN stays NaN
        expected = np.linalg.cholesky(COVS["full"])
        np.testing.assert_allclose(compiled(COVS["full"]), expected, atol=1e-12)
        assert np.isnan(compiled(np.diag([1.0, np.nan, 1, 1, 1]))[1, 1])


@every_fn
def test_variances_and_their_diagonal_matrix_agree(fn):
    variances = COVS["diagonal"]
    values = [everything(MEAN, cov)[fn][0] for cov in (variances, np.diag(variances))]
    np.testing.assert_allclose(*values, atol=1e-12)


@every_cov
def test_values_are_the_averages_over_the_points(cov):
    results = everything(MEAN, cov)
    points = np.asarray(results["points"])
    lse = np.mean(np.log(np.exp(points).sum(axis=1)))
    probabilities = np.mean(scipy.special.softmax(points, axis=1), axis=0)
    np.testing.assert_allclose(results["logsumexp"][0], lse, atol=1e-12)
    np.testing.assert_allclose(np.exp(results["softmax"][0]), probabilities, atol=1e-12)


@every_cov
@every_fn
def test_derivative_in_the_mean_is_that_of_the_average(fn, cov):
    direction = np.asarray([0.5, -0.2, 1.0, 0.3, -0.7])
    tangent = everything(MEAN, cov)[fn][1] @ direction
    step = 1e-5
    up, down = (everything(MEAN + k * step * direction, cov)[fn][0] for k in (1, -1))
    np.testing.assert_allclose(tangent, (up - down) / (2 * step), atol=1e-8)


@every_fn
def test_price_derivative_at_zero_covariance_is_half_the_hessian(fn):
    at_mean = jax.nn.logsumexp if fn == "logsumexp" else jax.nn.softmax
    hessian = np.asarray(jax.jit(jax.hessian(at_mean))(MEAN))
    if fn == "softmax":
        hessian = hessian / scipy.special.softmax(MEAN)[:, None, None]
    full = everything(MEAN, COVS["zero"])[fn][2]
    diagonal = everything(MEAN, COVS["zero_diagonal"])[fn][2]
    np.testing.assert_allclose(full, hessian / 2, atol=1e-12)
    np.testing.assert_allclose(diagonal, np.diagonal(hessian, axis1=-2, axis2=-1) / 2, atol=1e-12)


@every_fn
def test_price_derivative_is_the_cubatures_own_slope_as_points_grow(fn):
    cov = 0.25 * (COVS["full"] + 0.5 * np.eye(C))
    direction, step = 0.1 * cov, 1e-4

    def slopes(num_points):
        tangent = np.tensordot(everything(MEAN, cov, num_points)[fn][2], direction, axes=2)
        up, down = (
            everything(MEAN, cov + sign * step * direction, num_points)[fn][0] for sign in (1, -1)
        )
        return tangent, np.asarray(up - down) / (2 * step)

    gaps = [np.max(np.abs(np.subtract(*slopes(num_points)))) for num_points in (64, 2048)]
    assert gaps[1] < gaps[0]
    assert gaps[1] < 0.02 * np.max(np.abs(slopes(2048)[0]))


@every_cov
@every_fn
def test_reverse_agrees_with_forward_and_second_derivatives_are_finite(fn, cov):
    backward, second = in_reverse(MEAN, cov)[fn]
    for back, ahead in zip(backward, everything(MEAN, cov)[fn][1:], strict=True):
        assert np.all(np.isfinite(back))
        np.testing.assert_allclose(back, ahead, atol=1e-12)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(second))


@every_fn
@pytest.mark.parametrize("scale", [0.0, 1e4])
def test_huge_logits_stay_finite(fn, scale):
    mean = np.asarray([1e4, -1e4, 0.0, 1e4, 3.0], np.float32)
    for cov in (np.full(C, scale, np.float32), np.full((C, C), scale, np.float32)):
        results = everything(mean, cov)[fn]
        assert results[0].dtype == np.float32
        assert all(np.all(np.isfinite(leaf)) for leaf in results)


@pytest.mark.parametrize("name", ["full", "diagonal"])
def test_jit_and_vmap(name):
    means, cov = np.stack([MEAN, -MEAN, 2 * MEAN]), COVS[name]

    @jax.jit
    @partial(jax.vmap, in_axes=(0, None))
    def batched(mean, cov):
        return {name: fn(mean, cov, 64) for name, fn in FUNCTIONS.items()}

    batch = batched(means, cov)
    for fn in FUNCTIONS:
        loop = np.stack([everything(mean, cov)[fn][0] for mean in means])
        np.testing.assert_allclose(batch[fn], loop, atol=1e-12)
        if name == "full":
            np.testing.assert_allclose(FUNCTIONS[fn](MEAN, cov, 64), loop[0], atol=1e-12)


@every_fn
@every_cov
def test_float32(fn, cov):
    value = everything(MEAN.astype(np.float32), cov.astype(np.float32))[fn][0]
    assert value.dtype == np.float32
    np.testing.assert_allclose(value, everything(MEAN, cov)[fn][0], atol=1e-3)


@every_fn
def test_a_shift_that_the_logits_share_moves_logsumexp_alone(fn):
    shifted, value = (everything(MEAN + k, COVS["full"])[fn][0] for k in (3.0, 0.0))
    np.testing.assert_allclose(shifted, value + 3 * (fn == "logsumexp"), atol=1e-12)
