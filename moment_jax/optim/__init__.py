"""Second-order updates as Optax transformations, for any JAX network."""

from moment_jax.optim.adaptation import adapt_damping, trust_region, undo_bad_steps
from moment_jax.optim.capture import (
    CategoricalPrediction,
    NormalPrediction,
    Prediction,
    find_blocks,
    value_grad_and_factors,
)
from moment_jax.optim.curvature import DiagonalFactor, EmbeddingFactor, KroneckerFactor
from moment_jax.optim.natural_gradient import (
    cg_fac,
    curvature_due,
    for_model,
    kfac,
    scale_by_cg_fac,
    scale_by_kfac,
)

__all__ = [
    "CategoricalPrediction", "DiagonalFactor", "EmbeddingFactor", "KroneckerFactor",
    "NormalPrediction", "Prediction", "adapt_damping", "cg_fac", "curvature_due", "find_blocks",
    "for_model", "kfac", "scale_by_cg_fac", "scale_by_kfac", "trust_region", "undo_bad_steps",
    "value_grad_and_factors",
]  # fmt: skip
