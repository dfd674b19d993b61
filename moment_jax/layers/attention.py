"""Multi-head attention: the public functions, and what they check."""

import jax.numpy as jnp
from jax import Array

from moment_jax.covariance import Covariance
from moment_jax.layers import params as checks
from moment_jax.layers.params import AttentionParams, S
from moment_jax.layers.rules import Attending, Carry, rules_of
from moment_jax.xla import materialized_inputs


@materialized_inputs
def attention(
    mean: Array, cov: S, params: AttentionParams, *, num_heads: int, mask: Array | None = None,
    order: int = 2,
) -> tuple[Array, S]:  # fmt: skip
    """Moments of multi-head self-attention, softmax(q k^T / sqrt(K)) v and the output projection.

    Scores are correlated across queries as well as keys, because all tokens share the weight noise. Each
    structure keeps what it can of that, and of the input x that queries, keys and values share: `Full`
    keeps it everywhere; `Separable` in the means E[scores] and E[weights v], `Diagonal` in E[scores].
    Order 1 leaves it out of the means. The score noise of different heads is independent, except in
    `Full`.

    Assumes that x and the four weight matrices are independent of each other.

    Args (mean, cov, results and errors are those of `dense`):
      params: beliefs about the kernels (D, H K) of query, key and value and (H K, D) of the output.
      num_heads: H, a divisor of their width.
      mask: (T, T), (1, T) for all queries, or (H, T, T) boolean, True where a query (row) may look at a
        key (column). Masked keys get a weight of exactly zero, a query with no key left a zero output.
      order: 1 (Taylor at the mean, as derived) or 2.

    With a mask, the feature Gram matrix of `Separable` is from here on that of the tokens which no query
    is denied.

    Source: Transformer derivation, sections 4.2 to 4.4.
    """
    return attention_with_carry(mean, cov.seen_by(mask), params, num_heads, mask, order)[:2]


@materialized_inputs
def cross_attention(
    mean: Array, cov: S, memory_mean: Array, memory_cov: S, params: AttentionParams, *,
    num_heads: int, mask: Array | None = None, order: int = 2,
) -> tuple[Array, S]:  # fmt: skip
    """Moments of multi-head attention of a random sequence x to a random memory.

    Queries come from x, keys and values from the memory. What keys and values share through the memory
    is kept as in `attention`.

    Assumes that x, the memory and the four weight matrices are mutually independent. In a decoder this
    holds for the first block only; in later ones x depends on the memory.

    Args (the others, the results and the errors are those of `attention`):
      memory_mean: mean of the memory, (S, E).
      memory_cov: its covariance, of shape (S, E), in the structure of `cov`; TypeError in another.
      params: beliefs about the kernels (D, H K) of query, (E, H K) of key and value, (H K, D) of the
        output.
      mask: (T, S), (1, S) or (H, T, S) boolean, True where a query may look.

    Source: Transformer derivation, sections 1.1 and 4.2 to 4.4.
    """
    memory = memory_mean, memory_cov.seen_by(mask, memory=True)
    return attention_with_carry(mean, cov, params, num_heads, mask, order, memory=memory)[:2]


def attention_with_carry(
    mean: Array, cov: S, params: AttentionParams, num_heads: int, mask: Array | None, order: int, *,
    memory: tuple[Array, Covariance] | None = None,
    turns: tuple[Array | None, Array | None] = (None, None),
) -> tuple[Array, S, Carry]:  # fmt: skip
    """`attention`, or `cross_attention` with a memory, and how it carries covariances: see `rules`.

    `turns` multiplies each token's queries and keys by a matrix (T, K, K): rotary positions.
    """
    name = "attention" if memory is None else "cross_attention"
    checks.check_moments(name, mean, cov)
    checks.check_order(name, order)
    source, source_cov = (mean, cov) if memory is None else memory
    if memory is not None:
        checks.check_moments("cross_attention's memory", source, source_cov)
        if type(source_cov) is not type(cov):
            raise TypeError(
                f"`{name}` needs x and the memory in one structure. Got {type(cov).__name__} and "
                f"{type(source_cov).__name__}. Use {type(cov).__name__}.project(cov.to_dense()), or "
                "one structure for encoder and decoder."
            )
    checks.check_kernel(name, mean.shape[1], params.query.kernel)
    for projection in (params.key, params.value):
        checks.check_kernel(name, source.shape[1], projection.kernel)
    widths = [p.kernel.shape[1] for p in (params.query, params.key, params.value)]
    checks.check_heads(name, num_heads, *widths)
    if len(set(widths)) > 1:
        raise ValueError(
            f"`{name}` needs query, key and value kernels of one width (D, H K). Got widths {widths}. "
            "Use the same H K for all three."
        )
    checks.check_kernel(name, widths[2], params.output.kernel)
    queries, keys = len(mean), len(source)
    what = "(queries, keys), (1, keys) or (heads, queries, keys), True where a query may look"
    whole = num_heads, queries, keys
    checks.check_mask(name, what, mask, whole[1:], (1, keys), whole)
    if mask is not None:
        source_cov.check_mask(name, mask)
        mask = jnp.broadcast_to(mask, whole)
    attending = Attending(num_heads, mask, order, turns)
    return rules_of(type(cov)).attention(mean, cov, memory, params, attending)
