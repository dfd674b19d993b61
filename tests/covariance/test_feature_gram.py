"""Lazily formed feature Gram matrices against the dense ones, in every form that they can have."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moment_jax.covariance.feature_gram import FeatureGram
from tests.builders import assert_close, random_psd

KEYS = jax.random.split(jax.random.key(5), 6)
D, WIDE = 6, 8
INNER, BASIS = random_psd(KEYS[0], D), jax.random.normal(KEYS[1], (D, WIDE))
DIAGONAL = jax.random.uniform(KEYS[2], (WIDE,))
FORMS = {
    "whole": FeatureGram(random_psd(KEYS[3], WIDE)),
    "whole and diagonal": FeatureGram(random_psd(KEYS[3], WIDE), None, DIAGONAL),
    "basis": FeatureGram(INNER, BASIS),
    "basis and diagonal": FeatureGram(INNER, BASIS, DIAGONAL),
    "diagonal": FeatureGram(diagonal=DIAGONAL),
}


@pytest.mark.parametrize("form", FORMS)
def test_looking(form):
    gram = FORMS[form]
    dense = gram.dense()
    assert_close(gram.diag(), jnp.diagonal(dense))
    blocks = np.einsum("hdhe->hde", dense.reshape(2, WIDE // 2, 2, WIDE // 2))
    assert_close(gram.blocks(2), blocks)


@pytest.mark.parametrize("form", FORMS)
def test_maps(form):
    gram, kernel = FORMS[form], jax.random.normal(KEYS[4], (WIDE, 5))
    dense = gram.dense()
    mapped = gram.map(kernel)
    assert_close(mapped.dense(), kernel.T @ dense @ kernel)
    again = jax.random.normal(KEYS[5], (5, 3))
    assert_close(mapped.map(again).dense(), again.T @ kernel.T @ dense @ kernel @ again)


@pytest.mark.parametrize("form", FORMS)
def test_rescaled_and_raised(form):
    gram, gain = FORMS[form], jax.random.normal(KEYS[4], (WIDE,))
    expected = gain[:, None] * gram.dense() * gain[None, :]
    raised = gram.rescaled(gain).raised(jnp.arange(1.0, 1 + WIDE)).times(jnp.float64(2))
    expected = 2 * (expected + jnp.diag(jnp.arange(1.0, 1 + WIDE)))
    assert_close(raised.dense(), expected)
    assert_close(raised.diag(), jnp.diagonal(expected))


@pytest.mark.parametrize("left", FORMS)
@pytest.mark.parametrize("right", FORMS)
def test_sums(left, right):
    total = FORMS[left].plus(FORMS[right])
    assert_close(total.dense(), FORMS[left].dense() + FORMS[right].dense())


NOISE = """
import jax, jax.numpy as jnp
from moment_jax.covariance.feature_gram import column_noise
from moment_jax.posterior import Factorized

def noise(mean):
    kernel = Factorized(jnp.zeros((64, 64)), jnp.full((64, 64), 0.01))
    return column_noise(kernel, mean, jnp.zeros_like(mean)).diag()

mean = jax.random.normal(jax.random.key(0), (64, 64))
found, expected = jax.jit(noise)(mean), 0.01 * jnp.sum(mean**2)
assert jnp.allclose(found, expected, rtol=1e-5), (found[0], expected)
"""


def test_noise_of_a_constant_variance_is_right_as_users_compile_it():
    """XLA for CPU (jaxlib 0.10.2, 0.12.0) gives garbage for sum(x @ constant, axis=0).

    In a process of its own, because the tests switch the faulty fusions off.
    """
    environment = {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", NOISE], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
