"""Observation models p(y | f): what the network's random output f says about a target y."""

from __future__ import annotations

import dataclasses

import jax

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Gaussian:
    """y = f + noise, the noise Gaussian with the same variance for every example.

    Args:
      noise_variance: a scalar, (D,) variances of independent noises, or a (D, D) covariance; D is
        the number of features of y. In the squared units of y, and positive (definite): it is a
        pytree leaf and may be learned, so keep it positive by learning its logarithm. Tokens of a
        sequence have independent noise.
    """

    noise_variance: Array | float


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeteroscedasticGaussian:
    """y_d = f_d + exp(f_{D+d} / 2) noise_d: the network also says how noisy its targets are.

    The network has 2 D outputs: D means, then D logarithms of noise variances. Both are random and
    may be correlated with each other.
    """


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Categorical:
    """y in {0, ..., C-1} with p(y | f) = softmax(f)_y, f the (C,) logits.

    Args:
      num_points: points of the cubature that takes expectations over the logits (see
        `moment_jax.objectives.cubature`); rounded up to a power of two. None for 128, or 8 for each
        class where that is more. Four times the points cut the error by more than half.
    """

    num_points: int | None = dataclasses.field(default=None, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Bernoulli:
    """y_d = 1 with probability sigmoid(f_d), else 0, independently: f holds one logit a number."""


Likelihood = Gaussian | HeteroscedasticGaussian | Categorical | Bernoulli
