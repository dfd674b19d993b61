"""Gaussian expectations of plain arrays: moments of nonlinear functions of Gaussian variables.

Elementwise functions return `ElementwiseMoments` (mean, variance, gain, second): `rectified`, `gelu`
and `piecewise_linear` in closed form, `elementwise` for any other by quadrature; `of(activation)`
chooses. Softmax functions take one row of scores; use `jax.vmap` for a batch.
"""

from moment_jax.expectations.activations import (
    ElementwiseMoments,
    gelu,
    piecewise_linear,
    rectified,
)
from moment_jax.expectations.quadrature import elementwise
from moment_jax.expectations.recognition import of
from moment_jax.expectations.softmax import (
    SoftmaxExpansion,
    expected_softmax_jacobian,
    softmax_expansion,
    softmax_jacobian,
)
from moment_jax.expectations.softmax_mean import ScoreCovariance, expected_softmax, masked_softmax

__all__ = [
    "ElementwiseMoments", "ScoreCovariance", "SoftmaxExpansion", "elementwise",
    "expected_softmax", "expected_softmax_jacobian", "gelu", "masked_softmax",
    "of", "piecewise_linear", "rectified", "softmax_expansion", "softmax_jacobian",
]  # fmt: skip
