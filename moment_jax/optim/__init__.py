"""Second-order updates as Optax transformations, for any Flax NNX model, plain or Bayesian."""

from moment_jax.optim.capture import value_grad_and_factors
from moment_jax.optim.cg_fac import ConjugateGradientState, Jacobi, cg_fac, scale_by_cg_fac
from moment_jax.optim.conjugate_gradient import conjugate_gradient
from moment_jax.optim.damping import AdaptiveDamping, LevenbergMarquardt, TrustRegion
from moment_jax.optim.factors import (
    DiagonalFactor,
    EmbeddingFactor,
    KroneckerFactor,
    RowFactor,
    apply_curvature,
)
from moment_jax.optim.for_model import for_model
from moment_jax.optim.inverses import Cholesky, Eigh, NewtonSchulz
from moment_jax.optim.kfac import KFACState, StaleInverse, kfac, scale_by_kfac
from moment_jax.optim.natural_scales import find_scales, natural_scales
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
from moment_jax.optim.statistics import KroneckerExpand, KroneckerReduce, PerSample, PerToken
from moment_jax.optim.taps import find_blocks

__all__ = [
    "AdaptiveDamping",
    "BayesianCategoricalPrediction",
    "BernoulliPrediction",
    "CategoricalPrediction",
    "Cholesky",
    "ConjugateGradientState",
    "DiagonalFactor",
    "Eigh",
    "EmbeddingFactor",
    "EmpiricalFisher",
    "Jacobi",
    "KFACState",
    "KroneckerExpand",
    "KroneckerFactor",
    "KroneckerReduce",
    "LevenbergMarquardt",
    "NewtonSchulz",
    "NormalPrediction",
    "PerSample",
    "PerToken",
    "Prediction",
    "RowFactor",
    "SafeguardedState",
    "SampledFisher",
    "SecondOrderState",
    "StaleInverse",
    "TrustRegion",
    "apply_curvature",
    "cg_fac",
    "conjugate_gradient",
    "curvature_due",
    "find_blocks",
    "find_scales",
    "for_model",
    "kfac",
    "natural_scales",
    "scale_by_cg_fac",
    "scale_by_kfac",
    "value_grad_and_factors",
]
