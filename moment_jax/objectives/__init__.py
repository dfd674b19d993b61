"""Likelihoods, the ELBO, predictions and metrics, from the mean and covariance of the output."""

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
    accuracy,
    expected_calibration_error,
    negative_log_likelihood,
)

__all__ = [
    "Bernoulli", "BernoulliPredictive", "Categorical", "CategoricalPredictive", "Gaussian",
    "GaussianPredictive", "HeteroscedasticGaussian", "Likelihood", "MixturePredictive",
    "TokenUncertainty", "accuracy", "class_probabilities", "elbo", "expected_calibration_error",
    "expected_log_likelihood", "kl_warmup", "negative_log_likelihood",
]  # fmt: skip
