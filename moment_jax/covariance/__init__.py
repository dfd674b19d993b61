"""Structured covariances of (T, D) arrays; algebra only.

| type | keeps | numbers kept |
|---|---|---|
| `Diagonal` | variance | T D |
| `TokenBlock` | each token's feature covariance | T D^2 |
| `TokenCorrelated` | signed scale, one token correlation | T D + T^2 |
| `Separable` | signed scale, a token and a feature correlation | T D + T^2 + D^2 |
| `BatchSeparable` | the same, with one feature correlation per batch | T D + T^2 |
| `FrozenSeparable` | the same, with a feature correlation averaged beforehand | T D + T^2 |
| `Full` | everything | T^2 D^2 |
| `ByProjection` | whatever a subclass of yours keeps | |
"""

from moment_jax.covariance.base import Covariance
from moment_jax.covariance.batch_separable import BATCH_AXIS, BatchSeparable
from moment_jax.covariance.by_projection import ByProjection
from moment_jax.covariance.diagonal import Diagonal
from moment_jax.covariance.fields import register_fields
from moment_jax.covariance.frozen_separable import FrozenSeparable
from moment_jax.covariance.full import Full
from moment_jax.covariance.separable import Separable
from moment_jax.covariance.statistics import with_feature_statistics
from moment_jax.covariance.token_block import TokenBlock
from moment_jax.covariance.token_correlated import TokenCorrelated

STRUCTURES: dict[str, type[Covariance]] = {
    structure.__name__: structure
    for structure in (Diagonal, TokenBlock, TokenCorrelated, Separable, BatchSeparable, Full)
}
"""Structures by name, for command lines and tests; `FrozenSeparable` needs a module's statistics."""

__all__ = [
    "BATCH_AXIS",
    "STRUCTURES",
    "BatchSeparable",
    "ByProjection",
    "Covariance",
    "Diagonal",
    "FrozenSeparable",
    "Full",
    "Separable",
    "TokenBlock",
    "TokenCorrelated",
    "register_fields",
    "with_feature_statistics",
]
