"""Attention as a random walk on a sphere: kernels, Markov chains, diffusion, Brownian motion.

The statements are exact for identity projections on the sphere. `python -m experiments brownian`
measures how far a model is from that.
"""

from moment_jax.brownian.diffusion import DiffusionMap, diffusion_map
from moment_jax.brownian.heat import heat_step
from moment_jax.brownian.ito_formula import ito
from moment_jax.brownian.kernels import (
    attention_scores,
    gaussian_kernel,
    row_normalize,
    transition_matrix,
)
from moment_jax.brownian.krylov import Eigenpairs
from moment_jax.brownian.markov import (
    ChainClasses,
    chain_classes,
    detailed_balance_gap,
    eigenpairs,
    entropy_rate,
    mixing_time,
    spectral_gap,
    stationary,
)
from moment_jax.brownian.sphere import (
    SphereGap,
    sphere_dot,
    sphere_gap,
    squared_distances,
    to_sphere,
)

__all__ = [
    "ChainClasses",
    "DiffusionMap",
    "Eigenpairs",
    "SphereGap",
    "attention_scores",
    "chain_classes",
    "detailed_balance_gap",
    "diffusion_map",
    "eigenpairs",
    "entropy_rate",
    "gaussian_kernel",
    "heat_step",
    "ito",
    "mixing_time",
    "row_normalize",
    "spectral_gap",
    "sphere_dot",
    "sphere_gap",
    "squared_distances",
    "stationary",
    "to_sphere",
    "transition_matrix",
]
