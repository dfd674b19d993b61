"""Attention for `Diagonal`: the formulas of `TokenCorrelated` for uncorrelated tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from moment_jax.covariance import Diagonal, TokenCorrelated
from moment_jax.layers.attention.inputs import Inputs, KeyInput, Mixing, Projection, SharedInput
from moment_jax.layers.attention.token_correlated import mix_token_correlated

Array = jax.Array


def mix_diagonal(inputs: Inputs[Diagonal]) -> tuple[Array, Diagonal, Mixing]:
    """Moments of the concatenated heads: mean (T, H K), variance, and weights (H, T, S)."""
    key, shared = inputs.key_input, inputs.shared
    correlated = Inputs(
        _correlated(inputs.query),
        _correlated(inputs.key),
        _correlated(inputs.value),
        KeyInput(key.mean, _with_identity(key.cov), key.kernel),
        shared if shared is None else SharedInput(_with_identity(shared.cov), *shared[1:]),
        inputs.output,
        inputs.mask,
        inputs.num_heads,
        inputs.order,
    )
    mean, cov, mixing = mix_token_correlated(correlated)
    return mean, Diagonal(cov.variance()), mixing


def _correlated(projection: Projection[Diagonal]) -> Projection[TokenCorrelated]:
    return Projection(projection.mean, _with_identity(projection.cov))


def _with_identity(cov: Diagonal) -> TokenCorrelated:
    identity = jnp.eye(cov.shape[0], dtype=cov.dtype)
    return TokenCorrelated.from_moments(cov.variances, identity * jnp.sum(cov.variances, 1)[None])
