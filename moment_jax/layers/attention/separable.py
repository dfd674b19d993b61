"""Attention for `Separable`, from the projections to the projected output.

The heads' averages are not projected to the structure: each token has its own feature correlation
there, which would be lost. Variances and Gram matrices of the projected output are computed directly
from the values times the output kernel.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.covariance import Separable
from moment_jax.covariance.numerics import fit_rows, gram, pooled, safe_divide, vector_cov
from moment_jax.covariance.separable_grams import FeatureGram
from moment_jax.covariance.separable_noise import column_noise
from moment_jax.layers.attention.head_noise import Projected, centred_rows, over_sum
from moment_jax.layers.attention.inputs import Inputs, Mixing, merge_heads, split_heads
from moment_jax.layers.attention.mix import each_head, mix
from moment_jax.layers.attention.separable_head import Head, HeadOutput, SeparableHead, Tokens
from moment_jax.layers.attention.shared_input import Links, make_links
from moment_jax.layers.attention.values import ValueNoise
from moment_jax.layers.params import DenseParams
from moment_jax.layers.seen import pool_scores
from moment_jax.posterior import Point
from moment_jax.xla import diagonal_matrix, diagonal_of, materialized


def attend_separable(inputs: Inputs[Separable]) -> tuple[Array, Separable, Mixing]:
    """Moments of the output: mean (T, D), covariance, and the mixing of the tokens."""
    h, output = inputs.num_heads, inputs.output
    kernel = output.kernel.mean
    noise_metric = output.kernel.input_metric()
    metric = gram(kernel) + vector_cov(noise_metric)
    pattern = own_pattern = over_sum(inputs.shared.cov)
    if inputs.query_input.cov is not inputs.shared.cov:
        own_pattern = over_sum(inputs.query_input.cov)
    query, key, value = (
        Projected.of(source, projection.cov, over, h)
        for source, projection, over in (
            (inputs.query_input, inputs.query, own_pattern),
            (inputs.key_input, inputs.key, pattern),
            (inputs.value_input, inputs.value, pattern),
        )
    )
    heads, tokens = _heads(inputs, query, key, value, metric)
    links = make_links(inputs.shared, pattern, key.pulled, value.pulled, h)

    def mix_one(one: Any) -> tuple[Array, HeadOutput, Mixing]:
        head, own, mask = one
        return mix(SeparableHead(head, tokens, Links(pattern, *own)), mask, inputs.order)

    each = (heads, links[1:], inputs.mask)
    means, mixed, mixing = materialized(each_head(mix_one, each, inputs.num_scores()))
    summed = jax.tree.map(lambda x: jnp.sum(x, axis=0), mixed.summed)
    like = inputs.query.cov
    pool = like.pool
    values = ValueNoise(value.whole, mixing.weights, mixed.reach, pool)
    own = value.of_sums(mixing.weights, pool)
    mean, mixed = merge_heads(means), mixed._replace(summed=summed)
    cov = _output_cov(output, values, own, mixed, mean, (metric, noise_metric), like)
    return output.mean_output(mean), cov, mixing


def _output_cov(
    output: DenseParams,
    values: ValueNoise,
    own: Array | None,
    mixed: HeadOutput,
    mean: Array,
    metrics: tuple[Array, Array],
    like: Separable,
) -> Separable:
    """Covariance of the projected output, including its random kernel and bias.

    `metrics` are the second moment of the output kernel and its noise alone.
    """
    kernel, pool = output.kernel.mean, like.pool
    metric, noise_metric = metrics
    variance = values.mapped_variance(kernel) + mixed.summed.variance
    by_head = jax.vmap(_outer)(mixed.energy, diagonal_of(mixed.feature_gram))
    if own is not None and mixed.own_value is not None:
        size = jnp.sum(diagonal_of(metric).reshape(own.shape) * own, axis=1, keepdims=True)
        energy = safe_divide(mixed.own_value, jnp.broadcast_to(size, mixed.own_value.shape))
        split = kernel.reshape(*own.shape, -1)
        variance = variance + energy.T @ jnp.einsum("hko,hk->ho", split**2, own)
        by_head = by_head + energy[:, :, None] * own[:, None, :]
        mixed = mixed._replace(feature_gram=mixed.feature_gram + diagonal_matrix(own))
    averages = values.feature_gram() + _block_diagonal(mixed.feature_gram)
    averages = materialized(averages)
    features = FeatureGram(gram(kernel.T, averages))
    token_gram = values.token_gram(metric) + mixed.summed.token_gram
    if not isinstance(output.kernel, Point):
        mixed_variance = values.variance() + merge_heads(by_head)
        variance = variance + output.kernel.noise_variance(mean, mixed_variance)
        token_gram = token_gram + gram(mean, noise_metric)
        if output.kernel.uncorrelated:
            moment = diagonal_of(averages) + pooled(mean, pool) ** 2
            features = features.plus(column_noise(output.kernel, moment))
        else:
            total = pooled(mean, pool)
            moment = averages + total[:, None] * total[None, :]
            features = features.plus(FeatureGram(output.kernel.noise_block(moment)))
    variance = fit_rows(variance, diagonal_of(token_gram))
    cov = like.from_crossed(variance, token_gram, features, pool)
    if output.bias is None or isinstance(output.bias, Point):
        return cov
    return cov.add(like.shared(mean.shape[0], output.bias.vector_cov()))


def _outer(rows: Array, columns: Array) -> Array:
    """The outer product, normalised by the columns' sum."""
    total = jnp.broadcast_to(jnp.sum(columns), columns.shape)
    return rows[:, None] * safe_divide(columns, total)[None, :]


def _heads(
    inputs: Inputs[Separable], query: Projected, key: Projected, value: Projected, metric: Array
) -> tuple[Head, Tokens]:
    """All heads' moments, leading axis H, and what they share."""
    h, kernel, keys = inputs.num_heads, inputs.output.kernel.mean, inputs.key_input
    if inputs.shared.query_kernel is None:
        query_pool, key_pool = inputs.query.cov.pool, keys.cov.pool
    else:
        query_pool = key_pool = pool_scores(keys.cov.pool, inputs.mask)
    spread, _ = centred_rows(inputs.key.mean, key_pool)
    heads = Head(
        inputs.centres(),
        query.heads,
        key.heads,
        value.heads,
        query.by_token(query_pool),
        key.contrasts(key_pool),
        split_heads(spread, h),
        inputs.value.cov.features().blocks(h),
        FeatureGram(metric).blocks(h),
        kernel.reshape(h, kernel.shape[0] // h, -1),
    )
    tokens = Tokens(
        inputs.query_input.mean,
        keys.mean,
        query.pattern,
        key.pattern,
        value.pattern,
        inputs.query.cov.pool,
        query_pool,
    )
    return heads, tokens


def _block_diagonal(blocks: Array) -> Array:
    """(H, K, K) -> (H K, H K), zero between the heads."""
    h, k, _ = blocks.shape
    # Repeats rows only, which moves nothing on a TPU.
    columns = jnp.broadcast_to(blocks.swapaxes(0, 1).reshape(k, h * k), (h, k, h * k))
    head = jax.lax.broadcasted_iota(jnp.int32, columns.shape, 0)
    of_column = jax.lax.div(jax.lax.broadcasted_iota(jnp.int32, columns.shape, 2), jnp.int32(k))
    own = jnp.where(head == of_column, columns, jnp.zeros((), blocks.dtype))
    return own.reshape(h * k, h * k)
