"""Laplace approximation: a belief about the weights of an ordinarily trained network."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

from moment_jax.inference import data as checks
from moment_jax.inference.curvature import Arrays, Curvature, Frame, by_path, check_network
from moment_jax.nn.bayesian import Bayesian
from moment_jax.nn.belief import joined, matrix_shape, priors, selected
from moment_jax.nn.modules import FLOATING, as_nnx
from moment_jax.nn.static import Static
from moment_jax.objectives import Categorical, Gaussian, HeteroscedasticGaussian
from moment_jax.posterior import Factorized, FullNormal, KroneckerEigen, Posterior
from moment_jax.progress import compiling

NUMBERS = 2**25  # of the Jacobian at once
LONGEST = 4096  # axis of a matrix that has Kronecker factors
LOG_RANGE = (-14.0, 18.0)  # of the prior precision by the evidence: 1e-6 to 7e7
PRECISIONS = np.logspace(-2, 6, 17)  # compared on held-out data
_need, _warn = (partial(fn, "laplace") for fn in (checks.need, checks.warn))


class LaplaceReceipt(NamedTuple):
    """The marginal likelihood of a Laplace approximation and what follows from it."""

    log_evidence: float  # nats, for the whole data set
    prior_precision: dict[str, float]  # by layer
    noise_variance: Any  # of a Gaussian likelihood, a number; (C,) where `laplace` estimated it
    effective_parameters: float  # number of weights that the data determine


def laplace(
    network: nnx.Module | linen.Module, likelihood: Any, data: tuple[Any, Any], *,
    held_out: tuple[Any, Any] | None = None, random: Any = nnx.Param, kind: str = "kfac",
    prior_precision: float | None = None, per_layer: bool = False, prior: Any = None,
    batch_size: int = 256, receipt: bool = False, progress: bool | None = None,
    output: Callable[[Any], Any] | None = None,
) -> Any:  # fmt: skip
    """A trained network with the belief N(weights, (GGN + prior precision)^-1) about its weights.

    GGN is the generalised Gauss-Newton matrix of -log p(targets | outputs), summed over the data, from
    the exact Jacobian of each example's outputs, so layers may be of any kind, shared or repeated. It
    costs a backward pass for each output, and "kfac" in out (in + out) products more. Weight arrays are
    taken as independent. A direction that the data say nothing about has the prior's variance,
    1 / prior_precision, and none has more. The model is `linearised`, since the approximation describes
    the linearised network and is too wide for the network itself.

    Pass `held_out` data if you have any. The evidence assumes a minimum of the loss with its prior: a
    network trained to fit, with more weights than data, gets far too small a precision and too wide a
    predictive distribution.

    Args:
      network: as in `mj.calibrate`, each of its outputs observed. It is not changed.
      likelihood: as in `mj.calibrate`; `mj.Gaussian()` to estimate the noise by the evidence, for each
        output in proportion to its residuals.
      data: inputs and targets, as `held_out` of `mj.calibrate`.
      held_out: likewise, but not trained on: selects from a grid from 1e-2 to 1e6, two per decade, the
        precision with the highest predictive log density of the linearised network.
      random: as in `mj.calibrate`.
      kind: "kfac" takes, for an array as a matrix (in, out), the eigenbases of the two partial traces of
        its GGN, and the GGN's diagonal there; vectors, biases and gains keep their whole covariance, and
        matrices with more than 4,096 rows or columns only variances. "diagonal": variances alone.
      prior_precision: of all weights; None for the highest evidence, or, with `held_out`, the highest
        held-out density.
      per_layer: one prior precision per layer instead of one for all.
      prior: as in `mj.Bayesian`, of which all variances are divided by the prior precision; None for
        N(0, 1). "kfac" takes one variance for each array, such as those of "network".
      batch_size: number of backward passes at once, at most; fewer for large networks.
      receipt: also return a `LaplaceReceipt`.
      progress: as in `mj.calibrate`.
      output: see `mj.Bayesian`.

    Returns:
      A linearised `mj.Bayesian`, whose `beliefs` are `KroneckerEigen`, `FullNormal` or `Factorized`.

    Raises:
      TypeError, ValueError: if an argument is invalid, the network in training mode, or its derivative
        not that of its values (`stop_gradient`). It warns of arrays that the outputs do not depend on,
        and of a precision at the edge of its range.

    Source: Daxberger et al., "Laplace redux" (2021); Immer et al., "Scalable marginal likelihood
    estimation for model selection in deep learning" (2021); George et al. as in `KroneckerEigen`.

    >>> import moment_jax as mj
    >>> network = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    >>> x = jax.random.normal(jax.random.key(0), (20, 2))
    >>> model = mj.laplace(network, mj.Gaussian(0.1), (x, x[:, :1]))
    >>> model.predict(x).sd.shape
    (20, 1)
    """
    _need(kind in ("kfac", "diagonal"), "a kind, kfac or diagonal", repr(kind))
    checks.likelihood("laplace", likelihood)
    rule = "either held_out, which chooses one prior precision, or per_layer or prior_precision"
    other = per_layer or prior_precision is not None
    _need(held_out is None or not other, rule, "both", "Leave one out.")
    checks.positive("laplace", prior_precision=prior_precision, batch_size=batch_size)
    plain = as_nnx(network, output)
    selected("laplace", plain, random)  # or raise
    split: Any = nnx.split(plain, nnx.All(FLOATING, random), ...)
    graph, *state = split
    frame, known = (*state, np.ones(1)), by_path(state[0])
    arrays = {path: x[...] for path, x in nnx.to_flat_state(nnx.state(plain, nnx.Param))}
    centre = {joined(path): x for path, x in priors("laplace", prior, 1.0, arrays).items()}
    inputs, targets, shape = checks.data("laplace", plain, likelihood, data)
    held = None
    if held_out is not None:
        held = checks.data("laplace", plain, likelihood, held_out, inputs)[:2]

    shapes = {path: matrix_shape(path.rpartition("/")[2], x.shape) for path, x in known.items()}
    rows = min(batch_size, max(1, NUMBERS // sum(x.size for x in known.values())))
    noiseless = Gaussian() if isinstance(likelihood, Gaussian) else likelihood
    of, size = tuple(shapes.items()), math.prod(shape)
    curvature = Curvature(Static(graph), noiseless, of, rows, size, progress)
    small = [path for path, sizes in shapes.items() if kind == "kfac" and max(sizes) <= LONGEST]
    widths = {path: np.asarray(centre[path].variance, np.float64) for path in known}
    for path in small:
        rule = "one prior variance for each array, or kind='diagonal'"
        _need(np.ptp(widths[path]) == 0, rule, f"several at {path}")
    check_network("laplace", split, inputs)
    parts = [*curvature.batches(curvature.outputs, frame, inputs, batch_size)]
    outputs = np.concatenate(parts)[: len(targets)].reshape(-1, *shape)
    _need(np.isfinite(outputs).all(), "a network with finite outputs", "NaN or infinity")
    units = np.ones(1)
    if likelihood == Gaussian():  # outputs may be in different ones
        residuals, columns = (x.reshape(-1, shape[-1]) for x in (targets - outputs, targets))
        least = 1e-8 * np.maximum(columns.var(axis=0), 1e-30)
        units = np.sqrt(np.maximum(np.mean(residuals**2, axis=0), least))
        outputs, targets, frame = outputs / units, targets / units, (*state, units)
        held = held and (held[0], held[1] / units)
    with compiling(f"the curvature of {type(network).__name__}"):
        bases, squares = curvature.spectrum(frame, inputs, small)
    silent = ", ".join(path for path in shapes if not squares[path].any())
    if silent:
        _warn(f"the outputs do not depend on {silent}, which keep the prior.")
    # In units of the prior's standard deviations, all that is left of the prior is its precision.
    offsets = {p: np.asarray(x, np.float64) - np.asarray(centre[p].mean) for p, x in known.items()}
    offsets = {p: x / np.sqrt(widths[p]) for p, x in offsets.items()}
    widths = {p: np.broadcast_to(x, known[p].shape).reshape(shapes[p]) for p, x in widths.items()}
    squares = {p: x * widths[p] for p, x in squares.items()}

    def at(given: float | None) -> Any:
        found = posterior(squares, offsets, likelihood, outputs, targets, per_layer, given)
        return {p: x * widths[p] for p, x in found[0].items()}, *found[1:]

    chosen = prior_precision if held is None else _best_on(held, at, curvature, frame, bases)
    variance, _, found = at(chosen)
    low, high = np.exp(LOG_RANGE) if held is None else (PRECISIONS[0], PRECISIONS[-1])
    odd = [x for x in found.prior_precision.values() if not 1.01 * low < x < high / 1.01]
    if odd and prior_precision is None:
        what, edge = "held-out data" if held else "the evidence", f"{low:.3g} to {high:.3g}"
        what += f" chose the prior precision {odd[0]:.3g}, at the edge of the range from {edge}"
        _warn(f"{what}. Look at the network's fit, or give prior_precision.")
    beliefs = {path: _belief(x, bases[path], variance[path]) for path, x in known.items()}
    flat = {path: beliefs.get(joined(path), x) for path, x in arrays.items()}
    tree = nnx.traversals.unflatten_mapping(flat)
    if likelihood == Gaussian():
        evidence = found.log_evidence - float(targets.size * np.mean(np.log(units)))
        noise = found.noise_variance * units**2
        found = found._replace(log_evidence=evidence, noise_variance=noise)
    known_noise = Gaussian(found.noise_variance) if noiseless == Gaussian() else likelihood
    model = Bayesian(plain, known_noise, beliefs=tree, linearised=True)
    return (model, found) if receipt else model


def _best_on(held: Any, at: Any, curvature: Curvature, frame: Frame, bases: Arrays) -> float:
    """The prior precision of the grid with the highest predictive density of held-out data."""
    variances, noises, _ = zip(*map(at, PRECISIONS), strict=True)
    stacked = jax.tree.map(lambda *x: jnp.asarray(np.stack(x)), *variances)
    more = bases, stacked, jnp.asarray(noises)
    densities = curvature.total(curvature.log_densities, frame, held, *more)
    return float(PRECISIONS[np.argmax(np.nan_to_num(densities, nan=-np.inf))])


def posterior(
    squares: Arrays, offsets: Arrays, likelihood: Any, outputs: np.ndarray, targets: np.ndarray,
    per_layer: bool, given: float | None,
) -> tuple[Arrays, float, LaplaceReceipt]:  # fmt: skip
    """Variances of each array in its bases, the noise variance, and the receipt.

    A prior precision d that is not `given` maximises the evidence (MacKay, "Bayesian interpolation",
    Eq. 4): the only root of sum l / (l + d) = d |w - prior mean|^2, as the left side falls in d. Here l,
    `squares`, are the eigenvalues of the summed curvature at noise variance 1, and `offsets` are w -
    prior mean, by path. The likelihood's noise variance is None where it is estimated too.
    """
    layers = {path: path.rpartition("/")[0] or "model" for path in offsets}
    names = list(dict.fromkeys(layers.values()))
    group = {path: names.index(layer) * per_layer for path, layer in layers.items()}
    values = np.concatenate([squares[path].ravel() for path in group])
    of = np.concatenate([np.full(squares[path].size, i) for path, i in group.items()])
    square = np.bincount([*group.values()], [np.sum(x**2) for x in offsets.values()])

    def determined(precision: np.ndarray, noise: float) -> np.ndarray:
        """The number of weights that the data determine, in each group."""
        return np.bincount(of, values / (values + noise * precision[of]))

    def precisions(noise: float) -> np.ndarray:
        if given is not None:
            return np.full(square.shape, float(given))
        low, high = (np.full(square.shape, edge) for edge in LOG_RANGE)
        for _ in range(60):
            middle = (low + high) / 2
            rising = determined(np.exp(middle), noise) > np.exp(middle) * square
            low, high = np.where(rising, middle, low), np.where(rising, high, middle)
        return np.exp((low + high) / 2)

    gaussian, size = isinstance(likelihood, Gaussian), outputs.size
    noise = likelihood.noise_variance if gaussian else 1.0
    if noise is None:
        residual = float(np.sum((targets - outputs) ** 2))
        tiny = 1e-8 * max(float(np.var(targets)), 1e-30)
        noise = max(residual / size, tiny)
        for _ in range(50):
            # MacKay's update; the weights use up at most half of the data's degrees of freedom.
            used = min(np.sum(determined(precisions(noise), noise)), size / 2)
            new = max(residual / (size - used), tiny)
            if abs(new / noise - 1) < 1e-4:
                break
            noise = new
    noise, chosen = float(noise), precisions(noise)
    variances = {path: 1 / (squares[path] / noise + chosen[i]) for path, i in group.items()}
    evidence = log_likelihood(likelihood, outputs, targets, noise)
    evidence -= 0.5 * float(chosen @ square + np.sum(np.log1p(values / (noise * chosen[of]))))
    known = {name: float(chosen[i * per_layer]) for i, name in enumerate(names)}
    number = float(np.sum(determined(chosen, noise)))
    return variances, noise, LaplaceReceipt(evidence, known, noise if gaussian else None, number)


def _belief(mean: Any, basis: Any, variance: np.ndarray) -> Posterior:
    """The belief with these variances of an array's entries, or of its coordinates in bases."""
    shape, dtype = mean.shape, jnp.promote_types(mean.dtype, jnp.float32)
    if basis is None:
        return Factorized(mean, jnp.asarray(variance.reshape(shape), dtype))
    u, w = basis
    if variance.shape[1] == 1:
        # In double precision, where it has a Cholesky factor.
        u, kept = np.asarray(u, np.float64), np.maximum(variance, 1e-12 * variance.max())
        cov: Any = ((u * kept.T) @ u.T).reshape(*shape, *shape)
        return FullNormal(mean, cov)
    return KroneckerEigen(mean, u, w, jnp.asarray(variance, dtype))


def log_likelihood(likelihood: Any, outputs: Any, targets: Any, noise: float) -> float:
    """The log likelihood of the whole data set, in nats."""
    if isinstance(likelihood, Gaussian):
        squares = np.sum((targets - outputs) ** 2) / noise
        return float(-0.5 * (squares + outputs.size * math.log(2 * math.pi * noise)))
    if isinstance(likelihood, HeteroscedasticGaussian):
        mean, log_noise = np.split(outputs, 2, axis=-1)
        squares = (targets - mean) ** 2 * np.exp(-log_noise)
        return float(-0.5 * np.sum(squares + log_noise + math.log(2 * math.pi)))
    if isinstance(likelihood, Categorical):
        logs = outputs - np.logaddexp.reduce(outputs, axis=-1, keepdims=True)
        return float(np.sum(np.take_along_axis(logs, targets[..., None].astype(int), axis=-1)))
    return float(np.sum(targets * outputs - np.logaddexp(0, outputs)))
