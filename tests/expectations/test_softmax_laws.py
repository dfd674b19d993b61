"""The softmax of Gaussian scores: fixed points, limits, invariances, derivatives, masks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from moment_jax.expectations import (
    expected_softmax_jacobian,
    logsumexp_mean,
    softmax_jacobian,
    softmax_mean,
    softmax_moments,
)

# Compiled once for all tests.
mean_of = jax.jit(softmax_mean)
moments_of = jax.jit(softmax_moments)
logsumexp_of = jax.jit(logsumexp_mean)
batch_mean = jax.jit(jax.vmap(softmax_mean))
batch_moments = jax.jit(jax.vmap(softmax_moments))
batch_jacobian = jax.jit(jax.vmap(expected_softmax_jacobian))


def rows(scale: float, num_scores: int = 16, count: int = 40, dtype=jnp.float64):
    """Means of sd 1.5; half the covariances are diagonal, half of rank 6; all variances scale^2."""
    rng = np.random.default_rng(3)
    factor = rng.normal(size=(count, num_scores, 6))
    factor /= np.linalg.norm(factor, axis=-1, keepdims=True)
    cov = np.einsum("nik,njk->nij", factor, factor)
    cov[::2] = np.eye(num_scores)
    mean = 1.5 * rng.normal(size=(count, num_scores))
    return jnp.asarray(mean, dtype), jnp.asarray(scale**2 * cov, dtype)


def relative(error, size):
    axes = tuple(range(1, error.ndim))
    return np.sqrt((np.asarray(error) ** 2).sum(axes) / (np.asarray(size) ** 2).sum(axes)).max()


@pytest.mark.parametrize(
    ("num_scores", "dtype"), [(16, jnp.float32), (16, jnp.float64), (64, jnp.float32)]
)
@pytest.mark.parametrize("scale", [0.1, 1.0, 3.0, 5.0])
def test_the_equation_of_the_expected_jacobian_holds(scale, dtype, num_scores):
    """X = J - X cov X with J = diag(q) - q q^T: the documented residual."""
    mean, cov = rows(scale, num_scores, dtype=dtype)
    q = batch_mean(mean, cov)
    x = batch_jacobian(q, cov)
    residual = jax.vmap(softmax_jacobian)(q) - x - x @ cov @ x
    assert relative(residual, x) < 1e-3
    assert q.dtype == x.dtype == dtype


def test_expected_jacobian_in_closed_form():
    """X = A 2 (1 + sqrt(1 + 4 A^T cov A))^-1 A^T for any A with A A^T = diag(q) - q q^T."""
    mean, cov = (x[1] for x in rows(1.0))
    q = np.asarray(softmax_mean(mean, cov))
    root = np.diag(np.sqrt(q)) @ (np.eye(len(q)) - np.outer(np.sqrt(q), np.sqrt(q)))
    values, vectors = np.linalg.eigh(root.T @ np.asarray(cov) @ root)
    middle = vectors * (2 / (1 + np.sqrt(1 + 4 * np.maximum(values, 0))))[None, :] @ vectors.T
    got = expected_softmax_jacobian(jnp.asarray(q), cov)
    np.testing.assert_allclose(got, root @ middle @ root.T, atol=1e-10)


def test_order_one_is_the_derivation():
    mean, cov = (x[1] for x in rows(1.0))
    w = jax.nn.softmax(mean)
    got_mean, got_cov = softmax_moments(mean, cov, order=1)
    np.testing.assert_allclose(got_mean, w, rtol=1e-14)
    jacobian = jax.jacobian(jax.nn.softmax)(mean)
    np.testing.assert_allclose(softmax_jacobian(w), jacobian, atol=1e-15)
    np.testing.assert_allclose(got_cov, jacobian @ cov @ jacobian.T, atol=1e-14)
    np.testing.assert_allclose(softmax_mean(mean, cov, order=1), w, rtol=1e-14)


def test_small_noise_is_itos_correction():
    mean, cov = rows(1e-3)
    w = np.asarray(jax.nn.softmax(mean))
    pulled, diagonal = np.einsum("nij,nj->ni", cov, w), np.einsum("nii->ni", cov)
    inner = 2 * pulled - 2 * np.sum(w * pulled, axis=1, keepdims=True)
    ito = w + w / 2 * (diagonal - inner - np.sum(w * diagonal, axis=1, keepdims=True))
    np.testing.assert_allclose(batch_mean(mean, cov), ito, atol=1e-10)


@pytest.mark.parametrize("scale", [0.0, 0.3, 2.0, 5.0, 100.0])
def test_a_distribution_and_its_covariance(scale):
    mean, cov = rows(scale)
    q, out = batch_moments(mean, cov)
    rounding = 1e-12 * (1 + scale**2)
    np.testing.assert_allclose(q.sum(-1), 1, atol=1e-12)
    assert bool(jnp.all(q >= 0))
    np.testing.assert_allclose(out.sum(-1), 0, atol=rounding)
    assert np.linalg.eigvalsh(out).min() > -rounding


def test_common_noise_changes_nothing():
    mean, cov = (x[1] for x in rows(1.0))
    b = jnp.linspace(-1.0, 2.0, 16)
    shared = cov + b[:, None] + b[None, :] + 20.0
    for got, want in zip(moments_of(mean, shared), moments_of(mean, cov), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-9)


def test_diagonal_and_operator_forms():
    mean, cov = (x[0] for x in rows(1.5))
    variance = jnp.diagonal(cov)
    np.testing.assert_allclose(mean_of(mean, variance), mean_of(mean, cov), atol=1e-9)
    for got, want in zip(moments_of(mean, variance), moments_of(mean, cov), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-9)
    np.testing.assert_allclose(logsumexp_of(mean, variance), logsumexp_of(mean, cov), rtol=1e-10)


def test_gradients_match_finite_differences():
    mean, cov = (x[1, :6] for x in rows(1.2))
    cov = cov[:, :6]
    weight = jax.random.normal(jax.random.key(0), (6, 6))
    weight = weight + weight.T

    def symmetric(c):
        return 0.5 * (c + c.T)

    def everything(m, c):
        mean, out = softmax_moments(m, symmetric(c))
        diagonal = softmax_mean(m, jnp.diagonal(c))
        return mean, (weight * out).sum(), diagonal, logsumexp_mean(m, symmetric(c))

    check_grads(jax.jit(everything), (mean, cov), order=1, eps=1e-4)
    slope = jax.jit(jax.grad(lambda m: weight[0] @ softmax_mean(m, cov)))
    step, direction = 1e-4, weight[1]
    turn = slope(mean + step * direction) - slope(mean - step * direction)
    second = jax.jvp(slope, (mean,), (direction,))[1]
    np.testing.assert_allclose(second, turn / (2 * step), atol=1e-6)


def best_bound(mean, cov):
    """The least of the bounds, by many short steps to the fixed point."""
    raised, a = mean + 0.5 * np.diag(cov), np.full(len(mean), 1 / len(mean))
    for _ in range(2000):
        weights = np.exp(raised - cov @ a - np.max(raised))
        a = 0.9 * a + 0.1 * weights / weights.sum()
    tilted = raised - cov @ a
    return np.max(tilted) + np.log(np.exp(tilted - np.max(tilted)).sum()) + 0.5 * a @ cov @ a


def test_logsumexp_is_an_upper_bound_and_nearly_the_least_of_its_kind():
    mean, cov = rows(1.0, count=4)
    z = np.random.default_rng(0).normal(size=(50_000, 16))
    for m, c in zip(np.asarray(mean), np.asarray(cov), strict=True):
        values, vectors = np.linalg.eigh(c)
        s = m + z @ (vectors * np.sqrt(np.maximum(values, 0))).T
        samples = s.max(1) + np.log(np.exp(s - s.max(1, keepdims=True)).sum(1))
        bound, best = logsumexp_of(jnp.asarray(m), jnp.asarray(c)), best_bound(m, c)
        assert bound > samples.mean() - 4 * samples.std() / len(z) ** 0.5
        assert best - 1e-9 < bound < best + 0.02 * (best - samples.mean())


def test_masks():
    mean, cov = (x[1] for x in rows(1.0))
    mask = jnp.arange(16) % 3 != 1
    kept = np.flatnonzero(mask)
    junk = jnp.where(mask, mean, jnp.nan), cov + jnp.where(mask, 0.0, jnp.inf)[None, :]
    q, out = moments_of(*junk, mask=mask)
    want_q, want = moments_of(mean[kept], cov[np.ix_(kept, kept)])
    np.testing.assert_allclose(q[kept], want_q, atol=1e-12)
    np.testing.assert_allclose(out[np.ix_(kept, kept)], want, atol=1e-12)
    gone = np.flatnonzero(~mask)
    assert not q[gone].any()
    assert not out[gone].any()
    by_minus_infinity = mean_of(jnp.where(mask, mean, -jnp.inf), cov)
    np.testing.assert_allclose(by_minus_infinity, q, atol=1e-14)
    grads = jax.jit(jax.grad(lambda m, c: softmax_mean(m, c, mask=mask)[0], (0, 1)))(*junk)
    assert all(bool(jnp.all(jnp.isfinite(g))) for g in grads)
    none_left = moments_of(mean, cov, mask=jnp.zeros(16, bool))
    assert not any(x.any() for x in none_left)
    one = jnp.arange(16) == 3
    np.testing.assert_array_equal(mean_of(mean, cov, mask=one), one)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_huge_scores(dtype):
    mean = jnp.array([1e4, -1e4, 9999.0, 0.0, -1e4, 1e4], dtype)

    def total(m, c):
        q, out = softmax_moments(m, c)
        return (q**2).sum() + (out**2).sum() + logsumexp_mean(m, c)

    value_and_grad = jax.jit(jax.value_and_grad(total, (0, 1)))
    for scale in (0.0, 1.0, 30.0):
        value, grads = value_and_grad(mean, jnp.asarray(scale**2 * np.eye(6), dtype))
        assert bool(jnp.isfinite(value))
        assert all(bool(jnp.all(jnp.isfinite(g))) for g in grads)


def test_gradients_are_finite_however_sure_the_row():
    """Between an even row and one with a single score left, weights pass through every size."""
    mean, cov = (x[1, :4].astype(jnp.float32) for x in rows(0.1))

    def total(scale):
        q, out = softmax_moments(scale * mean, cov[:, :4])
        return q @ jnp.arange(4.0, dtype=q.dtype) + (out**2).sum()

    slopes = jax.jit(jax.vmap(jax.grad(total)))(jnp.linspace(1, 150, 300, dtype=jnp.float32))
    assert bool(jnp.all(jnp.isfinite(slopes)))


def test_jit_and_vmap():
    mean, cov = rows(1.0, count=3)
    for got, want in zip(
        batch_moments(mean, cov),
        zip(*(softmax_moments(m, c) for m, c in zip(mean, cov, strict=True)), strict=True),
        strict=True,
    ):
        np.testing.assert_allclose(got, np.stack(want), atol=1e-10)
    each = np.stack([logsumexp_of(m, c) for m, c in zip(mean, cov, strict=True)])
    np.testing.assert_allclose(jax.vmap(logsumexp_mean)(mean, cov), each, rtol=1e-10)


def test_errors():
    mean, cov = jnp.zeros(3), jnp.eye(3)
    with pytest.raises(ValueError, match=r"jax.vmap\(softmax_mean\)"):
        softmax_mean(mean[None, :], cov)
    with pytest.raises(ValueError, match="takes one row"):
        softmax_moments(mean, jnp.eye(4))
    with pytest.raises(ValueError, match="order 1 or 2"):
        softmax_mean(mean, cov, order=3)
    with pytest.raises(ValueError, match="boolean mask"):
        logsumexp_mean(mean, cov, mask=jnp.ones(3))


@pytest.mark.parametrize("moments", [softmax_mean, softmax_moments, logsumexp_mean])
def test_nan_stays_nan(moments):
    mean, cov = jnp.array([1.0, 0.0, 2.0]), 0.1 * jnp.eye(3)
    for arguments in ((mean.at[1].set(jnp.nan), cov), (mean, cov.at[1, 1].set(jnp.nan))):
        assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(moments(*arguments)))
