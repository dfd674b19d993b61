"""A budget for the programs: what a block costs before the compiler has seen it.

Operations of StableHLO with functions inlined, matrix products, and different products among them, of a
post-norm encoder block (D 64, hidden 256, 4 heads) of a certain input: forward, and with gradient. Of 16
tokens, and of so many that `Separable` reads them by landmarks.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import moment_jax as mj
from experiments.programs import Size, size_of
from tests.builders import random_block

pytestmark = pytest.mark.slow

BUDGET = {
    (mj.Diagonal, 16): (Size(1490, 42, 11), Size(3770, 116, 29)),
    (mj.TokenBlock, 16): (Size(1750, 78, 35), Size(4350, 218, 79)),
    (mj.TokenCorrelated, 16): (Size(2360, 73, 10), Size(6100, 191, 21)),
    (mj.Separable, 16): (Size(3850, 153, 45), Size(9930, 409, 106)),
    (mj.Separable, 512): (Size(6970, 211, 70), Size(15480, 589, 173)),
    (mj.Full, 16): (Size(1970, 80, 31), Size(4680, 221, 80)),
}
"""What was measured; of operations a fiftieth more, since versions of jax count them otherwise."""


@pytest.mark.parametrize(("structure", "tokens"), BUDGET)
def test_a_block_keeps_within_its_budget(structure: type[mj.Covariance], tokens: int):
    with jax.enable_x64(False):
        params = random_block(jax.random.key(0), 64, 256)
        x = jax.random.normal(jax.random.key(1), (tokens, 64))

        def forward(params, x):
            cov = structure.zeros(x.shape)
            mean, cov = mj.encoder_block(x, cov, params, num_heads=4, activation=mj.gelu)
            return mean, cov.variance()

        def loss(params, x):
            mean, variance = forward(params, x)
            return jnp.mean(mean**2) + jnp.mean(variance)

        sizes = [
            size_of(jax.jit(function).lower(params, x))
            for function in (forward, jax.value_and_grad(loss))
        ]
    for size, budget in zip(sizes, BUDGET[structure, tokens], strict=True):
        assert all(n <= most for n, most in zip(size, budget, strict=True)), (size, budget)
