"""LayerNorm as a map onto a sphere; kernels between tokens, attention as a row-normalised one."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from moment_jax.covariance.fields import check_array, need
from moment_jax.xla import inlined


def to_sphere(x: Array, *, epsilon: float = 0.0) -> Array:
    """LayerNorm without gain and bias: maps to the sphere of radius sqrt(D) with features summing to 0.

    Tokens (..., D), D at least 2, or ValueError, stay (..., D). One with equal features has no direction
    and is mapped to the origin. With epsilon > 0, as in every implementation, a token whose features
    have variance v is mapped inside the sphere, to radius sqrt(D v / (v + epsilon)).

    Source: The Brownian motion in the Transformer, Eq. 11 and section 3.1.
    """
    right, came = x.ndim > 0 and x.shape[-1] > 1 and epsilon >= 0, f"{x.shape} and {epsilon}"
    need("to_sphere", right, "tokens (..., D) with D >= 2 and epsilon >= 0", came)
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    spread = jnp.mean(centred**2, axis=-1, keepdims=True) + epsilon
    positive = spread > 0
    return centred * jnp.where(positive, jax.lax.rsqrt(jnp.where(positive, spread, 1)), 0)


@inlined
def squared_distances(x: Array, y: Array) -> Array:
    """|x_i - y_j|^2 for points (T, D) and (S, D): (T, S), never negative.

    Computed from norms and dot products, relative to the mean of y to reduce cancellation. Where all
    |x_i|^2 = |y_j|^2 = D, as on the sphere, (2 D - this) / 2 is x @ y.T.

    Source: The Brownian motion in the Transformer, Eq. 12.
    """
    centre = jnp.mean(y, axis=0, keepdims=True)
    x, y = x - centre, y - centre
    rows = jnp.sum(x**2, axis=1)[:, None] + jnp.sum(y**2, axis=1)[None, :]
    return jnp.maximum(rows - 2 * x @ y.T, 0)


def gaussian_kernel(x: Array, y: Array, *, bandwidth: float | Array | None = None) -> Array:
    """exp(-|x - y|^2 / (2 bandwidth^2)) for points (T, D) and (S, D): (T, S).

    The bandwidth is in the units of x; None for D^(1/4), attention's on the sphere. ValueError if it is
    not positive, or shapes do not fit.

    Source: The Brownian motion in the Transformer, Eq. 1 and 15.
    """
    check_points("gaussian_kernel", x)
    check_points("gaussian_kernel", y)
    rule, came = "points of the same number of features", f"{x.shape} and {y.shape}"
    need("gaussian_kernel(x, y)", x.shape[1] == y.shape[1], rule, came)
    if bandwidth is None:
        bandwidth = x.shape[1] ** 0.25
    check_positive("gaussian_kernel", "bandwidth", bandwidth)
    variance = jnp.asarray(bandwidth, x.dtype) ** 2
    return jnp.exp(-squared_distances(x, y) / (2 * variance))


def row_normalize(kernel: Array) -> Array:
    """Divide each row of nonnegative weights (T, S) by its sum: the probabilities of one step.

    ValueError if an entry is negative or a row is all zero; in compiled code that becomes uniform.
    """
    call = "row_normalize"
    need(call, kernel.ndim == 2, "weights (T, S)", kernel.shape)
    total = jnp.sum(kernel, axis=1, keepdims=True)
    if not isinstance(kernel, jax.core.Tracer):
        weights, sums = np.asarray(kernel), np.asarray(kernel).sum(axis=1)
        right, mend = (weights >= 0) & np.isfinite(weights), "For scores, use jax.nn.softmax."
        need(call, right.all(), "finite weights, none negative", f"{weights.min():.3g}", mend)
        came, mend = f"none in row {np.argmin(sums)}", "Widen the bandwidth, or drop the point."
        need(call, (sums > 0).all(), "a positive weight in every row", came, mend)
    connected = total > 0
    return jnp.where(connected, kernel / jnp.where(connected, total, 1), 1 / kernel.shape[1])


def transition_matrix(tokens: Array) -> Array:
    """Attention's Markov chain over tokens: softmax(x x^T / sqrt(D)), rows sum to one.

    Of tokens (T, D), else ValueError, it is (T, T); entry (i, j) is the probability of the step i -> j.
    For tokens on the sphere of radius sqrt(D) (`to_sphere`) it equals `row_normalize(gaussian_kernel(x,
    x))`. Elsewhere column j has an additional weight exp(|x_j|^2 / (2 sqrt(D))).

    Source: The Brownian motion in the Transformer, Eq. 13 to 15 with identity projections.
    """
    check_points("transition_matrix", tokens)
    return jax.nn.softmax(tokens @ tokens.T / tokens.shape[1] ** 0.5, axis=1)


def attention_scores(
    tokens: Array, query_kernel: Array, key_kernel: Array, query_bias: Array | None = None,
    key_bias: Array | None = None,
) -> Array:  # fmt: skip
    """Scores x^T Wq Wk^T y / sqrt(K) of one head, or of all: the log of attention's kernel.

    Of tokens (T, D), kernels (D, K) and biases (K,) they are (T, T); of all heads, with the layout of
    `nnx.MultiHeadAttention`, (D, H, K) and (H, K), they are (H, T, T). Their softmax over the last axis
    is the transition matrix. ValueError if shapes do not fit.
    """
    check_points("attention_scores", tokens)
    shapes = query_kernel.shape, key_kernel.shape
    rule = "kernels (D, K) or (D, H, K) of one shape, D the features of the tokens"
    right = shapes[0] == shapes[1] and shapes[0][0] == tokens.shape[1]
    need("attention_scores", right, rule, f"{shapes} and tokens {tokens.shape}")
    query, key = (jnp.tensordot(tokens, x, axes=1) for x in (query_kernel, key_kernel))
    query = query if query_bias is None else query + query_bias[None]
    key = key if key_bias is None else key + key_bias[None]
    return jnp.einsum("i...k,j...k->...ij", query, key) / query.shape[-1] ** 0.5


def check_points(name: str, points: Array) -> None:
    """Raise unless `points` are floating-point numbers (T, D) with T and D at least one."""
    check_array(name, points)
    right, mend = points.ndim == 2 and min(points.shape) > 0, f"For a batch, use jax.vmap({name})."
    need(name, right, "points of shape (T, D), one in each row", points.shape, mend)


def check_positive(name: str, what: str, value: float | Array) -> None:
    """Raise unless a number is positive; not checked inside compiled code."""
    known = isinstance(value, jax.core.Tracer) or np.all(np.asarray(value) > 0)
    need(name, known, f"{what} > 0", value)
