"""moment_jax: the mean and covariance of a Transformer with Gaussian weights, in one analytic pass.

Every layer is a pure function `(mean, cov, params) -> (mean, cov)` of one (T, D) sequence: jit it, vmap
it, differentiate it. The type of `cov` says what is kept of the covariance.
"""

from moment_jax import (
    brownian,
    decoding,
    discrete,
    expectations,
    inference,
    nn,
    objectives,
    optim,
    parallel,
    posterior,
    reference,
)
from moment_jax.covariance import (
    STRUCTURES,
    Covariance,
    Diagonal,
    Full,
    Moments,
    Separable,
    register_fields,
)
from moment_jax.inference import calibrate, fit, laplace
from moment_jax.layers import (
    AttentionParams,
    DecoderBlockParams,
    DenseParams,
    EncoderBlockParams,
    FeedForwardParams,
    NormParams,
    activation,
    attention,
    cross_attention,
    decoder_block,
    dense,
    embedding,
    encoder_block,
    feed_forward,
    layer_norm,
    matmul,
    softmax,
)
from moment_jax.nn.bayesian import Bayesian
from moment_jax.nn.joint import joint
from moment_jax.objectives import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian
from moment_jax.propagation import PropagationError, linearised, propagate, propagation_rule
from moment_jax.reference import monte_carlo

__version__ = "0.3.0"

__all__ = [
    "STRUCTURES", "AttentionParams", "Bayesian", "Bernoulli", "Categorical", "Covariance",
    "DecoderBlockParams", "DenseParams", "Diagonal", "EncoderBlockParams", "FeedForwardParams",
    "Full", "Gaussian", "HeteroscedasticGaussian", "Moments", "NormParams", "PropagationError",
    "Separable", "__version__", "activation", "attention", "brownian", "calibrate", "cross_attention",
    "decoder_block", "decoding", "dense", "discrete", "embedding", "encoder_block", "expectations",
    "feed_forward", "fit", "inference", "joint", "laplace", "layer_norm", "linearised", "matmul",
    "monte_carlo", "nn", "objectives", "optim", "parallel", "posterior",
    "propagate", "propagation_rule", "reference", "register_fields", "softmax",
]  # fmt: skip
