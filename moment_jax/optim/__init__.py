"""Second-order updates as Optax transformations, for any Flax NNX model, plain or Bayesian."""

from moment_jax.optim.capture import EmpiricalFisher, SampledFisher, value_grad_and_factors
from moment_jax.optim.predictions import (
    BayesianCategoricalPrediction,
    BernoulliPrediction,
    CategoricalPrediction,
    NormalPrediction,
    Prediction,
)
from moment_jax.optim.statistics import KroneckerExpand, KroneckerReduce, PerSample, PerToken
from moment_jax.optim.taps import find_blocks
from moment_jax.optim.cg_fac import cg_fac
from moment_jax.optim.damping import LevenbergMarquardt
from moment_jax.optim.inverses import Cholesky, Eigh, NewtonSchulz
from moment_jax.optim.kfac import kfac
