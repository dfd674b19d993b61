"""A block's sublayers: layer normalisation (Prop. 4), multi-head attention, the feed-forward layer.

Each has a public function, and one that also returns how it carries covariances with its input: see
`rules`. They check what came; what they do with it is the rule of the structure.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax import expectations
from moment_jax.covariance import Covariance
from moment_jax.covariance.fields import need
from moment_jax.expectations.activations import Formula
from moment_jax.layers import params as checks
from moment_jax.layers.dense import Activation, dense
from moment_jax.layers.params import AttentionParams, FeedForwardParams, NormParams, S, with_bias
from moment_jax.layers.rules import Attending, Carry, ScoreNoise, rules_of
from moment_jax.posterior import Point
from moment_jax.xla import materialized_inputs


@materialized_inputs
def layer_norm(
    mean: Array, cov: S, params: NormParams, *, epsilon: float = 1e-6, centres: bool = True
) -> tuple[Array, S]:
    """Moments of gain * (x - avg(x)) / sqrt(var(x) + epsilon) + bias, token by token.

    With `centres=False` those of RMSNorm, gain * x / sqrt(avg(x^2) + epsilon) + bias.

    The covariance passes through the full Jacobian (I - 11^T/D - n n^T/D) / sqrt(q), n the normalised
    mean, because a token's average and deviation depend on x. The deviation is taken at the expected
    sample variance q = Var_d(E[x]) + tr(P Cov P)/D + epsilon, P = I - 11^T/D, and the mean has its
    second-order correction.

    Assumes that x, the gain and the bias are mutually independent, and x Gaussian.
    `Separable` also assumes that normalising keeps the correlation between tokens. Source: Transformer
    derivation, section 4.5 and Prop. 4, corrected as in `reference`.

    Args (mean, cov, results and errors are those of `dense`):
      params: beliefs about the gain (D,) and the bias (D,); each may be None.
      epsilon: added to the variance over the features, as in Flax; not negative.
    """
    return norm_with_carry(mean, cov, params, epsilon, centres=centres)[:2]


def norm_with_carry(
    mean: Array, cov: S, params: NormParams, epsilon: float, *, centres: bool = True
) -> tuple[Array, S, Carry]:
    """`layer_norm`, and how it carries covariances."""
    name = "layer_norm"
    checks.check_moments(name, mean, cov)
    right = isinstance(epsilon, jax.core.Tracer) or epsilon >= 0
    mend = "It is added to the variance; Flax uses 1e-6."
    need(name, right, "epsilon >= 0", epsilon, mend)
    gain, d = params.scale, mean.shape[1]
    checks.check_belief(name, "scale", d, gain)
    checks.check_belief(name, "bias", d, params.bias)
    rule = rules_of(type(cov)).norm
    mean, normal, carry = rule(mean, cov, epsilon=epsilon, centres=centres)
    if gain is None:
        return params.mean_output(mean), with_bias(normal, params.bias), carry
    rows = gain.mean[None, :]
    cov = normal.rescale(rows)
    if not isinstance(gain, Point):
        cov = cov.add(normal.gain_noise(mean, gain.vector_cov()))
    cov = with_bias(cov, params.bias)
    return params.mean_output(mean), cov, lambda cross: carry(cross).rescale(rows)


@materialized_inputs
def attention(
    mean: Array, cov: S, params: AttentionParams, *, num_heads: int, mask: Array | None = None
) -> tuple[Array, S]:
    """Moments of multi-head self-attention, softmax(q k^T / sqrt(K)) v and the output projection.

    Scores are correlated across queries as well as keys, because all tokens share the weight noise. Each
    structure keeps what it can of that, and of the input x that queries, keys and values share: `Full`
    keeps it everywhere; `Separable` in the means E[scores] and E[weights v], `Diagonal` in E[scores].
    The score noise of different heads is independent, except in `Full`. Assumes that x and the four
    weight matrices are independent of each other.

    Args (mean, cov, results and errors are those of `dense`):
      params: beliefs about the kernels (D, H K) of query, key and value and (H K, D) of the output.
      num_heads: H, a divisor of their width.
      mask: (T, T), (1, T) for all queries, or (H, T, T) boolean, True where a query (row) may look at a
        key (column). Masked keys get a weight of exactly zero, a query with no key left a zero output.

    With a mask, the feature Gram matrix of `Separable` is from here on that of the tokens which no query
    is denied. Source: Transformer derivation, sections 4.2 to 4.4.
    """
    cov = cov.seen_by(mask)
    return attention_with_carry(mean, cov, params, num_heads, mask)[:2]


@materialized_inputs
def cross_attention(
    mean: Array, cov: S, memory_mean: Array, memory_cov: S, params: AttentionParams, *,
    num_heads: int, mask: Array | None = None,
) -> tuple[Array, S]:  # fmt: skip
    """Moments of multi-head attention of a random sequence x to a random memory.

    Queries come from x, keys and values from the memory. What keys and values share through the memory
    is kept as in `attention`.

    Assumes that x, the memory and the four weight matrices are mutually independent. In a decoder this
    holds for the first block only. Source: Transformer derivation, sections 1.1 and 4.2 to 4.4.

    Args (the others, the results and the errors are those of `attention`, with S keys):
      memory_mean: mean of the memory, (S, E).
      memory_cov: its covariance, of shape (S, E), in the structure of `cov`; TypeError in another.
      params: beliefs about the kernels (D, H K) of query, (E, H K) of key and value, (H K, D).
    """
    memory = memory_mean, memory_cov.seen_by(mask, memory=True)
    return attention_with_carry(mean, cov, params, num_heads, mask, memory=memory)[:2]


def attention_with_carry(
    mean: Array, cov: S, params: AttentionParams, num_heads: int, mask: Array | None, *,
    memory: tuple[Array, Covariance] | None = None,
    turns: tuple[Array | None, Array | None] = (None, None), scale: Array | None = None,
    bias: Array | None = None, noise: tuple[ScoreNoise, ...] = (), cap: Formula | None = None,
) -> tuple[Array, S, Carry]:  # fmt: skip
    """`attention`, or `cross_attention` with a memory, and how it carries covariances.

    The rest is what `Attending` says; of scale, bias and factors of noise H may be 1 too.
    """
    name = "attention" if memory is None else "cross_attention"
    checks.check_moments(name, mean, cov)
    source, source_cov = (mean, cov) if memory is None else memory
    if memory is not None:
        checks.check_moments("cross_attention's memory", source, source_cov)
        own, other = type(cov).__name__, type(source_cov).__name__
        rule, right = "x and the memory in one structure", type(source_cov) is type(cov)
        mend = f"Use {own}.project(cov.to_dense()), or one structure for encoder and decoder."
        need(name, right, rule, f"{own} and {other}", mend, TypeError)
    checks.check_belief(name, "kernel", mean.shape[1], params.query.kernel)
    for projection in (params.key, params.value):
        checks.check_belief(name, "kernel", source.shape[1], projection.kernel)
    widths = [p.kernel.shape[1] for p in (params.query, params.key, params.value)]
    checks.check_heads(name, num_heads, widths)
    checks.check_belief(name, "kernel", widths[2], params.output.kernel)
    whole = num_heads, len(mean), len(source)
    what = "(queries, keys), (1, keys) or (heads, queries, keys), True where a query may look"
    checks.check_mask(name, what, mask, whole[1:], (1, len(source)), whole)
    if mask is not None:
        source_cov.check_mask(name, mask)
        mask = jnp.broadcast_to(mask, whole)
    if bias is not None:  # a key of -inf is masked: its derivative would be NaN
        keep = bias > -jnp.inf
        bias, mask = jnp.where(keep, bias, 0), keep if mask is None else mask & keep
        mask = jnp.broadcast_to(mask, whole)

    def of_heads(x: Array) -> Array:
        return jnp.broadcast_to(x, (num_heads, *x.shape[1:]))

    scale, bias = (None if x is None else of_heads(x) for x in (scale, bias))
    noise = tuple(each._replace(factor=of_heads(each.factor)) for each in noise)
    attending = Attending(num_heads, mask, turns, scale, bias, noise, cap)
    return rules_of(type(cov)).attention(mean, cov, memory, params, attending)


@materialized_inputs
def feed_forward(
    mean: Array, cov: S, params: FeedForwardParams, *, activation: Activation
) -> tuple[Array, S]:
    """Moments of `activation(x @ hidden) @ output`, each dense layer with its bias, (D, F) and (F, D).

    Assumes that x and the four parameters are mutually independent. The activation is as in
    `activation`, the rest as in `dense`. Source: Transformer derivation, section 4.6.
    """
    return feed_forward_with_carry(mean, cov, params, activation)[:2]


def feed_forward_with_carry(
    mean: Array, cov: S, params: FeedForwardParams, activation: Activation
) -> tuple[Array, S, Carry]:
    """`feed_forward`, and how it carries covariances."""
    checks.check_moments("feed_forward", mean, cov)
    hidden = params.hidden.kernel
    checks.check_belief("feed_forward", "kernel", mean.shape[1], hidden)
    checks.check_belief("feed_forward", "kernel", hidden.shape[1], params.output.kernel)
    rule = rules_of(type(cov)).feed_forward or _layer_by_layer
    return rule(mean, cov, params, expectations.of(activation))


def _layer_by_layer(
    mean: Array, cov: S, params: FeedForwardParams, activation: Formula
) -> tuple[Array, S, Carry]:
    """The rule of structures without one of their own: `dense`, the activation, `dense`."""
    hidden, hidden_cov = dense(mean, cov, params.hidden)
    moments = activation(hidden, hidden_cov.variance())
    out, out_cov = dense(moments.mean, hidden_cov.elementwise(moments), params.output)

    def carry(cross: Any) -> Any:
        cross = cross.map_features(params.hidden.kernel.mean).rescale(moments.gain)
        return cross.map_features(params.output.kernel.mean)

    return out, out_cov, carry
