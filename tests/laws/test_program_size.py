"""A budget for the programs: what a block costs before the compiler has seen it.

Operations of StableHLO with functions inlined, and matrix products, of a post-norm encoder block (16
tokens, D 64, hidden 256, 4 heads) of a certain input: forward, and with gradient.
"""

import jax
import jax.numpy as jnp

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
