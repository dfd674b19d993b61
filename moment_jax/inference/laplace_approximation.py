"""Laplace approximation: a belief about the weights of an ordinarily trained network."""

import functools
import math
import warnings
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moment_jax.inference.curvature import Curvature, by_path
from moment_jax.inference.data import checked_likelihood, examples
from moment_jax.nn.any_model import check_inference_mode
from moment_jax.nn.base import BayesianModule
from moment_jax.objectives import Bernoulli, Categorical, Gaussian
from moment_jax.posterior import Factorized, FullNormal, KroneckerEigen, Posterior
from moment_jax.posterior.reshaped import Reshaped

NUMBERS = 2**25  # of the Jacobian at once
LONGEST = 4096  # axis of a matrix that has Kronecker factors
LOG_RANGE = (-14.0, 18.0)  # of the prior precision by the evidence: 1e-6 to 7e7
PRECISIONS = np.logspace(-2, 6, 17)  # compared on held-out data


class LaplaceReceipt(NamedTuple):
    """The marginal likelihood of a Laplace approximation and what follows from it."""

    log_evidence: float  # nats, for the whole data set
    prior_precision: dict[str, float]  # by layer
    noise_variance: float | None  # of a Gaussian likelihood
    effective_parameters: float  # number of weights that the data determine


def laplace(
    model: nnx.Module,
    likelihood: Any,
    data: tuple[Any, Any],
    *,
    kind: str = "kfac",
    wrt: Any = nnx.Param,
    prior_precision: float | None = None,
    per_layer: bool = False,
    prior_mean: Any = None,
    held_out: tuple[Any, Any] | None = None,
    batch_size: int = 256,
    receipt: bool = False,
) -> Any:
    """A belief about the weights of a trained model: N(weights, (GGN + prior precision)^-1).

    GGN is the generalised Gauss-Newton matrix of -log p(targets | outputs), summed over the data, from
    the exact Jacobian of each example's outputs, so layers may be of any kind, shared or repeated. It
    costs a backward pass for each output, and "kfac" in out (in + out) products more. Weight arrays are
    taken as independent. A direction that the data say nothing about has the prior's variance,
    1 / prior_precision, and none has more. Predict with `mj.linearised` or
    `mj.bayesian(model, belief, linearised=True)`: the approximation describes the linearised network
    and is too wide for the network itself (`mj.propagate`).

    Pass `held_out` data if you have any. The evidence assumes a minimum of the loss with its prior, and
    data that determine most weights. A network trained to fit, with more weights than data, gets far too
    small a precision and too wide a predictive distribution; so it does with the exact GGN.

    Args:
      model: a Flax NNX module in inference mode (`model.eval()`) that returns outputs (N, ..., C) for a
        batch, each of them observed; it is not changed.
      likelihood: `mj.objectives.Categorical()`, `Bernoulli()` or `Gaussian(noise_variance)`, a number;
        the type `Gaussian` to estimate the noise by the evidence.
      data: inputs, an array (N, ...) or a tuple of them, and targets: (N, ...) integers for
        Categorical, else the outputs' shape; from 0 to 1 for Bernoulli.
      kind: "kfac" takes, for an array as a matrix (in, out), the eigenbases of the two partial traces of
        its GGN, and the GGN's diagonal there; vectors, biases and gains keep their whole covariance, and
        matrices with more than 4,096 rows or columns only variances. "diagonal": variances alone.
      wrt: an NNX filter of the random parameters, such as `nnx.PathContains("head")`; the others are
        certain.
      prior_precision: of all weights; None for the highest evidence, or, with `held_out`, the highest
        held-out density.
      per_layer: one prior precision per layer instead of one for all.
      prior_mean: centre of the prior, a tree of parameters; zero for None and what it omits.
      held_out: as `data`, but not trained on: selects from a grid from 1e-2 to 1e6, two per decade, the
        precision with the highest predictive log density of the linearised network.
      batch_size: number of backward passes at once, at most; fewer for large models.
      receipt: also return a `LaplaceReceipt`: log evidence, prior precisions, noise variance.

    Returns:
      A tree as `nnx.to_pure_dict(nnx.state(model, nnx.Param))`, with a belief in place of each random
      array: `KroneckerEigen` (as `Reshaped`, if it has more axes), `FullNormal` or `Factorized`.

    Raises:
      TypeError, ValueError: if an argument is invalid or the model in training mode. It warns of arrays
        that the outputs do not depend on, and if the chosen precision is at the edge of its range.

    Source: Daxberger et al., "Laplace redux" (2021); Immer et al., "Scalable marginal likelihood
    estimation for model selection in deep learning" (2021); George et al., "Fast approximate natural
    gradient descent in a Kronecker-factored eigenbasis" (2018).

    >>> import moment_jax as mj
    >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    >>> x = jax.random.normal(jax.random.key(0), (20, 2))
    >>> belief = mj.laplace(model, mj.objectives.Gaussian(0.1), (x, x[:, :1]))
    >>> mean, cov = mj.bayesian(model, belief, linearised=True)(x)
    >>> mean.shape, jax.vmap(lambda c: c.variance())(cov).shape
    ((20, 1), (20, 1, 1))
    """
    if kind not in ("kfac", "diagonal"):
        raise ValueError(f"`laplace` needs a kind, kfac or diagonal. Got {kind!r}.")
    name, noise = checked_likelihood("laplace", likelihood, (Categorical, Bernoulli, Gaussian))
    noise = noise if name is Gaussian else 1.0
    if isinstance(model, BayesianModule) or not isinstance(model, nnx.Module):
        raise TypeError(
            "`laplace` needs a Flax NNX module of plain weights. Got "
            f"{type(model).__name__}. Of a module of mj.nn, take module.mean_network()."
        )
    if held_out is not None and (per_layer or prior_precision is not None):
        raise ValueError(
            "`laplace(held_out=...)` chooses one prior precision. Got per_layer or prior_precision too; "
            "leave them out."
        )
    for setting, value in (("prior_precision", prior_precision), ("batch_size", batch_size)):
        number = np.asarray(1 if value is None else value)
        if number.ndim or number.dtype.kind not in "iuf" or not 0 < number < math.inf:
            raise ValueError(f"`laplace` needs a positive number as {setting}. Got {value!r}.")

    def is_floating(_: Any, variable: Any) -> bool:
        return jnp.issubdtype(getattr(variable, "dtype", int), jnp.floating) and variable.size > 0

    split: Any = nnx.split(model, nnx.All(nnx.Param, wrt, is_floating), ...)
    graph, *state = split
    frame, known = tuple(state), by_path(state[0])
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    if not known:
        raise ValueError(
            "`laplace` needs parameters that `wrt` selects. Got none of "
            f"{', '.join(by_path(params))}. Give a filter such as nnx.PathContains('head')."
        )
    centre = _checked_centre(prior_mean, by_path(params))
    shapes = {path: _matrix_shape(path, x.shape) for path, x in known.items()}
    rows = min(batch_size, max(1, NUMBERS // sum(x.size for x in known.values())))
    curvature = Curvature(graph, name, tuple(shapes.items()), rows)

    inputs, targets, shape = _checked_data(curvature, frame, data)
    count = math.prod(shape)

    def total(fn: Any, data: Any, *more: Any) -> Any:
        parts = curvature.batches(fn, frame, data, max(1, rows // count), *more)
        return functools.reduce(functools.partial(jax.tree.map, np.add), parts)

    parts = [*curvature.batches(curvature.outputs, frame, inputs, batch_size)]
    outputs = np.concatenate(parts)[: len(targets)].reshape(-1, *shape)
    if not np.isfinite(outputs).all():
        raise ValueError("`laplace` needs a model with finite outputs. Got NaN or infinity.")
    small = {path for path, sizes in shapes.items() if kind == "kfac" and max(sizes) <= LONGEST}
    bases: dict[str, Any] = {path: () if path in small else None for path in shapes}
    squares = total(curvature.sums, inputs, bases)
    for path in small:
        dtype = jnp.promote_types(known[path].dtype, jnp.float32)
        bases[path] = tuple(jnp.asarray(np.linalg.eigh(x)[1], dtype) for x in squares[path])
    if small:
        squares |= total(curvature.sums, inputs, {path: bases[path] for path in small})
    silent = [path for path in shapes if not squares[path].any()]
    if silent:
        names = ", ".join(silent)
        message = f"`laplace`: the outputs do not depend on {names}, which keep the prior."
        warnings.warn(message, stacklevel=2)

    layers: dict[str, list[str]] = {}
    for path in known:
        layers.setdefault(path.rpartition("/")[0] or "model", []).append(path)

    def weights(path: str) -> Weights:
        offset = np.asarray(known[path], np.float64) - centre.get(path, 0.0)
        return Weights(squares[path].ravel(), float(np.sum(offset**2)))

    groups = [joined(map(weights, paths)) for paths in layers.values()]
    groups = groups if per_layer else [joined(groups)]

    def at(given: float | None) -> tuple[dict[str, np.ndarray], float, LaplaceReceipt]:
        """Variances of each array in its bases, the noise variance, and the receipt."""
        precisions, variance = optimised(groups, given, noise, outputs, targets)
        pairs = list(zip(groups, precisions, strict=True))
        of = dict(zip(layers, precisions * (len(layers) // len(groups)), strict=True))
        own = {path: of[layer] for layer, paths in layers.items() for path in paths}
        variances = {path: 1 / (squares[path] / variance + own[path]) for path in own}
        evidence = _log_likelihood(name, outputs, targets, variance)
        found = LaplaceReceipt(
            evidence + sum(group.log_evidence(precision, variance) for group, precision in pairs),
            of,
            variance if name is Gaussian else None,
            sum(group.effective_number(precision, variance) for group, precision in pairs),
        )
        return variances, variance, found

    edges, why = tuple(np.exp(LOG_RANGE)), "the evidence"
    if held_out is not None:
        given, wanted, _ = _checked_data(curvature, frame, held_out)
        variances, noises, _ = zip(*map(at, PRECISIONS), strict=True)
        stacked = jax.tree.map(lambda *x: jnp.asarray(np.stack(x)), *variances)
        more = bases, stacked, jnp.asarray(noises)
        densities = total(curvature.log_densities, (given, wanted), *more)
        best = np.argmax(np.nan_to_num(densities, nan=-np.inf))
        edges, why = (PRECISIONS[0], PRECISIONS[-1]), "held-out data"
        chosen = float(PRECISIONS[best])
    variances, _, found = at(prior_precision if held_out is None else chosen)
    odd = [x for x in found.prior_precision.values() if not 1.01 * edges[0] < x < edges[1] / 1.01]
    if odd and prior_precision is None:
        warnings.warn(
            f"`laplace`: {why} chose the prior precision {odd[0]:.3g}, at the edge of the range from "
            f"{edges[0]:.3g} to {edges[1]:.3g}. Look at the network's fit, or give prior_precision.",
            stacklevel=2,
        )
    beliefs = {path: _belief(x, bases[path], variances[path]) for path, x in known.items()}
    flat = nnx.traversals.flatten_mapping(params).items()
    whole = {path: beliefs.get("/".join(map(str, path)), x) for path, x in flat}
    tree = nnx.traversals.unflatten_mapping(whole)
    return (tree, found) if receipt else tree


class Weights(NamedTuple):
    """Arrays of weights with one prior precision d."""

    eigenvalues: np.ndarray  # l, of the summed curvature at noise variance 1; one for each weight
    square: float  # |w - prior mean|^2

    def optimal_precision(self, noise: float) -> float:
        """The prior precision that maximises the evidence (MacKay, "Bayesian interpolation", Eq. 4).

        The only root of sum l / (l + d) = d |w - prior mean|^2: the left side falls, the right rises.
        """
        low, high = LOG_RANGE
        for _ in range(60):
            middle = (low + high) / 2
            precision = np.exp(middle)
            rising = self.effective_number(precision, noise) > precision * self.square
            low, high = (middle, high) if rising else (low, middle)
        return float(np.exp((low + high) / 2))

    def effective_number(self, precision: float, noise: float) -> float:
        """Sum of l / (l + d): the number of weights that the data determine."""
        return float(np.sum(self.eigenvalues / (self.eigenvalues + noise * precision)))

    def log_evidence(self, precision: float, noise: float) -> float:
        """-1/2 (d |w - prior mean|^2 + sum log(1 + l / d)), their part in log p(y), nats."""
        logs = np.log1p(self.eigenvalues / (noise * precision))
        return float(-0.5 * (precision * self.square + np.sum(logs)))


def joined(parts: Iterable[Weights]) -> Weights:
    """All these weights, with one prior precision."""
    eigenvalues, squares = zip(*parts, strict=True)
    return Weights(np.concatenate(eigenvalues), sum(squares))


def optimised(
    groups: list[Weights],
    given: float | None,
    noise: float | None,
    outputs: np.ndarray,
    targets: np.ndarray,
) -> tuple[list[float], float]:
    """Prior precision of each group, and the noise variance, which is estimated where it is None."""

    def precisions(noise: float) -> list[float]:
        return [group.optimal_precision(noise) if given is None else given for group in groups]

    if noise is not None:
        return precisions(noise), noise
    residual = float(np.sum((targets - outputs) ** 2))
    tiny = 1e-8 * max(float(np.var(targets)), 1e-30)
    value = max(residual / outputs.size, tiny)
    for _ in range(50):
        pairs = zip(groups, precisions(value), strict=True)
        # MacKay's update; the weights use up at most half of the data's degrees of freedom.
        used = sum(group.effective_number(precision, value) for group, precision in pairs)
        new = max(residual / (outputs.size - min(used, outputs.size / 2)), tiny)
        if abs(new / value - 1) < 1e-4:
            break
        value = new
    return precisions(value), value


def _belief(mean: Any, basis: Any, variance: np.ndarray) -> Posterior:
    """The belief with these variances of an array's entries, or of its coordinates in bases."""
    shape, dtype = mean.shape, jnp.promote_types(mean.dtype, jnp.float32)
    if basis is None:
        return Factorized(mean, jnp.asarray(variance.reshape(shape), dtype))
    u, w = basis
    if variance.shape[1] == 1:
        cov = (u * variance.T) @ np.asarray(u, np.float64).T
        return FullNormal(mean, jnp.asarray(cov.reshape(*shape, *shape), dtype))
    belief = KroneckerEigen(mean.reshape(variance.shape), u, w, jnp.asarray(variance, dtype))
    return belief if shape == variance.shape else Reshaped(belief, shape)


def _matrix_shape(path: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """(in, out): (D, 1) for a vector, a bias or a gain, else the cut with the smallest factors."""
    size = math.prod(shape)
    if path.rpartition("/")[2] in ("bias", "scale") or max(shape, default=1) == size:
        return size, 1
    return min(((math.prod(shape[:i]), math.prod(shape[i:])) for i in range(len(shape))), key=sum)


def _checked_data(
    curvature: Curvature, frame: Any, data: Any
) -> tuple[Any, np.ndarray, tuple[int, ...]]:
    """Inputs, targets and the shape of one example's outputs; checks the model's mode too."""
    given, targets = examples("laplace", data)
    for x in given:
        if x.dtype.kind in "OUSMm" or x.ndim == 0:
            raise TypeError(
                "`laplace` needs inputs that are arrays (N, ...), or a tuple of them. Got "
                f"{type(data[0]).__name__}. For other inputs, write a module that takes arrays."
            )
        if x.dtype.kind in "fcV" and not np.isfinite(x).all():
            raise ValueError(
                "`laplace` needs finite inputs. Got NaN or infinity; fill or drop them."
            )
    inputs = tuple(map(jnp.asarray, given))
    two = jax.tree.map(lambda x: x[:2], inputs)
    state = nnx.merge_state(*frame)
    check_inference_mode("laplace", curvature.graph, state, lambda model: model(*two))
    found = jax.eval_shape(lambda: curvature.call(frame, two))
    shape: tuple[int, ...] = getattr(found, "shape", ())
    dtype = getattr(found, "dtype", int)
    if len(shape) < 2 or shape[0] != len(two[0]) or not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            "`laplace` needs a model that returns one array of real outputs (N, ..., C). Got, for "
            f"{len(two[0])} examples, {found}. Write a module that calls it and returns such an array."
        )
    likelihood, y = curvature.likelihood, np.asarray(targets)
    outputs, name = (len(targets), *shape[1:]), likelihood.__name__
    wanted = outputs[:-1] if likelihood is Categorical else outputs
    if y.shape != wanted:
        raise ValueError(
            f"`laplace` with {name} and outputs of shape {outputs} needs targets of shape {wanted}. Got "
            f"{y.shape}."
        )
    kinds, most = {Categorical: ("iu", outputs[-1] - 1), Bernoulli: ("fiub", 1)}.get(
        likelihood, ("fiub", math.inf)
    )
    least = -math.inf if likelihood is Gaussian else 0
    if y.dtype.kind not in kinds or not np.isfinite(y).all() or y.min() < least or y.max() > most:
        what = "integer" if likelihood is Categorical else "finite"
        came = f" from {y.min()} to {y.max()}" if y.dtype.kind in "fiub" else ""
        raise ValueError(
            f"`laplace` with {name} needs {what} targets from {least} to {most}. Got {y.dtype}{came}."
        )
    return inputs, y if likelihood is Categorical else y.astype(np.float64), shape[1:]


def _checked_centre(prior_mean: Any, known: dict[str, Any]) -> dict[str, np.ndarray]:
    """The prior mean by path."""
    if not isinstance(prior_mean, dict | nnx.State | None):
        raise TypeError(f"`laplace(prior_mean=...)` needs a tree. Got {type(prior_mean).__name__}.")
    centre = {} if prior_mean is None else by_path(prior_mean)
    for path, x in centre.items():
        fits = path in known and np.shape(x) == known[path].shape and not isinstance(x, Posterior)
        if not fits or not np.isfinite(x).all():
            places = ", ".join(f"{path} {x.shape}" for path, x in known.items())
            raise ValueError(
                "`laplace(prior_mean=...)` needs finite arrays in the places and shapes of the model's "
                f"parameters: {places}. Got {type(x).__name__} of shape {np.shape(x)} at {path}. Start "
                "from nnx.to_pure_dict(nnx.state(model, nnx.Param))."
            )
    return {path: np.asarray(x, np.float64) for path, x in centre.items()}


def _log_likelihood(
    likelihood: type, outputs: np.ndarray, targets: np.ndarray, noise: float
) -> float:
    if likelihood is Gaussian:
        squares = np.sum((targets - outputs) ** 2) / noise
        return float(-0.5 * (squares + outputs.size * math.log(2 * math.pi * noise)))
    if likelihood is Categorical:
        logs = outputs - np.logaddexp.reduce(outputs, axis=-1, keepdims=True)
        return float(np.sum(np.take_along_axis(logs, targets[..., None].astype(int), axis=-1)))
    return float(np.sum(targets * outputs - np.logaddexp(0, outputs)))
