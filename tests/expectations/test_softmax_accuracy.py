"""Errors of the softmax moments against 200,000 samples: the table of the docstrings."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moment_jax as mj
from moment_jax.expectations import softmax_jacobian
from tests.expectations.families import softmax_moments

COUNT, SCORES, SAMPLES = 8, 16, 200_000
# score sd: relative error of E[softmax] and of Cov[softmax], both of order 2.
TABLE = {0.3: (0.0005, 0.004), 1.0: (0.005, 0.03), 2.0: (0.04, 0.09), 3.0: (0.10, 0.13)}


@pytest.fixture(scope="module")
def sampled():
    """Mean and covariance of softmax(mean + factor z) over one set of samples z, compiled once."""
    z = jnp.asarray(np.random.default_rng(2).standard_normal((SAMPLES, SCORES), np.float32))

    @jax.jit
    def moments(mean, factor):
        w = jax.nn.softmax(mean[None, :] + z @ factor.T)
        centred = w - w.mean(0)[None, :]
        return w.mean(0), centred.T @ centred / SAMPLES

    return moments


@jax.jit
def both_orders(mean, cov):
    plain, jacobian = jax.nn.softmax(mean), softmax_jacobian(jax.nn.softmax(mean))
    return *softmax_moments(mean, cov), plain, jacobian @ cov @ jacobian


@pytest.mark.parametrize("scale", TABLE)
def test_table(scale, sampled):
    rng = np.random.default_rng(0)
    errors = []
    for i in range(COUNT):
        factor = np.eye(SCORES)
        if i % 2:
            factor[:, 6:], factor[:, :6] = 0, rng.normal(size=(SCORES, 6))
        factor *= scale / np.linalg.norm(factor, axis=1, keepdims=True)
        mean = 1.5 * rng.normal(size=SCORES)
        want = [np.asarray(x) for x in sampled(np.float32(mean), np.float32(factor))]
        errors.append(
            [
                np.linalg.norm(a - b) / np.linalg.norm(b)
                for a, b in zip(both_orders(mean, factor @ factor.T), want * 2, strict=True)
            ]
        )
    average = np.mean(errors, axis=0)
    spread = np.std(errors, axis=0) / COUNT**0.5
    for k in (0, 1):
        # The cases drawn differ from the table's, and the truth is itself sampled.
        assert average[k] < TABLE[scale][k] + 3 * spread[k] + SAMPLES**-0.5, (average, spread)
        assert average[k] < average[2 + k]  # better than order 1


# score sd: bounds on the sd of a transform's entries over the sampled one, and on their total variance.
RATIOS = {1.0: (0.75, 1.1, 0.03), 2.0: (0.6, 1.15, 0.06), 3.0: (0.5, 1.2, 0.12)}


@functools.cache
def sampled_variances():
    """Mean scores (8,), and Var[softmax(mean + scale z)] for each scale."""
    rng = np.random.default_rng(1)
    mean, z = rng.normal(size=8), rng.normal(size=(SAMPLES, 8))
    weights = {scale: np.exp(mean[None] + scale * z) for scale in RATIOS}
    return mean, {s: np.var(w / w.sum(1, keepdims=True), axis=0) for s, w in weights.items()}


@pytest.mark.parametrize("structure", list(mj.STRUCTURES.values()))
def test_variances_of_eight_independent_logits(structure):
    mean, sampled = sampled_variances()

    @jax.jit
    def variance_of(variance):
        return mj.softmax(mean[None], structure.independent(variance))[1].variance()[0]

    for scale, (least, most, of_total) in RATIOS.items():
        variance = np.asarray(variance_of(np.full((1, 8), scale**2)))
        ratio = np.sqrt(variance / sampled[scale])
        assert least < ratio.min(), ratio
        assert ratio.max() < most, ratio
        assert abs(variance.sum() / sampled[scale].sum() - 1) < of_total
