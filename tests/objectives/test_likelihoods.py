"""Expected log-likelihoods and log marginals beside textbook formulas, quadrature and sampling."""

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
    bernoulli_probabilities,
    class_probabilities,
    expected_log_likelihood_bound,
    log_marginal,
)
from moment_jax.objectives import expected_log_likelihood as uncompiled
from moment_jax.objectives.bernoulli import expected_softplus

T, D, C = 3, 2, 4
# Compiled once for each form of the arguments: the value and its gradients.
with_grads = {
    score: jax.jit(jax.value_and_grad(score, argnums=(0, 2, 3), allow_int=True))
    for score in (uncompiled, log_marginal)
}


def expected_log_likelihood(*args):
    return with_grads[uncompiled](*args)[0]


def random_cov(seed, size, scale=0.7):
    factor = np.random.default_rng(seed).normal(size=(size, size))
    return scale**2 * factor @ factor.T / size


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


NOISES = {
    "scalar": np.asarray(0.5),
    "vector": np.asarray([0.3, 1.2]),
    "matrix": np.asarray([[0.9, 0.4], [0.4, 0.6]]),
}
# Each case: likelihood, target, mean.
CASES = {f"gaussian_{k}": (Gaussian(v), normal(0, D), normal(1, D)) for k, v in NOISES.items()}
CASES["heteroscedastic"] = (HeteroscedasticGaussian(), normal(2, D), normal(3, 2 * D))
CASES["categorical"] = (Categorical(), np.asarray(2), normal(4, C))
SCORES = [(name, uncompiled) for name in CASES]
SCORES += [(name, log_marginal) for name in CASES if name != "heteroscedastic"]
every_case = pytest.mark.parametrize("name", CASES)
closed_form = pytest.mark.parametrize("name", [name for name in CASES if name != "categorical"])
every_score = pytest.mark.parametrize(("name", "score"), SCORES)


def log_density(likelihood, target, f):
    """log p(target | f), spelled out with scipy."""
    if isinstance(likelihood, Gaussian):
        noise = np.asarray(likelihood.noise_variance)
        noise = np.diag(np.broadcast_to(noise, D)) if noise.ndim < 2 else noise
        return np.atleast_1d(scipy.stats.multivariate_normal(cov=noise).logpdf(f - target))
    if isinstance(likelihood, HeteroscedasticGaussian):
        return scipy.stats.norm(f[:, :D], np.exp(f[:, D:] / 2)).logpdf(target).sum(1)
    return f[:, int(target)] - np.log(np.exp(f).sum(1))


@pytest.mark.parametrize("full", [False, True])
def test_categorical_against_sampling(full):
    """Closed forms are compared with a quadrature below, to more digits."""
    likelihood, target, mean = CASES["categorical"]
    cov = random_cov(5, C) if full else np.diagonal(random_cov(5, C))
    root = np.linalg.cholesky(cov if full else np.diag(cov))
    draws = np.random.default_rng(6).normal(size=(200_000, C))
    values = log_density(likelihood, target, mean + draws @ root.T)
    error = np.std(values) / np.sqrt(values.size)
    assert abs(expected_log_likelihood(likelihood, target, mean, cov) - values.mean()) < 4.5 * error


@every_case
def test_variances_and_their_diagonal_matrix_agree(name):
    likelihood, target, mean = CASES[name]
    variance = np.diagonal(random_cov(7, mean.size))
    values = [
        expected_log_likelihood(likelihood, target, mean, cov)
        for cov in (variance, np.diag(variance))
    ]
    np.testing.assert_allclose(*values, atol=1e-10)


@every_case
def test_without_uncertainty_it_is_the_log_likelihood(name):
    likelihood, target, mean = CASES[name]
    exact = log_density(likelihood, target, mean[None])[0]
    for cov in (np.zeros(mean.size), np.zeros((mean.size, mean.size))):
        value = expected_log_likelihood(likelihood, target, mean, cov)
        np.testing.assert_allclose(value, exact, atol=1e-10)


@pytest.mark.parametrize("name", [name for name in CASES if name != "heteroscedastic"])
def test_jensen(name):
    likelihood, target, mean = CASES[name]
    for scale in (0.01, 0.5, 2.0):
        args = (likelihood, target, mean, random_cov(8, mean.size, scale))
        assert expected_log_likelihood(*args) < with_grads[log_marginal](*args)[0]


def gauss_hermite(size, count):
    nodes, weights = np.polynomial.hermite_e.hermegauss(count)
    nodes, weights = (
        np.stack(np.meshgrid(*[x] * size, indexing="ij"), axis=-1).reshape(-1, size)
        for x in (nodes, weights / weights.sum())
    )
    return nodes, np.prod(weights, axis=1)


@closed_form
def test_closed_forms_against_quadrature(name):
    likelihood, target, mean = CASES[name]
    full = random_cov(9, mean.size, 0.5)
    nodes, weights = gauss_hermite(mean.size, 18 if mean.size > 2 else 8)
    for cov in (full, np.diagonal(full)):
        root = np.linalg.cholesky(cov if cov.ndim == 2 else np.diag(cov))
        exact = weights @ log_density(likelihood, target, mean + nodes @ root.T)
        value = expected_log_likelihood(likelihood, target, mean, cov)
        np.testing.assert_allclose(value, exact, atol=1e-10)


def test_categorical_error_on_two_classes():
    """They have a one-dimensional truth: the docstring's table is for ten."""
    nodes, weights = gauss_hermite(1, 200)
    mean = np.asarray([0.3, -0.5])
    for scale in (0.3, 1.0, 2.0, 3.0):
        cov = scale**2 * np.asarray([[1.0, 0.4], [0.4, 0.8]])
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


@pytest.mark.parametrize("structure", [mj.Diagonal, mj.TokenBlock, mj.Full])
@pytest.mark.parametrize("score", [uncompiled, log_marginal])
def test_gaussian_sequences_and_structures(structure, score):
    """A structure, its dense form and its variances; of independent tokens, also token by token."""
    cov = structure.project(random_cov(10, T * D).reshape(T, D, T, D))
    target, mean = normal(11, T, D), normal(12, T, D)

    @jax.jit
    def in_all_forms(likelihood, cov):
        dense = cov.to_dense()
        values = [score(likelihood, target, mean, form) for form in (cov, dense)]
        if score is uncompiled or structure is not mj.Full:
            tokens = [score(likelihood, target[t], mean[t], dense[t, :, t, :]) for t in range(T)]
            values.append(sum(tokens))
        if structure is mj.Diagonal:
            values.append(score(likelihood, target, mean, cov.variance()))
        return jnp.stack(values)

    for noise in NOISES.values():
        values = in_all_forms(Gaussian(noise), cov)
        np.testing.assert_allclose(values, np.full(values.shape, values[0]), atol=1e-10)


def test_a_number_is_the_noise_of_every_feature():
    _, target, mean = CASES["gaussian_scalar"]
    values = [
        uncompiled(Gaussian(noise), target, mean, mean**2) for noise in (0.5, NOISES["scalar"])
    ]
    assert values[0] == values[1]


@every_score
def test_gradients_are_finite_without_uncertainty(name, score):
    """And everything stays in float32 where the arguments are."""
    likelihood, target, mean = CASES[name]
    for shape in ((mean.size,), (mean.size, mean.size)):
        args = likelihood, target, mean, np.zeros(shape)
        _, grads = with_grads[score](*args)
        assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(grads))
        narrow = jax.tree.map(
            lambda x: x if np.issubdtype(x.dtype, np.integer) else x.astype(np.float32), args
        )
        results = jax.tree.leaves(jax.eval_shape(with_grads[score], *narrow))
        assert all(leaf.dtype == np.float32 for leaf in results)


# The gradients for classes follow Price's theorem and are tested with the cubature.
@pytest.mark.parametrize(("name", "score"), [s for s in SCORES if s[0] != "categorical"])
def test_gradients_against_differences(name, score):
    likelihood, target, mean = CASES[name]
    cov = random_cov(13, mean.size)
    step, shift = 1e-5, 0.1 * cov

    def value(t):
        return with_grads[score](likelihood, target, mean + t, cov + t * shift)[0]

    _, (_, by_mean, by_cov) = with_grads[score](likelihood, target, mean, cov)
    difference = (value(step) - value(-step)) / (2 * step)
    slope = np.sum(by_mean) + np.vdot(by_cov, shift)
    np.testing.assert_allclose(slope, difference, rtol=1e-7, atol=1e-7)


@every_score
def test_jit_and_vmap(name, score):
    likelihood, target, mean = CASES[name]
    means, targets = np.stack([mean, -mean]), np.stack([target, target])
    covs = np.stack([random_cov(14, mean.size), random_cov(15, mean.size)])
    loop = [with_grads[score](likelihood, target, *one)[0] for one in zip(means, covs, strict=True)]
    batch = jax.jit(jax.vmap(score, in_axes=(None, 0, 0, 0)))
    np.testing.assert_allclose(batch(likelihood, targets, means, covs), loop, atol=1e-10)
    if name != "gaussian_scalar":
        eager = score(likelihood, target, mean, covs[0])
        np.testing.assert_allclose(eager, loop[0], atol=1e-10)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_huge_outputs_stay_finite(dtype):
    cases = [
        (Categorical(), np.asarray(1), [1e4, -1e4, 0.0, 3.0]),
        (HeteroscedasticGaussian(), np.ones(2, dtype), [1e4, 0, -1e4, 0]),
        (HeteroscedasticGaussian(), np.ones(2, dtype), [-1e4, 0, 1e4, 0]),
    ]
    for likelihood, target, mean in cases:
        args = likelihood, target, np.asarray(mean, dtype), np.ones(4, dtype)
        value, (_, *grads) = with_grads[uncompiled](*args)
        assert np.isfinite(value)
        assert all(np.all(np.isfinite(leaf)) for leaf in grads)


# -- log marginals ------------------------------------------------------------------------------------


def noise_block(noise):
    return noise if noise.ndim == 2 else np.diag(np.broadcast_to(noise, D))


@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES)
def test_log_marginal_against_scipy(noise):
    """Of vectors and sequences: Eq. 13 with noise, also where the covariance alone is singular."""
    for shape, ranks in (((D,), (D, 1)), ((T, D), (T * D, 2))):
        size = int(np.prod(shape))
        total_noise = np.kron(np.eye(size // D), noise_block(noise))
        for rank in ranks:
            target, mean, factor = normal(3, *shape), normal(4, *shape), normal(5, size, rank)
            cov = factor @ factor.T
            for form in (cov, np.diag(np.diagonal(cov))):
                law = scipy.stats.multivariate_normal(mean.ravel(), form + total_noise)
                given = (
                    form.reshape(*shape, *shape) if form is cov else np.diagonal(cov).reshape(shape)
                )
                value, _ = with_grads[log_marginal](Gaussian(noise), target, mean, given)
                np.testing.assert_allclose(value, law.logpdf(target.ravel()), atol=1e-10)


def test_log_marginal_of_classes_is_the_logarithm_of_the_probability():
    mean, full = normal(9, C), random_cov(10, C)
    probabilities = jax.jit(class_probabilities, static_argnames="num_points")
    for cov in (full, np.diagonal(full)):
        expected = np.log(probabilities(mean, cov, num_points=256))
        score = with_grads[log_marginal]
        values = [score(Categorical(256), np.asarray(k), mean, cov)[0] for k in range(C)]
        np.testing.assert_allclose(values, expected, atol=1e-10)


def test_log_marginal_is_finite_where_the_probability_underflows():
    mean = np.asarray([500.0, -500.0, 0.0, -2000.0], np.float32)
    for cov in (np.zeros(4, np.float32), np.ones((4, 4), np.float32)):
        value, (_, *grads) = with_grads[log_marginal](Categorical(), np.asarray(1), mean, cov)
        assert -1100 < value < -900
        assert all(np.all(np.isfinite(leaf)) for leaf in grads)
        np.testing.assert_allclose(grads[0], [-1.0, 1.0, 0.0, 0.0], atol=1e-5)


def test_bad_input_of_log_marginal():
    with pytest.raises(TypeError, match="gaussian_negative_log_likelihood"):
        log_marginal(HeteroscedasticGaussian(), np.ones(1), np.ones(2), np.ones(2))
    with pytest.raises(ValueError, match=r"target\.shape == mean\.shape"):
        log_marginal(Gaussian(1.0), np.ones(2), np.ones(3), np.ones(3))
    with pytest.raises(ValueError, match="integer class index"):
        log_marginal(Categorical(), np.asarray(0.0), np.ones(3), np.ones(3))


# -- Bernoulli, against a very fine sum ----------------------------------------------------------------

LOGITS = np.linspace(-8, 8, 17)
PLAIN = {expected_softplus: jax.nn.softplus, bernoulli_probabilities: jax.nn.sigmoid}


def fine_average(fn, mean, variance):
    z = np.linspace(-12, 12, 4_001)
    weights = np.exp(-(z**2) / 2)
    return np.asarray(fn(mean[:, None] + np.sqrt(variance) * z)) @ (weights / weights.sum())


@pytest.mark.parametrize("fn", PLAIN, ids=["softplus", "sigmoid"])
def test_quadrature_of_the_logistic_function(fn):
    @jax.jit
    def everything(mean, variance):
        by_both = jax.grad(lambda m, v: jnp.sum(fn(m, v)), argnums=(0, 1))
        return fn(mean, variance), *by_both(mean, variance)

    plain = {expected_softplus: lambda f: np.logaddexp(0, f)}.get(fn, scipy.special.expit)
    for variance, error in ((0.0, 1e-14), (1.0, 1e-9), (4.0, 6e-6), (9.0, 3e-4)):
        exact = fine_average(plain, LOGITS, variance)
        assert np.abs(everything(LOGITS, np.full(17, variance))[0] - exact).max() < error
    _, by_mean, by_variance = everything(LOGITS, np.zeros(17))
    slope = jax.vmap(jax.grad(PLAIN[fn]))
    _, curvature = jax.jit(lambda m: jax.jvp(slope, (m,), (jnp.ones_like(m),)))(LOGITS)
    np.testing.assert_allclose(by_mean, slope(LOGITS), atol=1e-12)
    np.testing.assert_allclose(by_variance, curvature / 2, atol=1e-12)
    up, down = (everything(LOGITS, np.full(17, 0.5 + k))[0] for k in (1e-5, -1e-5))
    np.testing.assert_allclose(
        everything(LOGITS, np.full(17, 0.5))[2], (up - down) / 2e-5, atol=1e-7
    )


def test_bernoulli():
    target = np.asarray([[1.0, 0.0], [0.25, 1.0]])
    mean, cov = np.asarray([[0.3, -1.0], [2.0, 0.0]]), np.asarray([[0.5, 0.0], [1.0, 2.0]])
    fit = uncompiled(Bernoulli(), target, mean, cov)
    softplus = [
        fine_average(lambda f: np.logaddexp(0, f), *np.atleast_1d(m, v))[0]
        for m, v in zip(mean.flat, cov.flat, strict=True)
    ]
    np.testing.assert_allclose(fit, np.sum(target * mean) - np.sum(softplus), rtol=1e-6)
    with pytest.raises(ValueError, match="target"):
        uncompiled(Bernoulli(), target[0], mean, cov)


def test_bernoulli_targets_out_of_range():
    mean = np.ones(2)
    with pytest.raises(ValueError, match=r"from 0 to 1. Got 0 to 2"):
        uncompiled(Bernoulli(), np.array([2, 0]), mean, mean)
    score = jax.jit(lambda target: uncompiled(Bernoulli(), target, mean, mean))
    assert np.isfinite(score(np.array([0.3, 1.0])))
    assert np.isnan(score(np.array([2.0, 0])))
    assert np.isnan(score(np.array([-0.5, 0])))


# -- the tilted bound: below the expectation, tight where there is little noise -----------------------


@jax.jit
def bound_and_expectation(target, mean, cov):
    score = uncompiled(Categorical(num_points=512), target, mean, cov)
    return expected_log_likelihood_bound(target, mean, cov), score


def logits(seed, scale):
    rng = np.random.default_rng(seed)
    factor = scale * rng.normal(size=(6, 6)) / np.sqrt(6)
    return 2 * rng.normal(size=6), factor @ factor.T


# Mean gap between bound and expectation, as the docstring states it for ten classes, with room.
@pytest.mark.parametrize(("scale", "gap"), [(0.1, 2e-4), (0.3, 2e-3), (1.0, 0.15), (2.0, 1.5)])
def test_the_bound_is_below_the_expectation_and_tight_for_little_noise(scale, gap):
    gaps = []
    for seed in range(6):
        mean, cov = logits(seed, scale)
        for form in (cov, np.diagonal(cov)):
            for target in (0, 3):
                bound, expectation = bound_and_expectation(target, mean, form)
                gaps.append(expectation - bound)
    assert np.min(gaps) > -1e-4
    assert np.mean(gaps) < gap


def test_the_bound_without_noise_is_the_log_likelihood():
    mean, cov = logits(0, 0.0)
    expected = mean[2] - np.log(np.exp(mean).sum())
    np.testing.assert_allclose(bound_and_expectation(2, mean, cov)[0], expected, atol=1e-10)


def test_gradients_of_the_bound_are_finite():
    gradients = jax.jit(jax.grad(expected_log_likelihood_bound, argnums=(1, 2)))
    for mean in (np.zeros(6), np.asarray([1e4, -1e4, 0, 0, 1e4, 3])):
        for form in (np.zeros(6), np.zeros((6, 6)), np.eye(6), np.ones((6, 6))):
            grads = gradients(1, mean.astype(np.float32), form.astype(np.float32))
            assert all(np.all(np.isfinite(leaf)) for leaf in grads)
            assert grads[0].dtype == np.float32


# -- errors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "error", "match"),
    [
        ((Gaussian(1.0), (2,), (3,), (3,)), ValueError, "target.shape == mean.shape"),
        ((Gaussian(1.0), (5, 3, 2), (5, 3, 2), (5, 3, 2)), ValueError, "jax.vmap"),
        ((Gaussian(1.0), (3,), (3,), (3, 2)), ValueError, r"\(3,\) or \(3, 3\)"),
        ((Gaussian(np.ones(2)), (3,), (3,), (3,)), ValueError, "scalar"),
        ((Gaussian(-1.0), (2,), (2,), (2,)), ValueError, "not negative. Got -1"),
        ((HeteroscedasticGaussian(), (2,), (2,), (2,)), ValueError, "2 D outputs"),
        ((HeteroscedasticGaussian(), (2,), (4,), (4, 2)), ValueError, r"\(4,\) or \(4, 4\)"),
        ((Categorical(), 0, (3,), (2,)), ValueError, r"\(3,\) or \(3, 3\)"),
        ((Categorical(), 0, (5, 3), (5, 3)), ValueError, "jax.vmap"),
        ((Categorical(), (3,), (3,), (3,)), ValueError, "one-hot"),
        ((Categorical(num_points=8), 0, (3,), (3,)), ValueError, "num_points >= 12"),
        ((Categorical(), 0, (3,), mj.Diagonal.zeros((1, 3))), TypeError, "variance"),
        ((Gaussian(1.0), (3,), (3,), 1.0), TypeError, "Got float"),
        (("gaussian", (3,), (3,), (3,)), TypeError, "Got str"),
    ],
)
def test_bad_input(args, error, match):
    likelihood, *rest = args
    rest = [np.ones(x) if isinstance(x, tuple) else x for x in rest]
    with pytest.raises(error, match=match):
        uncompiled(likelihood, *rest)


def test_bad_input_of_the_bound():
    with pytest.raises(ValueError, match=r"jax\.vmap"):
        expected_log_likelihood_bound(0, np.zeros((2, 3)), np.zeros((2, 3)))
    with pytest.raises(ValueError, match="integer class index"):
        expected_log_likelihood_bound(np.zeros(3), np.zeros(3), np.zeros(3))


def test_a_label_out_of_range():
    """An error if it is known; NaN in compiled code, for the default with a gradient of NaN."""
    mean, cov = np.arange(4.0), np.ones(4)
    scores = (
        lambda label, mean: uncompiled(Categorical(), label, mean, cov),
        lambda label, mean: log_marginal(Categorical(), label, mean, cov),
        lambda label, mean: expected_log_likelihood_bound(label, mean, cov),
    )
    compiled = jax.jit(lambda label, mean: [jax.value_and_grad(s, 1)(label, mean) for s in scores])
    for label in (4, -1):
        for score in scores:
            for known in (label, np.asarray(label), jnp.asarray(label)):
                with pytest.raises(ValueError, match=f"index from 0 to 3. Got {label}"):
                    score(known, mean)
            with pytest.raises(ValueError, match=f"Got {label}"):
                jax.jit(lambda m, score=score, label=label: score(label, m))(mean)
        results = compiled(label, mean)
        assert all(np.isnan(value) for value, _ in results)
        assert [bool(np.isnan(slope).all()) for _, slope in results] == [True, False, False]
    batch = jax.jit(jax.vmap(uncompiled, (None, 0, None, None)))
    values = batch(Categorical(), np.array([0, 4, -1]), mean, cov)
    assert list(np.isnan(values)) == [False, True, True]


@pytest.mark.parametrize("likelihood", [Gaussian(1.0), Bernoulli(), Categorical()])
def test_logits_are_real_numbers(likelihood):
    y = 0 if isinstance(likelihood, Categorical) else np.ones(2)
    for mean, cov in ((np.ones(2, int), np.ones(2)), (np.ones(2), np.ones(2, int))):
        with pytest.raises(TypeError, match=r"int64. Use .astype\(jnp.float32\)"):
            uncompiled(likelihood, y, mean, cov)
    with pytest.raises(TypeError, match=r"Got list. Use jnp.asarray"):
        uncompiled(likelihood, y, [1.0, 1.0], np.ones(2))
