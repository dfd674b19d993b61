"""Expected log-likelihoods beside textbook formulas, Gauss-Hermite quadrature and sampling."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import moment_jax as mj
from moment_jax.objectives import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    log_marginal,
)
from moment_jax.objectives import expected_log_likelihood as uncompiled

T, D, C = 3, 2, 4
expected_log_likelihood = jax.jit(uncompiled)


def random_cov(seed, size, scale=0.7):
    factor = np.random.default_rng(seed).normal(size=(size, size))
    return scale**2 * factor @ factor.T / size


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


NOISES = {
    "scalar": np.asarray(0.5),
    "float": 0.5,
    "vector": np.asarray([0.3, 1.2]),
    "matrix": np.asarray([[0.9, 0.4], [0.4, 0.6]]),
}
# Each case: likelihood, target, mean, full covariance of the flattened output.
CASES = {f"gaussian_{k}": (Gaussian(v), normal(0, D), normal(1, D)) for k, v in NOISES.items()}
CASES["heteroscedastic"] = (HeteroscedasticGaussian(), normal(2, D), normal(3, 2 * D))
CASES["categorical"] = (Categorical(), np.asarray(2), normal(4, C))
every_case = pytest.mark.parametrize(
    ("likelihood", "target", "mean"), CASES.values(), ids=CASES.keys()
)


def log_density(likelihood, target, f):
    """log p(target | f), spelled out with scipy."""
    if isinstance(likelihood, Gaussian):
        noise = np.asarray(likelihood.noise_variance)
        noise = (
            noise * np.eye(D) if noise.ndim == 0 else np.diag(noise) if noise.ndim == 1 else noise
        )
        density = scipy.stats.multivariate_normal(cov=noise).logpdf(f - np.asarray(target))
        return np.atleast_1d(density)
    if isinstance(likelihood, HeteroscedasticGaussian):
        return scipy.stats.norm(f[:, :D], np.exp(f[:, D:] / 2)).logpdf(np.asarray(target)).sum(1)
    return f[:, int(target)] - np.log(np.exp(f).sum(1))


@every_case
@pytest.mark.parametrize("full", [False, True])
def test_against_sampling(likelihood, target, mean, full):
    cov = random_cov(5, mean.size)
    cov = cov if full else np.diagonal(cov)
    dense = cov if full else np.diag(cov)
    draws = np.random.default_rng(6).multivariate_normal(
        mean, dense, size=200_000, method="cholesky"
    )
    values = log_density(likelihood, target, draws)
    error = np.std(values) / np.sqrt(values.size)
    assert abs(expected_log_likelihood(likelihood, target, mean, cov) - values.mean()) < 4.5 * error


@every_case
def test_variances_and_their_diagonal_matrix_agree(likelihood, target, mean):
    variance = np.diagonal(random_cov(7, mean.size))
    np.testing.assert_allclose(
        expected_log_likelihood(likelihood, target, mean, variance),
        expected_log_likelihood(likelihood, target, mean, np.diag(variance)),
        atol=1e-10,
    )


@every_case
def test_without_uncertainty_it_is_the_log_likelihood(likelihood, target, mean):
    exact = log_density(likelihood, target, np.asarray(mean)[None])[0]
    for cov in (np.zeros(mean.size), np.zeros((mean.size, mean.size))):
        value = expected_log_likelihood(likelihood, target, mean, cov)
        np.testing.assert_allclose(value, exact, atol=1e-10)


@pytest.mark.parametrize("name", [name for name in CASES if name != "heteroscedastic"])
def test_jensen(name):
    likelihood, target, mean = CASES[name]
    for scale in (0.01, 0.5, 2.0):
        cov = random_cov(8, mean.size, scale)
        args = (likelihood, target, mean, cov)
        assert expected_log_likelihood(*args) < jax.jit(log_marginal)(*args)


def gauss_hermite(size, count):
    nodes, weights = np.polynomial.hermite_e.hermegauss(count)
    grid = np.stack(np.meshgrid(*[nodes] * size, indexing="ij"), axis=-1).reshape(-1, size)
    return grid, np.prod(
        np.stack(np.meshgrid(*[weights / weights.sum()] * size, indexing="ij"), axis=-1), axis=-1
    ).reshape(-1)


@pytest.mark.parametrize("name", [name for name in CASES if name != "categorical"])
def test_closed_forms_against_quadrature(name):
    likelihood, target, mean = CASES[name]
    cov = random_cov(9, mean.size, 0.5)
    nodes, weights = gauss_hermite(mean.size, 18 if mean.size > 2 else 8)
    values = log_density(likelihood, target, np.asarray(mean) + nodes @ np.linalg.cholesky(cov).T)
    np.testing.assert_allclose(
        expected_log_likelihood(likelihood, target, mean, cov), weights @ values, atol=1e-10
    )


@pytest.mark.parametrize("scale", [0.3, 1.0, 2.0, 3.0])
def test_categorical_error_against_quadrature(scale):
    """Two classes have a one-dimensional truth: the docstring's table is for ten."""
    nodes, weights = gauss_hermite(1, 200)
    mean = jnp.asarray([0.3, -0.5])
    cov = scale**2 * jnp.asarray([[1.0, 0.4], [0.4, 0.8]])
    spread = np.sqrt(cov[0, 0] + cov[1, 1] - 2 * cov[0, 1])
    exact = weights @ -np.logaddexp(0, -0.8 - spread * nodes[:, 0])
    value = expected_log_likelihood(Categorical(num_points=1024), 0, mean, cov)
    assert abs(value - exact) < 0.005


@pytest.mark.parametrize(("scale", "bound"), [(0.3, 1e-4), (1.0, 0.005), (2.0, 0.025), (3.0, 0.06)])
def test_categorical_error_on_ten_classes(scale, bound):
    """Noise of rank 3 has an exact truth; the mean error is what the docstring states."""
    nodes, weights = gauss_hermite(3, 30)
    errors = []
    for seed in range(10):
        rng = np.random.default_rng(100 + seed)
        mean, factor = 2 * rng.normal(size=10), scale * rng.normal(size=(10, 3)) / np.sqrt(3)
        truth = mean[0] - weights @ np.log(np.exp(mean + nodes @ factor.T).sum(axis=1))
        errors.append(truth - expected_log_likelihood(Categorical(), 0, mean, factor @ factor.T))
    assert np.mean(np.abs(errors)) < bound


STRUCTURES = {
    "diagonal": lambda dense: mj.Diagonal.project(dense),
    "token_block": lambda dense: mj.TokenBlock.project(dense),
    "full": lambda dense: mj.Full.project(dense),
}


@pytest.mark.parametrize("structure", STRUCTURES.values(), ids=STRUCTURES.keys())
@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES.keys())
def test_gaussian_sequences_and_structures(noise, structure):
    cov = structure(random_cov(10, T * D).reshape(T, D, T, D))
    target, mean = normal(11, T, D), normal(12, T, D)
    value = expected_log_likelihood(Gaussian(noise), target, mean, cov)
    dense = expected_log_likelihood(Gaussian(noise), target, mean, cov.to_dense())
    tokens = [
        expected_log_likelihood(Gaussian(noise), target[t], mean[t], cov.to_dense()[t, :, t, :])
        for t in range(T)
    ]
    np.testing.assert_allclose(value, dense, atol=1e-10)
    np.testing.assert_allclose(value, sum(tokens), atol=1e-10)
    if isinstance(cov, mj.Diagonal):
        variance = expected_log_likelihood(Gaussian(noise), target, mean, cov.variance())
        np.testing.assert_allclose(value, variance, atol=1e-10)


@every_case
def test_gradients_are_finite_without_uncertainty(likelihood, target, mean):
    dtype = np.float32
    likelihood = jax.tree.map(lambda leaf: np.asarray(leaf, dtype), likelihood)
    target = target if target.ndim == 0 else target.astype(dtype)
    for shape in ((mean.size,), (mean.size, mean.size)):
        value, grads = jax.jit(jax.value_and_grad(uncompiled, argnums=(0, 2, 3), allow_int=True))(
            likelihood, target, mean.astype(dtype), np.zeros(shape, dtype)
        )
        assert value.dtype == dtype
        assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(grads))


@pytest.mark.parametrize("name", [name for name in CASES if name != "categorical"])
def test_gradients_against_differences(name):
    likelihood, target, mean = CASES[name]
    cov = random_cov(13, mean.size)
    step, shift = 1e-5, 0.1 * cov

    def value(t):
        return expected_log_likelihood(likelihood, target, mean + t, cov + t * shift)

    difference = (value(step) - value(-step)) / (2 * step)
    np.testing.assert_allclose(jax.jit(jax.grad(value))(0.0), difference, rtol=1e-7, atol=1e-7)


@every_case
def test_jit_and_vmap(likelihood, target, mean):
    means = np.stack([mean, -mean])
    covs = np.stack([random_cov(14, mean.size), random_cov(15, mean.size)])
    targets = np.stack([target, target])
    loop = [uncompiled(likelihood, target, one, cov) for one, cov in zip(means, covs, strict=True)]
    batch = jax.jit(jax.vmap(uncompiled, in_axes=(None, 0, 0, 0)))
    np.testing.assert_allclose(batch(likelihood, targets, means, covs), np.stack(loop), atol=1e-10)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_huge_outputs_stay_finite(dtype):
    cases = [
        (Categorical(), jnp.asarray(1), jnp.asarray([1e4, -1e4, 0.0], dtype)),
        (HeteroscedasticGaussian(), jnp.ones(1, dtype), jnp.asarray([1e4, -1e4], dtype)),
        (HeteroscedasticGaussian(), jnp.ones(1, dtype), jnp.asarray([-1e4, 1e4], dtype)),
    ]
    for likelihood, target, mean in cases:
        value, grads = jax.jit(jax.value_and_grad(uncompiled, argnums=(2, 3)))(
            likelihood, target, mean, jnp.ones(mean.shape, dtype)
        )
        assert np.isfinite(value)
        assert all(np.all(np.isfinite(leaf)) for leaf in grads)


@pytest.mark.parametrize(
    ("args", "error", "match"),
    [
        ((Gaussian(1.0), (2,), (3,), (3,)), ValueError, "target.shape == mean.shape"),
        ((Gaussian(1.0), (5, 3, 2), (5, 3, 2), (5, 3, 2)), ValueError, "jax.vmap"),
        ((Gaussian(1.0), (3,), (3,), (3, 2)), ValueError, r"\(3,\) or \(3, 3\)"),
        ((Gaussian(jnp.ones(2)), (3,), (3,), (3,)), ValueError, "scalar"),
        ((HeteroscedasticGaussian(), (2,), (2,), (2,)), ValueError, "2 D outputs"),
        ((HeteroscedasticGaussian(), (2,), (4,), (4, 2)), ValueError, r"\(4,\) or \(4, 4\)"),
        ((Categorical(), (), (3,), (2,)), ValueError, r"\(3,\) or \(3, 3\)"),
        ((Categorical(), (), (5, 3), (5, 3)), ValueError, "jax.vmap"),
        ((Categorical(), (3,), (3,), (3,)), ValueError, "one-hot"),
        ((Categorical(num_points=8), (), (3,), (3,)), ValueError, "num_points >= 12"),
        (("gaussian", (3,), (3,), (3,)), TypeError, "Got str"),
    ],
)
def test_bad_input(args, error, match):
    likelihood, *shapes = args
    target, mean, cov = (jnp.ones(shape) for shape in shapes)
    if shapes[0] == ():
        target = jnp.asarray(0)
    with pytest.raises(error, match=match):
        uncompiled(likelihood, target, mean, cov)


@pytest.mark.parametrize("label", [4, -1])
def test_a_label_out_of_range(label):
    """An error where it is known, NaN in compiled code, and with the default no gradient to follow."""
    mean, cov = jnp.arange(4.0), jnp.ones(4)

    def expected(label, mean):
        return uncompiled(Categorical(), label, mean, cov)

    for score in (
        expected,
        lambda label, mean: mj.objectives.log_marginal(Categorical(), label, mean, cov),
        lambda label, mean: mj.objectives.expected_log_likelihood_bound(label, mean, cov),
    ):
        for known in (label, np.asarray(label), jnp.asarray(label)):
            with pytest.raises(ValueError, match=f"index from 0 to 3. Got {label}"):
                score(known, mean)
        value, slope = jax.jit(jax.value_and_grad(score, 1))(label, mean)
        assert np.isnan(value)
        assert np.isnan(slope).all() == (score is expected)
        with pytest.raises(ValueError, match=f"Got {label}"):
            jax.jit(lambda m, score=score: score(label, m))(mean)
    batch = jax.vmap(uncompiled, (None, 0, None, None))
    assert list(np.isnan(batch(Categorical(), jnp.array([0, label]), mean, cov))) == [False, True]


def test_numbers_that_are_no_probabilities_of_ones():
    mean = jnp.ones(2)
    with pytest.raises(ValueError, match=r"from 0 to 1. Got 0 to 2"):
        uncompiled(Bernoulli(), jnp.array([2, 0]), mean, mean)
    score = jax.jit(lambda target: uncompiled(Bernoulli(), target, mean, mean))
    assert np.isfinite(score(jnp.array([0.3, 1.0])))
    assert np.isnan(score(jnp.array([2, 0])))
    assert np.isnan(score(jnp.array([-0.5, 0])))


@pytest.mark.parametrize("likelihood", [Gaussian(1.0), Bernoulli(), Categorical()])
def test_logits_are_real_numbers(likelihood):
    y = jnp.asarray(0) if isinstance(likelihood, Categorical) else jnp.ones(2)
    for mean, cov in ((jnp.ones(2, int), jnp.ones(2)), (jnp.ones(2), jnp.ones(2, int))):
        with pytest.raises(TypeError, match=r"int64. Use .astype\(jnp.float32\)"):
            uncompiled(likelihood, y, mean, cov)
    with pytest.raises(TypeError, match=r"Got list. Use jnp.asarray"):
        uncompiled(likelihood, y, [1.0, 1.0], jnp.ones(2))


def test_a_negative_noise_is_refused():
    with pytest.raises(ValueError, match=r"not negative. Got -1"):
        uncompiled(Gaussian(-1.0), jnp.ones(2), jnp.ones(2), jnp.ones(2))


def test_a_structure_of_logits_is_refused_with_the_mend():
    cov = mj.Diagonal.zeros((1, 3))
    with pytest.raises(TypeError, match="variance"):
        uncompiled(Categorical(), 0, jnp.zeros(3), cov)
    with pytest.raises(TypeError, match="Got float"):
        uncompiled(Gaussian(1.0), jnp.zeros(3), jnp.zeros(3), 1.0)
