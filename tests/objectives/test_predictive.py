"""Predictive probabilities against sampling and quadrature; variances against sampling."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats

import moment_jax as mj
from moment_jax.expectations.quadrature import expected
from moment_jax.objectives import class_probabilities, expected_log_likelihood
from moment_jax.objectives.cubature import probabilities_with_uncertainty

C = 10
SCALES = [0.3, 1.0, 2.0, 3.0, 5.0]
compiled = jax.jit(class_probabilities)


def problem(seed, scale, rank):
    """Mean logits and a factor of their covariance; rank 0 stands for independent logits."""
    rng = np.random.default_rng(seed)
    mean = 2 * rng.normal(size=C)
    independent = np.diag(rng.uniform(0.5, 1.5, C))
    factor = rng.normal(size=(C, rank)) / np.sqrt(rank) if rank else independent
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


def epistemic(mean, cov):
    return probabilities_with_uncertainty(mean, cov)[1].epistemic


@pytest.mark.parametrize("scale", [0.3, 1.0, 2.0])
def test_labels_of_one_input_share_their_weights(scale, draws):
    """Ten labels against draws of the logits; one label is `log_prob`; averages of models average.

    So is the share of draws that a class leads.
    """
    mean, factor = problem(1, scale, 3)
    cov = mj.Full((factor @ factor.T)[None, None, :, None])
    prediction = mj.Categorical()(mj.Moments(mean[None], cov))
    labels = np.random.default_rng(2).integers(0, C, size=(1, 10))
    logits = mean + draws[:, :3] @ factor.T
    logs = logits - scipy.special.logsumexp(logits, axis=1, keepdims=True)
    truth = scipy.special.logsumexp(logs[:, labels[0]].sum(axis=1)) - np.log(len(draws))
    found = prediction.joint_log_prob(labels)
    np.testing.assert_allclose(found, [truth], atol=0.05 * max(scale, 1))
    leads = (logits.argmax(axis=1) == labels[0, 0]).mean()
    np.testing.assert_allclose(prediction.expected_accuracy(labels[:, 0]), [leads], atol=0.01)
    one = prediction.joint_log_prob(labels[:, :1])
    np.testing.assert_allclose(one, prediction.log_prob(labels[:, 0]), atol=0.01 * scale)
    other = mj.Categorical()(mj.Moments(-mean[None], cov))
    both = np.logaddexp(found, other.joint_log_prob(labels)) - np.log(2)
    average = mj.objectives.predictive.averaged([prediction, other])
    np.testing.assert_allclose(average.joint_log_prob(labels), both)


def test_joint_labels_in_diagonal_and_what_is_refused():
    cov = jax.vmap(mj.Diagonal)(jnp.ones((2, 1, 40)))
    wide = mj.Categorical()(mj.Moments(jnp.zeros((2, 40)), cov))
    apart = wide.joint_log_prob(jnp.zeros((2, 3), int))
    assert (
        apart > 3 * wide.log_prob(jnp.zeros(2, int))
    ).all()  # a class once seen is likelier again
    with pytest.raises(ValueError, match=r"from 0 to 39\. Got 0 to 40"):
        wide.joint_log_prob(jnp.array([[0], [40]]))
    with pytest.raises(ValueError, match=r"each prediction, of shape \(2, 3\)"):
        wide.joint_log_prob(jnp.zeros((1, 3), int))
    dense = mj.Categorical()(
        mj.Moments(jnp.zeros((1, 40)), mj.Full(jnp.eye(40)[None, None, :, None]))
    )
    with pytest.raises(ValueError, match=r"at most 32 classes.*Got 40"):
        dense.joint_log_prob(jnp.zeros((1, 3), int))


@pytest.mark.parametrize("structure", [mj.Diagonal, mj.Separable, mj.Full])
@pytest.mark.parametrize("lead", [(4, 1), (2, 2, 2)])  # vectors, and two batch axes of sequences
def test_moments_of_a_batch(structure, lead):
    """Variances and predictions are those of single examples, each by its dense covariance."""
    rng = np.random.default_rng(0)
    size = 3 * lead[-1]
    root = rng.normal(size=(*lead[:-1], size, size))
    dense = (root @ np.swapaxes(root, -1, -2)).reshape(*lead[:-1], *(lead[-1], 3) * 2)
    mean = rng.normal(size=(*lead, 3) if lead[-1] > 1 else (lead[0], 3))

    @jax.jit
    def both(mean, dense):
        project = structure.project
        for _ in lead[:-1]:
            project = jax.vmap(project)
        cov = project(dense)
        moments = mj.Moments(mean, cov)
        rows, blocks = mean.reshape(-1, 3), cov.token_blocks().reshape(-1, 3, 3)
        own = jnp.diagonal(blocks, axis1=1, axis2=2)
        pairs = [
            (moments.sd**2, own),
            (moments.variance, own),
            (moments.features, blocks),
            (mj.Bernoulli()(moments).probs, expected(jax.nn.sigmoid, rows, own)),
            (mj.Gaussian(0.5)(moments).variance, own + 0.5),
        ]
        return [(found.ravel(), right.ravel()) for found, right in pairs]

    for found, right in both(mean, dense):
        np.testing.assert_allclose(found, right, atol=1e-12)


def test_heteroscedastic_total_variance_against_sampling():
    rng = np.random.default_rng(2)
    mean, factor = rng.normal(size=4), 0.4 * rng.normal(size=(4, 4))
    outputs = mean + rng.normal(size=(400_000, 4)) @ factor.T
    samples = outputs[:, :2] + np.exp(outputs[:, 2:] / 2) * rng.normal(size=(400_000, 2))
    cov = mj.Full((factor @ factor.T)[None, :, None])
    found = mj.HeteroscedasticGaussian()(mj.Moments(jnp.asarray(mean), cov))
    deviations = (samples - np.asarray(found.mean)) ** 2
    for values, exact in ((samples, found.mean), (deviations, found.variance)):
        error = np.std(values, axis=0) / np.sqrt(len(values))
        assert np.all(np.abs(values.mean(axis=0) - exact) < 4.5 * error)


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_density_of_a_target_whose_noise_is_random(size):
    rng = np.random.default_rng(3)
    mean, factor = rng.normal(size=2 * size), 0.6 * rng.normal(size=(2 * size, 2 * size))
    cov = mj.Full(jnp.asarray(factor @ factor.T)[None, None, :, None])
    found = mj.HeteroscedasticGaussian()(mj.Moments(jnp.asarray(mean)[None], cov))
    means, log_noise = np.split(mean + rng.normal(size=(200_000, 2 * size)) @ factor.T, 2, axis=1)
    scale = np.exp(log_noise / 2)
    for shift in (0, 1, 4):  # in standard deviations
        y = mean[:size] + shift * np.asarray(found.sd[0])
        truth = scipy.stats.norm.pdf(y, means, scale).prod(axis=1)
        error = truth.std() / truth.mean() / len(truth) ** 0.5
        assert float(found.log_prob(y[None])[0]) == pytest.approx(
            np.log(truth.mean()), abs=4 * error + (0.02 if shift < 4 else 0.1)
        )
    low, high = (np.asarray(x[0]) for x in found.interval(0.8))
    inside = scipy.stats.norm.cdf(high, means, scale) - scipy.stats.norm.cdf(low, means, scale)
    np.testing.assert_allclose(inside.mean(axis=0), 0.8, atol=0.01)


def test_half_precision_keeps_the_doubt_of_many_classes():
    random = np.random.default_rng(0)
    root = random.normal(size=(128, 128))

    @jax.jit
    def scores(mean, cov):
        fit = expected_log_likelihood(mj.Categorical(), 3, mean, cov)
        return *probabilities_with_uncertainty(mean, cov), fit

    for dtype in (jnp.float16, jnp.bfloat16):
        given = [jnp.asarray(x, dtype) for x in (2 * random.normal(size=128), root @ root.T / 128)]
        right = scores(*(x.astype(jnp.float32) for x in given))
        assert right[1].epistemic > 0.1
        chex.assert_trees_all_close(scores(*given), right, atol=1e-6)


def test_logits_that_are_nan_have_no_probabilities():
    cov = mj.Diagonal(jnp.ones((50, 1, 2), jnp.float32))
    mean = jnp.zeros_like(cov.variances).at[::3].set(jnp.nan)  # XLA's maximum loses them on CPUs
    found = mj.Categorical()(mj.Moments(mean, cov))
    assert (jnp.isnan(found.probs) == jnp.isnan(mean)).all()
    assert (jnp.isnan(found.entropy) == jnp.isnan(mean[..., 0])).all()
