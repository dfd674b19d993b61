"""The base class of Gaussian beliefs about one array of weights, the prior, draws of a whole tree."""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from moment_jax.covariance.fields import need, register_fields


@register_fields
@dataclasses.dataclass(frozen=True)
class GaussianPrior:
    """Prior N(mean, variance) of the entries of one array of weights, independent of each other.

    Mean and variance, which is assumed positive, are scalars or arrays that broadcast to the shape of
    the weights. Both are differentiable, so the prior can be learned (empirical Bayes).
    """

    mean: Array | float = 0.0
    variance: Array | float = 1.0


class Posterior(abc.ABC):
    """Gaussian belief N(mean, Cov) about one array of weights, independent of all other arrays.

    All subclasses are frozen pytree dataclasses whose first field is `mean`. Covariances may be
    singular and variances zero: samples and second moments stay exact, with finite gradients, and
    `kl` is +inf. No method checks values; shapes are checked while tracing. All results have the
    dtype of the arrays given.

    `noise_variance`, `noise_block`, `input_metric`, `rows` and `transpose` are for kernels (in, out), as
    `matrix` makes them, `vector_cov` is for biases and gains (D,). They take one belief: for a stack use
    `jax.vmap`. A subclass defines those with an underscore, whose arguments have been checked.
    """

    uncorrelated: ClassVar[bool] = True
    """Whether the family makes all entries uncorrelated, whatever its parameters."""

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

        It is mean + R z with R R^T = Cov and z = normal(key, shape). Gradients to the covariance are
        zero along directions without variance, where R has no finite derivative.
        """

    @abc.abstractmethod
    def marginal_variance(self) -> Array:
        """The variance of each entry, of the mean's shape."""

    @abc.abstractmethod
    def kl(self, prior: GaussianPrior) -> Array:
        """KL(self || prior) in nats, in closed form, summed over all entries: a scalar.

        It is +inf, never NaN, where the belief is singular (for a dense covariance: where it has no
        Cholesky factor). Gradients are right wherever the variance is positive.
        """

    # -- kernels (in, out) ------------------------------------------------------------------------

    def noise_variance(self, mean: Array, variance: Array) -> Array:
        """The variance that the randomness of this kernel w adds to x @ w, (..., out).

        Of E[x] and Var[x], (..., in), it is sum_ij (diag(variance) + mean mean^T)_ij Cov[w_io, w_jo],
        never negative. Assumes that x is independent of w and that its features are uncorrelated.
        """
        self._check_kernel("noise_variance")
        right = mean.shape[-1:] == self.shape[:1] and variance.shape == mean.shape
        rule = f"two arrays of one shape (..., in) with in == {self.shape[0]}"
        mend = "To give each mean its variance, use jnp.broadcast_to or jnp.zeros_like(mean)."
        self._need("noise_variance", right, rule, f"{mean.shape} and {variance.shape}", mend)
        return self._noise_variance(mean, variance)

    def noise_block(self, moment: Array) -> Array:
        """The covariance that the randomness of this kernel w adds between x @ w and y @ w.

        Of moments E[x_i y_j], (..., in, in), not necessarily symmetric, it is
        sum_ij moment_ij Cov[w_io, w_jp], (..., out, out). Assumes that x and y are independent of w.
        """
        self._check_kernel("noise_block")
        right, mend = moment.shape[-2:] == 2 * self.shape[:1], "Move the two feature axes last."
        rule = f"a moment (..., in, in) with in == {self.shape[0]}"
        self._need("noise_block", right, rule, moment.shape, mend)
        return self._noise_block(moment)

    def input_metric(self) -> Array:
        """sum_o Cov[w_io, w_jo]: its diagonal (in,) where it is diagonal, else (in, in)."""
        self._check_kernel("input_metric")
        return self._input_metric()

    @abc.abstractmethod
    def rows(self, indices: Array) -> Posterior:
        """The belief about these rows (N,), (N, out); repeated ones would count as independent."""

    @abc.abstractmethod
    def transpose(self) -> Posterior:
        """The belief about the transposed kernel, (out, in)."""

    # -- biases and gains (D,) --------------------------------------------------------------------

    def vector_cov(self) -> Array:
        """Covariance of a vector: (D,) variances where its entries are independent, else (D, D)."""
        cov: Any = self._vector_cov() if len(self.shape) == 1 else None
        mend = "Use Point, Factorized or FullNormal; of a stack, jax.vmap over the belief."
        rule = "a belief about a bias or a gain (D,)"
        self._need("vector_cov", cov is not None, rule, self.shape, mend)
        return cov

    # -- what a family defines ----------------------------------------------------------------------

    def _need(self, method: str, right: bool, rule: str, came: Any, mend: str) -> None:
        need(f"{type(self).__name__}.{method}", right, rule, came, mend)

    def _check_kernel(self, method: str) -> None:
        """Raise unless the belief is about one kernel (in, out)."""
        mend = "Of a stack, use jax.vmap over the belief; of a kernel of more axes, its `matrix`."
        rule = "a belief about a kernel of shape (in, out)"
        self._need(method, len(self.shape) == 2, rule, self.shape, mend)

    @abc.abstractmethod
    def _noise_variance(self, mean: Array, variance: Array) -> Array: ...

    @abc.abstractmethod
    def _noise_block(self, moment: Array) -> Array: ...

    @abc.abstractmethod
    def _input_metric(self) -> Array: ...

    def _vector_cov(self) -> Array | None:
        """None if the family holds kernels alone."""
        return None


def divergence(prior: GaussianPrior, mean: Array, variance: Array, log_variance: Array) -> Array:
    """KL(N(mean, Cov) || prior), a scalar, for any covariance: derivation, Eq. 12, extended.

    The log-determinant of Cov is passed as one term per entry, so that large terms cancel before they
    are summed: for independent entries the log of each variance; -inf where Cov is singular.
    """
    right, came = isinstance(prior, GaussianPrior), type(prior).__name__
    mend = "For a variance s, use GaussianPrior(variance=s)."
    need("kl(prior)", right, "a GaussianPrior", came, mend, TypeError)
    given = [jnp.asarray(x, jnp.result_type(mean, 0.0)) for x in (prior.mean, prior.variance)]
    try:
        prior_mean, prior_variance = (jnp.broadcast_to(x, mean.shape) for x in given)
    except ValueError:
        rule = f"a prior mean and variance that broadcast to the shape of the weights, {mean.shape}"
        came = f"{given[0].shape} and {given[1].shape}"
        need("kl(prior)", False, rule, came, "Use scalars, or arrays of that shape.")
    squares = (variance + (mean - prior_mean) ** 2) / prior_variance
    return 0.5 * jnp.sum(squares - 1 - (log_variance - jnp.log(prior_variance)))


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


def is_belief(leaf: Any) -> bool:
    """For `is_leaf=` of `jax.tree`."""
    return isinstance(leaf, Posterior)


def mean_params(params: Any) -> Any:
    """The same pytree with the mean of every belief in its place."""
    return jax.tree.map(lambda x: x.mean if is_belief(x) else x, params, is_leaf=is_belief)


def sample_params(params: Any, key: Array) -> Any:
    """One draw of the weights: the same pytree, with an array in place of every belief.

    The tree is any with `Posterior` leaves, such as `EncoderBlockParams`. Beliefs are drawn
    independently of each other. Other leaves and None are returned unchanged.
    """
    leaves, treedef = jax.tree.flatten(params, is_leaf=is_belief)
    keys = jax.random.split(key, max(len(leaves), 1))
    # Beliefs of one family and shape are drawn in one batch, each with its own key: one random number
    # generator per leaf of a deep network would take minutes to compile.
    alike: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
        if is_belief(leaf):
            arrays, structure = jax.tree.flatten(leaf)
            kind = (structure, *((jnp.shape(a), jnp.result_type(a)) for a in arrays))
            alike.setdefault(kind, []).append(i)
    for members in alike.values():
        beliefs = jax.tree.map(lambda *arrays: jnp.stack(arrays), *(leaves[i] for i in members))
        draws = jax.vmap(lambda belief, key: belief.sample(key))(beliefs, keys[np.array(members)])
        for member, draw in zip(members, draws, strict=True):
            leaves[member] = draw
    return jax.tree.unflatten(treedef, leaves)
