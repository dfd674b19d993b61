"""Kernels between tokens, and attention as their row-normalised form."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moment_jax.brownian.checks import check_points, check_positive, check_square
from moment_jax.brownian.sphere import squared_distances

Array = jax.Array


def _check_pair(name: str, x: Array, y: Array) -> None:
    check_points(name, x)
    check_points(name, y)
    if x.shape[1] != y.shape[1]:
        raise ValueError(
            f"`{name}(x, y)` needs points of the same number of features. Got "
            f"{tuple(x.shape)} and {tuple(y.shape)}."
        )


def linear_kernel(x: Array, y: Array) -> Array:
    """Dot products of points (T, D) and (S, D): (T, S)."""
    _check_pair("linear_kernel", x, y)
    return x @ y.T


def gaussian_kernel(x: Array, y: Array, *, bandwidth: float | Array | None = None) -> Array:
    """exp(-|x - y|^2 / (2 bandwidth^2)) for points (T, D) and (S, D): (T, S).

    Args:
      x: (T, D).
      y: (S, D).
      bandwidth: sigma, in the units of x; None for D^(1/4), with which it is attention's kernel on
        the sphere, exp(-|x - y|^2 / (2 sqrt(D))).

    Raises:
      ValueError: if shapes do not fit, or the bandwidth is not positive: with a bandwidth of zero no
        point would be connected to any other.

    Source: The Brownian motion in the Transformer, Eq. 1 and 15.

    >>> import jax.numpy as jnp
    >>> near, far = gaussian_kernel(jnp.zeros((1, 1)), jnp.array([[0.0], [2.0]]), bandwidth=2.0)[0]
    >>> f"{near:.3f} {far:.3f}"
    '1.000 0.607'
    """
    _check_pair("gaussian_kernel", x, y)
    if bandwidth is None:
        bandwidth = x.shape[1] ** 0.25
    check_positive("gaussian_kernel", "bandwidth", bandwidth)
    variance = jnp.asarray(bandwidth, x.dtype) ** 2
    return jnp.exp(-squared_distances(x, y) / (2 * variance))


def row_normalize(kernel: Array) -> Array:
    """Each row of nonnegative weights (T, S) over its sum: the probabilities of one step.

    Raises:
      ValueError: if an entry is negative or a row has no weight at all (not looked at in compiled
        code, where such a row becomes uniform).
    """
    if kernel.ndim != 2:
        raise ValueError(f"`row_normalize` needs weights (T, S). Got {tuple(kernel.shape)}.")
    total = jnp.sum(kernel, axis=1, keepdims=True)
    if not isinstance(kernel, jax.core.Tracer):
        weights, sums = np.asarray(kernel), np.asarray(kernel).sum(axis=1)
        if np.any(weights < 0) or not np.all(np.isfinite(weights)):
            raise ValueError(
                "`row_normalize` needs finite weights, none negative. The smallest is "
                f"{weights.min():.3g}. For scores of either sign, use jax.nn.softmax."
            )
        if np.any(sums == 0):
            raise ValueError(
                f"`row_normalize` needs some weight in every row. Row {np.argmin(sums)} has "
                "none: widen the bandwidth, or leave the point out."
            )
    connected = total > 0
    return jnp.where(connected, kernel / jnp.where(connected, total, 1), 1 / kernel.shape[1])


def transition_matrix(tokens: Array, *, temperature: float | Array | None = None) -> Array:
    """Attention's Markov chain over tokens: softmax(x x^T / temperature), rows sum to one.

    Entry (i, j) is the probability of the step i -> j. For tokens on the sphere of radius sqrt(D)
    (`to_sphere`) and the default temperature it equals `row_normalize(gaussian_kernel(x, x))`;
    elsewhere row i carries the factors exp(|x_j|^2 / (2 sqrt(D))) of the columns.

    Args:
      tokens: (T, D).
      temperature: the divisor of the dot products; sqrt(D) where None.

    Returns:
      (T, T).

    Raises:
      ValueError: if tokens is not (T, D), or the temperature is not positive.

    Source: The Brownian motion in the Transformer, Eq. 13 to 15 with identity projections.

    >>> import jax.numpy as jnp
    >>> print(transition_matrix(jnp.zeros((2, 3))))
    [[0.5 0.5]
     [0.5 0.5]]
    """
    check_points("transition_matrix", tokens)
    if temperature is None:
        temperature = tokens.shape[1] ** 0.5
    check_positive("transition_matrix", "temperature", temperature)
    return jax.nn.softmax(linear_kernel(tokens, tokens) / temperature, axis=1)


def attention_scores(
    tokens: Array,
    query_kernel: Array,
    key_kernel: Array,
    query_bias: Array | None = None,
    key_bias: Array | None = None,
) -> Array:
    """Scores x^T Wq Wk^T y / sqrt(K) of one head, or of all: the log of attention's kernel.

    Args:
      tokens: (T, D).
      query_kernel: (D, K), or (D, H, K) for all heads, as `nnx.MultiHeadAttention` keeps them.
      key_kernel: of the same shape.
      query_bias: (K,) or (H, K); None for none.
      key_bias: of the same shape.

    Returns:
      (T, T), or (H, T, T); their softmax over the last axis is the transition matrix.

    Raises:
      ValueError: if shapes do not fit.
    """
    check_points("attention_scores", tokens)
    if query_kernel.shape != key_kernel.shape or query_kernel.shape[0] != tokens.shape[1]:
        raise ValueError(
            "`attention_scores` needs kernels (D, K) or (D, H, K) of one shape, D the features of the "
            f"tokens. Got {tuple(query_kernel.shape)}, {tuple(key_kernel.shape)} and tokens "
            f"{tuple(tokens.shape)}."
        )
    query = jnp.tensordot(tokens, query_kernel, axes=1)
    key = jnp.tensordot(tokens, key_kernel, axes=1)
    query = query if query_bias is None else query + query_bias[None]
    key = key if key_bias is None else key + key_bias[None]
    return jnp.einsum("i...k,j...k->...ij", query, key) / query.shape[-1] ** 0.5


class ScoreParts(NamedTuple):
    """A matrix as symmetric + gradient + cyclic, and the share of each in its squared norm.

    Attributes:
      symmetric: (s + s^T)/2.
      gradient: the part g_j - g_i of the antisymmetric rest. It leaves a chain reversible.
      cyclic: what is left: flow around cycles of tokens. The chain softmax(s) is reversible exactly
        where it is zero.
      symmetric_share: between 0 and 1; the three shares sum to one.
      gradient_share: so too.
      cyclic_share: so too; gradient_share + cyclic_share is the antisymmetric part's.
    """

    symmetric: Array
    gradient: Array
    cyclic: Array
    symmetric_share: Array
    gradient_share: Array
    cyclic_share: Array


def split_scores(scores: Array) -> ScoreParts:
    """Split scores (T, T) into what a reversible chain may have and what makes it irreversible.

    The rows of scores are centred first: a softmax does not see a constant in its row.
    Detailed balance pi_i P_ij = pi_j P_ji for P = softmax(s) says s_ij - s_ji = g_j - g_i for some
    g, so the antisymmetric part is projected onto such differences; what is left is orthogonal to them.

    Returns:
      `ScoreParts`; all shares are zero where every row is constant.

    Raises:
      ValueError: if the scores are not square.
    """
    check_square("split_scores", scores)
    scores = scores - jnp.mean(scores, axis=1, keepdims=True)
    symmetric, antisymmetric = symmetric_and_antisymmetric(scores)
    height = jnp.mean(antisymmetric, axis=0)
    gradient = height[None, :] - height[:, None]
    cyclic = antisymmetric - gradient
    squares = [jnp.sum(part**2) for part in (symmetric, gradient, cyclic)]
    total = sum(squares[1:], squares[0])
    share = [square / jnp.where(total > 0, total, 1) for square in squares]
    return ScoreParts(symmetric, gradient, cyclic, *share)


def symmetric_and_antisymmetric(matrix: Array) -> tuple[Array, Array]:
    """(m + m^T)/2 and (m - m^T)/2 of a square matrix."""
    check_square("symmetric_and_antisymmetric", matrix)
    return (matrix + matrix.T) / 2, (matrix - matrix.T) / 2


class FormParts(NamedTuple):
    """A bilinear form in its two parts, (D, D) each, and the share of each in its squared norm."""

    symmetric: Array
    antisymmetric: Array
    symmetric_share: Array
    antisymmetric_share: Array


def split_projections(query_kernel: Array, key_kernel: Array) -> FormParts:
    """Symmetric and antisymmetric part of the form Wq Wk^T / sqrt(K) of one head.

    With identity projections all of it is symmetric; with independent random ones about half. The
    form's antisymmetric part is what can make attention's chain irreversible; how much of it the tokens
    see is `split_scores` of their scores.

    Args:
      query_kernel: (D, K).
      key_kernel: (D, K).

    Raises:
      ValueError: if shapes differ or are not (D, K).
    """
    if query_kernel.ndim != 2 or query_kernel.shape != key_kernel.shape:
        raise ValueError(
            "`split_projections` needs two kernels (D, K) of one head. Got "
            f"{tuple(query_kernel.shape)} and {tuple(key_kernel.shape)}. For all heads, use jax.vmap "
            "with in_axes=1 on kernels (D, H, K)."
        )
    form = query_kernel @ key_kernel.T / query_kernel.shape[1] ** 0.5
    symmetric, antisymmetric = symmetric_and_antisymmetric(form)
    total = jnp.sum(form**2)
    scale = jnp.where(total > 0, total, 1)
    return FormParts(
        symmetric, antisymmetric, jnp.sum(symmetric**2) / scale, jnp.sum(antisymmetric**2) / scale
    )
