"""Likelihoods, the ELBO and predictions, from the mean and covariance of the output."""

from moment_jax.objectives.cubature import TokenUncertainty, class_probabilities
from moment_jax.objectives.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
)
from moment_jax.objectives.lower_bound import elbo, expected_log_likelihood, kl_warmup
from moment_jax.objectives.predictive import (
    BernoulliPredictive,
    CategoricalPredictive,
    GaussianPredictive,
    MixturePredictive,
)

__all__ = [
    "Bernoulli", "BernoulliPredictive", "Categorical", "CategoricalPredictive", "Gaussian",
    "GaussianPredictive", "HeteroscedasticGaussian", "Likelihood", "MixturePredictive",
    "TokenUncertainty", "class_probabilities", "elbo",
    "expected_log_likelihood", "kl_warmup",
]  # fmt: skip
