"""Feature Gram matrices in factored form against dense ones, for every form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moment_jax.covariance.separable_grams import FeatureGram
from tests.builders import assert_close, random_psd

KEYS = jax.random.split(jax.random.key(5), 6)
D, WIDE = 6, 8
INNER, BASIS = random_psd(KEYS[0], D), jax.random.normal(KEYS[1], (D, WIDE))
DIAGONAL = jax.random.uniform(KEYS[2], (WIDE,))
FORMS = {
    "whole": FeatureGram(random_psd(KEYS[3], WIDE)),
    "whole and diagonal": FeatureGram(random_psd(KEYS[3], WIDE), None, DIAGONAL),
    "basis": FeatureGram.through(INNER, BASIS),
    "basis and diagonal": FeatureGram.through(INNER, BASIS)._replace(diagonal=DIAGONAL),
    "diagonal": FeatureGram(diagonal=DIAGONAL),
}


@pytest.mark.parametrize("form", FORMS)
def test_diagonal_and_blocks(form):
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
