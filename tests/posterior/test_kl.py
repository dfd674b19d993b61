"""Divergences against integrals, sampling, and the dense formula, of which Eq. 12 is one case."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from moment_jax.posterior import GaussianPrior
from tests.builders import KERNEL_FAMILIES
from tests.posterior import families as of
from tests.posterior.families import IN, OUT, TOL, VECTOR, dense_cov, example, name_of, random

Point, Factorized, OutputShared, KroneckerEigen, FullNormal = KERNEL_FAMILIES
PRIOR = GaussianPrior(*map(jnp.asarray, (random(20, IN, OUT), 0.5 + random(21, IN, OUT) ** 2)))
families = pytest.mark.parametrize("family", of.RANDOM_FAMILIES, ids=name_of)


# Compiled once for each family and form of the prior: the divergence and its gradients.
value_and_grad = jax.jit(jax.value_and_grad(lambda belief, prior: belief.kl(prior), argnums=(0, 1)))


def kl(belief, prior):
    return value_and_grad(belief, prior)[0]


def prior_moments(prior, shape):
    return (np.ravel(np.broadcast_to(field, shape)) for field in (prior.mean, prior.variance))


def dense_kl(belief, prior):
    """KL of two multivariate normal distributions, as in the textbooks."""
    mean, variance = prior_moments(prior, belief.shape)
    cov, deviation = dense_cov(belief), np.ravel(belief.mean) - mean
    precision = np.linalg.inv(np.diag(variance))
    logdet = np.linalg.slogdet(np.diag(variance))[1] - np.linalg.slogdet(cov)[1]
    mahalanobis = deviation @ precision @ deviation
    return 0.5 * (np.trace(precision @ cov) + mahalanobis - len(mean) + logdet)


@pytest.mark.parametrize(("family", "shape"), of.RANDOM_MEMBERS, ids=name_of)
def test_kl_is_the_dense_formula(family, shape):
    belief, prior = example(family, shape), PRIOR
    if family is KroneckerEigen and len(shape) == 2:  # some rows of it too
        part, scalar = belief.rows(np.array([2, 0])), GaussianPrior(0.2, 0.7)
        np.testing.assert_allclose(kl(part, scalar), dense_kl(part, scalar), **TOL)
    if len(shape) != 2:
        prior = GaussianPrior(0.2, jnp.asarray(1.0 + random(1, shape[-1]) ** 2))
    np.testing.assert_allclose(kl(belief, prior), dense_kl(belief, prior), **TOL)


def test_a_prior_is_broadcast_to_the_weights():
    """`kl` of the other families goes through the same function."""
    fields = np.array([0.1, -0.4]), np.array([[0.2], [1.0], [5.0]])
    whole = [np.broadcast_to(field, (IN, OUT)) for field in fields]
    for family in (Point, Factorized):
        values = [kl(example(family), GaussianPrior(*given)) for given in (fields, whole)]
        np.testing.assert_allclose(*values, **TOL)


def test_kl_of_a_point_is_the_negative_log_prior():
    point = example(Point)
    mean, variance = prior_moments(PRIOR, point.shape)
    expected = -scipy.stats.norm(mean, variance**0.5).logpdf(np.ravel(point.mean)).sum()
    np.testing.assert_allclose(kl(point, PRIOR), expected, **TOL)


@pytest.mark.parametrize("family", KERNEL_FAMILIES, ids=name_of)
def test_kl_gradients(family):
    """With respect to the belief and to a learned prior, against finite differences."""
    direction = example(family, seed=5), jax.tree.map(lambda x: 0.5 * np.abs(x), PRIOR)
    of.assert_gradient(lambda pair: value_and_grad(*pair), (example(family), PRIOR), direction)


def test_second_derivative_of_the_log_determinant():
    """That of -log det(C + t D) / 2 along t is tr(C^-1 D C^-1 D) / 2."""
    belief, direction = example(FullNormal, VECTOR), example(FullNormal, VECTOR, seed=5).cov

    def along(step):
        return FullNormal(belief.mean, belief.cov + step * direction).kl(GaussianPrior())

    relative = np.linalg.solve(belief.cov, direction)
    expected = 0.5 * np.trace(relative @ relative)
    np.testing.assert_allclose(jax.jit(jax.grad(jax.grad(along)))(0.0), expected, **TOL)


@families
def test_empirical_bayes_has_its_closed_form(family):
    """The KL is least where the prior's variance is E_q[(w - prior mean)^2]."""
    belief = example(family)
    second_moment = np.diag(dense_cov(belief)).reshape(IN, OUT) + (belief.mean - PRIOR.mean) ** 2
    _, (_, of_prior) = value_and_grad(belief, GaussianPrior(PRIOR.mean, second_moment))
    np.testing.assert_allclose(of_prior.variance, 0, **TOL)


def certain_of_one_input(family):
    """A belief that has no variance in the weights of the last input (or output) unit."""
    belief, name = example(family), of.covariances(family)[0]
    cov = np.array(getattr(belief, name))
    cov[-1] = 0
    cov[np.s_[:, :, -1] if family is FullNormal else np.s_[..., -1]] = 0
    return dataclasses.replace(belief, **{name: jnp.asarray(cov)})


@families
def test_kl_of_a_singular_belief_is_infinite(family):
    for belief in (of.without_variance(family), certain_of_one_input(family)):
        value, gradient = value_and_grad(belief, PRIOR)
        assert value == np.inf
        assert not any(np.any(np.isnan(leaf)) for leaf in jax.tree.leaves(gradient))
        expected = (belief.mean - PRIOR.mean) / PRIOR.variance
        np.testing.assert_allclose(gradient[0].mean, expected, **TOL)


def test_kl_gradient_beside_a_zero_variance():
    variance = np.array([0.5, 0.0, 1.5, 1e-300])
    _, (gradient, _) = value_and_grad(Factorized(random(1, 4), variance), GaussianPrior(0.0, 2.0))
    expected = 0.5 * (1 / 2.0 - 1 / variance[variance > 0])
    np.testing.assert_allclose(np.asarray(gradient.variance)[variance > 0], expected, **TOL)
    assert gradient.variance[1] == -np.inf


def test_kl_keeps_its_digits_where_large_terms_cancel():
    """A belief that is its prior, about 10^5 tiny weights, in float32: an eps an entry at most."""
    mean = np.zeros((500, 200), np.float32)
    belief = OutputShared(mean, np.full((200,), 1e-6, np.float32))
    error = abs(kl(belief, GaussianPrior(0.0, np.float32(1e-6))))
    assert error <= mean.size * np.finfo(np.float32).eps
