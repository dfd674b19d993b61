"""Structured covariances of (T, D) arrays; algebra only.

| type | keeps | numbers |
|---|---|---|
| `Diagonal` | variances | T D |
| `Separable` | variances, a token Gram matrix, a feature Gram matrix | T D + T^2 + D^2 |
| `Full` | everything | T^2 D^2 |
| a subclass of yours | what its `project` keeps | |
"""

from moment_jax.covariance.base import Covariance, Moments
from moment_jax.covariance.diagonal import Diagonal
from moment_jax.covariance.fields import register_fields
from moment_jax.covariance.full import Full
from moment_jax.covariance.separable import Separable

STRUCTURES: dict[str, type[Covariance]] = {
    structure.__name__: structure for structure in (Diagonal, Separable, Full)
}
"""Structures that hold a covariance, by name, for command lines and tests."""
