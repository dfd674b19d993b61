"""Multi-head attention: the public functions, their checks, and the rule of each structure."""

from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.covariance import Covariance, Diagonal, Separable
from moment_jax.layers.attention.diagonal import mix_diagonal
from moment_jax.layers.attention.full import mix_full
from moment_jax.layers.attention.inputs import (
    DenseInput,
    Inputs,
    Mixing,
    Projection,
    SharedInput,
    Turns,
    turned_projection,
)
from moment_jax.layers.attention.separable import attend_separable
from moment_jax.layers.attention.tangent import AttentionTangent
from moment_jax.layers.checks import (
    check_heads,
    check_kernel,
    check_mask,
    check_moments,
    check_order,
)
from moment_jax.layers.dense import dense
from moment_jax.layers.params import AttentionParams
from moment_jax.layers.seen import pool_as, pool_seen
from moment_jax.xla import materialized_inputs

S = TypeVar("S", bound=Covariance)


@materialized_inputs
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

    Scores are correlated across queries as well as keys, because all tokens share the weight noise. Each
    structure keeps what it can of that, and of the input x that queries, keys and values share: `Full`
    keeps it everywhere; `Separable` and `Diagonal` keep their part of E[scores] and of E[weights v], but
    take q, k and v as independent in covariances. Order 1 leaves it out of the means. The score noise of
    different heads is independent, except in `Full`.

    Assumes that x and the four weight matrices are independent of each other.

    Args:
      mean: E[x], (T, D).
      cov: covariance of x, a structure of shape (T, D).
      params: beliefs about the kernels (D, H K) of query, key and value and (H K, D) of the output.
      num_heads: H.
      mask: (T, T), (1, T) for all queries, or (H, T, T) boolean, True where a query (row) may look at a
        key (column). Masked keys get a weight of exactly zero, a query with no key left a zero output.
      order: 1 (Taylor at the mean, as derived) or 2.

    Returns:
      Mean (T, D) and covariance of the output, in the structure of `cov`.

    Raises:
      ValueError: if shapes do not fit or the heads do not divide the width.

    Source: Transformer derivation, sections 4.2 to 4.4.
    """
    out_mean, out_cov, _ = attention_and_tangent(
        mean, pool_seen(cov, mask), params, num_heads=num_heads, mask=mask, order=order
    )
    return out_mean, out_cov if mask is None else pool_as(out_cov, cov)


@materialized_inputs
def cross_attention(
    mean: Array,
    cov: S,
    memory_mean: Array,
    memory_cov: S,
    params: AttentionParams,
    *,
    num_heads: int,
    mask: Array | None = None,
    order: int = 2,
) -> tuple[Array, S]:
    """Moments of multi-head attention of a random sequence x to a random memory.

    Queries come from x, keys and values from the memory. What keys and values share through the memory
    is kept as in `attention`.

    Assumes that x, the memory and the four weight matrices are mutually independent. In a decoder this
    holds for the first block only; in later ones x depends on the memory.

    Args:
      mean: E[x], (T, D).
      cov: covariance of x, a structure of shape (T, D).
      memory_mean: mean of the memory, (S, E).
      memory_cov: its covariance, of shape (S, E), in the structure of `cov`.
      params: beliefs about the kernels (D, H K) of query, (E, H K) of key and value, (H K, D) of the
        output.
      num_heads: H.
      mask: (T, S), (1, S) or (H, T, S) boolean, True where a query may look, as for `attention`.
      order: 1 or 2, as for `attention`.

    Returns:
      Mean (T, D) and covariance of the output, in the structure of `cov`.

    Raises:
      ValueError: if shapes do not fit or the heads do not divide the width.
      TypeError: if the two covariances have different structures.

    Source: Transformer derivation, sections 1.1 and 4.2 to 4.4.
    """
    memory = Memory(memory_mean, pool_seen(memory_cov, mask, memory=True))
    out_mean, out_cov, _ = attention_and_tangent(
        mean, cov, params, num_heads=num_heads, mask=mask, order=order, memory=memory
    )
    return out_mean, out_cov


class Memory(NamedTuple):
    """The random sequence that a decoder attends to."""

    mean: Array  # (S, E)
    cov: Covariance


def attention_and_tangent(
    mean: Array,
    cov: S,
    params: AttentionParams,
    *,
    num_heads: int,
    mask: Array | None,
    order: int,
    memory: Memory | None = None,
    turns: Turns = (None, None),
) -> tuple[Array, S, AttentionTangent]:
    """`attention`, or `cross_attention` with a memory, and its linearisation.

    `turns` multiplies each token's queries and keys by a matrix (T, K, K): rotary positions.
    """
    name = "attention" if memory is None else "cross_attention"
    check_moments(name, mean, cov)
    looked_at = Memory(mean, cov) if memory is None else memory
    _check(name, mean, cov, looked_at, params, num_heads, mask)
    check_order(name, order)
    if mask is not None:
        mask = jnp.broadcast_to(mask, (num_heads, mean.shape[0], looked_at.mean.shape[0]))
    by_query, by_key, by_value = (p.kernel.mean for p in (params.query, params.key, params.value))
    query = Projection(*dense(mean, cov, params.query))
    key = Projection(*dense(*looked_at, params.key))
    value = Projection(*dense(*looked_at, params.value))
    inputs: Inputs[Any] = Inputs(
        turned_projection(query, turns[0], num_heads),
        turned_projection(key, turns[1], num_heads),
        value,
        DenseInput(mean, cov, params.query),
        DenseInput(*looked_at, params.key),
        DenseInput(*looked_at, params.value),
        SharedInput(looked_at.cov, by_query if memory is None else None, by_key, by_value, turns),
        params.output,
        mask,
        num_heads,
        order,
    )
    out_mean, out_cov, mixing = _attended(cov, inputs)
    tangent = AttentionTangent(
        inputs.query.mean,
        inputs.key.mean,
        inputs.value.mean,
        mixing,
        by_query,
        (by_key, by_value) if memory is None else None,
        params.output.kernel.mean,
        turns,
    )
    return out_mean, out_cov, tangent


def _attended(cov: Covariance, inputs: Inputs[Any]) -> tuple[Array, Any, Mixing]:
    """Mean (T, D) and covariance after the output projection, and the mixing of the tokens.

    By default through dense covariances.
    """
    if isinstance(cov, Separable):
        return attend_separable(inputs)
    mixed: Covariance
    if isinstance(cov, Diagonal):
        mean, mixed, mixing = mix_diagonal(inputs)
    else:

        def full(node: Any) -> Any:
            return node.full() if isinstance(node, Covariance) else node

        of_full = jax.tree.map(full, inputs, is_leaf=lambda node: isinstance(node, Covariance))
        mean, joint, mixing = mix_full(of_full)
        mixed = type(cov).project(joint.cov)
    return *dense(mean, mixed, inputs.output), mixing


def _check(
    name: str,
    mean: Array,
    cov: Covariance,
    source: Memory,
    params: AttentionParams,
    num_heads: int,
    mask: Array | None,
) -> None:
    """Raise unless sequences, kernels, heads and mask fit together."""
    if name == "cross_attention":
        check_moments("cross_attention's memory", source.mean, source.cov)
        if type(source.cov) is not type(cov):
            raise TypeError(
                f"`{name}` needs x and the memory in one structure. Got {type(cov).__name__} and "
                f"{type(source.cov).__name__}. Use {type(cov).__name__}.project(cov.to_dense()), or "
                "one structure for encoder and decoder."
            )
    check_kernel(name, mean.shape[1], params.query.kernel)
    for projection in (params.key, params.value):
        check_kernel(name, source.mean.shape[1], projection.kernel)
    widths = [p.kernel.shape[1] for p in (params.query, params.key, params.value)]
    check_heads(name, num_heads, *widths)
    if len(set(widths)) > 1:
        raise ValueError(
            f"`{name}` needs query, key and value kernels of one width (D, H K). Got widths {widths}. "
            "Use the same H K for all three."
        )
    check_mask(name, mask, num_heads, mean.shape[0], source.mean.shape[0])
