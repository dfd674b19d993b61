"""Gaussian integrals on plain arrays: what nonlinearities do to means and variances."""

from moment_jax.expectations.gelu import gelu
from moment_jax.expectations.moments import ElementwiseMoments
from moment_jax.expectations.quadrature import elementwise
from moment_jax.expectations.rectified import rectified

__all__ = ["ElementwiseMoments", "elementwise", "gelu", "rectified"]
