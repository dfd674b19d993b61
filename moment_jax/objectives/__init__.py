"""Likelihoods, the ELBO, predictions and metrics, from the mean and covariance of the output."""

from moment_jax.objectives.bernoulli import bernoulli_probabilities
from moment_jax.objectives.densities import (
    expected_log_likelihood,
    expected_log_likelihood_bound,
    log_marginal,
)
from moment_jax.objectives.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    predictive_gaussian,
)
from moment_jax.objectives.lower_bound import elbo, kl_warmup, monte_carlo_expected_log_likelihood
from moment_jax.objectives.metrics import (
    ReliabilityCurve,
    accuracy,
    brier_score,
    expected_calibration_error,
    gaussian_crps,
    gaussian_negative_log_likelihood,
    interval_coverage,
    negative_log_likelihood,
    reliability_curve,
)
from moment_jax.objectives.prediction import (
    BernoulliPredictive,
    CategoricalPredictive,
    GaussianPredictive,
)
from moment_jax.objectives.predictive import (
    TokenUncertainty,
    class_probabilities,
    log_class_probabilities,
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
    "ReliabilityCurve",
    "TokenUncertainty",
    "accuracy",
    "bernoulli_probabilities",
    "brier_score",
    "class_probabilities",
    "elbo",
    "expected_calibration_error",
    "expected_log_likelihood",
    "expected_log_likelihood_bound",
    "gaussian_crps",
    "gaussian_negative_log_likelihood",
    "interval_coverage",
    "kl_warmup",
    "log_class_probabilities",
    "log_marginal",
    "monte_carlo_expected_log_likelihood",
    "negative_log_likelihood",
    "predictive_gaussian",
    "reliability_curve",
    "token_uncertainty",
]
