"""Attention in `Separable`, from the projections to the projected output.

Read every input as Cov[x_ti, x_sj] = P_ts C_ij with its token pattern P. Scores have ONE Kronecker
product as covariance, Cov[s_ac, s_bf] = A_ab B_cf; queries, keys and values are independent in it, and
share x in the means alone. Queries and keys see the diagonal of C. Kernels' noise has one token
pattern for all heads and projections of a sequence. Per head, with W = E[softmax] and values v:

    G  += A * (W (B * V) W^T - X - X^T + (a a^T) * (W B W^T)) + W V W^T,  X = ((W V) * (W B)) W^T

under the metric of the output, where V is E[v v^T] over tokens and a = W v.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.covariance.numerics import gram as feature_gram
from moment_jax.covariance.numerics import (
    nonnegative,
    safe_divide,
    safe_sqrt,
    summed_covs,
    weighted_sum,
)
from moment_jax.covariance.separable import (
    Separable,
    SeparableCross,
    agreeing,
    kernel_noise,
    spread,
)
from moment_jax.covariance.token_gram import (
    Nystroem,
    TokenGram,
    Tokens,
    bounded,
    congruent,
    contracted,
    contrasted,
    count_of,
    diagonal_of,
    divided,
    gram,
    nystroem,
    product,
    pulled,
    seen_only,
    spread_within,
    through,
    whole,
)
from moment_jax.covariance.token_gram import total as sum_of
from moment_jax.expectations import expected_softmax, masked_softmax
from moment_jax.expectations.softmax_mean import quick_expected_softmax
from moment_jax.layers.heads import (
    each_head,
    kept_jacobian,
    left_within,
    merge_heads,
    split_heads,
    turned,
)
from moment_jax.layers.params import AttentionParams, DenseParams, bias_cov, with_bias
from moment_jax.layers.rules import Attending, Carry
from moment_jax.layers.seen import pool_scores
from moment_jax.xla import diagonal_matrix, materialized


class Projection(NamedTuple):
    """Queries, keys or values y = x @ kernel + bias of all heads (leading axis H), or of one."""

    mean: Array  # (T, K)
    kernel: Array  # mean, (D, K)
    by_input: Array  # (K, K): noise of x, through the kernel's mean and its noise
    by_kernel: Array  # (K, K): noise of the kernel alone, in the tokens' weighted sum of squares
    by_bias: Array  # (K, K)

    def under(self, metric: Array, pattern: Tokens, noise: Tokens) -> Tokens:
        """sum_ij metric_ij Cov[y_ti, y_sj], (T, T), without the bias, from both patterns."""
        return jnp.sum(self.by_input * metric) * pattern + jnp.sum(self.by_kernel * metric) * noise


def _projection(
    mean: Array, features: Array, by_mean: Array | None, layer: DenseParams, weights: Array,
    turn: Array | None, h: int,
) -> Projection:  # fmt: skip
    """All heads' projections by a layer.

    `features` is C, or its diagonal, and `by_mean` (H, K, K) what the kernel's mean makes of it.
    `weights` (T,) are those of the tokens in the sum of squares.
    """
    kernels = split_heads(layer.kernel.mean, h)
    if by_mean is None:
        by_mean = jax.vmap(lambda each: feature_gram(each.T, features))(kernels)
    by_input = kernel_noise(layer.kernel, features, jnp.zeros_like(mean[:1]))
    return Projection(
        turned(split_heads(layer.mean_output(mean), h), turn),
        kernels,
        by_mean + _blocks(by_input, h),
        _blocks(kernel_noise(layer.kernel, None, safe_sqrt(weights)[:, None] * mean), h),
        _blocks(bias_cov(layer.bias, layer.kernel.shape[1], mean.dtype), h),
    )


def _pattern(noise: Tokens, weights: Array) -> Tokens:
    """The token Gram matrix of kernels' noise in units of its weighted trace."""
    return divided(noise, weights @ diagonal_of(noise))


def _blocks(cov: Array, num_heads: int) -> Array:
    """Each head's block (H, K, K) of a covariance (H K, H K), or of a diagonal (H K,)."""
    if cov.ndim == 1:
        return diagonal_matrix(cov.reshape(num_heads, -1))
    k = len(cov) // num_heads
    return jnp.einsum("hkhl->hkl", cov.reshape(num_heads, k, num_heads, k))


class _Tokens(NamedTuple):
    """What all heads share: token patterns and weights."""

    x: Tokens  # pattern of the queries' input, (T, T)
    source: Tokens  # pattern of the keys' and values' input, (S, S)
    query: Tokens  # patterns of the kernels' noise
    key: Tokens
    value: Tokens
    averaged: Array | Nystroem  # `source`, to be multiplied
    own: Array | None  # `source` in full, (T, T), if that is x
    seen: Array  # keys that some query may look at, (S,)
    pool: Array  # weights of the sum over queries, (T,)
    query_weights: Array  # weights of averages over queries and keys, for the scores
    key_weights: Array


class _Head(NamedTuple):
    query: Projection
    key: Projection
    value: Projection
    contrasts: Array  # by_kernel of the keys minus their average, (K, K)
    metric: Array  # second moment of the output kernel, (K, K)
    drawn: Array  # C kernel of the values, (D, K)
    linked: Array  # sum_k Cov[q_ak, k_ck] of a unit of x's token pattern, ()
    mask: Array | None


class _Output(NamedTuple):
    mean: Array  # (T, K)
    weights: Array  # E[softmax], (T, S)
    total: Array  # its sum over queries, (S,)
    tokens: Tokens  # what the head alone adds to the token Gram matrix, (T, T)
    by_scores: Array  # covariance of the sum through the scores, (K, K)


def attention(
    mean: Array,
    cov: Separable,
    memory: tuple[Array, Separable] | None,
    params: AttentionParams,
    attending: Attending,
) -> tuple[Array, Separable, Carry]:
    """The rule of `attention` and `cross_attention`: see there."""
    h, mask, _, turns = attending
    source, source_cov = (mean, cov) if memory is None else memory
    key_weights = pool_scores(source_cov.pool, mask) if memory is None else source_cov.pool
    query_weights = key_weights if memory is None else cov.pool
    count, key_count = count_of(cov.tokens), count_of(source_cov.tokens)
    others = diagonal_of(source_cov.features)
    own = others if memory is None else diagonal_of(cov.features)
    value_kernel = params.value.kernel.mean
    drawn = source_cov.features @ value_kernel
    common = value_kernel.T @ drawn  # noise of x in the values of all heads, (H K, H K)
    query = _projection(mean, own, None, params.query, query_weights, turns[0], h)
    key = _projection(source, others, None, params.key, key_weights, turns[1], h)
    value = _projection(
        source, source_cov.features, _blocks(common, h), params.value, source_cov.pool, None, h
    )
    metrics = [layer.kernel.input_metric() for layer in (params.query, params.key, params.value)]
    if memory is None:
        noise = gram(source, summed_covs(*metrics), key_count)
        query_noise = key_noise = _pattern(noise, key_weights)
    else:
        noise = gram(source, summed_covs(*metrics[1:]), key_count)
        query_noise = _pattern(gram(mean, metrics[0], count), query_weights)
        key_noise = _pattern(noise, key_weights)
    seen = jnp.ones(len(source), bool) if mask is None else jnp.any(mask, axis=(0, 1))
    pattern = seen_only(source_cov.pattern(), seen)
    averaged = nystroem(pattern)
    own_pattern = pattern if memory is None else cov.pattern()
    tokens = _Tokens(
        *(own_pattern, pattern, query_noise, key_noise, _pattern(noise, source_cov.pool)),
        averaged,
        whole(pattern) if memory is None else None,
        *(seen, cov.pool, query_weights, key_weights),
    )
    centred = safe_sqrt(key_weights)[:, None] * (source - _average(key_weights, source)[None])
    contrasts = _blocks(kernel_noise(params.key.kernel, None, centred), h)
    output, output_metric = params.output.kernel.mean, params.output.kernel.input_metric()
    kernels = output.reshape(h, -1, output.shape[1])
    metric = kernels @ jnp.swapaxes(kernels, 1, 2) + _blocks(output_metric, h)

    def one_head(head: _Head) -> _Output:
        return _one_head(head, tokens, attending.order)

    linked = own @ jnp.sum(query.kernel * key.kernel, axis=2).T
    heads = _Head(query, key, value, contrasts, metric, split_heads(drawn, h), linked, mask)
    # At landmarks what cancels is approximated, and bfloat16 would not cancel.
    exact = any(isinstance(c.tokens, TokenGram) for c in (cov, source_cov))
    with jax.default_matmul_precision("highest") if exact else contextlib.nullcontext():
        out = each_head(one_head, heads, num_scores=h * len(mean) * len(source))

    # All heads average the same noise of x in the values; pairs of heads do with their mean weights.
    common = common.reshape(*(h, len(common) // h) * 2)
    between = jnp.sum(common * feature_gram(output).reshape(common.shape), axis=(1, 3))
    shared = jnp.sum(between) - jnp.sum(diagonal_of(between))  # by pairs of different heads
    mixed = merge_heads(out.mean)
    gram_tokens = jax.tree.map(lambda each: jnp.sum(each, axis=0), out.tokens)
    gram_tokens = gram_tokens + gram(mixed, output_metric, count)
    gram_tokens = gram_tokens + shared * gram(jnp.mean(out.weights, axis=0), averaged, count)

    # The sum over queries: averages of values' noise, and every head's own.
    total = out.total
    overlap = (total @ averaged) @ total.T
    energy = diagonal_of(overlap)
    own_noise = jax.vmap(
        lambda mean: _blocks(kernel_noise(params.value.kernel, None, mean[None]), h)
    )
    by_kernel = jnp.einsum("hhkl->hkl", own_noise(total @ source))
    by_head = energy[:, None, None] * value.by_input + by_kernel + out.by_scores
    by_head = by_head + (jnp.sum(total, axis=1) ** 2)[:, None, None] * value.by_bias
    same = jnp.eye(h, dtype=bool)[:, None, :, None]
    averages = jnp.where(same, by_head[:, :, None], common * overlap[:, None, :, None])
    averages = averages.reshape(len(output), -1)
    by_noise = kernel_noise(params.output.kernel, averages, weighted_sum(cov.pool, mixed)[None])
    features = summed_covs(feature_gram(output.T, averages), by_noise)
    variances = spread(diagonal_of(gram_tokens), diagonal_of(features))
    features = agreeing(features, gram_tokens, cov.pool)
    out_cov = Separable.unchecked(variances, gram_tokens, features, cov.pool)
    out_cov = with_bias(out_cov, params.output.bias)

    def carry(
        cross: SeparableCross | None, with_memory: SeparableCross | None = None
    ) -> SeparableCross | None:
        """Through the values alone, so from a memory and not from what looks at it."""
        given = cross if memory is None else with_memory
        if given is None:
            return None
        return _through_values(given, value.kernel @ kernels, out.weights, total, cov.pool)

    return params.output.mean_output(mixed), out_cov, carry


def _average(weights: Array, rows: Array) -> Array:
    return safe_divide(weights @ rows, jnp.sum(weights))


def _through_values(
    cross: SeparableCross, paths: Array, weights: Array, total: Array, pool: Array
) -> SeparableCross:
    """Cov[u, attention] of Cov[u, x]; `paths` (H, D, E) are the products of each head's kernels.

    That of the pooled sums is exact; the pattern averages heads by what each of them carries.
    """
    carried = safe_sqrt(jnp.sum(paths**2, axis=(1, 2)))
    carried = safe_divide(carried, jnp.sum(carried))
    reached = total @ pulled(cross.pools[0], cross.tokens)  # (H,)
    paths = jnp.tensordot(safe_divide(reached, jnp.sum(reached * carried)), paths, 1)
    tokens = through(cross.tokens, jnp.tensordot(carried, weights, 1).T)
    return SeparableCross(tokens, cross.features @ paths, (cross.pools[0], pool))


def _one_head(head: _Head, tokens: _Tokens, order: int) -> _Output:
    """One head: its averages of the values, and what its noise adds to the projected output."""
    q, k, v = head.query, head.key, head.value
    root, pool, metric = q.mean.shape[1] ** 0.5, tokens.pool, head.metric
    queries, contrasts = _scores(head, tokens)
    known, count = nystroem(contrasts), count_of(queries)
    scores = q.mean @ k.mean.T
    if tokens.own is not None and order == 2:
        scores = scores + tokens.own * head.linked
    scores = materialized(scores / root)
    if order == 1:
        weights = masked_softmax(scores, head.mask)
    else:
        weights = _expected_weights(scores, queries, contrasts, known, head.mask)
    weights = materialized(weights)
    total = weighted_sum(pool, weights)
    centre = _average(total, v.mean)[None]  # nothing large cancels below
    value = v.mean - centre
    average = weights @ value

    # Second moments of values v and averages a = W v over tokens, under the metric of the output.
    noise = v.under(metric, tokens.source, tokens.value) + jnp.sum(v.by_bias * metric)
    noise = seen_only(noise, tokens.seen)
    mapped = value @ metric
    spread_by = nystroem(noise)
    values = mapped @ value.T + whole(spread_by)
    reached, met, seen = weights @ spread_by, weights @ known, whole(known) * values
    crossed = average @ mapped.T + reached
    within, met_twice = (product(x, weights, count) for x in (reached, met))
    averages = gram(average, metric, count) + within
    by_scores = averages * met_twice
    by_scores = queries * contracted(weights, seen, 2 * crossed * met, by_scores, pool > 0)
    gain = jnp.ones_like(pool)
    if order == 2:  # law of total variance: the softmax keeps a part of its Jacobian
        second, found = weights @ diagonal_of(values), nonnegative(diagonal_of(by_scores))
        gain, _ = kept_jacobian(found, second, diagonal_of(averages))
        by_scores = bounded(gain[:, None] * by_scores * gain[None, :], gain * safe_sqrt(found))

    # Through the scores into the sum over queries: from the spread of the mean values, and of noise.
    size = pool * gain
    pairs = size[:, None] * queries * size[None, :]
    paired, outer = congruent(nystroem(pairs), weights)
    outer = whole(known) * outer
    far, near = pairs * met_twice, paired * met
    bent = value.T @ (0.5 * (outer @ value) - near.T @ average)
    features = bent + bent.T + average.T @ nystroem(far) @ average
    noisy = jnp.sum(outer * whole(spread_by)) - 2 * jnp.sum(near * reached)
    noisy = noisy + sum_of(far * within)
    if order == 2:  # no more than the values' variance under the weights, in every token at once
        each = pool @ safe_sqrt(left_within(weights @ value**2, average**2))
        features = jnp.clip(features, -each[:, None] * each[None, :], each[:, None] * each[None, :])
        most = pool @ safe_sqrt(left_within(weights @ diagonal_of(noise), diagonal_of(within)))
        noisy = jnp.minimum(noisy, most**2)
    noisy = safe_divide(nonnegative(noisy), jnp.sum(v.by_input * metric))
    features = features + noisy * v.by_input

    mean = average + centre * jnp.sum(weights, axis=1, keepdims=True)
    if order == 2:
        mean = mean + _shared(head, tokens, weights, gain / root)
    return _Output(mean, weights, total, by_scores + within, features)


def _scores(head: _Head, tokens: _Tokens) -> tuple[Tokens, Tokens]:
    """A (T, T) and B (S, S) of Cov[s_ac, s_bf] = A_ab B_cf, without what all keys of a row share.

    Softmax sees differences of keys alone, so B becomes minus half the variance of each difference. Both
    sides are averaged over tokens: A by an average pair of keys, B by an average query.
    """
    q, k, (_, width) = head.query, head.key, head.query.mean.shape
    at, by = tokens.query_weights, tokens.key_weights
    count, counted = jnp.sum(at), jnp.sum(by)
    of_query = at @ diagonal_of(tokens.x)
    of_key = by @ diagonal_of(tokens.source) - safe_divide(by @ tokens.averaged @ by, counted)
    contrasts = k.by_input * of_key + head.contrasts
    by_query = safe_divide(q.by_input * of_query + q.by_kernel + count * q.by_bias, count)
    moment = safe_divide((q.mean.T * at[None, :]) @ q.mean, count) + by_query  # E[q q^T]
    centred = safe_sqrt(by)[:, None] * (k.mean - _average(by, k.mean)[None])
    met_twice = centred.T @ centred
    size = jnp.sum(contrasts * moment) + jnp.sum(met_twice * by_query)
    differences = met_twice + contrasts
    queries = q.under(differences, tokens.x, tokens.query) + jnp.sum(q.by_bias * differences)
    queries = queries + gram(q.mean, contrasts, count_of(queries))
    keys = k.under(moment, tokens.source, tokens.key)
    keys = keys + gram(k.mean, by_query, count_of(keys))
    keys = contrasted(seen_only(keys, tokens.seen), tokens.seen)
    return divided(queries, size * width), seen_only(keys, tokens.seen)


class _Contrasts(NamedTuple):
    """Covariance of each row's contrasts, own_a B: a `ScoreCovariance`."""

    own: Array  # (T, 1)
    spread: Array  # the diagonal of B, or zero
    keys: Any  # B, (S, S), in the form in which it multiplies

    def variance(self) -> Array:
        return self.spread if self.spread.ndim == 0 else self.own * self.spread[None, :]

    def matvec(self, vectors: Array) -> Array:
        return self.own * (vectors @ self.keys)

    def square_matvec(self, vectors: Array, unit: Array) -> Array:
        return (self.own / unit) ** 2 * (vectors @ self.keys**2)


def _expected_weights(
    scores: Array, queries: Tokens, contrasts: Tokens, known: Array | Nystroem, mask: Array | None
) -> Array:
    """E[softmax]; where B is known at landmarks, with two products and none with its squares."""
    own = diagonal_of(queries)[:, None]
    if isinstance(contrasts, TokenGram):
        rows = _Contrasts(own, contrasts.diagonal, known)
        return quick_expected_softmax(scores, rows, mask)
    return expected_softmax(scores, _Contrasts(own, jnp.zeros((), own.dtype), contrasts), mask)


def _shared(head: _Head, tokens: _Tokens, weights: Array, gain: Array) -> Array:
    """sum_c Cov[W_ac, v_cd], (T, K): weights and values share the random input.

    By Stein's lemma Cov[W_ac, v_cd] = sum_f E[dW_ac/dS_af] Cov[S_af, v_cd], with Cov[S_af, v_cd] =
    (P_fc (q_a C_kv)_d + P_ac (k_f C_qv)_d) / sqrt(K); `gain` holds that root.
    """
    q, k = head.query, head.key
    free = spread_within(weights, diagonal_of(tokens.source), tokens.averaged)
    by_key = free * (q.mean @ (k.kernel.T @ head.drawn))
    if tokens.own is None:  # queries do not share x
        return gain[:, None] * by_key
    linked = weights * tokens.own
    total = jnp.sum(linked, axis=1, keepdims=True)
    by_query = (linked @ k.mean - total * (weights @ k.mean)) @ (q.kernel.T @ head.drawn)
    return gain[:, None] * (by_key + by_query)
