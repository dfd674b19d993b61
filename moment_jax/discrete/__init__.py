"""Discrete latent variables: Gumbel-max, Gumbel-softmax, and codes with random logits.

Pure functions on log-probabilities (..., K), normalised or not, with -inf for what cannot occur.
"""

from moment_jax.discrete.categorical import (
    categorical_entropy,
    categorical_kl,
    category_moments,
    code_usage,
    log_category_probabilities,
    log_probabilities,
    perplexity,
)
from moment_jax.discrete.sampling import exponential_annealing, gumbel, gumbel_max, gumbel_softmax

__all__ = [
    "categorical_entropy",
    "categorical_kl",
    "category_moments",
    "code_usage",
    "exponential_annealing",
    "gumbel",
    "gumbel_max",
    "gumbel_softmax",
    "log_category_probabilities",
    "log_probabilities",
    "perplexity",
]
