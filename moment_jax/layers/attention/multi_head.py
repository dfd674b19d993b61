"""Multi-head attention: projections, the mixing of the tokens, and the output projection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from moment_jax.covariance import (
    Covariance,
    Diagonal,
    Full,
    Separable,
    TokenBlock,
    TokenCorrelated,
)
from moment_jax.layers.attention.diagonal import mix_diagonal
from moment_jax.layers.attention.full import mix_full
from moment_jax.layers.attention.inputs import (
    Inputs,
    KeyInput,
    Mixing,
    Projection,
    SharedInput,
)
from moment_jax.layers.attention.separable import attend_separable
from moment_jax.layers.attention.tangent import AttentionTangent
from moment_jax.layers.attention.token_block import mix_token_block
from moment_jax.layers.attention.token_correlated import mix_token_correlated
from moment_jax.layers.checks import (
    check_heads,
    check_kernel,
    check_mask,
    check_moments,
    check_order,
)
from moment_jax.layers.dense import dense
from moment_jax.layers.params import AttentionParams

Array = jax.Array
S = TypeVar("S", bound=Covariance)
Attend = Callable[[Inputs[Any]], tuple[Array, Any, Mixing]]


def _projected(mix: Callable[[Inputs[Any]], tuple[Array, Any, Mixing]]) -> Attend:
    """The output projection after a mixing of the tokens whose covariance is formed by itself."""

    def attend(inputs: Inputs[Any]) -> tuple[Array, Any, Mixing]:
        mean, cov, mixing = mix(inputs)
        return *dense(mean, cov, inputs.output), mixing

    return attend


ATTENDERS: dict[type[Covariance], Attend] = {
    Diagonal: _projected(mix_diagonal),
    TokenBlock: _projected(mix_token_block),
    TokenCorrelated: _projected(mix_token_correlated),
    Separable: attend_separable,
    Full: _projected(mix_full),
}
"""How each structure mixes tokens and projects the result; a new structure enters here."""


def attention(
    mean: Array,
    cov: S,
    params: AttentionParams,
    *,
    num_heads: int,
    mask: Array | None = None,
    order: int = 2,
) -> tuple[Array, S]:
    """Moments of multi-head self-attention, softmax(q k^T / sqrt(K)) v and the output projection.

    Scores are correlated across queries as well as keys, because weight noise is shared by all tokens;
    that is kept, as far as the structure can. So is what comes from queries, keys and values sharing
    the random input x: in `Full` everywhere; in the others the structure's part of E[scores], in
    `Separable`, `TokenCorrelated` and `Diagonal` of E[weights v] too, and in `Separable` of the
    covariance of weights with values; otherwise their covariances take q, k and v as independent. With
    order 1 the means leave all of it out. Heads' score noise is independent but in `Full`.

    Assumes that x and the four weight matrices are independent of each other.

    Args:
      mean: E[x], (T, D).
      cov: covariance of x, a structure of shape (T, D).
      params: beliefs about the kernels (D, H K) of query, key and value and (H K, D) of the output.
      num_heads: H.
      mask: (T, T) or (H, T, T) boolean, True where a query (row) may look at a key (column). Masked
        keys get a weight of exactly zero; a query with no key left gets a zero output.
      order: 1 (Taylor at the mean, as derived) or 2.

    Returns:
      Mean (T, D) and covariance of the output, in the structure of `cov`.

    Raises:
      ValueError: if shapes do not fit or the heads do not divide the width.

    Source: Transformer derivation, sections 4.2 to 4.4.
    """
    out_mean, out_cov, _ = attention_and_tangent(
        mean, cov, params, num_heads=num_heads, mask=mask, order=order
    )
    return out_mean, out_cov


def attention_and_tangent(
    mean: Array,
    cov: S,
    params: AttentionParams,
    *,
    num_heads: int,
    mask: Array | None,
    order: int,
) -> tuple[Array, S, AttentionTangent]:
    """`attention`, and the linear map by which its covariance carries the covariance of x."""
    check_moments("attention", mean, cov)
    check_order("attention", order)
    for projection in (params.query, params.key, params.value):
        check_kernel("attention", mean.shape[1], projection.kernel)
    widths = [p.kernel.shape[1] for p in (params.query, params.key, params.value)]
    check_heads("attention", num_heads, *widths)
    if len(set(widths)) > 1:
        raise ValueError(
            "`attention` needs query, key and value kernels of one width (D, H K). Got widths "
            f"{widths}."
        )
    t = mean.shape[0]
    check_mask("attention", mask, num_heads, t, t)
    if mask is not None:
        mask = jnp.broadcast_to(mask, (num_heads, t, t))
    kernels = (params.query.kernel.mean, params.key.kernel.mean, params.value.kernel.mean)
    inputs = Inputs(
        Projection(*dense(mean, cov, params.query)),
        Projection(*dense(mean, cov, params.key)),
        Projection(*dense(mean, cov, params.value)),
        KeyInput(mean, cov, params.key.kernel),
        SharedInput(cov, *kernels),
        params.output,
        mask,
        num_heads,
        order,
    )
    out_mean, out_cov, mixing = ATTENDERS[type(cov)](inputs)
    tangent = AttentionTangent(
        inputs.query.mean,
        inputs.key.mean,
        inputs.value.mean,
        mixing,
        *kernels,
        params.output.kernel.mean,
    )
    return out_mean, out_cov, tangent
