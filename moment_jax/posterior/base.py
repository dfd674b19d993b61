"""Base class of Gaussian beliefs about one array of weights."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING

import jax

from moment_jax.posterior.prior import GaussianPrior

Array = jax.Array
Shape = tuple[int, ...]


class Posterior(abc.ABC):
    """Gaussian belief N(mean, Cov) about one array of weights, independent of all other arrays.

    All subclasses are frozen pytree dataclasses whose first field is `mean`. Covariances may be
    singular and variances zero: samples and second moments stay exact, with finite gradients, and
    `kl` is +inf. No method checks values; shapes are checked while tracing. All results have the
    dtype of the arrays given.

    `noise_variance`, `noise_block` and `input_metric` are for kernels (in, out), `vector_cov` is
    for biases and gains (D,). They take one belief: for a stack of beliefs use `jax.vmap`.
    """

    if TYPE_CHECKING:  # dataclasses would take a property of their base for a field's default

        @property
        def mean(self) -> Array:
            """The expected array."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array of weights."""
        return self.mean.shape

    # -- any array ------------------------------------------------------------------------------

    @abc.abstractmethod
    def sample(self, key: Array) -> Array:
        """One draw, of the mean's shape, exact and reparametrised.

        The draw is mean + root(Cov) z with the symmetric square root and z = normal(key, shape), so
        families that hold the same covariance draw the same weights from the same key. Gradients
        flow to the mean and the covariance; along directions without variance, where the root has
        no finite derivative, they are zero.
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
        """Whether different entries are uncorrelated, by the family's own definition."""
        return True

    # -- kernels (in, out) ------------------------------------------------------------------------

    @abc.abstractmethod
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

    @abc.abstractmethod
    def noise_block(self, moment: Array) -> Array:
        """The covariance that the randomness of this kernel w adds between x @ w and y @ w.

        That is sum_ij moment_ij Cov[w_io, w_jp]. Assumes that x and y are independent of w.

        Args:
          moment: E[x_i y_j], (..., in, in), not necessarily symmetric.

        Returns:
          (..., out, out).
        """

    @abc.abstractmethod
    def input_metric(self) -> Array:
        """sum_o Cov[w_io, w_jo]: its diagonal (in,) where it is diagonal, else (in, in).

        x^T metric y is the covariance that the randomness of this kernel w adds between x @ w and
        y @ w, summed over the outputs.
        """

    @abc.abstractmethod
    def rows(self, indices: Array) -> Posterior:
        """The belief about these rows of a kernel (in, out), such as those of a table of embeddings.

        Args:
          indices: (N,) integers, different from each other: a row that is asked for twice would be two
            independent rows in families of independent entries.

        Returns:
          A belief about a (N, out) kernel, of the same family.
        """

    @abc.abstractmethod
    def transpose(self) -> Posterior:
        """The belief about the transposed kernel, (out, in)."""

    # -- biases and gains (D,) --------------------------------------------------------------------

    def vector_cov(self) -> Array:
        """Covariance of a vector: (D,) variances where its entries are independent, else (D, D)."""
        family = type(self).__name__
        raise ValueError(
            f"`{family}` is a belief about a kernel (in, out), and `vector_cov()` needs one about "
            f"a bias or a gain (D,). Got {self.shape}. Use Point, Factorized or FullNormal."
        )


# Checks of shapes, made while tracing.


def check_kernel(call: str, shape: Shape) -> None:
    """Raise unless the belief is about one kernel (in, out)."""
    if len(shape) != 2:
        raise ValueError(
            f"`{call}` needs a belief about a kernel of shape (in, out). Got {tuple(shape)}. "
            "For a stack of kernels, use jax.vmap over the belief."
        )


def check_vector(call: str, shape: Shape) -> None:
    """Raise unless the belief is about one bias or gain (D,)."""
    if len(shape) != 1:
        raise ValueError(
            f"`{call}` needs a belief about a bias or a gain of shape (D,). Got {tuple(shape)}. "
            "For a stack of vectors, use jax.vmap over the belief."
        )


def check_inputs(family: str, shape: Shape, mean: Shape, variance: Shape) -> None:
    """Raise unless `noise_variance` got the moments (..., in) of the input of one kernel."""
    check_kernel(f"{family}.noise_variance", shape)
    if mean[-1:] != shape[:1] or variance != mean:
        raise ValueError(
            f"`{family}.noise_variance(mean, variance)` needs two arrays of one shape (..., in) "
            f"with in == {shape[0]}. Got {tuple(mean)} and {tuple(variance)}. To give each mean "
            "its variance, use jnp.broadcast_to or jnp.zeros_like(mean)."
        )


def check_moment(family: str, shape: Shape, moment: Shape) -> None:
    """Raise unless `noise_block` got the second moment (..., in, in) of the input of one kernel."""
    check_kernel(f"{family}.noise_block", shape)
    if moment[-2:] != (shape[0], shape[0]):
        raise ValueError(
            f"`{family}.noise_block(moment)` needs a moment of shape (..., in, in) with "
            f"in == {shape[0]}. Got {tuple(moment)}. Move the two feature axes last."
        )
