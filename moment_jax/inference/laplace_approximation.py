"""Laplace approximation: a belief about the weights of an ordinarily trained network."""

import functools
import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from moment_jax.inference import prior_precision as prior
from moment_jax.inference.curvature import Curvature, last_block, of_batches
from moment_jax.inference.data import checked_likelihood
from moment_jax.inference.prior_precision import Weights, joined
from moment_jax.objectives import Bernoulli, Categorical, Gaussian
from moment_jax.optim import KroneckerFactor, find_blocks
from moment_jax.optim.layer_blocks import flatten, path_name
from moment_jax.posterior import Factorized, FullNormal, MatrixNormal, Posterior
from moment_jax.posterior.reshaped import Reshaped

KINDS = ("kfac", "diagonal", "last_layer")
LIKELIHOODS = (Categorical, Bernoulli, Gaussian)
NOISE_UPDATES = 50


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
    prior_precision: float | None = None,
    per_layer: bool = False,
    prior_mean: Any = None,
    held_out: tuple[Any, Any] | None = None,
    batch_size: int = 256,
    receipt: bool = False,
) -> Any:
    """A belief about the weights of a trained model: N(weights, (GGN + prior precision)^-1).

    GGN is the generalised Gauss-Newton matrix of -log p(targets | outputs), summed over the data without
    sampling; for these likelihoods it is the Fisher matrix. Weight arrays are taken as independent.
    Predict with `mj.linearised` or `mj.bayesian(model, belief, linearised=True)`: the approximation
    describes the linearised network and is too wide for the network itself (`mj.propagate`).

    Pass `held_out` data if you have any. The evidence assumes a minimum of the loss with its prior, and
    data that determine most weights. A network trained to fit, with more weights than data, gets far too
    small a precision and too wide a predictive distribution; so it does with the exact GGN.

    Args:
      model: a Flax NNX module in inference mode (`model.eval()`) that returns outputs (N, ..., C) for a
        batch; it is not changed.
      likelihood: `mj.objectives.Categorical()`, `Bernoulli()` or `Gaussian(noise_variance)`, a number;
        the type `Gaussian` to estimate the noise by the evidence.
      data: inputs, an array (N, ...) or a tuple of them, and targets: (N, ...) integers for
        Categorical, else the outputs' shape.
      kind: "kfac" (Kronecker factors for dense and convolutional layers, the diagonal for other
        parameters), "diagonal", or "last_layer" (K-FAC of the last layer; the others are certain).
      prior_precision: of all weights; None for the highest evidence, or, with `held_out`, the highest
        held-out density.
      per_layer: one prior precision per layer instead of one for all.
      prior_mean: centre of the prior, a tree of parameters; None for zero.
      held_out: as `data`, but not trained on: selects from a grid from 1e-2 to 1e6, two per decade, the
        precision with the highest predictive log density of the linearised network.
      batch_size: number of examples per forward pass.
      receipt: also return a `LaplaceReceipt`: log evidence, prior precisions, noise variance.

    Returns:
      A tree as `nnx.to_pure_dict(nnx.state(model, nnx.Param))`, with a belief in place of each array.
      K-FAC kernels are `MatrixNormal`: the product of variances in the factors' eigenbases with the
      least KL divergence from the exact ones.

    Raises:
      TypeError, ValueError: if kind, likelihood or data are invalid.

    Source: Daxberger et al., "Laplace redux" (2021); Immer et al., "Scalable marginal likelihood
    estimation for model selection in deep learning" (2021).

    >>> import moment_jax as mj
    >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    >>> x = jax.random.normal(jax.random.key(0), (20, 2))
    >>> belief = mj.laplace(model, mj.objectives.Gaussian(0.1), (x, x[:, :1]))
    >>> mean, cov = mj.bayesian(model, belief, linearised=True)(x)
    >>> mean.shape, jax.vmap(lambda c: c.variance())(cov).shape
    ((20, 1), (20, 1, 1))
    """
    if kind not in KINDS:
        raise ValueError(f"`laplace` needs a kind, one of {', '.join(KINDS)}. Got {kind!r}.")
    name, known_noise = checked_likelihood("laplace", likelihood, LIKELIHOODS)
    inputs, targets = prior.checked_data(model, data)
    if held_out is not None and (per_layer or prior_precision is not None):
        raise ValueError(
            "`laplace(held_out=...)` chooses one prior precision. Got per_layer or prior_precision too; "
            "leave them out."
        )
    split: Any = nnx.split(model, nnx.Param, ...)
    graph, *frame = split
    known = flatten(frame[0])
    found = () if kind == "diagonal" else find_blocks(model)
    blocks = tuple(b for b in found if b.factor is KroneckerFactor and not b.stack)
    if kind == "last_layer":
        blocks = (last_block(model, blocks, inputs),)
    covered = {leaf for block in blocks for leaf in block.leaves}
    rest = [] if kind == "last_layer" else [path for path in known if path not in covered]

    curvature = Curvature(graph, name, blocks, tuple(rest))
    outputs = np.concatenate(
        list(of_batches(partial(curvature.outputs, tuple(frame)), inputs, batch_size))
    )
    prior.check_targets(outputs.shape, targets, name)
    sums = of_batches(partial(curvature.sums, tuple(frame)), inputs, batch_size)
    factors, squares = functools.reduce(partial(jax.tree.map, np.add), sums)

    centre = flatten(prior_mean) if prior_mean is not None else {}

    def weights(path: str, eigenvalues: np.ndarray) -> Weights:
        offset = np.asarray(known[path], np.float64) - np.asarray(centre.get(path, 0.0))
        return Weights(eigenvalues.ravel(), float(np.sum(offset**2)))

    layers: dict[str, list[Weights]] = {}
    spectra = {}
    for block in blocks:
        products, slopes = factors[block.name]
        inner = products[: block.heights[0], : block.heights[0]] / len(
            inputs[0]
        )  # without the bias
        spectra[block.name] = (rows, _), (columns, _) = _spectrum(inner), _spectrum(slopes)
        values = (np.outer(rows, columns), columns)
        layers[block.name] = [weights(*pair) for pair in zip(block.leaves, values, strict=False)]
    for path in rest:
        layers.setdefault(_layer(path), []).append(weights(path, squares[path]))
    groups = [*map(joined, layers.values())]
    groups = groups if per_layer else [joined(groups)]

    def at(given: float | None) -> tuple[Any, LaplaceReceipt]:
        precisions, noise = _optimise(groups, given, known_noise, outputs, targets, name)
        of_layer = dict(zip(layers, precisions * (1 if per_layer else len(layers)), strict=True))
        beliefs: dict[str, Posterior] = {}
        for block in blocks:
            spectrum, precision = spectra[block.name], of_layer[block.name]
            beliefs |= _kronecker_beliefs(block, spectrum, known, precision, noise)
        for path in rest:
            variance = 1 / (squares[path] / noise + of_layer[_layer(path)])
            beliefs[path] = Factorized(known[path], jnp.asarray(variance, known[path].dtype))
        tree = jax.tree_util.tree_map_with_path(
            lambda path, w: beliefs.get(path_name(path), w), nnx.to_pure_dict(frame[0])
        )
        pairs = list(zip(groups, precisions, strict=True))
        return tree, LaplaceReceipt(
            _log_likelihood(name, outputs, targets, noise)
            + sum(group.log_evidence(precision, noise) for group, precision in pairs),
            of_layer,
            noise if name is Gaussian else None,
            sum(group.effective_number(precision, noise) for group, precision in pairs),
        )

    if held_out is not None:
        prior_precision = prior.best_precision(model, name, held_out, at)
    result = at(prior_precision)
    return result if receipt else result[0]


def _layer(path: str) -> str:
    """The layer of a parameter."""
    return path.rpartition("/")[0] or path


def _spectrum(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eigenvalues, not below zero, and eigenvectors."""
    values, vectors = np.linalg.eigh(matrix)
    return np.maximum(values, 0), vectors


def _kronecker_beliefs(
    block: Any, spectra: Any, known: dict[str, Array], precision: float, noise: float
) -> dict[str, Posterior]:
    """Beliefs about a dense layer's kernel and bias, by path."""
    (rows, row_vectors), (columns, column_vectors) = spectra

    def cov(vectors: np.ndarray, values: np.ndarray, dtype: Any) -> Array:
        return jnp.asarray((vectors * values[None, :]) @ vectors.T, dtype)

    path, shape = block.leaves[0], block.shapes[0]
    kernel = known[path].reshape(block.heights[0], block.columns)
    a, b = prior.kronecker_variances(rows, columns / noise, precision)
    belief: Posterior = MatrixNormal(
        kernel, cov(row_vectors, a, kernel.dtype), cov(column_vectors, b, kernel.dtype)
    )
    beliefs = {path: belief if shape == kernel.shape else Reshaped(belief, shape)}
    for path in block.leaves[1:]:
        bias = known[path]
        of_bias = cov(column_vectors, 1 / (columns / noise + precision), bias.dtype)
        beliefs[path] = FullNormal(bias, of_bias.reshape(*bias.shape, *bias.shape))
    return beliefs


def _optimise(
    groups: list[Weights],
    given: float | None,
    noise: float | None,
    outputs: np.ndarray,
    targets: np.ndarray,
    name: type,
) -> tuple[list[float], float]:
    """Prior precision of each group, and the noise variance (1 if the likelihood has none)."""

    def precisions(noise: float) -> list[float]:
        return [group.optimal_precision(noise) if given is None else given for group in groups]

    if noise is not None or name is not Gaussian:
        value = 1.0 if noise is None else noise
        return precisions(value), value
    residual = float(np.sum((targets - outputs) ** 2))
    tiny = 1e-8 * max(float(np.var(targets)), 1e-30)
    value = max(residual / outputs.size, tiny)
    for _ in range(NOISE_UPDATES):
        pairs = zip(groups, precisions(value), strict=True)
        # MacKay's update; the weights use up at most half of the data's degrees of freedom.
        used = sum(group.effective_number(precision, value) for group, precision in pairs)
        new = max(residual / (outputs.size - min(used, outputs.size / 2)), tiny)
        if abs(new / value - 1) < 1e-4:
            break
        value = new
    return precisions(value), value


def _log_likelihood(name: type, outputs: np.ndarray, targets: np.ndarray, noise: float) -> float:
    if name is Gaussian:
        squares = np.sum((targets - outputs) ** 2) / noise
        return float(-0.5 * (squares + outputs.size * math.log(2 * math.pi * noise)))
    if name is Categorical:
        logs = outputs - np.logaddexp.reduce(outputs, axis=-1, keepdims=True)
        return float(np.sum(np.take_along_axis(logs, targets[..., None].astype(int), axis=-1)))
    return float(np.sum(targets * outputs - np.logaddexp(0, outputs)))
