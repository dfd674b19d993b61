"""The softmax of Gaussian scores: fixed points, limits, invariances, derivatives, masks; its errors."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moment_jax as mj
from moment_jax.expectations import expected_softmax_jacobian, softmax_expansion, softmax_jacobian
from tests.expectations.families import softmax_moments

ALL = np.ones(16, bool)


# Compiled once; most tests use the same shapes.
one_row = jax.jit(softmax_moments)
all_rows = jax.jit(jax.vmap(lambda mean, cov: softmax_moments(mean, cov, ALL)))


def rows(scale: float, num_scores: int = 16, count: int = 40, dtype=np.float64):
    """Means of sd 1.5; half the covariances are diagonal, half of rank 6; all variances scale^2."""
    rng = np.random.default_rng(3)
    factor = rng.normal(size=(count, num_scores, 6))
    factor /= np.linalg.norm(factor, axis=-1, keepdims=True)
    cov = np.einsum("nik,njk->nij", factor, factor)
    cov[::2] = np.eye(num_scores)
    mean = 1.5 * rng.normal(size=(count, num_scores))
    return mean.astype(dtype), (scale**2 * cov).astype(dtype)


def relative(error, size):
    axes = tuple(range(1, error.ndim))
    return np.sqrt((np.asarray(error) ** 2).sum(axes) / (np.asarray(size) ** 2).sum(axes)).max()


@pytest.mark.parametrize(("num_scores", "dtype"), [(64, np.float32), (16, np.float64)])
def test_the_equation_of_the_expected_jacobian_holds(num_scores, dtype):
    """X = J - X cov X with J = diag(q) - q q^T: the documented residual, at every noise."""

    @jax.jit
    @jax.vmap
    def solve(mean, cov):
        q = softmax_expansion(mean, cov).mean
        x = expected_softmax_jacobian(q, cov)
        return q, x, softmax_jacobian(q) - x - x @ cov @ x

    batches = [rows(scale, num_scores, dtype=dtype) for scale in (0.1, 1.0, 3.0, 5.0)]
    q, x, residual = solve(*(np.concatenate(part) for part in zip(*batches, strict=True)))
    assert relative(residual, x) < 1e-3
    assert q.dtype == x.dtype == dtype
    if num_scores == 16:  # in closed form, 2 A (1 + sqrt(1 + 4 A^T cov A))^-1 A^T, A A^T = J
        cov, q, x = batches[1][1][1], np.asarray(q[41]), x[41]
        root = np.diag(np.sqrt(q)) @ (np.eye(len(q)) - np.outer(np.sqrt(q), np.sqrt(q)))
        values, vectors = np.linalg.eigh(root.T @ cov @ root)
        middle = vectors * (2 / (1 + np.sqrt(1 + 4 * np.maximum(values, 0))))[None, :] @ vectors.T
        np.testing.assert_allclose(x, root @ middle @ root.T, atol=1e-10)


def test_small_noise_is_itos_correction():
    mean, cov = rows(1e-3)
    w = np.exp(mean) / np.exp(mean).sum(1, keepdims=True)
    pulled, diagonal = np.einsum("nij,nj->ni", cov, w), np.einsum("nii->ni", cov)
    inner = 2 * pulled - 2 * np.sum(w * pulled, axis=1, keepdims=True)
    ito = w + w / 2 * (diagonal - inner - np.sum(w * diagonal, axis=1, keepdims=True))
    np.testing.assert_allclose(all_rows(mean, cov)[0], ito, atol=1e-10)


@pytest.mark.parametrize("scale", [0.0, 0.3, 2.0, 5.0, 100.0])
def test_a_distribution_and_its_covariance(scale):
    q, out = all_rows(*rows(scale))
    rounding = 1e-12 * (1 + scale**2)
    np.testing.assert_allclose(q.sum(-1), 1, atol=1e-12)
    assert np.all(np.asarray(q) >= 0)
    np.testing.assert_allclose(out.sum(-1), 0, atol=rounding)
    assert np.linalg.eigvalsh(out).min() > -rounding


def test_common_noise_changes_no_probability():
    mean, cov = rows(1.0)
    b = np.linspace(-1.0, 2.0, 16)
    shared = cov + b[None, :, None] + b[None, None, :] + 20.0
    for got, want in zip(all_rows(mean, shared), all_rows(mean, cov), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-9)


def test_diagonal_covariances_and_single_rows():
    mean, cov = rows(1.5)
    batch = all_rows(mean, cov)
    for i in (0, 1):
        for got, want in zip(one_row(mean[i], cov[i], ALL), batch, strict=True):
            np.testing.assert_allclose(got, want[i], atol=1e-10)
    for got, want in zip(one_row(mean[0], np.diagonal(cov[0]), ALL), batch, strict=True):
        np.testing.assert_allclose(got, want[0], atol=1e-9)


@jax.jit
def derivatives(mean, cov, mask, directions, weight):
    """Values, their change along a direction, the same in reverse mode, and a second derivative."""

    def values(m, c):
        c = 0.5 * (c + c.T)
        q, out = softmax_moments(m, c, mask)
        diagonal = softmax_expansion(jnp.where(mask, m, -jnp.inf), jnp.diagonal(c)).mean
        return q, (weight * out).sum(), diagonal

    value, forward = jax.linearize(values, mean, cov)
    tangent = forward(*directions)
    cotangent = (weight[0], 1.3, weight[2])
    pulled = jax.linear_transpose(forward, mean, cov)(cotangent)
    slope = jax.grad(lambda m: weight[0] @ softmax_moments(m, cov, mask)[0])
    return value, tangent, cotangent, pulled, *jax.jvp(slope, (mean,), (directions[0],))


SIX = np.random.default_rng(0).normal(size=(13, 6))
SETTINGS = ALL[:6], (SIX[0], SIX[1:7]), SIX[7:] + SIX[7:].T


def test_gradients_match_finite_differences():
    mean, cov = (x[1, :6] for x in rows(1.2))
    cov, step, directions = cov[:, :6], 1e-4, SETTINGS[1]

    def difference(of, *moves):
        up, down = (
            derivatives(mean + k * moves[0], cov + k * moves[1], *SETTINGS)[of]
            for k in (step, -step)
        )
        return jax.tree.map(lambda a, b: np.asarray(a - b) / (2 * step), up, down)

    _, tangents, cotangents, pulled, _, second = derivatives(mean, cov, *SETTINGS)
    for tangent, expected in zip(tangents, difference(0, *directions), strict=True):
        np.testing.assert_allclose(tangent, expected, atol=1e-6, rtol=1e-6)
    reverse = sum(map(np.vdot, pulled, directions))
    np.testing.assert_allclose(reverse, sum(map(np.vdot, cotangents, tangents)), rtol=1e-10)
    np.testing.assert_allclose(second, difference(4, directions[0], 0.0), atol=1e-6)


def test_masks():
    mean, cov = (x[1] for x in rows(1.0))
    mask = np.arange(16) % 3 == 0
    kept, gone = np.flatnonzero(mask), np.flatnonzero(~mask)
    junk = np.where(mask, mean, np.nan), cov + np.where(mask, 0.0, np.inf)[None, :]
    q, out = one_row(*junk, mask)
    alone = mean[kept], cov[np.ix_(kept, kept)], *SETTINGS
    value = derivatives(*alone)[0]
    np.testing.assert_allclose(q[kept], value[0], atol=1e-12)
    weighted = (SETTINGS[2] * out[np.ix_(kept, kept)]).sum()
    np.testing.assert_allclose(weighted, value[1], atol=1e-12)
    assert not q[gone].any()
    assert not out[gone].any()
    by_minus_infinity = one_row(np.where(mask, mean, -np.inf), cov, ALL)
    for got, want in zip(by_minus_infinity, (q, out), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-14)
    assert not any(np.any(x) for x in one_row(mean, cov, ~ALL))
    np.testing.assert_array_equal(one_row(mean, cov, np.arange(16) == 3)[0], np.arange(16) == 3)
    some = junk[0][:6], junk[1][:6, :6], mask[:6]
    chex.assert_tree_all_finite(derivatives(*some, *SETTINGS[1:])[3])


HUGE = np.array([1e4, -1e4, 9999.0, 0.0, -1e4, 1e4])


def test_derivatives_are_finite_at_huge_scores():
    for scale in (0.0, 1.0, 30.0):
        chex.assert_tree_all_finite(derivatives(HUGE, scale**2 * np.eye(6), *SETTINGS))


def test_gradients_in_float32_are_finite_however_sure_the_row():
    """Between an even row and one with a single score left, weights pass through every size."""

    @jax.jit
    @jax.vmap
    def gradients(mean, cov):
        def total(mean, cov):
            q, out = softmax_moments(mean, cov)
            return q @ jnp.arange(6, dtype=q.dtype) + (q**2).sum() + (out**2).sum()

        return jax.value_and_grad(total, (0, 1))(mean, cov)

    sure, cov = (x[1, :6] for x in rows(0.1))
    means = np.concatenate([[HUGE] * 3, np.linspace(1, 150, 300)[:, None] * sure])
    noise = [scale**2 * np.eye(6) for scale in (0.0, 1.0, 30.0)]
    covs = np.concatenate([noise, np.broadcast_to(cov[:, :6], (300, 6, 6))])
    chex.assert_tree_all_finite(gradients(means.astype(np.float32), covs.astype(np.float32)))


def test_errors():
    mean, cov = jnp.zeros(3), jnp.eye(3)
    with pytest.raises(ValueError, match=r"jax.vmap\(softmax_expansion\)"):
        softmax_expansion(mean[None, :], cov)
    with pytest.raises(ValueError, match="needs one row"):
        softmax_expansion(mean, jnp.eye(4))


def test_nan_stays_nan():
    mean, cov = (x[0] for x in rows(0.3))
    for broken in ("mean", "cov"):
        m, c = mean.copy(), cov.copy()
        (m if broken == "mean" else c[1])[1] = np.nan
        assert all(np.isnan(leaf).all() for leaf in one_row(m, c, ALL))


# -- against 200,000 samples: the table of the docstrings ---------------------------------------------


COUNT, SCORES, SAMPLES = 8, 16, 200_000
# score sd: relative error of E[softmax] and of Cov[softmax], both of order 2.
TABLE = {0.3: (0.0005, 0.004), 1.0: (0.005, 0.03), 2.0: (0.04, 0.09), 3.0: (0.10, 0.13)}


@pytest.fixture(scope="module")
def sampled():
    """Mean and covariance of softmax(mean + factor z) over one set of samples z, compiled once."""
    z = jnp.asarray(np.random.default_rng(2).standard_normal((SAMPLES, SCORES), np.float32))

    @jax.jit
    def moments(mean, factor):
        w = jax.nn.softmax(mean[None, :] + z @ factor.T)
        centred = w - w.mean(0)[None, :]
        return w.mean(0), centred.T @ centred / SAMPLES

    return moments


@jax.jit
def both_orders(mean, cov):
    plain, jacobian = jax.nn.softmax(mean), softmax_jacobian(jax.nn.softmax(mean))
    return *softmax_moments(mean, cov), plain, jacobian @ cov @ jacobian


@pytest.mark.parametrize("scale", TABLE)
def test_table(scale, sampled):
    rng = np.random.default_rng(0)
    errors = []
    for i in range(COUNT):
        factor = np.eye(SCORES)
        if i % 2:
            factor[:, 6:], factor[:, :6] = 0, rng.normal(size=(SCORES, 6))
        factor *= scale / np.linalg.norm(factor, axis=1, keepdims=True)
        mean = 1.5 * rng.normal(size=SCORES)
        want = [np.asarray(x) for x in sampled(np.float32(mean), np.float32(factor))]
        errors.append(
            [
                np.linalg.norm(a - b) / np.linalg.norm(b)
                for a, b in zip(both_orders(mean, factor @ factor.T), want * 2, strict=True)
            ]
        )
    average = np.mean(errors, axis=0)
    spread = np.std(errors, axis=0) / COUNT**0.5
    for k in (0, 1):
        # The cases drawn differ from the table's, and the truth is itself sampled.
        assert average[k] < TABLE[scale][k] + 3 * spread[k] + SAMPLES**-0.5, (average, spread)
        assert average[k] < average[2 + k]  # better than order 1


# score sd: bounds on the sd of a transform's entries over the sampled one, and on their total variance.
RATIOS = {1.0: (0.75, 1.1, 0.03), 2.0: (0.6, 1.15, 0.06), 3.0: (0.5, 1.2, 0.12)}


@functools.cache
def sampled_variances():
    """Mean scores (8,), and Var[softmax(mean + scale z)] for each scale."""
    rng = np.random.default_rng(1)
    mean, z = rng.normal(size=8), rng.normal(size=(SAMPLES, 8))
    weights = {scale: np.exp(mean[None] + scale * z) for scale in RATIOS}
    return mean, {s: np.var(w / w.sum(1, keepdims=True), axis=0) for s, w in weights.items()}


@pytest.mark.parametrize("structure", list(mj.STRUCTURES.values()))
def test_variances_of_eight_independent_logits(structure):
    mean, sampled = sampled_variances()

    @jax.jit
    def variance_of(variance):
        return mj.softmax(mean[None], structure.independent(variance))[1].variance()[0]

    for scale, (least, most, of_total) in RATIOS.items():
        variance = np.asarray(variance_of(np.full((1, 8), scale**2)))
        ratio = np.sqrt(variance / sampled[scale])
        assert least < ratio.min(), ratio
        assert ratio.max() < most, ratio
        assert abs(variance.sum() / sampled[scale].sum() - 1) < of_total
