"""Small random beliefs and networks, and comparisons of their moments."""

import jax.numpy as jnp
import numpy as np

from moment_jax.layers import (
    AttentionParams,
    DenseParams,
    EncoderBlockParams,
    FeedForwardParams,
    NormParams,
)
from moment_jax.posterior import Factorized, MatrixNormal, OutputShared, Point
from tests.builders import VECTOR_FAMILIES

TOKENS, FEATURES, HIDDEN = 3, 4, 6


class Examples:
    """A stream of random arrays and beliefs from one seed.

    `noise` scales standard deviations: of kernels relative to 1/sqrt(in), of all else to 1.
    """

    def __init__(self, seed, noise=0.3, dtype=np.float64):
        self.random = np.random.default_rng(seed)
        self.noise = noise
        self.dtype = dtype

    def array(self, *shape):
        return jnp.asarray(self._numbers(*shape))

    def _numbers(self, *shape):
        return self.random.normal(size=shape).astype(self.dtype)

    def variance(self, *shape):
        return self.noise**2 * (0.2 + self._numbers(*shape) ** 2)

    def cov(self, *shape):
        """A covariance of this shape twice: no block of it is symmetric."""
        return jnp.asarray(self._cov(*shape))

    def _cov(self, *shape):
        size = int(np.prod(shape))
        factor = self._numbers(size, size)
        dense = self.noise**2 * (factor @ factor.T / size + 0.2 * np.eye(size, dtype=self.dtype))
        return dense.reshape(*shape, *shape)

    def belief(self, family, *shape):
        if len(shape) != 2 and family not in VECTOR_FAMILIES:
            family = Factorized
        fan_in = shape[0] if len(shape) == 2 else 1
        mean = self._numbers(*shape) / fan_in**0.5
        if family is Point:
            second = ()
        elif family is Factorized:
            second = (self.variance(*shape) / fan_in,)
        elif family is OutputShared:
            second = (self.variance(shape[1]) / fan_in,)
        elif family is MatrixNormal:
            in_cov, out_cov = self._cov(shape[0]), self._cov(shape[1])
            second = in_cov / fan_in, out_cov / self.noise**2
        else:
            second = (self._cov(*shape) / fan_in,)
        return family(*map(jnp.asarray, (mean, *second)))

    def dense(self, family, num_in, num_out):
        return DenseParams(self.belief(family, num_in, num_out), self.belief(family, num_out))

    def norm(self, family, size=FEATURES):
        return NormParams(self.belief(family, size), self.belief(family, size))

    def attention(self, family, output_family=None, width=FEATURES):
        projections = (self.dense(family, FEATURES, width) for _ in range(3))
        output = self.dense(family if output_family is None else output_family, width, FEATURES)
        return AttentionParams(*projections, output)

    def feed_forward(self, family):
        return FeedForwardParams(
            self.dense(family, FEATURES, HIDDEN), self.dense(family, HIDDEN, FEATURES)
        )

    def block(self, family):
        return EncoderBlockParams(
            self.attention(family),
            self.norm(family),
            self.feed_forward(family),
            self.norm(family),
        )


def product_operands():
    """Moments of two independent random matrices, (2, 3) and (3, 2)."""
    make = Examples(0, noise=1.0)
    return make.array(2, 3), make.cov(2, 3), make.array(3, 2), make.cov(3, 2)


def name(value):
    """A readable test id."""
    return value.__name__ if isinstance(value, type) else None


def assert_same(moments, expected):
    """Mean and `Full` covariance of a transform are those of a reference, at 1e-10."""
    mean, cov = moments
    for got, wanted in ((mean, expected[0]), (cov.cov, expected[1])):
        np.testing.assert_allclose(got, wanted, rtol=1e-10, atol=1e-10)


def worst(estimate, truth, error):
    """The largest deviation in standard errors; constant entries may deviate by rounding only."""
    rounding = 1e-12 * (1 + np.abs(np.asarray(truth)))
    return float(np.max(np.abs(estimate - truth) / (error + rounding)))
