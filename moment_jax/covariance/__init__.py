"""Structured covariances of (T, D) arrays; algebra only.

| type | keeps | numbers kept |
|---|---|---|
| `Diagonal` | variance | T D |
| `Separable` | signed scale, a token and a feature correlation | T D + T^2 + D^2 |
| `Full` | everything | T^2 D^2 |

A structure of your own is a subclass of `Covariance` with two methods, `project` and `to_dense`.
"""

from moment_jax.covariance.base import Covariance
from moment_jax.covariance.diagonal import Diagonal
from moment_jax.covariance.fields import register_fields
from moment_jax.covariance.full import Full
from moment_jax.covariance.separable import Separable

STRUCTURES: dict[str, type[Covariance]] = {
    structure.__name__: structure for structure in (Diagonal, Separable, Full)
}
"""Structures by name, for command lines and tests."""

__all__ = ["STRUCTURES", "Covariance", "Diagonal", "Full", "Separable", "register_fields"]
