"""The transforms against sampled networks of Flax's own layers, in one Monte Carlo run.

Where a transform is exact the noise is large; elsewhere it is so small that what second-order
moments leave out is far below a standard error.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moment_jax as mj
from moment_jax import reference
from moment_jax.covariance import Full
from moment_jax.posterior import Factorized, FullNormal, KroneckerEigen
from tests import builders
from tests.builders import decoder_of, plain_block, random_block, random_dense, random_dense_params
from tests.reference.test_derivation import FEATURES, HIDDEN, moments_of, product_operands

NUM_SAMPLES, EPSILON = 50_000, 1e-6


def beliefs():
    """The random inputs: (x, params) with small noise and with large noise, and two matrices."""
    key, operands = jax.random.key(20), product_operands()
    keys = jax.random.split(jax.random.key(12), 5)
    blocks = [random_block(k, FEATURES, HIDDEN, 0.01) for k in jax.random.split(keys[2])]

    def sequence(i, tokens):
        shape = tokens, FEATURES
        return FullNormal(jax.random.normal(keys[i], shape), random_dense(keys[3 + i], shape, 0.01))

    return {
        "small": (
            FullNormal(*moments_of(20, noise=0.01)),
            random_block(key, FEATURES, HIDDEN, 0.01, Factorized),
        ),
        "large": (
            FullNormal(*moments_of(21, noise=1.0)),
            random_dense_params(key, KroneckerEigen, (FEATURES, 2)),
        ),
        "pair": (sequence(0, 3), sequence(1, 4), decoder_of(*blocks)),
        "matrices": (FullNormal(*operands[:2]), FullNormal(*operands[2:])),
    }


class Case(NamedTuple):
    """A network of a group of beliefs: sampled, by Flax, and its moments, by the library."""

    group: str
    sampled: Callable
    moments: Callable


def block_case(norm_first):
    options = {"norm_first": norm_first, "epsilon": EPSILON}
    return Case(
        "small",
        lambda x, params: plain_block(params, 2, **options)(x),
        lambda x, params: mj.encoder_block(x.mean, Full(x.cov), params, num_heads=2, **options),
    )


CASES = {
    "product": Case(
        "matrices",
        lambda a, b: a @ b,
        lambda a, b: mj.matmul(a.mean, Full(a.cov), b.mean, Full(b.cov)),
    ),
    "dense": Case(
        "large",
        lambda x, params: builders.plain_linear(params)(x),
        lambda x, params: mj.dense(x.mean, Full(x.cov), params),
    ),
    "relu": Case(
        "large",
        lambda x, _: jax.nn.relu(x),
        lambda x, _: mj.activation(x.mean, Full(x.cov), "relu"),
    ),
    "layer_norm": Case(
        "small",
        lambda x, params: builders.plain_norm(params.norm1, EPSILON)(x),
        lambda x, params: mj.layer_norm(x.mean, Full(x.cov), params.norm1),
    ),
    "attention": Case(
        "small",
        lambda x, params: builders.plain_attention(params.attention, 2)(x),
        lambda x, params: mj.attention(x.mean, Full(x.cov), params.attention, num_heads=2),
    ),
    "decoder_block": Case(
        "pair",
        lambda x, memory, params: plain_block(params, 2, norm_first=True)(x, memory),
        lambda x, memory, params: mj.decoder_block(
            x.mean, Full(x.cov), memory.mean, Full(memory.cov), params, num_heads=2, norm_first=True
        ),
    ),
    "encoder_block": block_case(norm_first=False),
    "encoder_block_pre_norm": block_case(norm_first=True),
}


@pytest.fixture(scope="module")
def moments():
    """The library's moments of every case."""
    return jax.jit(
        lambda groups: {name: case.moments(*groups[case.group]) for name, case in CASES.items()}
    )(beliefs())


@pytest.fixture(scope="module")
def truths(moments):
    """Sampled moments of every case and of its products of deviations: in one run, compiled once."""

    def networks(draws):
        parts = []
        for name, case in CASES.items():
            output = case.sampled(*draws[case.group]).ravel()
            apart = output - moments[name][0].ravel()
            parts += [output, jnp.outer(apart, apart).ravel()]
        return jnp.concatenate(parts)

    sample = jax.jit(
        lambda groups: reference.monte_carlo(
            networks, groups, jax.random.key(0), NUM_SAMPLES, batch_size=500
        )
    )
    sizes = [size for name in CASES for size in (moments[name][0].size, moments[name][0].size ** 2)]
    ends = np.cumsum(sizes)[:-1]
    split = zip(*(np.split(np.asarray(x), ends) for x in sample(beliefs())), strict=True)
    parts = [reference.MonteCarloMoments(*each) for each in split]
    return dict(zip(CASES, zip(parts[::2], parts[1::2], strict=True), strict=True))


def worst(estimate, truth, error):
    """The largest deviation in standard errors; constant entries may deviate by rounding only."""
    rounding = 1e-12 * (1 + np.abs(np.asarray(truth)))
    return float(np.max(np.abs(estimate - truth) / (error + rounding)))


@pytest.mark.parametrize("case", CASES)
def test_moments(case, moments, truths):
    (mean, cov), (truth, products) = moments[case], truths[case]
    deviation = np.sqrt(cov.variance()).ravel()
    assert worst(mean.ravel(), truth.mean, truth.mean_error) < 5
    assert worst(deviation, truth.standard_deviation, truth.sd_error) < 5
    if case != "relu":
        assert worst(cov.cov.ravel(), products.mean, products.mean_error) < 5
