"""Attention as a random walk on a sphere: kernels, Markov chains, diffusion, Brownian motion.

The statements are exact for identity projections on the sphere. `python -m experiments brownian`
measures how far a model is from that.
"""

from moment_jax.brownian.kernels import (
    attention_scores,
    gaussian_kernel,
    row_normalize,
    squared_distances,
    to_sphere,
    transition_matrix,
)
from moment_jax.brownian.markov import (
    ChainClasses,
    DiffusionMap,
    chain_classes,
    detailed_balance_gap,
    diffusion_map,
    entropy_rate,
    mixing_time,
    spectral_gap,
    stationary,
)
from moment_jax.brownian.paths import (
    brownian_increments,
    brownian_path,
    heat_step,
    ito,
    quadratic_variation,
)

__all__ = [
    "ChainClasses", "DiffusionMap", "attention_scores", "brownian_increments", "brownian_path",
    "chain_classes", "detailed_balance_gap", "diffusion_map", "entropy_rate",
    "gaussian_kernel", "heat_step", "ito", "mixing_time", "quadratic_variation", "row_normalize",
    "spectral_gap", "squared_distances", "stationary", "to_sphere", "transition_matrix",
]  # fmt: skip
