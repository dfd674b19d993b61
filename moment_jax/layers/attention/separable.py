"""Attention for `Separable`: from the projections, through all heads, to the projected output.

The heads' averages are not projected to the structure: between them and the output projection each
token has its own correlation of features, which would be lost. Variances and Gram matrices are those
of the projected output, from the values times the output kernel.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from moment_jax.covariance import Separable
from moment_jax.covariance.feature_gram import FeatureGram, column_noise
from moment_jax.covariance.marginals import fit_rows
from moment_jax.covariance.numerics import pooled, safe_divide, vector_cov, weighted
from moment_jax.layers.attention.each_head import each_head
from moment_jax.layers.attention.inputs import DenseInput, Inputs, Mixing, merge_heads, split_heads
from moment_jax.layers.attention.separable_head import Head, Mixed, OwnValue, Tokens, mix_head
from moment_jax.layers.attention.shared_input import Links, make_links
from moment_jax.layers.attention.values import ValueNoise, over_sum, over_trace
from moment_jax.layers.params import DenseParams
from moment_jax.posterior import Point
from moment_jax.xla import diagonal_matrix, diagonal_of, rows_diagonal

Array = jax.Array


def attend_separable(inputs: Inputs[Separable]) -> tuple[Array, Separable, Mixing]:
    """Moments of the output: mean (T, D), covariance, and how the tokens were mixed."""
    h, output = inputs.num_heads, inputs.output
    kernel = output.kernel.mean
    noise_metric = vector_cov(output.kernel.input_metric())
    metric = kernel @ kernel.T + noise_metric
    heads, tokens = _heads(inputs, metric)
    links = make_links(inputs.shared, h)

    def mix(one: tuple[Head, tuple[Array | None, ...], Array | None]) -> Mixed:
        head, own, mask = one
        return mix_head(head, tokens, Links._make((links.tokens, *own)), mask, inputs.order)

    num_scores = h * heads.query.shape[1] * heads.key.shape[1]
    mixed = each_head(mix, (heads, links[1:], inputs.mask), num_scores)
    pool = inputs.query.cov.pool
    values = ValueNoise(_shared_values(inputs), mixed.weights, mixed.reach, pool)
    own = _own_features(inputs.value_input, mixed.weights, pool)
    mean = merge_heads(mixed.mean)
    cov = _output_cov(output, values, own, mixed, mean, noise_metric, pool)
    return output.mean_output(mean), cov, Mixing(mixed.weights, mixed.gain)


def _output_cov(
    output: DenseParams,
    values: ValueNoise,
    own: Array | None,
    mixed: Mixed,
    mean: Array,
    noise_metric: Array,
    pool: Array | None,
) -> Separable:
    """Covariance of the projected output, its random kernel and bias included."""
    kernel = output.kernel.mean
    metric = kernel @ kernel.T + noise_metric
    split = kernel.reshape(*mixed.feature_gram.shape[:2], -1)
    variance, feature_gram = values.map_features(kernel)
    variance = variance + jnp.sum(mixed.variance, axis=0)
    by_head = jax.vmap(_outer)(mixed.energy, diagonal_of(mixed.feature_gram))
    if own is not None:
        size = jnp.sum(diagonal_of(metric).reshape(own.shape) * own, axis=1, keepdims=True)
        energy = safe_divide(mixed.own_value, jnp.broadcast_to(size, mixed.own_value.shape))
        variance = variance + energy.T @ jnp.einsum("hko,hk->ho", split**2, own)
        by_head = by_head + energy[:, :, None] * own[:, None, :]
        mixed = mixed._replace(feature_gram=mixed.feature_gram + diagonal_matrix(own))
    feature_gram = feature_gram + jnp.einsum("hko,hkp->op", split, mixed.feature_gram @ split)
    token_gram = values.token_gram(metric) + jnp.sum(mixed.token_gram, axis=0)
    features = FeatureGram(feature_gram)
    if not isinstance(output.kernel, Point):
        mixed_variance = values.variance() + merge_heads(by_head)
        variance = variance + output.kernel.noise_variance(mean, mixed_variance)
        token_gram = token_gram + (mean @ noise_metric) @ mean.T
        if output.kernel.uncorrelated:
            by_score = diagonal_of(mixed.feature_gram).ravel()
            moment = values.sum_variance() + by_score + pooled(mean, pool) ** 2
            features = features.plus(column_noise(output.kernel, moment))
        else:
            moment = values.feature_gram() + _block_diagonal(mixed.feature_gram)
            total = pooled(mean, pool)
            moment = moment + total[:, None] * total[None, :]
            features = FeatureGram(feature_gram + output.kernel.noise_block(moment))
    variance = fit_rows(variance, rows_diagonal(token_gram))
    cov = Separable.from_moments(variance, token_gram, features, pool)
    if output.bias is None or isinstance(output.bias, Point):
        return cov
    return cov.add(Separable.shared(mean.shape[0], output.bias.vector_cov()))


def _outer(rows: Array, columns: Array) -> Array:
    """Rows times columns, over the columns' sum."""
    total = jnp.broadcast_to(jnp.sum(columns), columns.shape)
    return rows[:, None] * safe_divide(columns, total)[None, :]


def _heads(inputs: Inputs[Separable], metric: Array) -> tuple[Head, Tokens]:
    """All heads' moments, leading axis H, and what they have in common."""
    h, pool = inputs.num_heads, inputs.query.cov.pool
    contrasts, centre = _contrasts(inputs.key_input, h)
    kernel = inputs.output.kernel.mean
    heads = Head(
        split_heads(inputs.query.mean, h),
        split_heads(inputs.key.mean, h),
        split_heads(inputs.value.mean, h),
        _query_features(inputs.query_input, h),
        contrasts,
        inputs.value.cov.features().blocks(h),
        FeatureGram(metric).blocks(h),
        kernel.reshape(h, kernel.shape[0] // h, -1),
        *_value_noise(inputs, metric),
    )
    query, key = (over_trace(p.cov.token_gram(), p.cov.pool) for p in (inputs.query, inputs.key))
    made_of = inputs.value_input
    noisy = made_of.cov if _own_noise(made_of) else inputs.value.cov
    value = over_sum(noisy.token_gram(), noisy.pool)
    return heads, Tokens(query, key, value, made_of.mean, centre, pool)


def _own_noise(source: DenseInput[Separable]) -> bool:
    """Whether the noise of a dense layer is each head's own."""
    return source.params.kernel.uncorrelated


def _shared_values(inputs: Inputs[Separable]) -> Array:
    """Feature Gram matrix of what heads' values have in common, (H K, H K): the noise of the input."""
    _, cov, params = inputs.value_input
    if _own_noise(inputs.value_input):
        return cov.features().map(params.kernel.mean).dense()
    return inputs.value.cov.feature_gram()


def _value_noise(inputs: Inputs[Separable], metric: Array) -> tuple[Array, OwnValue | None]:
    """What the metric makes of the noise of values, (H,): what heads have in common, and their own."""
    h, (_, cov, params) = inputs.num_heads, inputs.value_input
    within = FeatureGram(_shared_values(inputs)).blocks(h) * FeatureGram(metric).blocks(h)
    shared = jnp.sum(within, axis=(1, 2))
    if not _own_noise(inputs.value_input):
        return shared, None
    # Each feature of the input counts as much as the output sees of it: a posterior's variances differ
    # by orders of magnitude, and one token pattern for all of them would be off by a tenth.
    diagonal, own = diagonal_of(metric), cov.features().diag()
    variance = params.kernel.marginal_variance() * diagonal[None, :]
    weights = jnp.sum(variance.reshape(variance.shape[0], h, -1), axis=2).T  # (H, D)
    share = weights @ safe_divide(own, jnp.broadcast_to(jnp.sum(own), own.shape))
    bias = jnp.zeros_like(shared)
    if params.bias is not None:
        bias = jnp.sum((params.bias.marginal_variance() * diagonal).reshape(h, -1), axis=1)
    return shared, OwnValue(weights, share, bias)


def _own_features(
    source: DenseInput[Separable], weights: Array, pool: Array | None
) -> Array | None:
    """Variances of the sum of every head's averages by its own noise of the values, (H, K)."""
    mean, cov, params = source
    if not _own_noise(source):
        return None
    h, kernel = weights.shape[0], params.kernel
    total = pooled(weights.swapaxes(0, 1), pool)  # (H, S)
    energy = jnp.sum((total @ cov.token_gram()) * total, axis=1)
    share = safe_divide(energy, jnp.broadcast_to(_total(cov), energy.shape))
    moment = (total @ mean) ** 2 + share[:, None] * cov.features().diag()[None, :]
    noise = kernel.noise_variance(jnp.zeros_like(moment), moment).reshape(h, h, -1)
    own = jnp.einsum("hhk->hk", noise)
    if params.bias is None:
        return own
    count = jnp.sum(total, axis=1, keepdims=True)
    return own + count**2 * params.bias.marginal_variance().reshape(h, -1)


def _total(cov: Separable) -> Array:
    """The sum of the token Gram matrix, with the weights of the tokens, ()."""
    return jnp.sum(weighted(pooled(cov.token_gram(), cov.pool), cov.pool))


def _query_features(source: DenseInput[Separable], num_heads: int) -> Array:
    """sum_t Cov[q_td, q_te] of every head, (H, K, K): scores see single queries, not their sum."""
    mean, cov, params = source
    rows = weighted(mean, None if cov.pool is None else jnp.sqrt(cov.pool))
    energy = jnp.sum(weighted(rows_diagonal(cov.token_gram()), cov.pool))
    features = _features_under(source, energy, rows, num_heads)
    if params.bias is None or isinstance(params.bias, Point):
        return features
    count = jnp.sum(weighted(jnp.ones(mean.shape[0], mean.dtype), cov.pool))
    return features + FeatureGram(count * vector_cov(params.bias.vector_cov())).blocks(num_heads)


def _contrasts(source: DenseInput[Separable], num_heads: int) -> tuple[Array, Array]:
    """Feature Gram matrices of every head's keys less their average, and the form that centres.

    They are taken before the keys' covariance is projected: the common part of all keys is the largest
    of their noise, and softmax does not see it.
    """
    mean, cov, _ = source
    used = jnp.ones(mean.shape[0], mean.dtype) if cov.pool is None else cov.pool
    share = used / jnp.maximum(jnp.sum(used), 1)
    centre = diagonal_matrix(used) - share[:, None] * used[None, :]
    rows = jnp.sqrt(used)[:, None] * (mean - (share @ mean)[None, :])
    energy = jnp.sum(cov.token_gram() * centre)
    return _features_under(source, energy, rows, num_heads), centre


def _features_under(
    source: DenseInput[Separable], energy: Array, rows: Array, num_heads: int
) -> Array:
    """sum_ts g_ts Cov[y_td, y_se] of every head, (H, K, K), for y = x @ kernel and a quadratic form g.

    Noise of the input is taken to have the features of its sum over the tokens.

    Args:
      source: x and the kernel.
      energy: sum_ts g_ts G_ts, G the token Gram matrix of x, ().
      rows: a root of g times the mean of x, (R, D).
      num_heads: H.
    """
    _, cov, params = source
    kernel = params.kernel
    features = cov.features().times(safe_divide(energy, _total(cov)))
    if kernel.uncorrelated:
        moment = features.diag() + jnp.sum(rows**2, axis=0)
        noise = FeatureGram(diagonal=kernel.noise_variance(0 * moment, moment))
    else:
        noise = FeatureGram(kernel.noise_block(features.dense() + rows.T @ rows))
    return features.map(kernel.mean).blocks(num_heads) + noise.blocks(num_heads)


def _block_diagonal(blocks: Array) -> Array:
    """(H, K, K) -> (H K, H K), zero between the heads."""
    h, k, _ = blocks.shape
    eye = jnp.eye(h, dtype=blocks.dtype)
    return (blocks[:, :, None, :] * eye[:, None, :, None]).reshape(h * k, h * k)
