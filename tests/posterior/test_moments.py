"""Second moments of every family against the dense covariance, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moment_jax.posterior import Factorized, FullNormal, MatrixNormal, OutputShared, Point
from tests.posterior.families import (
    IN,
    KERNEL_FAMILIES,
    KERNEL_METHODS,
    OUT,
    TENSOR_FAMILIES,
    VECTOR_FAMILIES,
    call_name,
    dense_cov,
    dense_kernel_cov,
    example,
    random,
    without_variance,
)

TOL = {"rtol": 1e-10, "atol": 1e-10}
kernels = pytest.mark.parametrize("family", KERNEL_FAMILIES, ids=call_name)
leading = pytest.mark.parametrize("lead", [(), (4,), (2, 3)], ids=str)


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        *((family, (IN, OUT)) for family in KERNEL_FAMILIES),
        *((family, (IN,)) for family in VECTOR_FAMILIES),
        *((family, (2, 3, 2)) for family in TENSOR_FAMILIES),
    ],
    ids=call_name,
)
def test_marginal_variance(family, shape):
    belief = example(family, shape)
    expected = np.diag(dense_cov(belief)).reshape(shape)
    np.testing.assert_allclose(belief.marginal_variance(), expected, **TOL)
    assert belief.shape == shape


@kernels
@leading
def test_noise_variance(family, lead):
    belief, mean, variance = example(family), random(1, *lead, IN), random(2, *lead, IN) ** 2
    moment = np.einsum("...i,...j->...ij", mean, mean) + np.einsum(
        "...i,ij->...ij", variance, np.eye(IN)
    )
    expected = np.einsum("...ij,iojo->...o", moment, dense_kernel_cov(belief))
    actual = belief.noise_variance(mean, variance)
    assert actual.shape == (*lead, OUT)
    np.testing.assert_allclose(actual, expected, **TOL)


@kernels
@leading
def test_noise_block_of_a_moment_that_is_not_symmetric(family, lead):
    belief, moment = example(family), random(3, *lead, IN, IN)
    expected = np.einsum("...ij,iojp->...op", moment, dense_kernel_cov(belief))
    actual = belief.noise_block(moment)
    assert actual.shape == (*lead, OUT, OUT)
    np.testing.assert_allclose(actual, expected, **TOL)


@kernels
def test_input_metric(family):
    belief = example(family)
    expected = np.einsum("iojo->ij", dense_kernel_cov(belief))
    metric = belief.input_metric()
    assert metric.ndim == (2 if family in (MatrixNormal, FullNormal) else 1)
    np.testing.assert_allclose(jnp.diag(metric) if metric.ndim == 1 else metric, expected, **TOL)


@pytest.mark.parametrize("family", VECTOR_FAMILIES, ids=call_name)
def test_vector_cov(family):
    belief = example(family, (IN,))
    cov = belief.vector_cov()
    assert cov.ndim == (2 if family is FullNormal else 1)
    np.testing.assert_allclose(jnp.diag(cov) if cov.ndim == 1 else cov, dense_cov(belief), **TOL)


@pytest.mark.parametrize("family", KERNEL_FAMILIES[1:], ids=call_name)
def test_noise_of_a_sum_is_what_samples_show(family):
    """The moments answer the question that a layer asks: Var[x @ w] for a random w and a fixed x."""
    belief, x = example(family), random(5, IN)
    draws = jax.vmap(belief.sample)(jax.random.split(jax.random.key(1), 20_000))
    outputs = jnp.einsum("i,nio->no", x, draws)
    expected = belief.noise_block(jnp.outer(x, x))
    variances = np.diag(expected)
    error = np.sqrt((np.outer(variances, variances) + expected**2) / len(draws))
    assert np.all(np.abs(np.cov(outputs, rowvar=False) - expected) <= 5 * error)


def equals(variance):
    """The same belief, one variance an output unit, as every family that can hold it."""
    mean, full = random(8, IN, OUT), jnp.broadcast_to(variance[None, :], (IN, OUT))
    cov = jnp.diag(full.ravel()).reshape(IN, OUT, IN, OUT)
    return [
        OutputShared(mean, variance),
        Factorized(mean, full),
        MatrixNormal(mean, jnp.eye(IN), jnp.diag(variance)),
        FullNormal(mean, cov),
    ]


@pytest.mark.parametrize("method", KERNEL_METHODS.items(), ids=call_name)
@pytest.mark.parametrize("variance", [(0.5, 2.0), (0.0, 1.0), (0.0, 0.0)], ids=str)
def test_special_cases_agree(method, variance):
    first, *others = (method[1](belief) for belief in equals(jnp.array(variance)))
    for other in others:
        other = jnp.diag(other) if method[0] == "input_metric" and other.ndim == 2 else other
        np.testing.assert_allclose(other, first, **TOL)


@pytest.mark.parametrize("method", sorted(set(KERNEL_METHODS) - {"kl"}))
@pytest.mark.parametrize("family", KERNEL_FAMILIES[1:], ids=call_name)
def test_no_variance_is_a_point(family, method):
    """All but `kl`, whose convention is tested beside the divergences."""
    call = KERNEL_METHODS[method]
    point, actual = call(example(Point)), call(without_variance(family))
    if method == "input_metric" and actual.ndim == 2:
        point = jnp.diag(point)
    np.testing.assert_array_equal(actual, point)


@pytest.mark.parametrize("family", KERNEL_FAMILIES[1:], ids=call_name)
def test_noise_variance_has_its_whole_gradient_at_zero(family):
    """It is linear in each covariance, so its gradient there is the same at zero as elsewhere."""

    def total(belief):
        return jnp.sum(KERNEL_METHODS["noise_variance"](belief))

    belief = example(family)
    name = next(field for field in vars(belief) if field != "mean")
    at_zero = {**vars(belief), name: 0 * getattr(belief, name)}
    expected, actual = jax.grad(total)(belief), jax.grad(total)(family(**at_zero))
    np.testing.assert_allclose(getattr(actual, name), getattr(expected, name), **TOL)


def test_rounding_leaves_no_negative_noise_variance():
    """Of inputs in the null space of a singular covariance only the rounding is left."""
    for seed in range(50):
        basis, _ = jnp.linalg.qr(random(seed, IN, IN))
        in_cov = jnp.outer(basis[:, 0], basis[:, 0]) * 1e6
        cov = jnp.einsum("ij,op->iojp", in_cov, jnp.eye(OUT))
        for belief in (
            MatrixNormal(jnp.zeros((IN, OUT)), in_cov, jnp.eye(OUT)),
            FullNormal(jnp.zeros((IN, OUT)), cov),
        ):
            assert jnp.all(belief.noise_variance(basis[:, 1], jnp.zeros(IN)) >= 0)
