"""Layers of `Full`. Attention is exact for jointly Gaussian queries, keys and values (Isserlis).

Its softmax is linearised by its Jacobian. Memory: H^2 T^2 S^2 numbers for the scores.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.covariance import Full
from moment_jax.covariance.base import Cross
from moment_jax.covariance.numerics import nonnegative
from moment_jax.expectations import expected_softmax
from moment_jax.expectations.softmax_mean import Rows
from moment_jax.layers import rules
from moment_jax.layers.dense import dense
from moment_jax.layers.params import AttentionParams
from moment_jax.layers.rules import Attending, Carry
from moment_jax.xla import diagonal_of, materialized


def norm(
    mean: Array, cov: Full, *, epsilon: Array | float, centres: bool
) -> tuple[Array, Full, Carry]:
    """The rule of `layer_norm`: see there."""
    d = mean.shape[1]
    centring = jnp.eye(d, dtype=mean.dtype) - centres / d
    blocks = centring @ cov.token_blocks() @ centring
    spread = nonnegative(jnp.einsum("tdd->t", blocks))[:, None] / d
    normal, inverse = rules.normalized(mean, spread, epsilon, centres)
    pulled = jnp.einsum("tde,te->td", blocks, normal)
    squares = jnp.sum(blocks**2, axis=(1, 2))[:, None]
    along = jnp.sum(normal * pulled, axis=1, keepdims=True) / d
    out = rules.normalized_mean(normal, inverse, pulled, along, squares)
    jacobian = centring[None] - normal[:, :, None] * normal[:, None, :] / d
    jacobian = jacobian * inverse[:, :, None]
    return out, cov.map_each(jacobian), lambda cross: cross.map_each(jacobian)


def attention(
    mean: Array, cov: Full, memory: tuple[Array, Full] | None, params: AttentionParams,
    attending: Attending,
) -> tuple[Array, Full, Carry]:  # fmt: skip
    """The rule of `attention` and `cross_attention`: see there.

    In letters, of all heads at once: queries, keys and values q, k, v and their covariances QQ, QK, ...;
    scores S with the covariance R; weights W = E[softmax], whose Jacobian is J; X = J Cov[S, v]. The
    averages a = W v have, for jointly Gaussian W and v and with sums over keys c and f,

        Cov[a_ad, a_be] = (J R J)_acbf E[v_cd v_fe] + W_ac W_bf VV_cdfe
                          + X_acfe X_bfcd + v_cd W_bf X_acfe + W_ac v_fe X_bfcd.
    """
    h, mask, turns = attending[:3]
    own = memory is None
    source = (mean, cov) if memory is None else memory
    of_query, of_key, of_value = params.query, params.key, params.value
    sides = (mean, cov, of_query, turns[0]), (*source, of_key, turns[1]), (*source, of_value, None)
    q, k, v = (rules.split_heads(p.mean_output(x), h, turn) for x, _, p, turn in sides)

    def joint(i: int, j: int) -> Array:
        """Covariance of two of q, k and v, by the random input that they share."""
        (x, x_cov, left, turn), (_, _, right, other) = sides[i], sides[j]
        if i == j:
            return _split_both(dense(x, x_cov, left)[1].cov, h, turn, turn)
        cross = jnp.einsum("ip,tisj,jq->tpsq", left.kernel.mean, x_cov.cov, right.kernel.mean)
        return _split_both(cross, h, turn, other)

    VV, KV = joint(2, 2), joint(1, 2)
    QK, QV = (joint(0, 1), joint(0, 2)) if own else (None, None)
    S, R, slope = _scores(q, k, _score_cov(q, k, joint(0, 0), joint(1, 1), QK), QK, attending)
    rows = jnp.einsum("hachaf->hacf", R)
    half = 0.5 * diagonal_of(rows)  # softmax sees contrasts alone
    W = expected_softmax(S, Rows(rows - half[..., :, None] - half[..., None, :]), mask)
    W = materialized(W)
    a = W @ v

    X = jnp.einsum("had,hcdgfe->hacgfe", q, KV)
    if QV is not None:
        X = X + jnp.einsum("hcd,hadgfe->hacgfe", k, QV)
    X = _through_softmax(W, _rows_times(slope, X))
    JRJ = _transpose(_through_softmax(W, _transpose(_through_softmax(W, R))))
    vv = VV + jnp.einsum("hcd,gfe->hcdgfe", v, v)
    by_scores = jnp.einsum("hacgbf,hcdgfe->hadgbe", JRJ, vv)
    by_values = jnp.einsum("hac,gbf,hcdgfe->hadgbe", W, W, VV)
    # The law of total variance: the softmax keeps a part of its Jacobian.
    whole = jnp.einsum("hac,hcdhcd->ha", W, vv)
    averaged = jnp.einsum("hadhad->ha", by_values) + jnp.sum(a**2, axis=2)
    gain, _ = rules.kept_jacobian(jnp.einsum("hadhad->ha", by_scores), whole, averaged)
    gain = gain[:, :, None]
    by_scores, X, slope = _both_times(gain, by_scores), _rows_times(gain, X), gain * slope
    a = a + jnp.einsum("hachcd->had", X)
    half = jnp.einsum("hcd,gbf,hacgfe->hadgbe", v, W, X)
    C = by_scores + by_values + jnp.einsum("hacgfe,gbfhcd->hadgbe", X, X) + half + _transpose(half)
    size = len(mean), of_value.kernel.shape[1]
    C = C.transpose(1, 0, 2, 4, 3, 5).reshape(2 * size)
    out, out_cov = dense(rules.merge_heads(a), Full.unchecked(C), params.output)

    def linearised(by_query: Array | None, by_source: Array | None) -> Array:
        """The change (T, D) of the output for changes of the input (T, D), and of the memory (S, D)."""
        scores, values = jnp.zeros_like(S), jnp.zeros_like(q)
        if by_query is not None:
            changed = rules.split_heads(by_query @ of_query.kernel.mean, h, turns[0])
            scores = scores + jnp.einsum("had,hcd->hac", changed, k)
        if by_source is not None:
            changed = rules.split_heads(by_source @ of_key.kernel.mean, h, turns[1])
            scores = scores + jnp.einsum("had,hcd->hac", q, changed)
            values = W @ rules.split_heads(by_source @ of_value.kernel.mean, h)
        scores = slope * scores
        scores = W * (scores - jnp.sum(W * scores, axis=2, keepdims=True))
        return rules.merge_heads(values + scores @ v) @ params.output.kernel.mean

    def carry(cross: Cross | None, with_memory: Cross | None = None) -> Cross:
        changes = cross, cross if own else with_memory
        given = [None if x is None else x.cov for x in changes]
        return Cross(jax.vmap(jax.vmap(linearised))(*given))

    return out, out_cov, carry


def _score_cov(q: Array, k: Array, QQ: Array, KK: Array, QK: Array | None) -> Array:
    """Cov[q_ha . k_hc, q_gb . k_gf], exact for jointly Gaussian q and k."""
    moment = QQ + jnp.einsum("had,gbe->hadgbe", q, q)
    result = jnp.einsum("hadgbe,hcdgfe->hacgbf", moment, KK)
    result = result + jnp.einsum("hadgbe,hcd,gfe->hacgbf", QQ, k, k)
    if QK is not None:
        # Cov[q_had, k_gfe] with Cov[k_hcd, q_gbe], and each with the means of the other two.
        result = result + jnp.einsum("hadgfe,gbehcd->hacgbf", QK, QK)
        half = jnp.einsum("had,gfe,gbehcd->hacgbf", q, k, QK)
        result = result + half + _transpose(half)
    return result


def _scores(
    q: Array, k: Array, R: Array, QK: Array | None, attending: Attending
) -> tuple[Array, Array, Array]:
    """Mean and covariance of the scores, and their slope by q k^T, whose covariance is R."""
    root = jnp.full((1, 1, 1), q.shape[2] ** -0.5, q.dtype)
    S = jnp.einsum("had,hcd->hac", q, k)
    if QK is not None:
        S = S + jnp.einsum("hadhcd->hac", QK)
    S, slope = rules.shaped(
        materialized(root * S), lambda: root**2 * nonnegative(jnp.einsum("hachac->hac", R)),
        attending.scale, attending.bias, attending.cap,
    )  # fmt: skip
    slope = root if slope is None else slope * root
    R = _both_times(slope, R)
    for each in attending.noise:
        same = each.places[..., None, None, None] == each.places[None, None, None]
        shared = jnp.where(same, each.variance[each.places][..., None, None, None], 0)
        R = R + _both_times(jnp.broadcast_to(each.factor, S.shape), shared)
    return S, R, slope


def _split_both(cov: Array, num_heads: int, turn: Array | None, other: Array | None) -> Array:
    """(T, H K, S, H K) -> (H, T, K, H, S, K), with each token multiplied by its matrix."""
    t, width, s, _ = cov.shape
    k = width // num_heads
    cov = cov.reshape(t, num_heads, k, s, num_heads, k).transpose(1, 0, 2, 4, 3, 5)
    cov = cov if turn is None else jnp.einsum("htjgse,tjk->htkgse", cov, turn)
    return cov if other is None else jnp.einsum("htkgsj,sje->htkgse", cov, other)


def _transpose(cov: Array) -> Array:
    """Transpose a cross-covariance: exchange its first three axes with its last three."""
    return jnp.transpose(cov, (3, 4, 5, 0, 1, 2))


def _rows_times(factor: Array, cov: Array) -> Array:
    """The first three axes times a factor, (H, T, S) or with ones."""
    return factor[..., None, None, None] * cov


def _both_times(factor: Array, cov: Array) -> Array:
    return _rows_times(factor, cov) * factor[None, None, None]


def _through_softmax(weights: Array, cov: Array) -> Array:
    """Apply the softmax's Jacobian W_hac (1[c=f] - W_haf) to the first three axes."""
    weights = weights[..., None, None, None]
    centred = cov - jnp.sum(weights * cov, axis=2, keepdims=True)
    result: Any = weights * centred
    return result
