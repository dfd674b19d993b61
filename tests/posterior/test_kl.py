"""Divergences against integrals, sampling, the dense formula and the derivation's Eq. 12."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate, stats

from moment_jax.posterior import (
    Factorized,
    FullNormal,
    GaussianPrior,
    MatrixNormal,
    OutputShared,
    Point,
)
from tests.builders import KERNEL_FAMILIES, VECTOR_FAMILIES
from tests.posterior.families import (
    IN,
    NUM_SAMPLES,
    OUT,
    RANDOM_FAMILIES,
    TENSOR,
    TOL,
    VECTOR,
    assert_gradient,
    dense_cov,
    draws,
    example,
    name_of,
    random,
    without_variance,
)

PRIORS = {
    "scalars": GaussianPrior(0.3, 2.0),
    "mixed": GaussianPrior(jnp.array([0.1, -0.4]), jnp.array([[0.2], [1.0], [5.0]])),
    "per_entry": GaussianPrior(
        jnp.asarray(random(20, IN, OUT)), jnp.asarray(0.5 + random(21, IN, OUT) ** 2)
    ),
}
families = pytest.mark.parametrize("family", RANDOM_FAMILIES, ids=name_of)
priors = pytest.mark.parametrize("prior", PRIORS.values(), ids=PRIORS)


# Compiled once for each family and form of the prior: the divergence and its gradients.
value_and_grad = jax.jit(jax.value_and_grad(lambda belief, prior: belief.kl(prior), argnums=(0, 1)))


def kl(belief, prior):
    return value_and_grad(belief, prior)[0]


def prior_moments(prior, shape):
    return (np.ravel(np.broadcast_to(field, shape)) for field in (prior.mean, prior.variance))


def log_normal(x, mean, variance):
    return -0.5 * ((x - mean) ** 2 / variance + np.log(2 * np.pi * variance))


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
    np.testing.assert_allclose(kl(belief, prior), dense_kl(belief, prior), **TOL)


@pytest.mark.parametrize("family", VECTOR_FAMILIES[1:], ids=name_of)
@pytest.mark.parametrize("shape", [VECTOR, TENSOR], ids=name_of)
def test_kl_of_vectors_and_tensors(family, shape):
    belief = example(family, shape)
    prior = GaussianPrior(0.2, jnp.asarray(1.0 + random(1, shape[-1]) ** 2))
    np.testing.assert_allclose(kl(belief, prior), dense_kl(belief, prior), **TOL)


@pytest.mark.parametrize("family", [Factorized, OutputShared], ids=name_of)
@priors
def test_kl_is_the_integral(family, prior):
    """Entry by entry, which are independent in these families."""
    belief = example(family)
    of_belief = np.ravel(belief.mean), np.diag(dense_cov(belief))
    of_prior = prior_moments(prior, belief.shape)
    total = 0.0
    for mean, variance, prior_mean, prior_variance in zip(*of_belief, *of_prior, strict=True):

        def integrand(x, q=(mean, variance), p=(prior_mean, prior_variance)):
            return np.exp(log_normal(x, *q)) * (log_normal(x, *q) - log_normal(x, *p))

        # Beyond 12 standard deviations the mass is below 1e-32.
        low, high = mean - 12 * np.sqrt(variance), mean + 12 * np.sqrt(variance)
        total += integrate.quad(integrand, low, high, epsabs=1e-13)[0]
    np.testing.assert_allclose(kl(belief, prior), total, **TOL)


@families
@priors
def test_kl_is_what_samples_show(family, prior):
    belief = example(family)
    samples = draws(belief)
    mean, variance = prior_moments(prior, belief.shape)
    log_q = stats.multivariate_normal(np.ravel(belief.mean), dense_cov(belief)).logpdf(samples)
    log_p = log_normal(samples, mean, variance).sum(1)
    ratio = log_q - log_p
    assert abs(ratio.mean() - kl(belief, prior)) <= 5 * ratio.std() / np.sqrt(NUM_SAMPLES)


def test_equation_12():
    belief = example(OutputShared)
    expected = 0.0
    for r in range(OUT):
        mu, variance = np.asarray(belief.mean)[:, r], float(belief.variance[r])
        expected += 0.5 * (IN * variance + mu @ mu - IN - IN * np.log(variance))
    np.testing.assert_allclose(kl(belief, GaussianPrior()), expected, **TOL)


@families
def test_kl_to_itself_is_zero(family):
    variance = 0.7
    mean, n = jnp.asarray(random(3, IN, OUT)), IN * OUT
    belief = {
        Factorized: lambda: Factorized(mean, np.full((IN, OUT), variance)),
        OutputShared: lambda: OutputShared(mean, np.full((OUT,), variance)),
        MatrixNormal: lambda: MatrixNormal(mean, np.eye(IN) * variance / 2, 2 * np.eye(OUT)),
        FullNormal: lambda: FullNormal(mean, variance * np.eye(n).reshape(IN, OUT, IN, OUT)),
    }[family]()
    np.testing.assert_allclose(kl(belief, GaussianPrior(mean, variance)), 0, **TOL)


def test_matrix_normal_depends_on_the_product_alone():
    belief, prior = example(MatrixNormal), PRIORS["per_entry"]
    scaled = MatrixNormal(belief.mean, 8 * belief.in_cov, belief.out_cov / 8)
    np.testing.assert_allclose(kl(scaled, prior), kl(belief, prior), **TOL)


@priors
def test_kl_of_a_point_is_the_negative_log_prior(prior):
    point = example(Point)
    mean, variance = prior_moments(prior, point.shape)
    expected = -log_normal(np.ravel(point.mean), mean, variance).sum()
    np.testing.assert_allclose(kl(point, prior), expected, **TOL)


@pytest.mark.parametrize("family", KERNEL_FAMILIES, ids=name_of)
def test_kl_gradients(family):
    """With respect to the belief and to a learned prior, against finite differences."""
    inputs, direction = (
        (example(family, seed=seed), jax.tree.map(lambda x, k=k: k * np.abs(x), prior))
        for seed, prior, k in ((0, PRIORS["per_entry"], 1), (5, PRIORS["per_entry"], 0.5))
    )
    assert_gradient(lambda pair: value_and_grad(*pair), inputs, direction)


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
    """The KL is least where the prior's variance is the mean of E_q[(w - prior mean)^2]."""
    belief = example(family)
    second_moment = np.diag(dense_cov(belief)) + (np.ravel(belief.mean) - 0.3) ** 2
    _, (_, of_prior) = value_and_grad(belief, GaussianPrior(0.3, float(second_moment.mean())))
    np.testing.assert_allclose(of_prior.variance, 0, **TOL)


def certain_of_one_input(family):
    """A belief that has no variance in the weights of the last input (or output) unit."""
    mean, *rest = map(np.array, jax.tree.leaves(example(family)))
    if family is FullNormal:
        rest[0][-1], rest[0][:, :, -1] = 0, 0
    else:
        rest[0][-1], rest[0][..., -1] = 0, 0
    return family(*map(jnp.asarray, (mean, *rest)))


@families
@pytest.mark.parametrize("make", [without_variance, certain_of_one_input])
def test_kl_of_a_singular_belief_is_infinite(family, make):
    belief = make(family)
    value, gradient = value_and_grad(belief, PRIORS["scalars"])
    assert value == np.inf
    assert not any(np.any(np.isnan(leaf)) for leaf in jax.tree.leaves(gradient))
    by_mean = (np.asarray(belief.mean) - 0.3) / 2.0
    np.testing.assert_allclose(gradient[0].mean, by_mean, **TOL)


def test_kl_gradient_beside_a_zero_variance():
    mean, variance = random(1, 4), np.array([0.5, 0.0, 1.5, 1e-300])
    prior = GaussianPrior(variance=2.0)
    of = jax.grad(lambda variance: Factorized(mean, variance).kl(prior))
    gradient = jax.jit(of)(variance)
    positive = np.array([0, 2, 3])
    np.testing.assert_allclose(
        np.asarray(gradient)[positive], 0.5 * (1 / 2.0 - 1 / variance[positive]), **TOL
    )
    assert gradient[1] == -np.inf


def test_kl_keeps_its_digits_where_large_terms_cancel():
    """A belief that is its prior, about 10^5 tiny weights, in float32: an eps an entry at most."""
    mean = np.zeros((500, 200), np.float32)
    belief = OutputShared(mean, np.full((200,), 1e-6, np.float32))
    error = abs(kl(belief, GaussianPrior(0.0, np.float32(1e-6))))
    assert error <= mean.size * np.finfo(np.float32).eps
