"""Small random moments and networks, and comparisons of moments."""

import dataclasses

import jax
import numpy as np

from moment_jax.layers import AttentionParams, NormParams
from moment_jax.posterior import Posterior
from tests.builders import random_dense, random_dense_params, random_vector

TOKENS, FEATURES, HIDDEN = 3, 4, 6
FAINT = 1e-8  # share of the noise at which only what is of first order in it is left


def moments_of(seed, *shape, noise=0.3):
    """Random moments, of a sequence unless another shape is given. No block is symmetric."""
    shape, key = shape or (TOKENS, FEATURES), jax.random.key(seed)
    return jax.random.normal(key, shape), random_dense(key, shape, noise)


def norm_of(seed, family):
    keys = jax.random.split(jax.random.key(seed))
    return NormParams(*(random_vector(key, family, FEATURES, 0.3) for key in keys))


def attention_of(seed, *families):
    """The last of the families is that of the output."""
    keys, (family, *others) = jax.random.split(jax.random.key(seed), 4), families
    return AttentionParams(
        *(
            random_dense_params(key, of, (FEATURES, FEATURES), 0.3)
            for key, of in zip(keys, [family] * 3 + (others or [family]), strict=True)
        )
    )


def product_operands():
    """Moments of two independent random matrices, (2, 3) and (3, 2)."""
    return *moments_of(0, 2, 3, noise=1.0), *moments_of(1, 3, 2, noise=1.0)


def name(value):
    """A readable test id."""
    return value.__name__ if isinstance(value, type) else None


def faint(params):
    """Beliefs with a small share of their noise."""

    def one(x):
        spread = (name for name in ("variance", "cov") if hasattr(x, name))
        return dataclasses.replace(x, **{name: FAINT * getattr(x, name) for name in spread})

    return jax.tree.map(one, params, is_leaf=lambda x: isinstance(x, Posterior))


def assert_same(moments, expected, rtol=1e-10):
    """Mean and `Full` covariance of a transform are those of a reference."""
    mean, cov = moments
    for got, wanted in ((mean, expected[0]), (cov.cov, expected[1])):
        np.testing.assert_allclose(got, wanted, rtol=rtol, atol=rtol * np.abs(wanted).max())


def worst(estimate, truth, error):
    """The largest deviation in standard errors; constant entries may deviate by rounding only."""
    rounding = 1e-12 * (1 + np.abs(np.asarray(truth)))
    return float(np.max(np.abs(estimate - truth) / (error + rounding)))
