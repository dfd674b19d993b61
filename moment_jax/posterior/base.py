"""Base class of Gaussian beliefs about one array of weights."""

from __future__ import annotations

import abc
import math
from typing import TYPE_CHECKING

from jax import Array

from moment_jax.posterior.prior import GaussianPrior


class Posterior(abc.ABC):
    """Gaussian belief N(mean, Cov) about one array of weights, independent of all other arrays.

    All subclasses are frozen pytree dataclasses whose first field is `mean`. Covariances may be
    singular and variances zero: samples and second moments stay exact, with finite gradients, and
    `kl` is +inf. No method checks values; shapes are checked while tracing. All results have the
    dtype of the arrays given.

    `noise_variance`, `noise_block`, `input_metric`, `rows` and `transpose` are for kernels (in, out), as
    `matrix` makes them, `vector_cov` is for biases and gains (D,). They take one belief: for a stack of
    beliefs use `jax.vmap`. A subclass defines them by the methods of the same names with an
    underscore, whose arguments have been checked.
    """

    if TYPE_CHECKING:  # dataclasses would take a property of their base for a field's default

        @property
        def mean(self) -> Array:
            """The expected array."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array of weights."""
        return self.mean.shape

    @property
    def matrix(self) -> Posterior:
        """The weights as a kernel (in, out), if the family holds a matrix in an array of more axes."""
        return self

    # -- any array ------------------------------------------------------------------------------

    @abc.abstractmethod
    def sample(self, key: Array) -> Array:
        """One draw, of the mean's shape, exact and reparametrised.

        The draw is mean + root(Cov) z with the symmetric square root and z = normal(key, shape), so
        families that hold the same covariance draw the same weights from the same key. Gradients
        flow to the mean and the covariance. They are zero along directions without variance, where
        the root has no finite derivative.
        """

    @abc.abstractmethod
    def marginal_variance(self) -> Array:
        """The variance of each entry, of the mean's shape."""

    @abc.abstractmethod
    def kl(self, prior: GaussianPrior) -> Array:
        """KL(self || prior) in nats, in closed form, summed over all entries: a scalar.

        It is +inf, never NaN, where the belief is singular (for a dense covariance: where it has no
        Cholesky factor). Gradients to the belief and to the prior's mean and variance are right
        wherever the variance is positive.
        """

    @property
    def uncorrelated(self) -> bool:
        """Whether the family makes all entries uncorrelated, whatever its parameters."""
        return True

    # -- kernels (in, out) ------------------------------------------------------------------------

    def noise_variance(self, mean: Array, variance: Array) -> Array:
        """The variance that the randomness of this kernel w adds to x @ w.

        That is sum_ij (diag(variance) + mean mean^T)_ij Cov[w_io, w_jo], never negative. Assumes
        that x is independent of w and that the features of x are uncorrelated.

        Args:
          mean: E[x], (..., in).
          variance: Var[x], (..., in).

        Returns:
          (..., out).
        """
        self._check_kernel("noise_variance")
        if mean.shape[-1:] != self.shape[:1] or variance.shape != mean.shape:
            raise ValueError(
                f"`{type(self).__name__}.noise_variance(mean, variance)` needs two arrays of one shape "
                f"(..., in) with in == {self.shape[0]}. Got {tuple(mean.shape)} and "
                f"{tuple(variance.shape)}. To give each mean its variance, use jnp.broadcast_to or "
                "jnp.zeros_like(mean)."
            )
        return self._noise_variance(mean, variance)

    def noise_block(self, moment: Array) -> Array:
        """The covariance that the randomness of this kernel w adds between x @ w and y @ w.

        That is sum_ij moment_ij Cov[w_io, w_jp]. Assumes that x and y are independent of w.

        Args:
          moment: E[x_i y_j], (..., in, in), not necessarily symmetric.

        Returns:
          (..., out, out).
        """
        self._check_kernel("noise_block")
        if moment.shape[-2:] != (self.shape[0], self.shape[0]):
            raise ValueError(
                f"`{type(self).__name__}.noise_block(moment)` needs a moment (..., in, in) with "
                f"in == {self.shape[0]}. Got {tuple(moment.shape)}. Move the two feature axes last."
            )
        return self._noise_block(moment)

    def input_metric(self) -> Array:
        """sum_o Cov[w_io, w_jo]: its diagonal (in,) where it is diagonal, else (in, in).

        x^T metric y is the covariance that the randomness of this kernel w adds between x @ w and
        y @ w, summed over the outputs.
        """
        self._check_kernel("input_metric")
        return self._input_metric()

    def rows(self, indices: Array) -> Posterior:
        """The belief about these rows of a kernel (in, out), such as those of an embedding table.

        Args:
          indices: (N,) distinct integers. A repeated row would count as two independent rows in
            families of independent entries.

        Returns:
          A belief about a (N, out) kernel, of the same family.
        """
        self._check_kernel("rows")
        return self._rows(indices)

    def transpose(self) -> Posterior:
        """The belief about the transposed kernel, (out, in)."""
        self._check_kernel("transpose")
        return self._transpose()

    # -- biases and gains (D,) --------------------------------------------------------------------

    def vector_cov(self) -> Array:
        """Covariance of a vector: (D,) variances where its entries are independent, else (D, D)."""
        cov = self._vector_cov() if len(self.shape) == 1 else None
        if cov is None:
            raise ValueError(
                f"`{type(self).__name__}.vector_cov` needs a belief about a bias or a gain (D,). Got "
                f"{tuple(self.shape)}. Use Point, Factorized or FullNormal; for a stack of vectors, "
                "jax.vmap over the belief."
            )
        return cov

    # -- what a family defines ----------------------------------------------------------------------

    def _check_kernel(self, method: str) -> None:
        """Raise unless the belief is about one kernel (in, out)."""
        if len(self.shape) != 2:
            raise ValueError(
                f"`{type(self).__name__}.{method}` needs a belief about a kernel of shape (in, out). "
                f"Got {tuple(self.shape)}. For a stack of kernels, use jax.vmap over the belief; for a "
                "kernel of more axes, its `matrix`."
            )

    @abc.abstractmethod
    def _noise_variance(self, mean: Array, variance: Array) -> Array: ...

    @abc.abstractmethod
    def _noise_block(self, moment: Array) -> Array: ...

    @abc.abstractmethod
    def _input_metric(self) -> Array: ...

    @abc.abstractmethod
    def _rows(self, indices: Array) -> Posterior: ...

    @abc.abstractmethod
    def _transpose(self) -> Posterior: ...

    def _vector_cov(self) -> Array | None:
        """None if the family holds kernels alone."""
        return None


def kernel_shape(shape: tuple[int, ...], outputs: tuple[int, ...]) -> tuple[int, ...]:
    """(..., in, out) of a kernel of two axes or more, cut where its last axes have `out` entries.

    `outputs` is (..., out), with the leading axes of a stack. Raises a ValueError for a vector.
    """
    stacked = max(len(outputs) - 1, 0)
    stack, array = shape[:stacked], shape[stacked:]
    if len(array) < 2:
        raise ValueError("needs the mean of a kernel, of shape (in, out).")
    cuts = [(math.prod(array[:i]), math.prod(array[i:])) for i in range(1, len(array))]
    return (*stack, *next((cut for cut in cuts if cut[1:] == outputs[-1:]), cuts[-1]))
