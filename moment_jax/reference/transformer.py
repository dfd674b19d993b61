"""The derivation's Transformer block (post-norm) on dense covariances, section by section.

The names and arguments are those of the library's transforms, but `cov` is a (T, D, T, D) array, every
mean is first-order, and the derivation's independence assumptions are made: of queries, keys and
values of a random input, of heads, and of a residual stream and its branch. For small sizes only.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax import layers, posterior
from moment_jax.posterior import Posterior
from moment_jax.reference import propositions


class DenseMoments(NamedTuple):
    """Mean of a random array, and its covariance: `cov.shape == (*mean.shape, *mean.shape)`."""

    mean: Array
    cov: Array


def dense_moments(belief: Posterior) -> DenseMoments:
    """Mean and dense covariance of a belief: (in, out, in, out) for a kernel, (D, D) for a vector.

    This is the derivation's covariance of the vectorised parameter, in the library's index order.
    Source: Transformer derivation, sections 2 and 5 (which print standard deviations in the diagonal
    blocks, where variances are meant).
    """
    if isinstance(belief, posterior.FullNormal):
        return DenseMoments(belief.mean, belief.cov)
    if isinstance(belief, posterior.KroneckerEigen):
        return DenseMoments(belief.mean, belief.dense_cov())
    if not getattr(belief, "uncorrelated", False):
        name = type(belief).__name__
        raise TypeError(f"`dense_moments` knows no family {name}. Use one of moment_jax.posterior.")
    variance = belief.marginal_variance().ravel()
    return DenseMoments(belief.mean, jnp.diag(variance).reshape(2 * belief.shape))


def dense(mean: Array, cov: Array, params: layers.DenseParams) -> DenseMoments:
    """Moments of x @ kernel + bias, (T, O), all independent, exact: derivation, section 4.2."""
    out_mean, out_cov = _product(DenseMoments(mean, cov), dense_moments(params.kernel))
    if params.bias is not None:
        bias = dense_moments(params.bias)
        out_mean = out_mean + bias.mean[None, :]
        out_cov = out_cov + bias.cov[None, :, None, :]
    return DenseMoments(out_mean, out_cov)


def softmax(mean: Array, cov: Array) -> DenseMoments:
    """First-order moments of the softmax of every row, (T, C): derivation, 4.3.2, Eq. 10 and Prop. 3."""
    return DenseMoments(jax.nn.softmax(mean, axis=-1), propositions.proposition3(mean, cov))


def attention(
    mean: Array, cov: Array, params: layers.AttentionParams, *, num_heads: int
) -> DenseMoments:
    """First-order moments of multi-head self-attention, (T, D).

    Of kernels (D, H K), heads outermost, and (H K, D) of the output. Assumes that queries, keys and
    values are independent, which is true if x is certain (cov zero); and heads, which is true if in
    addition the columns of each kernel are.

    Source: Transformer derivation, sections 4.2 to 4.4 (which print mod D for the head's index, where
    mod H is meant).
    """
    projected = [dense(mean, cov, layer) for layer in (params.query, params.key, params.value)]
    t, width = projected[2].mean.shape
    k = width // num_heads
    out_mean = jnp.zeros((t, width), mean.dtype)
    out_cov = jnp.zeros((t, width, t, width), mean.dtype)
    for head in range(num_heads):
        own = slice(head * k, (head + 1) * k)
        found = _one_head(*(DenseMoments(m[:, own], c[:, own, :, own]) for m, c in projected))
        out_mean = out_mean.at[:, own].set(found.mean)
        out_cov = out_cov.at[:, own, :, own].set(found.cov)
    return dense(out_mean, out_cov, params.output)


@jax.jit
def _one_head(query: DenseMoments, key: DenseMoments, value: DenseMoments) -> DenseMoments:
    """First-order moments of softmax(q k^T / sqrt(K)) v, (T, K): derivation, section 4.3."""
    k = query.mean.shape[1]
    transposed = DenseMoments(key.mean.T, jnp.transpose(key.cov, (1, 0, 3, 2)))
    scores, score_cov = _product(query, transposed)
    return _product(softmax(scores / k**0.5, score_cov / k), value)


def _product(a: DenseMoments, b: DenseMoments) -> DenseMoments:
    """Of independent matrices."""
    mean = propositions.proposition1(a.mean, b.mean)
    return DenseMoments(mean, propositions.proposition2(*a, *b))


def layer_norm(
    mean: Array, cov: Array, params: layers.NormParams, *, epsilon: float = 1e-6
) -> DenseMoments:
    """First-order moments of gain * (x - avg(x)) / sqrt(var(x) + epsilon) + bias, (T, D).

    Source: Transformer derivation, section 4.5 and Prop. 4, corrected as `proposition4` says.
    """
    one, zero = jnp.ones(mean.shape[1], mean.dtype), jnp.zeros(mean.shape[1], mean.dtype)
    gain = dense_moments(posterior.Point(one) if params.scale is None else params.scale)
    bias = dense_moments(posterior.Point(zero) if params.bias is None else params.bias)
    normal, _ = propositions.normalized(mean, epsilon)
    out_cov = propositions.proposition4(mean, cov, *gain, bias.cov, epsilon=epsilon)
    return DenseMoments(normal * gain.mean[None, :] + bias.mean[None, :], out_cov)


@jax.jit
def relu(mean: Array, cov: Array) -> DenseMoments:
    """Moments of max(x, 0) for Gaussian x, (T, D), instead of the derivation's first-order Taylor.

    With F = P(x > 0) and p the density of x at 0, E[relu] = m F + v p and
    E[relu^2] = (m^2 + v) F + m v p are exact, and so are the variances. Entries with covariance c get
    the covariance F F' c + p p' c^2 / 2, by Price's theorem to second order.

    Source: Transformer derivation, section 4.6, corrected.
    """
    t, d = mean.shape
    variance = jnp.einsum("tdtd->td", cov)
    certain = variance == 0  # then the density counts as zero
    deviation = jnp.sqrt(jnp.where(certain, 1, variance))
    standard = mean / deviation
    positive = jnp.where(certain, mean > 0, jax.scipy.stats.norm.cdf(standard))
    density = jnp.where(certain, 0, jax.scipy.stats.norm.pdf(standard) / deviation)
    out_mean = mean * positive + variance * density
    out_variance = (mean**2 + variance) * positive + mean * variance * density - out_mean**2
    pairs = (
        positive[:, :, None, None] * positive[None, None] * cov
        + density[:, :, None, None] * density[None, None] * cov**2 / 2
    )
    same = jnp.eye(t * d, dtype=bool).reshape(t, d, t, d)
    return DenseMoments(out_mean, jnp.where(same, out_variance[:, :, None, None], pairs))


def feed_forward(mean: Array, cov: Array, params: layers.FeedForwardParams) -> DenseMoments:
    """Moments of relu(x @ hidden) @ output, (T, D), each with its bias: derivation, section 4.6."""
    hidden = dense(mean, cov, params.hidden)
    active = relu(hidden.mean, hidden.cov)
    return dense(active.mean, active.cov, params.output)


def encoder_block(
    mean: Array, cov: Array, params: layers.EncoderBlockParams, *, num_heads: int,
    epsilon: float = 1e-6,
) -> DenseMoments:  # fmt: skip
    """First-order moments of norm2(z + feed_forward(z)), z = norm1(x + attention(x)), (T, D).

    Assumes what `attention` does, and that each branch is independent of its residual stream. That is
    true of the first for certain x, never of the second, whose covariance with its branch the derivation
    neglects, and says so (4.6). Source: Transformer derivation, section 4 and Figure 1.
    """
    branch = attention(mean, cov, params.attention, num_heads=num_heads)
    mean, cov = layer_norm(mean + branch.mean, cov + branch.cov, params.norm1, epsilon=epsilon)
    branch = feed_forward(mean, cov, params.feed_forward)
    return layer_norm(mean + branch.mean, cov + branch.cov, params.norm2, epsilon=epsilon)
