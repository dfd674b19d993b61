"""A budget for the programs: what a block costs before the compiler has seen it.

Operations of StableHLO with functions inlined, and matrix products, of a post-norm encoder block (16
tokens, D 64, hidden 256, 4 heads) of a certain input: forward, and with gradient.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import moment_jax as mj
from experiments.programs import Size, size_of
from tests.builders import quickly, random_block

BUDGET = {
    mj.Diagonal: (Size(1047, 32), Size(2814, 86)),
    mj.Separable: (Size(2894, 116), Size(6842, 291)),
    mj.Full: (Size(1592, 76), Size(3867, 207)),
}
"""What was measured; of operations a fiftieth more, since versions of jax count them otherwise."""


@quickly(mj.Diagonal)
def test_a_block_keeps_within_its_budget(structure: type[mj.Covariance]):
    with jax.enable_x64(False):
        params = random_block(jax.random.key(0), 64, 256)
        x = jax.random.normal(jax.random.key(1), (16, 64))

        def forward(params, x):
            cov = structure.zeros(x.shape)
            mean, cov = mj.encoder_block(x, cov, params, num_heads=4, activation="gelu")
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


@pytest.mark.slow
def test_a_loop_of_blocks_is_as_large_for_any_number_of_them():
    """With its gradient: the encoder's scan is one of (mean, cov)."""

    def size(num_blocks):
        options = {"hidden_features": 16, "activation": "gelu", "scan": True}
        encoder = mj.nn.Encoder(num_blocks, 8, 2, rngs=nnx.Rngs(0), **options)
        graph, state = nnx.split(mj.Bayesian(encoder, batch_axes=0))

        def loss(state, x):
            mean, cov = nnx.merge(graph, state)(x)
            return jnp.mean(mean**2) + jnp.mean(cov.variance())

        return size_of(jax.jit(jax.grad(loss)).lower(state, jnp.ones((4, 8), jnp.float32)))

    with jax.numpy_rank_promotion("allow"):  # Flax's layers promote
        assert size(6) == size(12)
