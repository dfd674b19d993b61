"""Errors of the softmax moments against 200,000 samples: the table of the docstrings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moment_jax.expectations import softmax_moments

COUNT, SCORES, SAMPLES = 12, 16, 200_000
# score sd: relative error of E[softmax] and of Cov[softmax], both of order 2.
TABLE = {0.3: (0.0005, 0.02), 1.0: (0.016, 0.15), 2.0: (0.08, 0.29), 3.0: (0.20, 0.37)}


@pytest.mark.parametrize("scale", TABLE)
def test_table(scale):
    rng = np.random.default_rng(0)

    @jax.jit
    def sampled(mean, factor, key):
        z = jax.random.normal(key, (SAMPLES, factor.shape[1]), jnp.float32)
        w = jax.nn.softmax(mean[None, :] + z @ factor.T)
        centred = w - w.mean(0)[None, :]
        return w.mean(0), centred.T @ centred / SAMPLES

    errors = []
    for i in range(COUNT):
        factor = np.eye(SCORES) if i % 2 else rng.normal(size=(SCORES, 6))
        factor *= scale / np.linalg.norm(factor, axis=1, keepdims=True)
        mean = 1.5 * rng.normal(size=SCORES)
        want = sampled(jnp.float32(mean), jnp.float32(factor), jax.random.key(i))
        got = softmax_moments(jnp.asarray(mean), jnp.asarray(factor @ factor.T))
        first = softmax_moments(jnp.asarray(mean), jnp.asarray(factor @ factor.T), order=1)
        norm = np.linalg.norm
        errors.append(
            [norm(a - b) / norm(b) for x in (got, first) for a, b in zip(x, want, strict=True)]
        )
    average = np.mean(errors, axis=0)
    spread = np.std(errors, axis=0) / COUNT**0.5
    print(scale, average, spread)
    for k in (0, 1):
        assert average[k] < TABLE[scale][k] + 3 * spread[k]  # the cases drawn differ
        assert average[k] < average[2 + k]  # better than order 1
