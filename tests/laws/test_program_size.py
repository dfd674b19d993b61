"""A budget for the programs: what a block costs before the compiler has seen it.

Operations of StableHLO with functions inlined, matrix products, and different products among them, of a
post-norm encoder block (T 16, D 64, hidden 256, 4 heads) of a certain input: forward, and with gradient.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import moment_jax as mj
from experiments.programs import Size, size_of
from tests.builders import random_block

BUDGET = {
    mj.Diagonal: (Size(1490, 44, 13), Size(3830, 121, 32)),
    mj.TokenBlock: (Size(1750, 78, 35), Size(4380, 218, 79)),
    mj.TokenCorrelated: (Size(2360, 73, 10), Size(6500, 195, 21)),
    mj.Separable: (Size(4060, 201, 49), Size(10720, 543, 113)),
    mj.Full: (Size(1970, 80, 31), Size(4720, 221, 80)),
}
"""What was measured; of operations a fiftieth more, since versions of jax count them otherwise."""


@pytest.mark.parametrize("structure", BUDGET)
def test_a_block_keeps_within_its_budget(structure: type[mj.Covariance]):
    with jax.enable_x64(False):
        params = random_block(jax.random.key(0), 64, 256)
        x = jax.random.normal(jax.random.key(1), (16, 64))

        def forward(params, x):
            cov = structure.zeros((16, 64))
            mean, cov = mj.encoder_block(x, cov, params, num_heads=4, activation=mj.gelu)
            return mean, cov.variance()

        def loss(params, x):
            mean, variance = forward(params, x)
            return jnp.mean(mean**2) + jnp.mean(variance)

        sizes = [
            size_of(jax.jit(function).lower(params, x))
            for function in (forward, jax.value_and_grad(loss))
        ]
    for size, budget in zip(sizes, BUDGET[structure], strict=True):
        assert all(n <= most for n, most in zip(size, budget, strict=True)), (size, budget)
