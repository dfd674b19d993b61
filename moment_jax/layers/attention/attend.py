"""Attention to given keys and values, dispatched on the structure."""

from functools import singledispatch
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

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
    DenseInput,
    Inputs,
    Mixing,
    Projection,
    SharedInput,
    Source,
    Turns,
    turned_projection,
)
from moment_jax.layers.attention.separable import attend_separable
from moment_jax.layers.attention.tangent import AttentionTangent
from moment_jax.layers.attention.token_block import mix_token_block
from moment_jax.layers.attention.token_correlated import mix_token_correlated
from moment_jax.layers.dense import dense
from moment_jax.layers.params import AttentionParams

S = TypeVar("S", bound=Covariance)


@singledispatch
def mixed(cov: Any, inputs: Inputs[Any]) -> tuple[Array, Any, Mixing]:
    """All heads before the output projection; the default goes through dense covariances.

    Returns the mean (T, H K), its covariance in the structure of `cov`, and the mixing of the tokens.
    """

    def dense(node: Any) -> Any:
        return Full(node.to_dense()) if isinstance(node, Covariance) else node

    mean, full, mixing = mix_full(
        jax.tree.map(dense, inputs, is_leaf=lambda node: isinstance(node, Covariance))
    )
    return mean, type(cov).project(full.cov), mixing


# Faster versions, one file per structure.
mixed.register(Full, lambda _, inputs: mix_full(inputs))
mixed.register(Diagonal, lambda _, inputs: mix_diagonal(inputs))
mixed.register(TokenBlock, lambda _, inputs: mix_token_block(inputs))
mixed.register(TokenCorrelated, lambda _, inputs: mix_token_correlated(inputs))


@singledispatch
def attended(cov: Any, inputs: Inputs[Any]) -> tuple[Array, Any, Mixing]:
    """`mixed` and the output projection: mean (T, D), covariance, and the mixing of the tokens."""
    mean, cov, mixing = mixed(cov, inputs)
    return *dense(mean, cov, inputs.output), mixing


attended.register(Separable, lambda _, inputs: attend_separable(inputs))


def make_source(mean: Array, cov: Covariance, params: AttentionParams) -> Source[Any]:
    """Keys and values of a random sequence."""
    key, value = (Projection(*dense(mean, cov, p)) for p in (params.key, params.value))
    return Source(mean, cov, key, value)


class View(NamedTuple):
    """How queries attend to a source."""

    num_heads: int
    mask: Array | None  # (T, S), (1, S) for all queries, or (H, T, S)
    order: int
    own: bool  # whether the queries come from tokens of the source
    places: Array | None = None  # positions of these tokens, (T,); None for token a of query a
    turns: Turns = (None, None)  # of queries and keys


def attend(
    mean: Array, cov: S, source: Source[Any], params: AttentionParams, view: View
) -> tuple[Array, S, AttentionTangent]:
    """Attention of a random sequence (T, D) to given keys and values, with its linearisation."""
    mask, h = view.mask, view.num_heads
    keys_alike = mask is None or mask.shape[-2] == 1
    if mask is not None:
        mask = jnp.broadcast_to(mask, (h, mean.shape[0], source.mean.shape[0]))
    kernels = (params.query.kernel.mean, params.key.kernel.mean, params.value.kernel.mean)
    inputs: Inputs[Any] = Inputs(
        turned_projection(Projection(*dense(mean, cov, params.query)), view.turns[0], h),
        turned_projection(source.key, view.turns[1], h),
        source.value,
        DenseInput(mean, cov, params.query),
        DenseInput(source.mean, source.cov, params.key),
        DenseInput(source.mean, source.cov, params.value),
        SharedInput(
            source.cov, kernels[0] if view.own else None, *kernels[1:], view.places, view.turns
        ),
        params.output,
        mask,
        keys_alike,
        h,
        view.order,
    )
    out_mean, out_cov, mixing = attended(cov, inputs)
    tangent = AttentionTangent(
        inputs.query.mean,
        inputs.key.mean,
        inputs.value.mean,
        mixing,
        kernels[0],
        (kernels[1], kernels[2]) if view.own else None,
        params.output.kernel.mean,
        view.places,
        view.turns,
    )
    return out_mean, out_cov, tangent
