"""A Gaussian belief about one weight array, and the first ones about all arrays of a network."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from moment_jax import posterior as families
from moment_jax.covariance.fields import known_values
from moment_jax.nn.modules import Module
from moment_jax.posterior import GaussianPrior, Posterior
from moment_jax.xla import diagonal_matrix, diagonal_of, inlined

# The parameters of a spread by family: a `scale` of entries, roots of covariance matrices, or matrices
# whose QR decomposition has an orthogonal basis.
FAMILIES: dict[Any, tuple[str, ...]] = {
    families.Point: (),
    families.Factorized: ("scale",),
    families.FullNormal: ("entries",),
    families.OutputShared: ("scale",),
    families.KroneckerEigen: ("in_basis", "out_basis", "scale"),
}
OF_MATRICES = families.OutputShared, families.KroneckerEigen
Path = tuple[Any, ...]
Family = type[Posterior] | Callable[[Path], type[Posterior]]


class VariationalMean(nnx.Param):
    """The mean of a Gaussian belief about one array."""


class VariationalScale(nnx.Param):
    """The unconstrained parameter of a Gaussian belief's spread."""


class PriorScale(nnx.Param):
    """The log standard deviation of a learned prior (empirical Bayes)."""


class Belief(Module):
    """Variational parameters of one array, and its prior N(0, prior_scale^2).

    All parameters are unconstrained: standard deviations are the softplus of a parameter, covariances
    L L^T with L lower triangular and softplus on its diagonal.

    Args:
      mean: initial mean, of any shape.
      family: `Point`, `Factorized`, `OutputShared`, `KroneckerEigen` or `FullNormal` of
        `mj.posterior`; `OutputShared` and `KroneckerEigen` are for matrices only.
      scale: initial standard deviation of every entry.
      prior_scale: standard deviation of the prior; its initial value if learned.
      learn_prior: learn the prior's standard deviation by the same objective.
      shape: of the array, where the belief is about it as a matrix.

    Raises:
      ValueError: if a scale is not positive, or the family does not fit the array.
      TypeError: if `family` is none of these.
    """

    def __init__(
        self, mean: Array, *, family: type[Posterior] = families.Factorized,
        scale: Array | float = 0.01, prior_scale: float = 1.0, learn_prior: bool = False,
        shape: tuple[int, ...] | None = None,
    ) -> None:  # fmt: skip
        if family not in FAMILIES:
            names = ", ".join(known.__name__ for known in FAMILIES)
            raise TypeError(f"`Belief` needs a posterior family, one of {names}. Got {family!r}.")
        known = known_values(scale)
        if (known is not None and not known > 0) or prior_scale <= 0:
            raise ValueError(
                "`Belief` needs positive scale and prior_scale. Got "
                f"{scale} and {prior_scale}. For a certain array, use family=Point."
            )
        if mean.ndim != 2 and family in OF_MATRICES:
            raise ValueError(
                f"`Belief` needs a matrix for {family.__name__}. Got an array of shape "
                f"{tuple(mean.shape)}; for biases, gains and positions use Factorized."
            )
        self.shape = tuple(mean.shape) if shape is None else shape
        self.family: Any = family
        self.mean = VariationalMean(mean)
        raw = _initial_raw(family, tuple(mean.shape), jnp.asarray(scale, mean.dtype))
        self.raw = nnx.data({name: VariationalScale(x) for name, x in raw.items()})
        log_scale = jnp.asarray(math.log(prior_scale), mean.dtype)
        self.prior_scale = float(prior_scale)
        self.prior_log_scale = nnx.data(PriorScale(log_scale) if learn_prior else None)

    @classmethod
    def of(cls, posterior: Posterior, **prior: Any) -> "Belief":
        """The belief with this posterior; `prior` are the constructor's arguments of that name.

        Raises:
          ValueError: if the family is not supported, or a covariance is singular.
        """
        known = posterior.matrix
        raw = stored_form(known)
        belief = cls(known.mean, family=families.Point, shape=posterior.shape, **prior)
        belief.family = next(f for f in FAMILIES if isinstance(known, f))
        dtype = jnp.promote_types(known.mean.dtype, jnp.float32)
        belief.raw = nnx.data({k: VariationalScale(jnp.asarray(v, dtype)) for k, v in raw.items()})
        return belief

    @property
    def posterior(self) -> Posterior:
        """The belief as a `mj.posterior` family, of the array's shape."""
        mean, family = self.mean[...], self.family
        spread = [_spread(name, self.raw[name][...]) for name in FAMILIES[family]]
        if family is families.FullNormal:
            spread = [spread[0].reshape(*mean.shape, *mean.shape)]
        belief: Posterior = family(mean.reshape(self.shape), *spread)
        return belief

    def __repr__(self) -> str:
        """One line: the family, the array's type and shape, the prior."""
        prior = "learned" if self.prior_log_scale is not None else f"N(0, {self.prior_scale:g}^2)"
        dtype = self.mean[...].dtype
        return f"Belief({self.family.__name__}, {dtype}{list(self.shape)}, prior {prior})"

    __str__ = __repr__

    def scale_by(self, factor: Array | float) -> None:
        """Multiply all standard deviations by a positive number."""
        for name, raw in self.raw.items():
            if name in ("scale", "entries"):
                raw.set_value(_scaled(name, raw[...], factor))

    def fit_prior(self) -> None:
        """Set a learned prior scale to its optimum, the root mean square of the random weights."""
        if self.prior_log_scale is not None:
            known = self.posterior
            size = jnp.mean(known.mean**2 + known.marginal_variance())
            self.prior_log_scale.set_value(0.5 * jnp.log(size).astype(known.mean.dtype))

    @property
    def prior(self) -> GaussianPrior:
        """The prior of every entry."""
        if self.prior_log_scale is None:
            return GaussianPrior(0.0, self.prior_scale**2)
        return GaussianPrior(0.0, jnp.exp(2 * self.prior_log_scale[...]))

    def kl(self) -> Array:
        """KL(belief || prior), a scalar, in nats."""
        return self.posterior.kl(self.prior)


def stored_form(belief: Posterior) -> dict[str, Array]:
    """The unconstrained parameters of a belief: inverses of softplus and of L L^T."""
    if isinstance(belief, families.Point):
        return {}
    if isinstance(belief, families.FullNormal):
        return {"entries": _root(belief.cov.reshape(2 * (belief.mean.size,)))}
    basis = {}
    if isinstance(belief, families.KroneckerEigen) and belief.variance.shape == belief.shape:
        basis = {"in_basis": belief.in_basis, "out_basis": belief.out_basis}
    elif not isinstance(belief, families.Factorized | families.OutputShared):
        raise ValueError(
            f"A module needs {', '.join(known.__name__ for known in FAMILIES)} of its own shape. Got "
            f"{type(belief).__name__} of shape {belief.shape}."
        )
    return {**basis, "scale": _inverse_softplus(jnp.sqrt(belief.variance))}


def _root(cov: Array) -> Array:
    known = known_values(cov)
    try:  # what is known in double precision, for nearly singular ones
        wide = None if known is None else jnp.asarray(np.linalg.cholesky(known.astype(np.float64)))
    except np.linalg.LinAlgError as error:
        message = "A belief needs positive definite covariances. Got a singular one."
        raise ValueError(message) from error
    root = jnp.linalg.cholesky(cov) if wide is None else wide
    return jnp.tril(root, -1) + diagonal_matrix(_inverse_softplus(diagonal_of(root)))


@partial(inlined, static_argnums=0)
def _scaled(name: str, raw: Array, factor: Array | float) -> Array:
    """The parameter of a spread that is `factor` times as large."""

    def entry(x: Array) -> Array:
        return _inverse_softplus(factor * jax.nn.softplus(x))

    if name == "scale":
        return entry(raw)
    return factor * jnp.tril(raw, -1) + diagonal_matrix(entry(diagonal_of(raw)))


def matrix_shape(name: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """(in, out) of an array as a matrix: (D, 1) for a vector, a bias or a gain, else its best cut.

    That is the one with the smallest factors: (D, H K) for a query's kernel (D, H, K).
    """
    size = math.prod(shape)
    if name in ("bias", "scale") or max(shape, default=1) == size:
        return size, 1
    cuts = ((math.prod(shape[:i]), math.prod(shape[i:])) for i in range(len(shape)))
    return min(cuts, key=sum)


@inlined
def _inverse_softplus(x: Array) -> Array:
    """log(exp(x) - 1); -inf at zero, where softplus gives zero again."""
    return x + jnp.log(-jnp.expm1(-x))


@partial(inlined, static_argnums=(0, 1))
def _initial_raw(family: Any, shape: tuple[int, ...], scale: Array) -> dict[str, Array]:
    """Parameters of a standard deviation of `scale` for every entry."""
    raw, value = {}, _inverse_softplus(scale)
    for name in FAMILIES[family]:
        if name.endswith("basis"):
            raw[name] = jnp.eye(shape[name == "out_basis"], dtype=value.dtype)
        elif name == "scale":
            raw[name] = jnp.full(shape[family is families.OutputShared :], value)
        else:
            raw[name] = value * jnp.eye(math.prod(shape), dtype=value.dtype)
    return raw


@partial(inlined, static_argnums=0)
def _spread(name: str, raw: Array) -> Array:
    """Variances, an orthogonal basis, or the covariance L L^T."""
    if name == "scale":
        return jax.nn.softplus(raw) ** 2
    if name.endswith("basis"):
        return jnp.linalg.qr(raw)[0]
    factor = jnp.tril(raw, -1) + diagonal_matrix(jax.nn.softplus(diagonal_of(raw)))
    return factor @ factor.T


def begun(
    arrays: dict[Path, Array], family: Family, relative_scale: float, prior: dict[str, Any]
) -> dict[Path, Belief]:
    """The first belief about each array, its mean; `Factorized` of vectors."""
    if not 0 < relative_scale < np.inf:
        raise ValueError(f"`mj.Bayesian` needs relative_scale > 0. Got {relative_scale}.")
    found = {}
    for path, value in arrays.items():
        kind: Any = family if isinstance(family, type) else family(path)
        if kind not in FAMILIES:
            Belief(value, family=kind)  # raises
        shape = tuple(value.shape)
        matrix: tuple[int, ...] = matrix_shape(str(path[-1]), shape)
        if kind not in OF_MATRICES:
            matrix = shape
        elif matrix[1] == 1:
            if not isinstance(family, type):
                raise ValueError(
                    f"`family` needs to fit every array. Got {kind.__name__}, a family of "
                    f"matrices, for the vector {joined(path)}. Return Factorized for it."
                )
            kind, matrix = families.Factorized, shape
        scale = _first_scale(value, relative_scale)
        found[path] = Belief(value.reshape(matrix), family=kind, scale=scale, shape=shape, **prior)
    return found


@inlined
def _first_scale(weights: Array, relative_scale: float) -> Array:
    return relative_scale * jnp.maximum(jnp.sqrt(jnp.mean(jnp.square(weights))), 0.1)


_FROM = (
    "Put mj.posterior.Factorized(mean, variance) in the places of arrays in "
    "nnx.to_pure_dict(nnx.state(network, nnx.Param))."
)


def placed(beliefs: Any, known: dict[Path, Any], prior: dict[str, Any]) -> dict[Path, Any]:
    """Beliefs and arrays by path, of a tree of posteriors in the places and shapes of parameters."""
    tree = nnx.to_pure_dict(beliefs) if isinstance(beliefs, nnx.State) else beliefs
    found = {(): tree}
    if isinstance(tree, dict):
        found = nnx.traversals.flatten_mapping(tree, keep_empty_nodes=True)
    inner = {path[:i] for path in known for i in range(len(path))}
    empty = nnx.traversals.empty_node
    found = {
        path: {} if x is empty else x
        for path, x in found.items()
        if x is not None and not (x is empty and path in inner)
    }
    for path, x in found.items():
        mean = x.mean if isinstance(x, Posterior) else x
        wanted = tuple(known[path][...].shape) if path in known else None
        if wanted is None or getattr(mean, "shape", None) != wanted:
            places = ", ".join(f"{joined(p)} {tuple(v[...].shape)}" for p, v in known.items())
            came = f"{type(x).__name__} of shape {getattr(mean, 'shape', None)} at "
            came = f"{came if wanted else 'the key '}'{joined(path)}'"
            raise ValueError(
                "`mj.Bayesian` needs beliefs in the places and shapes of the network's parameters: "
                f"{places}. Got {came}. {_FROM}"
            )
    if not any(isinstance(x, Posterior) for x in found.values()):
        raise ValueError(
            f"`mj.Bayesian` needs a belief about one array at least. Got none. {_FROM}"
        )
    for path, x in found.items():
        try:
            of_x = Belief.of(x, **prior) if isinstance(x, Posterior) else jnp.asarray(x)
        except ValueError as error:
            raise ValueError(f"`mj.Bayesian`: {error} It is at {joined(path)}.") from error
        found[path] = of_x
    return found


def joined(path: Path) -> str:
    """For messages."""
    return "/".join(map(str, path))
