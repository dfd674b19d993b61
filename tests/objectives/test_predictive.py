"""Predictive probabilities against sampling and quadrature; variances against sampling."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from flax import nnx

import moment_jax as mj
from moment_jax.objectives import (
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    bernoulli_probabilities,
    class_probabilities,
    expected_log_likelihood,
    log_class_probabilities,
    predictive_gaussian,
    token_uncertainty,
)

C = 10
SCALES = [0.3, 1.0, 2.0, 3.0, 5.0]
compiled = jax.jit(class_probabilities)


def problem(seed, scale, rank):
    """Mean logits and a factor of their covariance; rank 0 stands for independent logits."""
    rng = np.random.default_rng(seed)
    mean = 2 * rng.normal(size=C)
    factor = (
        rng.normal(size=(C, rank)) / np.sqrt(rank) if rank else np.diag(rng.uniform(0.5, 1.5, C))
    )
    return mean, scale * factor


@pytest.fixture(scope="module")
def draws():
    """8,192 draws and their mirror images, spread evenly by a scrambled Sobol sequence."""
    uniform = scipy.stats.qmc.Sobol(C, rng=np.random.default_rng(50)).random_base2(13)
    draws = scipy.stats.norm.ppf(uniform)
    return np.concatenate([draws, -draws])


@pytest.mark.parametrize("rank", [0, 3, C])
@pytest.mark.parametrize("scale", SCALES)
def test_against_sampling(rank, scale, draws):
    """The expected gap of the NLL, KL(sampled || analytic), is below 0.005 nats."""
    gaps = []
    for seed in range(6):
        mean, factor = problem(seed, scale, rank)
        weights = np.exp(mean + draws[:, : factor.shape[1]] @ factor.T)
        truth = np.mean(weights / weights.sum(axis=1, keepdims=True), axis=0)
        value = np.asarray(compiled(mean, factor @ factor.T))
        gaps.append(truth @ (np.log(truth) - np.log(value)))
    assert np.mean(gaps) < 0.005 * min(1.0, scale / 3)


def test_two_classes_against_quadrature():
    nodes, weights = np.polynomial.hermite_e.hermegauss(150)
    for scale in SCALES:
        exact = weights / weights.sum() @ (1 / (1 + np.exp(-(0.7 + scale * nodes))))
        value = compiled(np.asarray([0.7, 0.0]), scale**2 * np.diag([0.5, 0.5]))
        assert abs(value[0] - exact) < 0.002


def test_the_logarithm_vmap_and_the_softmax_without_uncertainty():
    means, factors = map(np.stack, zip(*(problem(seed, 1.0, C) for seed in range(3)), strict=True))
    covs = factors @ np.swapaxes(factors, 1, 2)
    covs[0] = 0
    loop = np.stack([compiled(m, c) for m, c in zip(means, covs, strict=True)])
    np.testing.assert_allclose(loop[0], np.exp(means[0]) / np.exp(means[0]).sum(), atol=1e-12)
    logarithm = jax.jit(jax.vmap(log_class_probabilities))(means, covs)
    np.testing.assert_allclose(np.exp(logarithm), loop, atol=1e-12)


@pytest.mark.parametrize("structure", [mj.Diagonal, mj.Separable, mj.Full])
@pytest.mark.parametrize("shape", [(4, 3), (2, 4, 2, 3)])  # (B, D), and two batch axes of sequences
def test_moments_of_any_model_on_a_batch(structure, shape):
    """Shape, variances and predictions are those of single examples, each by its dense covariance."""
    model = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    beliefs = jax.tree.map(
        lambda w: mj.posterior.Factorized(w, 0.1 + w**2),
        nnx.to_pure_dict(nnx.state(model, nnx.Param)),
    )
    axes = len(shape) // 2
    x = np.random.default_rng(0).normal(size=shape)
    with jax.numpy_rank_promotion("allow"):
        predict = mj.Bayesian(model, beliefs=beliefs, structure=structure, batch_axes=axes)
        mean, cov = moments = predict(x)
    assert cov.shape == cov.sd().shape == ((4, 1, 3) if axes == 1 else shape)
    rows, blocks = mean.reshape(-1, 3), cov.token_blocks().reshape(-1, 3, 3)
    own = np.diagonal(blocks, axis1=1, axis2=2)
    labels, fit = np.arange(len(rows)) % 3, jax.vmap(expected_log_likelihood, (None, 0, 0, 0))
    pairs = [
        (cov.sd() ** 2, own),
        (moments.variance, own),
        (moments.features, blocks),
        (
            class_probabilities(mean, cov),
            [compiled(*one) for one in zip(rows, blocks, strict=True)],
        ),
        (token_uncertainty(mean, cov)[2], [token_uncertainty(rows[0], blocks[0])[2]]),
        (bernoulli_probabilities(mean, cov), bernoulli_probabilities(rows, own)),
        (predictive_gaussian(mean, cov, Gaussian(0.5))[1], own + 0.5),
    ]
    if axes == 1:
        likelihoods = (Categorical(), labels), (Gaussian(0.5 * np.eye(3)), x)
        pairs += [(fit(*one, mean, cov), fit(*one, mean, blocks)) for one in likelihoods]
    for found, expected in pairs:
        expected = np.ravel(expected)
        np.testing.assert_allclose(np.ravel(found)[: expected.size], expected, atol=1e-12)


def test_gaussian_total_variance():
    mean, cov = np.asarray([1.0, 2.0]), np.asarray([[0.5, 0.1], [0.1, 0.3]])
    noise = np.asarray([[0.9, 0.4], [0.4, 0.6]])
    for form in (cov, np.diagonal(cov)):
        for given, added in ((0.2, 0.2), (np.diagonal(noise), [0.9, 0.6]), (noise, [0.9, 0.6])):
            out_mean, total = predictive_gaussian(mean, form, Gaussian(given))
            np.testing.assert_allclose(out_mean, mean)
            np.testing.assert_allclose(total, np.asarray([0.5, 0.3]) + added, atol=1e-12)
    sequence = predictive_gaussian(np.ones((3, 2)), np.ones((3, 2)), Gaussian(noise))[1]
    np.testing.assert_allclose(sequence, [[1.9, 1.6]] * 3, atol=1e-12)


def test_heteroscedastic_total_variance_against_sampling():
    rng = np.random.default_rng(2)
    mean, factor = rng.normal(size=4), 0.4 * rng.normal(size=(4, 4))
    outputs = mean + rng.normal(size=(400_000, 4)) @ factor.T
    samples = outputs[:, :2] + np.exp(outputs[:, 2:] / 2) * rng.normal(size=(400_000, 2))
    out_mean, total = predictive_gaussian(mean, factor @ factor.T, HeteroscedasticGaussian())
    deviations = (samples - np.asarray(out_mean)) ** 2
    for values, exact in ((samples, out_mean), (deviations, total)):
        error = np.std(values, axis=0) / np.sqrt(len(values))
        assert np.all(np.abs(values.mean(axis=0) - exact) < 4.5 * error)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_precision_keeps_the_doubt_of_many_classes(dtype):
    random = np.random.default_rng(0)
    root = random.normal(size=(300, 300))
    mean, cov = 2 * random.normal(size=300), root @ root.T / 300
    given = [jnp.asarray(x, dtype) for x in (mean, cov)]
    wide = [x.astype(jnp.float32) for x in given]
    found, right = (mj.objectives.token_uncertainty(*x) for x in (given, wide))
    assert right.epistemic > 0.1
    np.testing.assert_allclose(found, right, atol=1e-6)
    for fn in (mj.objectives.log_marginal, mj.objectives.expected_log_likelihood):
        a, b = (fn(mj.objectives.Categorical(), 3, *x) for x in (given, wide))
        np.testing.assert_allclose(a, b, atol=1e-6)
