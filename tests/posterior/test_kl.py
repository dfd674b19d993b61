"""Divergences against integrals, sampling, the dense formula and the derivation's Eq. 12."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from scipy import integrate, stats

from moment_jax.posterior import (
    Factorized,
    FullNormal,
    GaussianPrior,
    MatrixNormal,
    OutputShared,
    Point,
)
from tests.posterior.families import (
    IN,
    KERNEL_FAMILIES,
    OUT,
    PRIORS,
    VECTOR_FAMILIES,
    call_name,
    dense_cov,
    example,
    random,
    without_variance,
)

TOL = {"rtol": 1e-10, "atol": 1e-10}
RANDOM_FAMILIES = KERNEL_FAMILIES[1:]
families = pytest.mark.parametrize("family", RANDOM_FAMILIES, ids=call_name)
priors = pytest.mark.parametrize("prior", PRIORS.values(), ids=PRIORS)


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


@families
@priors
def test_kl_is_the_dense_formula(family, prior):
    belief = example(family)
    np.testing.assert_allclose(belief.kl(prior), dense_kl(belief, prior), **TOL)


@pytest.mark.parametrize("family", VECTOR_FAMILIES[1:], ids=call_name)
@pytest.mark.parametrize("shape", [(3,), (2, 2, 2)], ids=call_name)
def test_kl_of_vectors_and_tensors(family, shape):
    belief, prior = example(family, shape), GaussianPrior(0.2, 1.0 + random(1, shape[-1]) ** 2)
    np.testing.assert_allclose(belief.kl(prior), dense_kl(belief, prior), **TOL)


@pytest.mark.parametrize("family", [Factorized, OutputShared], ids=call_name)
@priors
def test_kl_is_the_integral(family, prior):
    belief = example(family)
    means, variances = np.ravel(belief.mean), np.diag(dense_cov(belief))
    total = 0.0
    for mean, variance, *of_prior in zip(
        means, variances, *prior_moments(prior, belief.shape), strict=True
    ):
        q, p = (stats.norm(m, np.sqrt(v)) for m, v in ((mean, variance), of_prior))

        def integrand(x, q=q, p=p):
            return q.pdf(x) * (q.logpdf(x) - p.logpdf(x))

        # Beyond 12 standard deviations the mass is below 1e-32.
        low, high = mean - 12 * np.sqrt(variance), mean + 12 * np.sqrt(variance)
        total += integrate.quad(integrand, low, high, epsabs=1e-13)[0]
    np.testing.assert_allclose(belief.kl(prior), total, **TOL)


@families
@priors
def test_kl_is_what_samples_show(family, prior):
    belief = example(family)
    keys = jax.random.split(jax.random.key(5), 20_000)
    draws = np.asarray(jax.vmap(belief.sample)(keys)).reshape(len(keys), -1)
    mean, variance = prior_moments(prior, belief.shape)
    log_q = stats.multivariate_normal(np.ravel(belief.mean), dense_cov(belief)).logpdf(draws)
    log_p = stats.multivariate_normal(mean, np.diag(variance)).logpdf(draws)
    ratio = log_q - log_p
    error = ratio.std() / np.sqrt(len(ratio))
    assert abs(ratio.mean() - belief.kl(prior)) <= 5 * error


def test_equation_12():
    belief = example(OutputShared)
    expected = 0.0
    for r in range(OUT):
        mu, variance = np.asarray(belief.mean[:, r]), float(belief.variance[r])
        expected += 0.5 * (IN * variance + mu @ mu - IN - IN * np.log(variance))
    np.testing.assert_allclose(belief.kl(GaussianPrior()), expected, **TOL)


@families
def test_kl_to_itself_is_zero(family):
    variance = 0.7
    mean, n = random(3, IN, OUT), IN * OUT
    belief = {
        Factorized: lambda: Factorized(mean, jnp.full_like(mean, variance)),
        OutputShared: lambda: OutputShared(mean, jnp.full((OUT,), variance)),
        MatrixNormal: lambda: MatrixNormal(mean, jnp.eye(IN) * variance / 2, 2 * jnp.eye(OUT)),
        FullNormal: lambda: FullNormal(mean, variance * jnp.eye(n).reshape(IN, OUT, IN, OUT)),
    }[family]()
    np.testing.assert_allclose(belief.kl(GaussianPrior(mean, variance)), 0, atol=1e-12)


def test_matrix_normal_depends_on_the_product_alone():
    belief, prior = example(MatrixNormal), PRIORS["per_entry"]
    scaled = MatrixNormal(belief.mean, 8 * belief.in_cov, belief.out_cov / 8)
    np.testing.assert_allclose(scaled.kl(prior), belief.kl(prior), **TOL)


@priors
def test_kl_of_a_point_is_the_negative_log_prior(prior):
    point = example(Point)
    mean, variance = prior_moments(prior, point.shape)
    expected = -stats.norm(mean, np.sqrt(variance)).logpdf(np.ravel(point.mean)).sum()
    np.testing.assert_allclose(point.kl(prior), expected, **TOL)


@pytest.mark.parametrize("family", KERNEL_FAMILIES, ids=call_name)
@pytest.mark.parametrize("prior", ["scalars", "per_entry"])
def test_kl_gradients(family, prior):
    """With respect to the belief and to a learned prior, against finite differences."""
    kl = jax.jit(lambda belief, prior: belief.kl(prior))
    check_grads(kl, (example(family), PRIORS[prior]), order=1)


def test_kl_hessian_of_correlated_weights():
    """The log-determinant twice differentiated, by the dense formula."""
    belief = example(FullNormal, (2,))
    direction = random(1, 2, 2)
    direction = direction + direction.T

    def along(step):
        return FullNormal(belief.mean, belief.cov + step * direction).kl(GaussianPrior())

    relative = np.linalg.solve(belief.cov, direction)
    expected = 0.5 * np.trace(relative @ relative)
    np.testing.assert_allclose(jax.grad(jax.grad(along))(0.0), expected, **TOL)


@families
def test_empirical_bayes_has_its_closed_form(family):
    """The KL is least where the prior's variance is the mean of E_q[(w - prior mean)^2]."""
    belief = example(family)
    best = jnp.mean(belief.marginal_variance() + (belief.mean - 0.3) ** 2)
    gradient = jax.grad(lambda variance: belief.kl(GaussianPrior(0.3, variance)))(best)
    np.testing.assert_allclose(gradient, 0, atol=1e-10)


@families
@pytest.mark.parametrize("rank", [0, 1])
def test_kl_of_a_singular_belief_is_infinite(family, rank):
    belief = without_variance(family) if rank == 0 else example(family, rank=rank)
    if family in (Factorized, OutputShared) and rank:
        variance = belief.variance.at[(0,) * belief.variance.ndim].set(0)
        belief = family(belief.mean, variance)
    prior = GaussianPrior(0.3, 2.0)
    value, gradient = jax.value_and_grad(lambda belief: belief.kl(prior))(belief)
    assert value == jnp.inf
    assert not any(jnp.any(jnp.isnan(leaf)) for leaf in jax.tree.leaves(gradient))
    np.testing.assert_allclose(gradient.mean, (belief.mean - 0.3) / 2.0, **TOL)


def test_kl_gradient_beside_a_zero_variance():
    mean, variance = random(1, 4), jnp.array([0.5, 0.0, 1.5, 1e-300])
    gradient = jax.grad(lambda v: Factorized(mean, v).kl(GaussianPrior(variance=2.0)))(variance)
    positive = np.array([0, 2, 3])
    np.testing.assert_allclose(gradient[positive], 0.5 * (0.5 - 1 / variance[positive]), **TOL)
    assert gradient[1] == -jnp.inf


def test_kl_keeps_its_digits_where_large_terms_cancel():
    """A belief that is its prior, of 10^5 tiny weights, in float32."""
    mean = jnp.zeros((500, 200), jnp.float32)
    prior = GaussianPrior(0.0, jnp.float32(1e-6))
    assert abs(OutputShared(mean, jnp.full((200,), 1e-6, jnp.float32)).kl(prior)) < 1e-3
