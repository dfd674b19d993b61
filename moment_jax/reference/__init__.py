"""What the transforms are checked against: sampled truth, and the derivation on dense covariances.

`monte_carlo` is the final authority. The formulas are first-order, take and return dense covariances
(T, D, T, D), and correct the printed ones.
"""

from moment_jax.reference.propositions import proposition1, proposition2, proposition3, proposition4
from moment_jax.reference.sampling import MonteCarloMoments, monte_carlo
from moment_jax.reference.transformer import (
    DenseMoments,
    attention,
    dense,
    dense_moments,
    encoder_block,
    feed_forward,
    layer_norm,
    relu,
    softmax,
)

__all__ = [
    "DenseMoments", "MonteCarloMoments", "attention", "dense", "dense_moments", "encoder_block",
    "feed_forward", "layer_norm", "monte_carlo", "proposition1", "proposition2", "proposition3",
    "proposition4", "relu", "softmax",
]  # fmt: skip
