"""Second-order updates as Optax transformations, for any Flax NNX model, plain or Bayesian."""

from moment_jax.optim.capture import value_grad_and_factors
from moment_jax.optim.conjugate_gradient import conjugate_gradient
from moment_jax.optim.damping import AdaptiveDamping, TrustRegion
from moment_jax.optim.factors import (
    DiagonalFactor,
    EmbeddingFactor,
    KroneckerFactor,
    RowFactor,
    apply_curvature,
)
from moment_jax.optim.for_model import for_model
from moment_jax.optim.inverses import KFACState
from moment_jax.optim.natural_gradient import (
    ConjugateGradientState,
    cg_fac,
    kfac,
    scale_by_cg_fac,
    scale_by_kfac,
)
from moment_jax.optim.predictions import (
    BayesianCategoricalPrediction,
    BernoulliPrediction,
    CategoricalPrediction,
    EmpiricalFisher,
    NormalPrediction,
    Prediction,
    SampledFisher,
)
from moment_jax.optim.safeguard import SafeguardedState, curvature_due
from moment_jax.optim.second_order import SecondOrderState
from moment_jax.optim.statistics import KroneckerExpand, PerSample
from moment_jax.optim.taps import find_blocks

__all__ = [
    "AdaptiveDamping",
    "BayesianCategoricalPrediction",
    "BernoulliPrediction",
    "CategoricalPrediction",
    "ConjugateGradientState",
    "DiagonalFactor",
    "EmbeddingFactor",
    "EmpiricalFisher",
    "KFACState",
    "KroneckerExpand",
    "KroneckerFactor",
    "NormalPrediction",
    "PerSample",
    "Prediction",
    "RowFactor",
    "SafeguardedState",
    "SampledFisher",
    "SecondOrderState",
    "TrustRegion",
    "apply_curvature",
    "cg_fac",
    "conjugate_gradient",
    "curvature_due",
    "find_blocks",
    "for_model",
    "kfac",
    "scale_by_cg_fac",
    "scale_by_kfac",
    "value_grad_and_factors",
]
