"""Likelihoods, the ELBO, predictions and metrics, from the mean and covariance of the output."""

from moment_jax.objectives.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    predictive_gaussian,
)
from moment_jax.objectives.lower_bound import (
    elbo,
    expected_log_likelihood,
    expected_log_likelihood_bound,
    kl_warmup,
    log_marginal,
    monte_carlo_expected_log_likelihood,
)
from moment_jax.objectives.mixture import MixturePredictive
from moment_jax.objectives.predictive import (
    BernoulliPredictive,
    CategoricalPredictive,
    GaussianPredictive,
    TokenUncertainty,
    accuracy,
    bernoulli_probabilities,
    class_probabilities,
    expected_calibration_error,
    log_class_probabilities,
    negative_log_likelihood,
    token_uncertainty,
)

__all__ = [
    "Bernoulli",
    "BernoulliPredictive",
    "Categorical",
    "CategoricalPredictive",
    "Gaussian",
    "GaussianPredictive",
    "HeteroscedasticGaussian",
    "Likelihood",
    "MixturePredictive",
    "TokenUncertainty",
    "accuracy",
    "bernoulli_probabilities",
    "class_probabilities",
    "elbo",
    "expected_calibration_error",
    "expected_log_likelihood",
    "expected_log_likelihood_bound",
    "kl_warmup",
    "log_class_probabilities",
    "log_marginal",
    "monte_carlo_expected_log_likelihood",
    "negative_log_likelihood",
    "predictive_gaussian",
    "token_uncertainty",
]
