"""Attention in `Separable`, from the projections to the projected output.

Read every input as Cov[x_ti, x_sj] = P_ts C_ij with its token pattern P. Scores have ONE Kronecker
product as covariance, Cov[s_ac, s_bf] = A_ab B_cf; queries, keys and values are independent in it, and
share x in the means alone. Queries and keys see the diagonal of C. Kernels' noise has one token
pattern for all heads and projections of a sequence. Per head, with W = E[softmax], values v, averages
a = W v, and V = E[v v^T] over tokens under the metric M of the output, the head adds

    G  += A * (W (B * V) W^T - X - X^T + E[a a^T] * (W B W^T)) + W N W^T,   X = ((W V) * (W B)) W^T
    C  += v^T ((W^T Q W) * B) v - Y - Y^T + a^T (Q * (W B W^T)) a,          Y = a^T ((Q W) * (W B)) v

where N is the noise of the values in V = v M v^T + N, Q = p p^T * A the pairs of queries in the pooled
sum, * the product of entries, and E[a a^T] = a M a^T + W N W^T. Softmax keeps a part of its Jacobian: A
is scaled by that, g_a g_b, and by the slopes z_a z_b of scale and cap, of an average key by its weight.

Entry n of a random bias, of variance u_n, moves averages by U_an = sqrt(u_n) sum_c W_ac f_ac (v_c - a_a)
over the keys c whose scores have it, and adds sum_n U_an M U_bn^T to G and (p^T U_n)^T (p^T U_n) to C.
"""

import contextlib
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from moment_jax.covariance import numerics
from moment_jax.covariance import token_gram as tg
from moment_jax.covariance.numerics import nonnegative, safe_divide, safe_sqrt, weighted_sum
from moment_jax.covariance.separable import Separable, SeparableCross, agreeing
from moment_jax.expectations import expected_softmax, masked_softmax
from moment_jax.expectations.activations import Formula
from moment_jax.expectations.softmax_mean import quick_expected_softmax
from moment_jax.layers import rules
from moment_jax.layers.params import AttentionParams, DenseParams, bias_cov, with_bias
from moment_jax.layers.rules import Attending, Carry, ScoreNoise
from moment_jax.xla import diagonal_matrix, diagonal_of, materialized


class Projection(NamedTuple):
    """Queries, keys or values y = x @ kernel + bias of all heads (leading axis H), or of one."""

    mean: Array  # (T, K)
    kernel: Array  # mean, (D, K)
    by_input: Array  # (K, K): noise of x, through the kernel's mean and its noise
    by_kernel: Array  # (K, K): noise of the kernel alone, in the tokens' weighted sum of squares
    by_bias: Array  # (K, K)

    def gram(self, metric: Array, pattern: tg.Tokens, noise: tg.Tokens) -> tg.Tokens:
        """sum_ij metric_ij Cov[y_ti, y_sj], (T, T), without the bias, from both patterns."""
        return jnp.sum(self.by_input * metric) * pattern + jnp.sum(self.by_kernel * metric) * noise

    def average(self, pattern: tg.Tokens, weights: Array) -> Array:
        """The covariance of an average token by weight, (K, K)."""
        total = self.by_input * (weights @ tg.diagonal_of(pattern)) + self.by_kernel
        return safe_divide(total, jnp.sum(weights)) + self.by_bias


class _Sequence(NamedTuple):
    """What all heads share: token patterns and weights."""

    x: tg.Tokens  # pattern of the queries' input, (T, T)
    source: tg.Tokens  # pattern of the keys' and values' input, (S, S)
    of_query: tg.Tokens  # patterns of the kernels' noise
    of_key: tg.Tokens
    of_value: tg.Tokens
    factored: Array | tg.Factored  # `source`, to be multiplied
    own: Array | None  # `source` in full, (T, T), if that is x
    seen: Array  # keys that some query may look at, (S,)
    pool: Array  # weights p of the sum over queries, (T,)
    query_weights: Array  # weights of averages over queries and keys, for the scores
    key_weights: Array


class _Head(NamedTuple):
    query: Projection
    key: Projection
    value: Projection
    differences: Array  # by_kernel of the keys minus their average, (K, K)
    metric: Array  # M, second moment of the output kernel, (K, K)
    drawn: Array  # C kernel of the values, (D, K)
    linked: Array  # sum_k Cov[q_ak, k_ck] of a unit of x's token pattern, ()
    mask: Array | None
    scale: Array | None  # of the scores, (T, S); each axis may be 1
    bias: Array | None
    random: tuple[ScoreNoise, ...]  # parts of the bias


class _Output(NamedTuple):
    mean: Array  # a, (T, K)
    weights: Array  # W, (T, S)
    total: Array  # p^T W, (S,)
    tokens: tg.Tokens  # what the head alone adds to G, (T, T)
    by_scores: Array  # and to C before the output kernel, through the scores, (K, K)


def attention(
    mean: Array, cov: Separable, memory: tuple[Array, Separable] | None, params: AttentionParams,
    attending: Attending,
) -> tuple[Array, Separable, Carry]:  # fmt: skip
    """The rule of `attention` and `cross_attention`: see there."""
    h, pool = attending.num_heads, cov.pool
    value, output = params.value.kernel.mean, params.output.kernel.mean
    source, source_cov = (mean, cov) if memory is None else memory
    drawn = source_cov.features @ value
    common = value.T @ drawn  # noise of x in the values of all heads, (H K, H K)
    sequence = _sequence(mean, cov, memory, params, attending.mask)
    head = _heads(mean, cov, memory, params, attending, sequence, drawn, common)
    # At landmarks what cancels is approximated, and bfloat16 would not cancel.
    exact = any(isinstance(c.tokens, tg.TokenGram) for c in (cov, source_cov))
    with jax.default_matmul_precision("highest") if exact else contextlib.nullcontext():
        one_head = partial(_one_head, sequence=sequence, cap=attending.cap)
        out = rules.each_head(one_head, head, h * len(mean) * len(source))

    # G: each head's own, the output kernel's noise, and what pairs of heads share. All heads average the
    # same noise of x in the values; pairs of heads do with their mean weights.
    count, mixed = tg.count_of(cov.tokens), rules.merge_heads(out.mean)
    common = common.reshape(*(h, len(common) // h) * 2)
    between = jnp.sum(common * numerics.gram(output).reshape(common.shape), axis=(1, 3))
    shared = jnp.sum(between) - jnp.sum(diagonal_of(between))  # by pairs of different heads
    tokens = jax.tree.map(lambda each: jnp.sum(each, axis=0), out.tokens)
    tokens = tokens + tg.gram(mixed, params.output.kernel.input_metric(), count)
    tokens = tokens + shared * tg.gram(jnp.mean(out.weights, axis=0), sequence.factored, count)

    # C, of the sum over queries: averages of values' noise, and every head's own.
    total = out.total
    overlap = (total @ sequence.factored) @ total.T
    of_kernel = partial(numerics.kernel_noise, params.value.kernel, None)
    by_kernel = jax.vmap(lambda mean: _blocks(of_kernel(mean[None]), h))(total @ source)
    own = diagonal_of(overlap)[:, None, None] * head.value.by_input
    own = own + jnp.einsum("hhkl->hkl", by_kernel) + out.by_scores
    own = own + (jnp.sum(total, axis=1) ** 2)[:, None, None] * head.value.by_bias
    same = jnp.eye(h, dtype=bool)[:, None, :, None]
    averages = jnp.where(same, own[:, :, None], common * overlap[:, None, :, None])
    averages, at_mean = averages.reshape(len(output), -1), weighted_sum(pool, mixed)[None]
    by_noise = numerics.kernel_noise(params.output.kernel, averages, at_mean)
    features = numerics.summed_covs(numerics.gram(output.T, averages), by_noise)
    variances = numerics.outer_by_share(tg.diagonal_of(tokens), diagonal_of(features))
    out_cov = Separable.unchecked(variances, tokens, agreeing(features, tokens, pool), pool)

    def carry(cross: Any, with_memory: Any = None) -> Any:
        """Through the values alone, so from a memory and not from what looks at it."""
        given = cross if memory is None else with_memory
        if given is None:
            return None
        paths = head.value.kernel @ output.reshape(h, -1, output.shape[1])
        return _through_values(given, paths, out.weights, total, pool)

    return params.output.mean_output(mixed), with_bias(out_cov, params.output.bias), carry


def _sequence(
    mean: Array, cov: Separable, memory: Any, params: AttentionParams, mask: Array | None
) -> _Sequence:
    """Token patterns of x, of the source, and of the noise of the three kernels."""
    source, source_cov = (mean, cov) if memory is None else memory
    at, by, count = cov.pool, source_cov.pool, tg.count_of(source_cov.tokens)
    metrics = [p.kernel.input_metric() for p in (params.query, params.key, params.value)]

    def pattern(noise: tg.Tokens, weights: Array) -> tg.Tokens:
        """Kernels' noise in units of its weighted trace."""
        return tg.divide(noise, weights @ tg.diagonal_of(noise))

    seen = jnp.ones(len(source), bool) if mask is None else jnp.any(mask, axis=(0, 1))
    x = known = tg.seen_only(source_cov.pattern(), seen)
    whole = None
    if memory is None:
        whole, at = tg.whole(known), tg.pool_scores(by, mask)
        noise = tg.gram(source, numerics.summed_covs(*metrics), count)
        by_query = by_key = pattern(noise, at)
    else:
        x = cov.pattern()
        noise = tg.gram(source, numerics.summed_covs(*metrics[1:]), count)
        by_query = pattern(tg.gram(mean, metrics[0], tg.count_of(cov.tokens)), at)
        by_key = pattern(noise, by)
    patterns = x, known, by_query, by_key, pattern(noise, by)
    weights = cov.pool, at, at if memory is None else by
    return _Sequence(*patterns, tg.factored(known), whole, seen, *weights)


def _heads(
    mean: Array, cov: Separable, memory: Any, params: AttentionParams, attending: Attending,
    sequence: _Sequence, drawn: Array, common: Array,
) -> _Head:  # fmt: skip
    """The projections of all heads, and the matrices in which they meet."""
    h, mask, turns, scale, bias, noise, _ = attending
    source, source_cov = (mean, cov) if memory is None else memory
    C, output = source_cov.features, params.output.kernel
    keys = diagonal_of(C)
    queries = keys if memory is None else diagonal_of(cov.features)
    at, by = sequence.query_weights, sequence.key_weights
    query = _projection(mean, queries, None, params.query, at, turns[0], h)
    key = _projection(source, keys, None, params.key, by, turns[1], h)
    common = _blocks(common, h)
    value = _projection(source, C, common, params.value, source_cov.pool, None, h)
    centred = safe_sqrt(by)[:, None] * (source - _average(by, source)[None])
    differences = _blocks(numerics.kernel_noise(params.key.kernel, None, centred), h)
    kernels = output.mean.reshape(h, -1, output.shape[1])
    metric = kernels @ jnp.swapaxes(kernels, 1, 2) + _blocks(output.input_metric(), h)
    linked = queries @ jnp.sum(query.kernel * key.kernel, axis=2).T
    drawn = rules.split_heads(drawn, h)
    random = tuple(map(_by_head, noise))
    return _Head(query, key, value, differences, metric, drawn, linked, mask, scale, bias, random)


def _by_head(noise: ScoreNoise) -> ScoreNoise:
    """With variances (H, N), and places in each head's own: entries that heads share are independent."""
    own = [np.unique(places, return_inverse=True) for places in np.asarray(noise.places)]
    count = max(len(entries) for entries, _ in own)
    entries = [np.pad(each, (0, count - len(each)), mode="edge") for each, _ in own]
    places = np.stack([place for _, place in own]).reshape(noise.places.shape)
    return ScoreNoise(noise.variance[np.stack(entries)], jnp.asarray(places), noise.factor)


def _projection(
    mean: Array, features: Array, by_mean: Array | None, layer: DenseParams, weights: Array,
    turn: Array | None, h: int,
) -> Projection:  # fmt: skip
    """All heads' projections by a layer, of C or its diagonal as `features`.

    `by_mean` (H, K, K) is what the kernel's mean makes of it; `weights` (T,) are of the sum of squares.
    """
    kernels = rules.split_heads(layer.kernel.mean, h)
    if by_mean is None:
        by_mean = jax.vmap(lambda each: numerics.gram(each.T, features))(kernels)
    by_input = numerics.kernel_noise(layer.kernel, features, jnp.zeros_like(mean[:1]))
    return Projection(
        rules.split_heads(layer.mean_output(mean), h, turn),
        kernels,
        by_mean + _blocks(by_input, h),
        _blocks(numerics.kernel_noise(layer.kernel, None, safe_sqrt(weights)[:, None] * mean), h),
        _blocks(bias_cov(layer.bias, layer.kernel.shape[1], mean.dtype), h),
    )


def _blocks(cov: Array, num_heads: int) -> Array:
    """Each head's block (H, K, K) of a covariance (H K, H K), or of a diagonal (H K,)."""
    if cov.ndim == 1:
        return diagonal_matrix(cov.reshape(num_heads, -1))
    k = len(cov) // num_heads
    return jnp.einsum("hkhl->hkl", cov.reshape(num_heads, k, num_heads, k))


def _average(weights: Array, rows: Array) -> Array:
    return safe_divide(weights @ rows, jnp.sum(weights))


def _through_values(
    cross: SeparableCross, paths: Array, weights: Array, total: Array, pool: Array
) -> SeparableCross:
    """Cov[u, attention] of Cov[u, x] by each head's product of kernels, `paths` (H, D, E).

    That of the pooled sums is exact; the pattern averages heads by what each of them carries.
    """
    carried = safe_sqrt(jnp.sum(paths**2, axis=(1, 2)))
    carried = safe_divide(carried, jnp.sum(carried))
    reached = total @ tg.vecmat(cross.pools[0], cross.tokens)  # (H,)
    paths = jnp.tensordot(safe_divide(reached, jnp.sum(reached * carried)), paths, 1)
    tokens = tg.right_multiply(cross.tokens, jnp.tensordot(carried, weights, 1).T)
    return SeparableCross(tokens, cross.features @ paths, (cross.pools[0], pool))


# -- one head, in the letters of the formulas above ------------------------------------------------


def _one_head(head: _Head, sequence: _Sequence, cap: Formula | None) -> _Output:
    """One head: its averages of the values, and what its noise adds to G and to C."""
    q, k, value, M = head.query, head.key, head.value, head.metric
    p, root = sequence.pool, q.mean.shape[1] ** 0.5
    S = q.mean @ k.mean.T
    if sequence.own is not None:
        S = S + sequence.own * head.linked
    variance = partial(_score_variance, head, sequence)
    S, z = rules.shaped(materialized(S / root), variance, head.scale, head.bias, cap)
    A, keys = _scores(head, sequence)
    if z is not None:
        z = z if z.shape[1] == 1 else jnp.sum(masked_softmax(S, head.mask) * z, 1, keepdims=True)
        A = z * A * z.T
    B, count = tg.factored(keys), tg.count_of(A)
    own, mask = tg.diagonal_of(A)[:, None], head.mask
    alone: Any = [sum(each.score_variance() for each in head.random)] if head.random else []
    if isinstance(keys, tg.TokenGram):  # two products, none with squares
        rows = _Rows(own, own * tg.diagonal_of(keys)[None, :], B, alone)
        W = quick_expected_softmax(S, rows, mask)
    else:
        W = expected_softmax(S, _Rows(own, jnp.zeros((), p.dtype), keys, alone), mask)
    W = materialized(W)
    w = weighted_sum(p, W)
    centre = _average(w, value.mean)[None]  # nothing large cancels below
    v = value.mean - centre
    a = W @ v

    noise = value.gram(M, sequence.source, sequence.of_value) + jnp.sum(value.by_bias * M)
    noise = tg.seen_only(noise, sequence.seen)
    N, vM = tg.factored(noise), v @ M
    N_, B_ = tg.whole(N), tg.whole(B)  # in full, for products entry by entry
    V = vM @ v.T + N_
    WN, WB = W @ N, W @ B
    WNW, WBW = tg.product(WN, W, count), tg.product(WB, W, count)
    aa = tg.gram(a, M, count) + WNW
    X = (a @ vM.T + WN) * WB
    G = A * tg.contract(W, B_ * V, 2 * X, aa * WBW, p > 0)
    by_bias = []
    for each in head.random:
        moved = (W * each.factor)[:, :, None] * (v[None] - a[:, None])
        at = partial(jax.ops.segment_sum, num_segments=len(each.variance))
        U = safe_sqrt(each.variance)[None, :, None] * jax.vmap(at)(moved, each.places)
        by_bias.append(U)
        G = G + tg.product((U @ M).reshape(len(a), -1), U.reshape(len(a), -1), count)
    found = nonnegative(tg.diagonal_of(G))  # the law of total variance
    g, _ = rules.kept_jacobian(found, W @ tg.diagonal_of(V), tg.diagonal_of(aa))
    G = tg.bound(g[:, None] * G * g[None, :], g * safe_sqrt(found))

    Q = (p * g)[:, None] * A * (p * g)[None, :]
    QW, WQW = tg.congruence(tg.factored(Q), W)
    BQ, QB, QWB = B_ * WQW, QW * WB, Q * WBW
    half = v.T @ (0.5 * (BQ @ v) - QB.T @ a)  # Y = a^T QB v
    C = half + half.T + a.T @ tg.factored(QWB) @ a
    for U in by_bias:
        C = C + numerics.gram(jnp.tensordot(p * g, U, 1).T)
    # The same of the noise, tr M C.
    n = jnp.sum(BQ * N_) - 2 * jnp.sum(QB * WN) + tg.total(QWB * WNW)
    # No more than the values' variance under the weights, in every token at once.
    most = p @ safe_sqrt(rules.left_within(W @ v**2, a**2))
    C = jnp.clip(C, -most[:, None] * most[None, :], most[:, None] * most[None, :])
    most = p @ safe_sqrt(rules.left_within(W @ tg.diagonal_of(noise), tg.diagonal_of(WNW)))
    n = jnp.minimum(n, most**2)
    C = C + safe_divide(nonnegative(n), jnp.sum(value.by_input * M)) * value.by_input

    mean = a + centre * jnp.sum(W, axis=1, keepdims=True)
    mean = mean + _shared(head, sequence, W, (g if z is None else g * z[:, 0]) / root)
    return _Output(mean, W, w, G + WNW, C)


def _score_variance(head: _Head, sequence: _Sequence) -> Array:
    """Variance of each score q k^T / sqrt(K), as of average queries and keys, (T, S)."""
    q, k = head.query, head.key
    Q = q.average(sequence.x, sequence.query_weights)
    K = k.average(sequence.source, sequence.key_weights)
    by_key = jnp.sum((q.mean @ K) * q.mean, axis=1)
    by_query = jnp.sum((k.mean @ Q) * k.mean, axis=1)
    return (by_key[:, None] + by_query[None, :] + jnp.sum(Q * K)) / q.mean.shape[1]


def _scores(head: _Head, sequence: _Sequence) -> tuple[tg.Tokens, tg.Tokens]:
    """A (T, T) and B (S, S) of Cov[s_ac, s_bf] = A_ab B_cf, without what all keys of a row share.

    Softmax sees differences of keys alone, so B becomes minus half the variance of each difference. Both
    sides are averaged over tokens: A by an average pair of keys, B by an average query.
    """
    q, k, width = head.query, head.key, head.query.mean.shape[1]
    at, by = sequence.query_weights, sequence.key_weights
    count, counted = jnp.sum(at), jnp.sum(by)
    of_key = by @ tg.diagonal_of(sequence.source)
    of_key = of_key - safe_divide(by @ sequence.factored @ by, counted)
    noise = k.by_input * of_key + head.differences
    by_query = q.average(sequence.x, at)
    qq = safe_divide((q.mean.T * at[None, :]) @ q.mean, count) + by_query  # E[q q^T]
    centred = safe_sqrt(by)[:, None] * (k.mean - _average(by, k.mean)[None])
    kk = centred.T @ centred
    size = jnp.sum(noise * qq) + jnp.sum(kk * by_query)
    differences = kk + noise
    A = q.gram(differences, sequence.x, sequence.of_query) + jnp.sum(q.by_bias * differences)
    A = A + tg.gram(q.mean, noise, tg.count_of(A))
    B = k.gram(qq, sequence.source, sequence.of_key)  # all keys share the bias
    B = B + tg.gram(k.mean, by_query, tg.count_of(B))
    B = tg.contrasts(tg.seen_only(B, sequence.seen), sequence.seen)
    return tg.divide(A, size * width), tg.seen_only(B, sequence.seen)


class _Rows(NamedTuple):
    """Covariance of each query's scores, A_aa B and that of random biases: a `ScoreCovariance`."""

    own: Array  # diag(A), (T, 1)
    spread: Array  # A_aa diag(B), (T, S), or zero
    keys: Any  # B, (S, S), in the form in which it multiplies
    alone: list[Array]  # variance by random biases, (T, S), read as independent; or nothing

    def variance(self) -> Array:
        return sum(self.alone, start=self.spread)

    def matvec(self, vectors: Array) -> Array:
        return sum((x * vectors for x in self.alone), start=self.own * (vectors @ self.keys))

    def square_matvec(self, vectors: Array, unit: Array) -> Array:
        by_keys = (self.own / unit) ** 2 * (vectors @ self.keys**2)
        return sum(((x / unit) ** 2 * vectors for x in self.alone), start=by_keys)


def _shared(head: _Head, sequence: _Sequence, W: Array, gain: Array) -> Array:
    """sum_c Cov[W_ac, v_cd], (T, K): weights and values share the random input.

    By Stein's lemma Cov[W_ac, v_cd] = sum_f E[dW_ac/dS_af] Cov[S_af, v_cd], with Cov[S_af, v_cd] =
    (P_fc (q_a C_kv)_d + P_ac (k_f C_qv)_d) / sqrt(K); `gain` holds that root.
    """
    q, k, P = head.query, head.key, sequence.own
    free = tg.variance_within(W, tg.diagonal_of(sequence.source), sequence.factored)
    by_key = free * (q.mean @ (k.kernel.T @ head.drawn))
    if P is None:  # queries do not share x
        return gain[:, None] * by_key
    WP = W * P
    total = jnp.sum(WP, axis=1, keepdims=True)
    by_query = (WP @ k.mean - total * (W @ k.mean)) @ (q.kernel.T @ head.drawn)
    return gain[:, None] * (by_key + by_query)
