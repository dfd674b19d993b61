"""A Gaussian belief about one weight array, and the first ones about all arrays of a network."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from moment_jax import posterior as families
from moment_jax.covariance.fields import known_values, need
from moment_jax.nn.modules import FLOATING, Module
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
NAMES = ", ".join(family.__name__ for family in FAMILIES)
OF_MATRICES = families.OutputShared, families.KroneckerEigen
ARRAYS = jax.Array, np.ndarray
Path = tuple[Any, ...]


class VariationalMean(nnx.Param):
    """The mean of a Gaussian belief about one array."""


class VariationalScale(nnx.Param):
    """The unconstrained parameter of a Gaussian belief's spread."""


class PriorScale(nnx.Param):
    """The log of a factor of the prior's standard deviations, which is learned (empirical Bayes)."""


class Belief(Module):
    """Variational parameters of one array, and its prior; N(0, 1) until `set_prior` gives another.

    All parameters are unconstrained: standard deviations are the softplus of a parameter, covariances
    L L^T with L lower triangular and softplus on its diagonal.

    Args:
      posterior: the first one, of a family of `mj.posterior`, or a ValueError is raised; not singular.
    """

    def __init__(self, posterior: Posterior) -> None:
        self.hold(posterior)
        self.set_prior(GaussianPrior())

    def hold(self, posterior: Posterior) -> None:
        """Take another posterior."""
        known = posterior.matrix
        wide = jnp.promote_types(known.mean.dtype, jnp.float32)
        raw = stored_form(known).items()
        kept = {k: x if x.dtype == known.mean.dtype else x.astype(wide) for k, x in raw}
        self.shape, self.mean = posterior.shape, VariationalMean(known.mean)
        self.family: Any = next(f for f in FAMILIES if isinstance(known, f))
        self.raw = nnx.data({name: VariationalScale(x) for name, x in kept.items()})

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
        mean, sd = (known_values(x[...]) for x in (self.prior_mean, self.prior_sd))
        prior = "of its own for each entry"
        if mean is not None and sd is not None and mean.size == sd.size == 1:
            prior = f"N({mean.item():.3g}, {sd.item():.3g}^2)"
        learned = "" if self.prior_log_scale is None else ", its scale learned"
        dtype = self.mean[...].dtype
        return f"Belief({self.family.__name__}, {dtype}{list(self.shape)}, prior {prior}{learned})"

    __str__ = __repr__

    def scale_by(self, factor: Array | float) -> None:
        """Multiply all standard deviations by a positive number."""
        for name, raw in self.raw.items():
            if name in ("scale", "entries"):
                raw.set_value(_scaled(name, raw[...], factor))

    def set_prior(self, prior: GaussianPrior, learn: bool = False) -> None:
        """Take this prior; with `learn`, a factor of its standard deviations is learned."""
        dtype = self.mean[...].dtype
        self.prior_mean = nnx.Variable(jnp.asarray(prior.mean, dtype))
        self.prior_sd = nnx.Variable(jnp.sqrt(jnp.asarray(prior.variance, dtype)))
        self.prior_log_scale = nnx.data(PriorScale(jnp.zeros((), dtype)) if learn else None)

    def fit_prior(self) -> None:
        """Set a learned factor of the prior to its optimum, by the spread of the random weights."""
        if self.prior_log_scale is not None:
            known, mean, sd = self.posterior, self.prior_mean[...], self.prior_sd[...]
            squares = ((known.mean - mean) ** 2 + known.marginal_variance()) / sd**2
            self.prior_log_scale.set_value(0.5 * jnp.log(jnp.mean(squares)).astype(sd.dtype))

    @property
    def prior(self) -> GaussianPrior:
        """The prior of the entries."""
        sd = self.prior_sd[...]
        if self.prior_log_scale is not None:
            sd = sd * jnp.exp(self.prior_log_scale[...])
        return GaussianPrior(self.prior_mean[...], sd**2)


def stored_form(belief: Any) -> dict[str, Array]:
    """The unconstrained parameters of a belief: inverses of softplus and of L L^T."""
    if isinstance(belief, families.Point):
        return {}
    if isinstance(belief, families.FullNormal):
        return {"entries": _root(belief.cov.reshape(2 * (belief.mean.size,)))}
    rotated = isinstance(belief, families.KroneckerEigen) and belief.variance.shape == belief.shape
    right = rotated or isinstance(belief, families.Factorized | families.OutputShared)
    came = f"{type(belief).__name__} of shape {belief.shape}"
    need("mj.nn.Belief", right, f"{NAMES} of its own shape", came)
    basis = {"in_basis": belief.in_basis, "out_basis": belief.out_basis} if rotated else {}
    return {**basis, "scale": _inverse_softplus(jnp.sqrt(belief.variance))}


def _root(cov: Array) -> Array:
    known = known_values(cov)
    try:  # what is known in double precision, for nearly singular ones
        wide = None if known is None else jnp.asarray(np.linalg.cholesky(known.astype(np.float64)))
    except np.linalg.LinAlgError as error:
        message = "`mj.nn.Belief` needs positive definite covariances. Got a singular one."
        raise ValueError(message) from error
    root = jnp.linalg.cholesky(cov) if wide is None else wide
    return jnp.tril(root, -1) + diagonal_matrix(_inverse_softplus(diagonal_of(root)))


@partial(inlined, static_argnums=0)
def _scaled(name: str, raw: Array, factor: Array | float) -> Array:
    """The parameter of a spread that is `factor` times as large."""
    sds = jax.nn.softplus(raw if name == "scale" else diagonal_of(raw))
    scaled = _inverse_softplus(factor * sds)
    return scaled if name == "scale" else factor * jnp.tril(raw, -1) + diagonal_matrix(scaled)


def matrix_shape(name: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """(in, out) as a matrix: (D, 1) of a vector, a bias or a gain, else the cut with least factors."""
    size = math.prod(shape)
    if name in ("bias", "scale") or max(shape, default=1) == size:
        return size, 1
    # A query's kernel (D, H, K) is (D, H K).
    cuts = ((math.prod(shape[:i]), math.prod(shape[i:])) for i in range(len(shape)))
    return min(cuts, key=sum)


@inlined
def _inverse_softplus(x: Array) -> Array:
    """log(exp(x) - 1); -inf at zero, where softplus gives zero again."""
    return x + jnp.log(-jnp.expm1(-x))


@partial(inlined, static_argnums=0)
def _spread(name: str, raw: Array) -> Array:
    """Variances, an orthogonal basis, or the covariance L L^T."""
    if name == "scale":
        return jax.nn.softplus(raw) ** 2
    if name.endswith("basis"):
        return jnp.linalg.qr(raw)[0]
    factor = jnp.tril(raw, -1) + diagonal_matrix(jax.nn.softplus(diagonal_of(raw)))
    return factor @ factor.T


def selected(call: str, network: nnx.Module, random: Any) -> dict[Path, Array]:
    """The real arrays that an NNX filter selects, by path; raises if there is none."""
    params = dict(nnx.to_flat_state(nnx.state(network, nnx.Param)))
    chosen = nnx.to_flat_state(nnx.state(network, nnx.All(FLOATING, random)))
    came, mend = ", ".join(map(joined, params)), "Give a filter such as nnx.PathContains('head')."
    need(call, chosen, "weights that `random` selects", f"none of {came}", mend)
    return {path: x[...] for path, x in chosen}


def begun(
    arrays: dict[Path, Array], family: type[Posterior], relative_scale: float
) -> dict[Path, Belief]:
    """The first belief about each array, its mean; `Factorized` of vectors to families of matrices."""
    need("mj.Bayesian", 0 < relative_scale < np.inf, "relative_scale > 0", relative_scale)
    rule = f"a posterior family, one of {NAMES}"
    need("family", family in FAMILIES, rule, repr(family), error=TypeError)
    found = {}
    for path, value in arrays.items():
        matrix = matrix_shape(str(path[-1]), tuple(value.shape))
        vector = family in OF_MATRICES and matrix[1] == 1
        kind = families.Factorized if vector else family
        found[path] = Belief(_first(kind, matrix, value, relative_scale))
    return found


@partial(inlined, static_argnums=(0, 1))
def _first(kind: Any, matrix: tuple[int, int], mean: Array, relative_scale: float) -> Posterior:
    """The belief of a family with this mean and one standard deviation of all entries."""
    variance = jnp.square(relative_scale * size_of(mean)).astype(mean.dtype)
    if kind is families.Point:
        return families.Point(mean)
    if kind is families.FullNormal:
        cov = variance * jnp.eye(mean.size, dtype=mean.dtype)
        return families.FullNormal(mean, cov.reshape(2 * mean.shape))
    if kind is families.OutputShared:
        return families.OutputShared(mean, jnp.full(matrix[1], variance))
    if kind is families.KroneckerEigen:
        left, right = (jnp.eye(size, dtype=mean.dtype) for size in matrix)
        return families.KroneckerEigen(mean, left, right, jnp.full(matrix, variance))
    return families.Factorized(mean, jnp.full_like(mean, variance))


@inlined
def size_of(weights: Array) -> Array:
    """The root mean square of an array, which counts as at least .1."""
    return jnp.maximum(jnp.sqrt(jnp.mean(jnp.square(weights))), 0.1)


def placed(beliefs: Any, arrays: dict[Path, Array]) -> dict[Path, Any]:
    """Beliefs and arrays by path, of a tree of posteriors in the places and shapes of parameters."""
    call, example = "mj.Bayesian(beliefs=...)", "mj.posterior.Factorized(mean, variance)"
    found = in_places(call, beliefs, arrays, "beliefs", example, (Posterior, *ARRAYS))
    right = any(isinstance(x, Posterior) for x in found.values())
    mend = f"Put {example} in its place."
    need(call, right, "a belief about one array at least", "none", mend)
    for path, x in found.items():
        try:
            found[path] = Belief(x) if isinstance(x, Posterior) else jnp.asarray(x)
        except ValueError as error:
            raise ValueError(f"`mj.Bayesian`: {error} It is at {joined(path)}.") from error
    return found


def in_places(
    call: str, tree: Any, arrays: dict[Path, Array], what: str, example: str, kinds: Any
) -> dict[Path, Any]:
    """What stands in the places of arrays in a tree, by path; raises unless places and shapes fit."""
    tree = nnx.to_pure_dict(tree) if isinstance(tree, nnx.State) else tree
    found = {(): tree}
    if isinstance(tree, dict):
        found = nnx.traversals.flatten_mapping(tree, keep_empty_nodes=True)
    inner = {path[:i] for path in arrays for i in range(len(path))}
    empty = nnx.traversals.empty_node
    skipped = {path for path, x in found.items() if x is None or (x is empty and path in inner)}
    found = {p: {} if x is empty else x for p, x in found.items() if p not in skipped}
    places = ", ".join(f"{joined(path)} {tuple(x.shape)}" for path, x in arrays.items())
    rule = f"{what} in the places and shapes of the network's parameters: {places}"
    of = "nnx.to_pure_dict(nnx.state(network, nnx.Param))"
    mend = f"Put {example} in the places of arrays in {of}."
    for path, x in found.items():
        wanted = tuple(arrays[path].shape) if path in arrays else None
        shape = getattr(x, "shape", None)
        if isinstance(x, GaussianPrior):  # broadcasts
            shapes = map(np.shape, (x.mean, x.variance))
            shape = next((s for s in shapes if not _fits(s, wanted)), wanted)
        came = f"{type(x).__name__} of shape {shape} at " if wanted else "the key "
        right = wanted is not None and shape == wanted and isinstance(x, kinds)
        need(call, right, rule, f"{came}'{joined(path)}'", mend)
    return found


def _fits(shape: tuple[int, ...], to: tuple[int, ...] | None) -> bool:
    """Whether an array broadcasts to this shape."""
    pairs = zip(shape[::-1], (to or ())[::-1], strict=False)
    return len(shape) <= len(to or ()) and all(a in (1, b) for a, b in pairs)


def priors(
    call: str, prior: Any, scale: float | None, arrays: dict[Path, Array]
) -> dict[Path, GaussianPrior]:
    """Means and variances of each array's prior, whatever form they came in: see `mj.Bayesian`.

    With a scale of None, of those alone that a tree names.
    """
    named, scale = scale is None, 1.0 if scale is None else scale
    need(call, 0 < scale < np.inf, "prior_scale > 0", scale)
    if isinstance(prior, str) and prior == "network":
        return {p: GaussianPrior(x, (scale * size_of(x)) ** 2) for p, x in arrays.items()}
    tree = prior.as_prior() if hasattr(prior, "as_prior") else prior
    kinds = GaussianPrior, Posterior
    if not isinstance(tree, dict | nnx.State | Posterior | GaussianPrior | None):
        rule = 'prior="network", a tree of GaussianPrior or Factorized, or a mj.Bayesian'
        mend = "For N(0, s^2) of every weight, give prior_scale=s."
        raise TypeError(f"`{call}` needs {rule}. Got {prior!r}. {mend}")
    given = in_places(call, tree or {}, arrays, "priors", "a GaussianPrior", kinds)
    for path, x in given.items():
        if isinstance(x, Posterior):
            given[path] = x = GaussianPrior(x.mean, x.marginal_variance())
        _check_positive(call, "prior variances", path, x.variance)
    return given if named else dict.fromkeys(arrays, GaussianPrior(0.0, scale**2)) | given


def _check_positive(call: str, what: str, path: Path, values: Any) -> None:
    known = known_values(values)
    if known is not None and not ((known > 0) & (known < np.inf)).all():
        rule, came = f"positive {what}", f"{known.min()} at '{joined(path)}'"
        mend = "Leave it out, or make its weights certain by random=."
        raise ValueError(f"`{call}` needs {rule}. Got {came}. {mend}")


def changed(
    weights: dict[Path, Any], where: Any, means: Any, sds: Any, relative: bool, prior: Any, scale: Any
) -> None:  # fmt: skip
    """Change beliefs and certain weights, by path, in place: see `Bayesian.with_beliefs`."""
    call, selects = "with_beliefs", nnx.filterlib.to_predicate(where)
    means_of = {p: x.mean if isinstance(x, Belief) else x for p, x in weights.items()}
    arrays = {p: x[...].reshape(getattr(weights[p], "shape", x.shape)) for p, x in means_of.items()}
    for path, x in in_places(call, means or {}, arrays, "means", "an array", ARRAYS).items():
        arrays[path] = jnp.asarray(x, arrays[path].dtype)
        means_of[path].set_value(arrays[path].reshape(means_of[path].shape))
    random = {path: x for path, x in weights.items() if isinstance(x, Belief)}
    chosen = {path: arrays[path] for path, x in random.items() if selects(path, x.mean)}
    came = f"none of {', '.join(map(joined, random))}"
    need(call, chosen, "random arrays that `where` selects", came)
    if isinstance(sds, dict | nnx.State):
        given = in_places(call, sds, chosen, "standard deviations", "an array", ARRAYS)
    else:
        given = {} if sds is None else dict.fromkeys(chosen, sds)
    for path, sd in given.items():
        _check_positive(call, "standard deviations", path, sd)
        sd = sd * size_of(chosen[path]) if relative else sd
        variance = jnp.broadcast_to(jnp.square(sd), chosen[path].shape).astype(chosen[path].dtype)
        random[path].hold(families.Factorized(chosen[path], variance))
    for path, x in priors(call, prior, scale, arrays).items():
        if path in chosen:
            random[path].set_prior(x, learn=random[path].prior_log_scale is not None)


def joined(path: Path) -> str:
    """For messages."""
    return "/".join(map(str, path))
