"""Attention as a random walk on a sphere: kernels, Markov chains, diffusion, Brownian motion.

Exact functions for what holds of identity projections on the sphere, and statistics that say how far a
model of yours is from it.
"""

from moment_jax.brownian.dependence import Dependence, independence_test
from moment_jax.brownian.diffusion import (
    DiffusionMap,
    diffusion_distances,
    diffusion_map,
    kernel_diffusion_map,
    median_bandwidth,
)
from moment_jax.brownian.growth import VarianceGrowth, variance_growth
from moment_jax.brownian.heads import (
    HeadCurve,
    HeadImportance,
    head_curve,
    head_importance,
    head_predictions,
    head_signal,
)
from moment_jax.brownian.ito import ito
from moment_jax.brownian.kernels import (
    FormParts,
    ScoreParts,
    attention_scores,
    gaussian_kernel,
    linear_kernel,
    row_normalize,
    split_projections,
    split_scores,
    symmetric_and_antisymmetric,
    transition_matrix,
)
from moment_jax.brownian.krylov import Eigenpairs
from moment_jax.brownian.markov import (
    detailed_balance_gap,
    entropy_rate,
    k_step,
    kernel_stationary,
    propagate,
    stationary,
)
from moment_jax.brownian.mixing import (
    absorbing,
    absorption_probabilities,
    eigenpairs,
    hitting_times,
    mixing_time,
    reversible_eigenpairs,
    spectral_gap,
)
from moment_jax.brownian.model_sphere import model_sphere
from moment_jax.brownian.motion import BlockMotion, TokenMotion, motion_report, token_motion
from moment_jax.brownian.normality import Normality, normality_test
from moment_jax.brownian.operators import TransitionOperator, attention_operator, lazy
from moment_jax.brownian.paths import (
    brownian_bridge,
    brownian_increments,
    brownian_path,
    euler_maruyama,
    milstein,
    quadratic_variation,
)
from moment_jax.brownian.pruning import mask_heads, prune_heads
from moment_jax.brownian.reachability import ChainClasses, chain_classes
from moment_jax.brownian.sphere import (
    SphereGap,
    sphere_dot,
    sphere_gap,
    squared_distances,
    to_sphere,
)
from moment_jax.brownian.stream import (
    StreamMoments,
    predicted_stream,
    residual_stream,
    sampled_stream,
)
from moment_jax.brownian.walk import graph_walk, grid_walk, heat_equation, heat_step, sample_walk

__all__ = [
    "BlockMotion",
    "ChainClasses",
    "Dependence",
    "DiffusionMap",
    "Eigenpairs",
    "FormParts",
    "HeadCurve",
    "HeadImportance",
    "Normality",
    "ScoreParts",
    "SphereGap",
    "StreamMoments",
    "TokenMotion",
    "TransitionOperator",
    "VarianceGrowth",
    "absorbing",
    "absorption_probabilities",
    "attention_operator",
    "attention_scores",
    "brownian_bridge",
    "brownian_increments",
    "brownian_path",
    "chain_classes",
    "detailed_balance_gap",
    "diffusion_distances",
    "diffusion_map",
    "eigenpairs",
    "entropy_rate",
    "euler_maruyama",
    "gaussian_kernel",
    "graph_walk",
    "grid_walk",
    "head_curve",
    "head_importance",
    "head_predictions",
    "head_signal",
    "heat_equation",
    "heat_step",
    "hitting_times",
    "independence_test",
    "ito",
    "k_step",
    "kernel_diffusion_map",
    "kernel_stationary",
    "lazy",
    "linear_kernel",
    "mask_heads",
    "median_bandwidth",
    "milstein",
    "mixing_time",
    "model_sphere",
    "motion_report",
    "normality_test",
    "predicted_stream",
    "propagate",
    "prune_heads",
    "quadratic_variation",
    "residual_stream",
    "reversible_eigenpairs",
    "row_normalize",
    "sample_walk",
    "sampled_stream",
    "spectral_gap",
    "sphere_dot",
    "sphere_gap",
    "split_projections",
    "split_scores",
    "squared_distances",
    "stationary",
    "symmetric_and_antisymmetric",
    "to_sphere",
    "token_motion",
    "transition_matrix",
    "variance_growth",
]
