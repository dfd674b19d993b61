"""A Gaussian belief about one weight array: its variational parameters and its prior."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from moment_jax import posterior as families
from moment_jax.posterior import GaussianPrior, Posterior
from moment_jax.xla import diagonal_matrix, diagonal_of

# The parameters of a spread by family: a `scale` of entries, roots of covariance matrices, or matrices
# whose QR decomposition has an orthogonal basis.
FAMILIES: dict[Any, tuple[str, ...]] = {
    families.Point: (),
    families.Factorized: ("scale",),
    families.FullNormal: ("entries",),
    families.OutputShared: ("scale",),
    families.MatrixNormal: ("rows", "columns"),
    families.KroneckerEigen: ("in_basis", "out_basis", "scale"),
}


class VariationalMean(nnx.Param):
    """The mean of a Gaussian belief about one array."""


class VariationalScale(nnx.Param):
    """The unconstrained parameter of a Gaussian belief's spread."""


class PriorScale(nnx.Param):
    """The log standard deviation of a learned prior (empirical Bayes)."""


class Belief(nnx.Module):
    """Variational parameters of one array, and its prior N(0, prior_scale^2).

    All parameters are unconstrained: standard deviations are the softplus of a parameter, covariances
    L L^T with L lower triangular and softplus on its diagonal.

    Args:
      mean: initial mean, of any shape.
      family: `Point`, `Factorized`, `OutputShared`, `MatrixNormal`, `KroneckerEigen` or `FullNormal` of
        `mj.posterior`; `OutputShared`, `MatrixNormal` and `KroneckerEigen` are for matrices only.
      scale: initial standard deviation of every entry.
      prior_scale: standard deviation of the prior; its initial value if learned.
      learn_prior: learn the prior's standard deviation by the same objective.

    Raises:
      ValueError: if a scale is not positive, or the family does not fit the array.
      TypeError: if `family` is none of these.
    """

    def __init__(
        self,
        mean: Array,
        *,
        family: type[Posterior] = families.Factorized,
        scale: float = 0.01,
        prior_scale: float = 1.0,
        learn_prior: bool = False,
    ) -> None:
        if family not in FAMILIES:
            names = ", ".join(known.__name__ for known in FAMILIES)
            raise TypeError(f"`Belief` needs a posterior family, one of {names}. Got {family!r}.")
        if scale <= 0 or prior_scale <= 0:
            raise ValueError(
                "`Belief` needs positive scale and prior_scale. Got "
                f"{scale} and {prior_scale}. For a certain array, use family=Point."
            )
        of_matrices = (families.OutputShared, families.MatrixNormal, families.KroneckerEigen)
        if mean.ndim != 2 and family in of_matrices:
            raise ValueError(
                f"`Belief` needs a matrix for {family.__name__}. Got an array of shape "
                f"{tuple(mean.shape)}; for biases, gains and positions use Factorized."
            )
        self.family: Any = family
        self.mean = VariationalMean(mean)
        self.raw = nnx.data(_initial_raw(family, mean, scale))
        log_scale = jnp.asarray(math.log(prior_scale), mean.dtype)
        self.prior_scale = float(prior_scale)
        self.prior_log_scale = nnx.data(PriorScale(log_scale) if learn_prior else None)

    @property
    def posterior(self) -> Posterior:
        """The belief as a `mj.posterior` family."""
        mean, family = self.mean[...], self.family
        spread = [_spread(name, self.raw[name][...]) for name in FAMILIES[family]]
        if family is families.FullNormal:
            spread = [spread[0].reshape(*mean.shape, *mean.shape)]
        return family(mean, *spread)

    def hold(self, posterior: Posterior) -> None:
        """Take over family, mean and covariance of a belief about the same array; keep the prior.

        Raises:
          ValueError: if the family is not supported, or a covariance is singular. Nothing is changed.
        """
        raw, dtype = stored_form(posterior), self.mean.dtype
        self.family = next(f for f in FAMILIES if isinstance(posterior, f))
        self.mean.set_value(jnp.asarray(posterior.mean, dtype))
        self.raw = nnx.data({k: VariationalScale(jnp.asarray(v, dtype)) for k, v in raw.items()})

    @property
    def prior(self) -> GaussianPrior:
        """The prior of every entry."""
        if self.prior_log_scale is None:
            return GaussianPrior(0.0, self.prior_scale**2)
        return GaussianPrior(0.0, jnp.exp(2 * self.prior_log_scale[...]))

    def kl(self) -> Array:
        """KL(belief || prior), a scalar, in nats."""
        return self.posterior.kl(self.prior)


def owned_beliefs(module: nnx.Module) -> list[Belief]:
    """All beliefs in a module."""
    return [node for _, node in nnx.iter_graph(module) if isinstance(node, Belief)]


def total_kl(module: nnx.Module) -> Array:
    """The sum of the KL divergences of all beliefs in a module: the complexity loss, in nats."""
    beliefs = owned_beliefs(module)
    if not beliefs:
        raise ValueError(
            f"`total_kl` needs a module that owns beliefs. Got {type(module).__name__} without any; "
            "use the modules of mj.nn."
        )
    return sum((belief.kl() for belief in beliefs[1:]), beliefs[0].kl())


def stored_form(belief: Posterior) -> dict[str, np.ndarray]:
    """The unconstrained parameters of a belief: inverses of softplus and of L L^T."""
    if isinstance(belief, families.Point):
        return {}
    if isinstance(belief, families.Factorized | families.OutputShared):
        return {"scale": _inverse_softplus(np.sqrt(np.asarray(belief.variance, np.float64)))}
    if isinstance(belief, families.FullNormal):
        return {"entries": _root(belief.cov.reshape(2 * (belief.mean.size,)))}
    if isinstance(belief, families.MatrixNormal):
        return {"rows": _root(belief.in_cov), "columns": _root(belief.out_cov)}
    if isinstance(belief, families.KroneckerEigen) and belief.variance.shape == belief.shape:
        scale = _inverse_softplus(np.sqrt(np.asarray(belief.variance, np.float64)))
        bases = np.asarray(belief.in_basis), np.asarray(belief.out_basis)
        return {"in_basis": bases[0], "out_basis": bases[1], "scale": scale}
    raise ValueError(
        f"A module needs {', '.join(known.__name__ for known in FAMILIES)} of its own shape. Got "
        f"{type(getattr(belief, 'belief', belief)).__name__} of shape {belief.shape}."
    )


def _root(cov: Array) -> np.ndarray:
    try:
        root = np.linalg.cholesky(np.asarray(cov, np.float64))
    except np.linalg.LinAlgError as error:
        raise ValueError(
            "A belief needs positive definite covariances. Got a singular one."
        ) from error
    return np.tril(root, -1) + np.diag(_inverse_softplus(np.diagonal(root)))


def _inverse_softplus(x: np.ndarray) -> np.ndarray:
    """log(exp(x) - 1); -inf at zero, where softplus gives zero again."""
    with np.errstate(divide="ignore"):
        return np.asarray(x + np.log(-np.expm1(-x)))


def _initial_raw(family: type[Posterior], mean: Array, scale: float) -> dict[str, VariationalScale]:
    """Parameters of a standard deviation of `scale` for every entry; of two factors, each a root."""
    shape, raw = mean.shape, {}
    sizes = {"rows": shape[:1], "columns": shape[1:], "entries": shape}
    for name in FAMILIES[family]:
        share = 2 if name in ("rows", "columns") else 1
        value = math.log(math.expm1(scale ** (1 / share)))  # softplus(value) is the scale
        if name.endswith("basis"):
            raw[name] = VariationalScale(jnp.eye(shape[name == "out_basis"], dtype=mean.dtype))
        elif name == "scale":
            shape = shape[1:] if family is families.OutputShared else shape
            raw[name] = VariationalScale(jnp.full(shape, value, mean.dtype))
        else:
            eye = jnp.eye(math.prod(sizes[name]), dtype=mean.dtype)
            raw[name] = VariationalScale(value * eye)
    return raw


def _spread(name: str, raw: Array) -> Array:
    """Variances, an orthogonal basis, or the covariance L L^T."""
    if name == "scale":
        return jax.nn.softplus(raw) ** 2
    if name.endswith("basis"):
        return jnp.linalg.qr(raw)[0]
    factor = jnp.tril(raw, -1) + diagonal_matrix(jax.nn.softplus(diagonal_of(raw)))
    return factor @ factor.T
