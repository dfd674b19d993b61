"""Alternatives to moments: the linearised network, and a few sampled networks.

The linearised network has the outputs of the mean weights as its mean, and as covariance that of the
weights between Jacobians at those weights: one backward pass for each logit.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import moment_jax as mj
from experiments import draws
from experiments.frontier.passes import Head, Moments, certain, classify, compiled, plain_tokens
from experiments.frontier.problem import Problem
from experiments.frontier.truth import Truth, sample
from experiments.programs import Program

NETWORKS = (10, 30, 100, 300)
"""Numbers of sampled networks."""
MOST_OUTPUTS = 2**17
"""Entries of the tokens, each a backward pass, beyond which the linearised network is skipped."""


def linearised(problem: Problem) -> Program:
    """Mean (N, C) and covariance (N, C, C) of the logits."""

    def forward(blocks: Any, head: Head, x: Array) -> tuple[Array, Array]:
        logits = mj.linearised(
            lambda arrays, x: classify(plain_tokens(problem.spec, arrays, x), head)
        )

        def one(x: Array) -> tuple[Array, Array]:
            mean, cov = logits(blocks, x)
            return mean[0], cov.to_dense()[0, :, 0]

        return jax.lax.map(one, x)

    return compiled(forward, problem.blocks, *certain(problem))


def linearised_tokens(problem: Problem) -> tuple[Array, Array]:
    """Mean and sd of the tokens, (N, T, D)."""
    x = jnp.asarray(problem.inputs)
    means = draws.means(problem.blocks)
    variances = [belief.marginal_variance() for belief in draws.beliefs(problem.blocks)]

    def one(x: Array) -> tuple[Array, Array]:
        tokens, pull = jax.vjp(lambda means: plain_tokens(problem.spec, means, x), means)

        def variance(entry: Array) -> Array:
            (row,) = pull(jnp.zeros(x.size, x.dtype).at[entry].set(1).reshape(x.shape))
            leaves = zip(jax.tree.leaves(row), variances, strict=True)
            return jnp.stack([jnp.sum(slope**2 * v) for slope, v in leaves]).sum()

        sd = jnp.sqrt(jax.lax.map(variance, jnp.arange(x.size), batch_size=32))
        return tokens, sd.reshape(x.shape)

    return jax.jit(lambda x: jax.lax.map(one, x))(x)


def sampled(problem: Problem, count: int, seed: int) -> tuple[Moments, Truth]:
    """Moments and predictive probabilities of `count` sampled networks."""
    drawn = sample(problem, count, seed)
    parts = drawn.tokens.mean, drawn.tokens.sd, drawn.logits.mean, drawn.logit_cov
    moments = Moments(*map(jnp.asarray, parts))
    return moments, drawn
