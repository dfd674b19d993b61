"""The posterior predictive p(y* | x*) of a class from the logits' moments (Eq. 1)."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.objectives import cubature
from moment_jax.objectives.cubature import Pair, count_points
from moment_jax.objectives.moments import Cov, logits_cov, over_batch


def log_class_probabilities(mean: Array, cov: Cov, *, num_points: int | None = None) -> Array:
    """Log E[softmax(f)], f ~ N(mean, cov): `class_probabilities` without underflow.

    It is -inf, with derivatives of zero, exactly where the mean is -inf.
    """
    spread = logits_cov("class_probabilities", mean, cov)
    count = count_points(num_points, default=512)
    known = cubature.wide(mean, spread)
    return over_batch(lambda m, c: cubature.log_expected_softmax(m, c, count), *known)


def class_probabilities(mean: Array, cov: Cov, *, num_points: int | None = None) -> Array:
    """Predictive class probabilities E[softmax(f)], f ~ N(mean, cov), by a deterministic cubature.

    They are nonnegative, sum to one, and have finite derivatives at any covariance, including singular
    and zero ones. The table has the loss in negative log-likelihood, KL(exact || this) in nats, over 180
    problems with 10 classes (mean logits of sd 1.5 or 4; noise independent, of full rank, or of rank 3),
    against 524,288 scrambled Sobol points, and that of closed forms:

    ======================================  ======  ======  ======  ======  ======
    sd of the logits                        0.3     1       2       3       5
    ======================================  ======  ======  ======  ======  ======
    512 points (the default)                1e-8    1e-5    1e-4    3e-4    7e-4
    128 points                              6e-8    4e-5    7e-4    2e-3    4e-3
    tilted fixed point                      6e-7    2e-3    0.08    0.6     2.4
    softmax(m_i / sqrt(1 + pi/8 v_i))       7e-4    0.03    0.09    0.15    0.18
    pairwise logistic, normalised           3e-4    0.015   0.05    0.10    0.13
    ======================================  ======  ======  ======  ======  ======

    With 300 classes, 512 points lose 2e-4, 0.003 and 0.013 at sd 1, 2 and 3.
    Small probabilities in the tail are the least accurate: few points cover the rare draws of the logits
    that such a class needs.

    Args:
      mean: (..., C) mean logits; -inf for an impossible class, which gets exactly 0.
      cov: their variances (..., C), or covariances (..., C, C), positive semidefinite and finite; or a
        structure, of which each token's own covariance counts.
      num_points: points of the cubature, rounded up to a power of two.

    Returns:
      (..., C) probabilities.

    Raises:
      ValueError: if shapes do not fit. TypeError: if mean or cov is not floating.

    >>> print(class_probabilities(jnp.eye(3), jnp.ones((3, 3))).round(2))
    [[0.52 0.24 0.24]
     [0.24 0.52 0.24]
     [0.24 0.24 0.52]]

    Source: Transformer derivation, Eq. 1.
    """
    return jnp.exp(log_class_probabilities(mean, cov, num_points=num_points))


class TokenUncertainty(NamedTuple):
    """Entropies of a prediction in nats, from 0 to log C; total = aleatoric + epistemic."""

    total: Array  # H[E softmax(f)], of the predictive distribution
    aleatoric: Array  # E[H[softmax(f)]], what would remain if the weights were known
    epistemic: Array  # the mutual information of the class and the weights


def token_uncertainty(mean: Array, cov: Cov, *, num_points: int | None = None) -> TokenUncertainty:
    """Total, aleatoric and epistemic uncertainty of a class (a token) with random logits.

    All three are averages over the cubature points of `class_probabilities`. So the epistemic part, the
    mean of KL(softmax(f_k) || E[softmax(f)]) over the points, is never negative, and exactly zero at
    zero covariance. Derivatives follow Price's theorem over the points and are finite at any covariance.

    Arguments and errors are those of `class_probabilities`, the results of shape (...). If all mean
    logits are -inf, all parts are zero.

    >>> import jax.numpy as jnp
    >>> parts = token_uncertainty(jnp.zeros(2), jnp.zeros(2))
    >>> round(float(parts.total), 4), float(parts.epistemic)
    (0.6931, 0.0)
    """
    return probabilities_with_uncertainty(mean, cov, num_points=num_points)[1]


def probabilities_with_uncertainty(
    mean: Array, cov: Cov, *, num_points: int | None = None
) -> tuple[Array, TokenUncertainty]:
    """`log_class_probabilities` (..., C) and `token_uncertainty`, in one pass over the points."""
    spread = logits_cov("token_uncertainty", mean, cov)
    count = count_points(num_points, default=512)
    known = cubature.wide(mean, spread)
    log_probs, aleatoric, epistemic = over_batch(lambda m, c: _parts(m, c, count), *known)
    return log_probs, TokenUncertainty(aleatoric + epistemic, aleatoric, epistemic)


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def _parts(mean: Array, cov: Array, num_points: int) -> tuple[Array, Array, Array]:
    """Log E[softmax], E[H[softmax]] and E[KL(softmax || E[softmax])]."""
    log_weights = cubature.log_softmax_rows(cubature.gaussian_points(mean, cov, num_points))
    log_probs = cubature.log_mean_exp(log_weights)
    divergence = jnp.sum(_divergence_terms(log_weights, log_probs[None, :]), axis=1)
    return log_probs, jnp.mean(_entropy(log_weights)), jnp.mean(divergence)


@_parts.defjvp
def _parts_jvp(
    num_points: int, primals: Pair, tangents: Pair
) -> tuple[tuple[Array, Array, Array], tuple[Array, Array, Array]]:
    """Price's theorem, dE[g]/dmean = E[g'] and dE[g]/dcov = E[g'']/2, for g = H[softmax(f)].

    With p = softmax(f) and d = log p + H: g' = -p d, g'' = p p^T (1 + d_i + d_j) - diag(p (1 + d)).
    """
    value = _parts(*primals, num_points)
    log_weights = cubature.log_softmax_rows(cubature.gaussian_points(*primals, num_points))
    weights = jnp.exp(log_weights)
    mean_dot, cov_dot = tangents
    deviation = _finite(log_weights) + _entropy(log_weights)[:, None]
    diagonal, pulled = cubature.curvature_terms(weights, cov_dot)
    slope = -(weights * deviation) @ mean_dot
    curved = (weights * (1 + deviation)) @ diagonal
    paired = jnp.sum(pulled * weights * (1 + 2 * deviation), axis=1)
    aleatoric_dot = jnp.mean(slope + (paired - curved) / 2)

    log_probs, log_probs_dot = jax.jvp(
        lambda mean, cov: cubature.log_expected_softmax(mean, cov, num_points), primals, tangents
    )
    surprise = jnp.exp(log_probs) * (1 + _finite(log_probs))
    total_dot = -jnp.sum(surprise * log_probs_dot)
    return value, (log_probs_dot, aleatoric_dot, total_dot - aleatoric_dot)


def _entropy(log_weights: Array) -> Array:
    """-sum p log p of every row, with 0 log 0 = 0."""
    return -jnp.sum(jnp.exp(log_weights) * _finite(log_weights), axis=1)


def _finite(logarithm: Array) -> Array:
    """The log of a probability, with 0 in place of -inf."""
    return jnp.where(logarithm > -jnp.inf, logarithm, 0)


def _divergence_terms(log_p: Array, log_q: Array) -> Array:
    """Elementwise p log(p / q) - p + q: its sum is KL(p || q), and every term is nonnegative.

    Rounding errors are of order eps |log(p / q)| and not eps, so small divergences are accurate.
    """
    both = (log_p > -jnp.inf) & (log_q > -jnp.inf)
    ratio = jnp.where(both, log_p - jnp.where(both, log_q, 0), 0)
    gap = jnp.abs(ratio)
    above = jnp.exp(log_p) * (gap + jnp.expm1(-gap))
    below = -jnp.exp(log_q) * (jnp.expm1(-gap) + gap * jnp.exp(-gap))
    return jnp.maximum(jnp.where(ratio >= 0, above, below), 0)
