"""Second moments of every family against the dense covariance, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moment_jax.posterior import Factorized, FullNormal, MatrixNormal, OutputShared, Point
from tests.posterior.families import (
    IN,
    KERNEL_FAMILIES,
    MEMBERS,
    NUM_SAMPLES,
    OUT,
    RANDOM_FAMILIES,
    TOL,
    VECTOR,
    VECTOR_FAMILIES,
    all_methods,
    compiled_methods,
    dense_cov,
    dense_kernel_cov,
    draws,
    example,
    name_of,
    random,
    without_variance,
)

kernels = pytest.mark.parametrize("family", KERNEL_FAMILIES, ids=name_of)
random_kernels = pytest.mark.parametrize("family", RANDOM_FAMILIES, ids=name_of)
leading = pytest.mark.parametrize("lead", [(), (4,), (2, 3)], ids=name_of)


def as_matrix(cov):
    return np.diag(cov) if cov.ndim == 1 else cov


@pytest.mark.parametrize(("family", "shape"), MEMBERS, ids=name_of)
def test_marginal_variance(family, shape):
    belief = example(family, shape)
    expected = np.diag(dense_cov(belief)).reshape(shape)
    np.testing.assert_allclose(belief.marginal_variance(), expected, **TOL)
    assert belief.shape == shape


@kernels
@leading
def test_noise_variance(family, lead):
    belief, mean, variance = example(family), random(1, *lead, IN), random(2, *lead, IN) ** 2
    moment = np.einsum("...i,...j->...ij", mean, mean) + variance[..., None] * np.eye(IN)
    expected = np.einsum("...ij,iojo->...o", moment, dense_kernel_cov(belief))
    actual = jax.jit(belief.noise_variance)(mean, variance)
    assert actual.shape == (*lead, OUT)
    np.testing.assert_allclose(actual, expected, **TOL)


@kernels
@leading
def test_noise_block_of_a_moment_that_is_not_symmetric(family, lead):
    belief, moment = example(family), random(3, *lead, IN, IN)
    expected = np.einsum("...ij,iojp->...op", moment, dense_kernel_cov(belief))
    actual = jax.jit(belief.noise_block)(moment)
    assert actual.shape == (*lead, OUT, OUT)
    np.testing.assert_allclose(actual, expected, **TOL)


@kernels
def test_input_metric(family):
    belief = example(family)
    expected = np.einsum("iojo->ij", dense_kernel_cov(belief))
    metric = belief.input_metric()
    assert metric.ndim == (2 if family in (MatrixNormal, FullNormal) else 1)
    np.testing.assert_allclose(as_matrix(metric), expected, **TOL)


@pytest.mark.parametrize("family", VECTOR_FAMILIES, ids=name_of)
def test_vector_cov(family):
    belief = example(family, VECTOR)
    cov = belief.vector_cov()
    assert cov.ndim == (2 if family is FullNormal else 1)
    np.testing.assert_allclose(as_matrix(cov), dense_cov(belief), **TOL)


@random_kernels
def test_noise_is_what_samples_show(family):
    """The moments answer the question a layer asks: Cov[x @ w] of a random w, for a fixed x."""
    belief, x = example(family), random(5, IN)
    outputs = np.einsum("i,nio->no", x, draws(belief).reshape(-1, IN, OUT))
    expected = belief.noise_block(np.outer(x, x))
    variance = belief.noise_variance(x, np.zeros(IN))
    np.testing.assert_allclose(variance, np.diag(expected), **TOL)
    error = np.sqrt((np.outer(variance, variance) + expected**2) / NUM_SAMPLES)
    assert np.all(np.abs(np.cov(outputs, rowvar=False) - expected) <= 5 * error)


@pytest.mark.parametrize("variance", [(0.5, 2.0), (0.0, 1.0)], ids=str)
def test_special_cases_agree(variance):
    """The same belief, one variance an output unit, in every family that can hold it."""
    mean, variance = jnp.asarray(random(8, IN, OUT)), np.array(variance)
    full = np.broadcast_to(variance, (IN, OUT))
    dense = np.diag(full.ravel()).reshape(IN, OUT, IN, OUT)
    expected = compiled_methods(OutputShared(mean, jnp.asarray(variance)))
    for other in (
        Factorized(mean, jnp.asarray(full)),
        MatrixNormal(mean, jnp.eye(IN), jnp.asarray(np.diag(variance))),
        FullNormal(mean, jnp.asarray(dense)),
    ):
        for name, actual in compiled_methods(other).items():
            wanted = expected[name]
            if name == "input_metric":
                actual, wanted = as_matrix(actual), as_matrix(wanted)
            np.testing.assert_allclose(actual, wanted, err_msg=name, **TOL)


@random_kernels
def test_no_variance_is_a_point(family):
    """In all but `kl`, whose convention is tested beside the divergences."""
    expected, actual = compiled_methods(example(Point)), compiled_methods(without_variance(family))
    for name in set(actual) - {"kl", "input_metric"}:
        np.testing.assert_array_equal(actual[name], expected[name])
    assert not np.any(actual["input_metric"])


@random_kernels
def test_noise_variance_has_its_whole_gradient_at_zero(family):
    """It is linear in each covariance, so its gradient there is the same at zero as elsewhere."""

    @jax.jit
    @jax.grad
    def gradient(belief):
        return jnp.sum(all_methods(belief)["noise_variance"])

    mean, first, *rest = jax.tree.leaves(example(family))
    _, expected, *_ = jax.tree.leaves(gradient(family(mean, first, *rest)))
    _, actual, *_ = jax.tree.leaves(gradient(family(mean, jnp.zeros_like(first), *rest)))
    np.testing.assert_allclose(actual, expected, **TOL)


def test_rounding_leaves_no_negative_noise_variance():
    """Of inputs in the null space of a singular covariance only the rounding is left."""
    mean = jnp.zeros((IN, OUT))
    for seed in range(50):
        basis, _ = np.linalg.qr(random(seed, IN, IN))
        in_cov = np.outer(basis[:, 0], basis[:, 0]) * 1e6
        cov = np.einsum("ij,op->iojp", in_cov, np.eye(OUT))
        for belief in (MatrixNormal(mean, in_cov, np.eye(OUT)), FullNormal(mean, cov)):
            assert np.all(belief.noise_variance(basis[:, 1], np.zeros(IN)) >= 0)
