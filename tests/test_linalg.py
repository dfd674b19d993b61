"""Factors, inverses and log-determinants against NumPy, of singular matrices too."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moment_jax import linalg

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
SIZE = 3


def psd(seed, size=SIZE, rank=None):
    """A random covariance: well conditioned, or singular where a rank is given."""
    factor = np.random.default_rng(seed).normal(size=(size, size if rank is None else rank))
    return factor @ factor.T + (0.5 * np.eye(size) if rank is None else 0)


def squared(root):
    return root @ root.T


REGULAR = psd(0)
SINGULAR = [*(psd(4, rank=rank) for rank in range(SIZE)), np.diag([1.0, -1e-18, 2.0])]
SIGNS = np.array([[1.0, 0.9, -0.8], [0.9, 1, 0.9], [-0.8, 0.9, 1]])  # indefinite

factor = jax.jit(linalg.psd_cholesky, static_argnames="bounded")
ridged = jax.jit(linalg.ridge_inverse, static_argnums=1)

# -- Cholesky -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("cov", [REGULAR, *SINGULAR, psd(0, 50, 20)])
def test_the_factor_squares_to_the_matrix(cov, dtype):
    cov = cov.astype(dtype)
    root = np.asarray(factor(cov))
    assert root.dtype == dtype
    np.testing.assert_array_equal(root, np.tril(root))
    rounding = 50 * np.finfo(dtype).eps * np.max(np.abs(cov))
    np.testing.assert_allclose(squared(root), cov, atol=rounding)
    assert np.isfinite(jax.grad(lambda cov: factor(cov).sum())(cov)).all()


@pytest.mark.parametrize("bounded", [False, True])
def test_the_factor_of_a_regular_matrix_and_its_derivative(bounded):
    """Of (1 + t) M the factor is sqrt(1 + t) L. NaN stays NaN."""
    expected = np.linalg.cholesky(REGULAR)
    fn = functools.partial(factor, bounded=bounded)
    found = jax.jvp(fn, (REGULAR,), (REGULAR,))
    chex.assert_trees_all_close(found, (expected, expected / 2), **CLOSE)
    assert np.isnan(fn(np.diag([1.0, np.nan, 1]))[1, 1])


def test_bounded_rows_keep_their_diagonal():
    root = factor(SIGNS, bounded=True)
    chex.assert_trees_all_close(jnp.diag(squared(root)), jnp.ones(SIZE), **CLOSE)
    semidefinite = np.s_[:2, :2]  # so far
    chex.assert_trees_all_close(squared(root)[semidefinite], SIGNS[semidefinite], **CLOSE)


# -- inverses -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 41, 129])  # one part, two, four
def test_inverse_root(size):
    """Of a stack; a matrix that has none is NaN and spoils no other."""
    matrix = psd(0, size) + 0.5 * np.eye(size)
    good, bad = jax.jit(jax.vmap(linalg.inverse_root))(jnp.stack([matrix, -matrix]))
    np.testing.assert_array_equal(good, np.tril(good))
    chex.assert_trees_all_close(good.T @ good, np.linalg.inv(matrix), **CLOSE)
    assert jnp.isnan(bad).any()


def test_rows_without_a_pivot_are_left_out():
    """Indefinite, in two parts: the inverse is that of the matrix without the spoilt row."""
    matrix = psd(1, 42)
    rest = np.arange(42) != 30
    spoilt = matrix - np.diag(np.where(rest, 0, 1e3))
    expected = np.zeros_like(matrix)
    expected[np.ix_(rest, rest)] = np.linalg.inv(matrix[np.ix_(rest, rest)] + 0.01 * np.eye(41))
    chex.assert_trees_all_close(ridged(spoilt, 0.01), expected, **CLOSE)


def test_ridge_inverse_and_its_derivative():
    def fn(matrix):
        return ridged(matrix, 0.01)

    change = psd(1)
    found, along = jax.jvp(fn, (REGULAR,), (change,))
    inverse = np.linalg.inv(REGULAR + 0.01 * np.eye(SIZE))
    chex.assert_trees_all_close((found, along), (inverse, -inverse @ change @ inverse), **CLOSE)
    for matrix in SINGULAR:
        chex.assert_tree_all_finite(jax.jvp(fn, (matrix,), (change,)))
    narrow = fn(jnp.asarray(REGULAR, jnp.bfloat16))
    assert narrow.dtype == jnp.bfloat16
    chex.assert_trees_all_close(narrow.astype(float), inverse, rtol=0.03, atol=0.03)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="others call their own library")
def test_no_stack_goes_to_lapack():
    def calls(fn):
        text = jax.jit(jax.vmap(fn)).lower(jnp.ones((4, SIZE, SIZE))).as_text()
        return set(re.findall(r"@lapack_.* : \(tensor<(.*?)x[a-z]", text))

    assert not any(map(calls, (linalg.psd_cholesky, linalg.inverse_root, linalg.psd_logdet)))


# -- log-determinant ----------------------------------------------------------------------------------


def test_psd_logdet_and_its_derivative():
    """The derivative is the inverse; where the logarithm is -inf, zero."""
    fn = jax.jit(jax.value_and_grad(linalg.psd_logdet))
    expected = np.linalg.slogdet(REGULAR)[1], np.linalg.inv(REGULAR)
    chex.assert_trees_all_close(fn(REGULAR), expected, **CLOSE)
    for cov in (np.zeros_like(REGULAR), np.diag([1.0, 0, 2])):
        chex.assert_trees_all_equal(fn(cov), (-np.inf, np.zeros_like(cov)))
    assert fn(REGULAR.astype(np.float32))[0].dtype == np.float32
