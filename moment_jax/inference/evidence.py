"""The evidence framework: MAP estimates whose prior precisions and noise the data choose on the way."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array

from moment_jax.inference import standardised
from moment_jax.inference.curvature import Curvature, check_network
from moment_jax.inference.data import REAL, need
from moment_jax.inference.laplace_approximation import NUMBERS, LaplaceReceipt, log_likelihood
from moment_jax.inference.training import Training
from moment_jax.nn.bayesian import Bayesian
from moment_jax.nn.modules import FLOATING, Raveled
from moment_jax.nn.static import Static
from moment_jax.objectives import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian
from moment_jax.posterior import FullNormal

STEPS, RATE = 20_000, 1e-2
MOST_WEIGHTS = 5_000  # a round inverts the square of that
ROUNDS, BATCH = 10, 64
FIRST_NOISE = 0.1
DIVERGED = 1e6  # root mean square of outputs in standard units
LEAST_NOISE = 1e-6  # variance, in standard units, of a noise that the network predicts
PRECISIONS, NOISES = np.exp([-6.0, 12.0]), np.exp([-8.0, 1.0])  # ranges, in standard units


class Mode(NamedTuple):
    """The network at some weights, in double precision; its Gauss-Newton matrix is V^T V at noise 1."""

    weights: np.ndarray  # (P,)
    outputs: np.ndarray  # (N, ..., C)
    roots: np.ndarray  # V (N M C, P) if it has fewer rows than columns, else V^T V


class Setting(NamedTuple):
    """What the evidence chooses."""

    precision: np.ndarray  # of the prior, (A,)
    noise: float  # its variance
    doubt: np.ndarray  # variance of each target's mean, (N, ..., D)


class Estimate(NamedTuple):
    """The Laplace approximation at a mode, N(mean, cov), and what the evidence chooses next."""

    mean: np.ndarray  # (P,)
    cov: np.ndarray  # (P, P), or empty
    receipt: LaplaceReceipt
    following: Setting


@dataclasses.dataclass(frozen=True)
class Loss:
    """-log p(targets, weights) for each example, up to a constant, from a batch drawn at random.

    A noise that the network predicts is fitted to E[(target - mean)^2] under the belief, the residual's
    square and the doubt: alone, residuals of a fitted mean are too small.
    """

    likelihood: Any

    def __call__(self, model: Any, data: Any, step: Array) -> Array:
        """Of (key, inputs, targets, precision of each weight, noise variance, doubt)."""
        key, inputs, targets, precision, noise, doubt = data
        size = len(targets)
        rows = jnp.arange(size)
        if size > BATCH:
            rows = jax.random.randint(jax.random.fold_in(key, step), (BATCH,), 0, size)
        outputs, y = model(*(x[rows] for x in inputs)), targets[rows]
        if isinstance(self.likelihood, Categorical):
            fits = optax.softmax_cross_entropy_with_integer_labels(outputs, y)
        elif isinstance(self.likelihood, Bernoulli):
            fits = optax.sigmoid_binary_cross_entropy(outputs, y)
        elif isinstance(self.likelihood, HeteroscedasticGaussian):
            mean, log_noise = jnp.split(outputs, 2, axis=-1)
            squares = (mean - y) ** 2 + doubt[rows] + LEAST_NOISE
            fits = 0.5 * (squares * jnp.exp(-log_noise) + log_noise)
        else:
            fits = 0.5 * (outputs - y) ** 2 / noise
        return fits.sum() / len(y) + 0.5 * jnp.sum(precision * model.weights[...] ** 2) / size


def _squares(matrix: np.ndarray) -> np.ndarray:
    """Sums of the squares of each column."""
    return np.einsum("ij,ij->j", matrix, matrix)


class Evidence:
    """The evidence of a network, log p(targets | prior precisions, noise), by Laplace's method.

    Its weights are the first start. Data are in standard units, and `shape` is of one example's outputs.
    Source: MacKay, "Bayesian interpolation" (1992); Immer et al., "Scalable marginal likelihood
    estimation for model selection in deep learning" (2021).
    """

    def __init__(
        self, network: Raveled, likelihood: Any, inputs: tuple[np.ndarray, ...], targets: np.ndarray,
        shape: tuple[int, ...],
    ) -> None:  # fmt: skip
        self.network, self.likelihood, self.shape = network, likelihood, shape
        self.inputs, self.targets = inputs, targets
        self.arrays = {path: np.asarray(x, np.float64) for path, x in network.arrays.items()}
        self.of = np.repeat(np.arange(len(self.arrays)), [x.size for x in self.arrays.values()])
        self.kind = Gaussian() if isinstance(likelihood, Gaussian) else likelihood
        self.known_noise = getattr(likelihood, "noise_variance", 1.0)  # None if to be estimated

    def maximised(
        self, members: int, steps: int, rate: float, seed: int, tell: Callable[[int, float], None]
    ) -> list[Estimate]:
        """Estimates, with their covariances, from different starts, side by side.

        Adam minimises -log p(targets, weights). After every tenth of its steps the precisions and the
        noise are re-estimated. `tell` is told the number of steps made and the mean log evidence.
        """
        first, rng = self.network.weights[...], np.random.default_rng(seed)
        training, _ = self._begun(first, rate, steps)
        others = [[anew(rng, x).ravel() for x in self.arrays.values()] for _ in range(members - 1)]
        starts = [first, *(jnp.asarray(np.concatenate(x), first.dtype) for x in others)]
        states = jax.vmap(lambda weights: self._begun(weights, rate, steps)[1])(jnp.stack(starts))
        data = jax.tree.map(jnp.asarray, (self.inputs, self.targets))
        if not isinstance(self.likelihood, Categorical):
            data = data[0], data[1].astype(first.dtype)
        keys, modes = jax.random.split(jax.random.key(seed), members), list[Mode]()
        unknown = np.ones(len(self.arrays)), self.known_noise or FIRST_NOISE
        settings = [Setting(*unknown, np.zeros(self.targets.shape))] * members
        for done in range(ROUNDS):
            start, end = (steps * n // ROUNDS for n in (done, done + 1))
            chosen = zip(*((x.precision[self.of], x.noise, x.doubt) for x in settings), strict=True)
            given = keys, *data, *(jnp.asarray(np.stack(x), first.dtype) for x in chosen)
            rounds = jnp.int32(start), jnp.int32(end - start)
            states, _ = _side_by_side(training)(states, given, *rounds)
            with np.errstate(over="ignore", invalid="ignore"):
                modes = [self.mode(w) for w in np.asarray(training.model(states).weights[...])]
                each = [np.sqrt(np.mean(x.outputs**2)) + 0 * np.sum(x.roots) for x in modes]
            if not np.max(each) < DIVERGED:
                raise ValueError(
                    f"`fit` diverged: after {end} steps the outputs are of size {np.max(each):.3g}, in "
                    f"standard units. Take a learning_rate below {rate}."
                )
            found = [self.estimate(*each) for each in zip(modes, settings, strict=True)]
            settings = [x.following for x in found]
            tell(end, float(np.mean([x.receipt.log_evidence for x in found])))
        return [self.estimate(*each, whole=True) for each in zip(modes, settings, strict=True)]

    def mode(self, weights: np.ndarray) -> Mode:
        """The network at these weights. Its matrix is summed in double precision: no sum is negative."""
        outputs = np.concatenate([*self._batches("outputs", weights)])[: len(self.targets)]
        if outputs.size < weights.size:
            roots = np.concatenate([x["weights"] for x in self._batches("roots", weights)])
            roots = roots[: outputs.size]
        else:
            roots = np.zeros((weights.size, weights.size))
            for batch in self._batches("roots", weights):
                roots += batch["weights"].T @ batch["weights"]
        return Mode(weights.astype(np.float64), outputs.reshape(-1, *self.shape), roots)

    def estimate(self, mode: Mode, setting: Setting, *, whole: bool = False) -> Estimate:
        """The evidence at a setting, and the next one by MacKay's update; if `whole`, the covariance.

        The update is the number of weights that the data determine over the sum of their squares. With
        S = V / sqrt(noise * precision), all follows from a Cholesky factor of I + S^T S or, the smaller
        one where there are fewer outputs than weights, of I + S S^T.
        """
        from scipy.linalg import lapack  # here, for it takes long to import

        precision, noise, _ = setting
        scale = 1 / np.sqrt(noise * precision[self.of])
        few = len(mode.roots) < len(scale)
        scaled = mode.roots * scale
        matrix = scaled @ scaled.T if few else scaled * scale[:, None]
        least = len(matrix) * np.finfo(float).eps * matrix.diagonal().max()  # for a Cholesky factor
        matrix[np.diag_indices_from(matrix)] += 1 + least
        inverse = lapack.dtrtri(np.linalg.cholesky(matrix), lower=1)[0]
        half = inverse @ scaled if few else inverse
        known = _squares(half) if few else 1 - _squares(half)
        used, squares = np.bincount(self.of, known), np.bincount(self.of, mode.weights**2)
        half_logdet = -np.sum(np.log(np.diag(inverse)))
        evidence = log_likelihood(self.likelihood, mode.outputs, self.targets, noise) - half_logdet
        evidence -= 0.5 * float(precision @ squares)
        of_noise = noise if isinstance(self.likelihood, Gaussian) else None
        named = dict(zip(self.arrays, precision.tolist(), strict=True))
        receipt = LaplaceReceipt(float(evidence), named, of_noise, float(used.sum()))

        following = np.clip(np.maximum(used, 0.5) / (squares + 1e-6), *PRECISIONS)
        if self.known_noise is None:
            size, residual = self.targets.size, np.sum((self.targets - mode.outputs) ** 2)
            noise = float(np.clip(residual / max(size - used.sum(), 0.1 * size), *NOISES))
        doubt = setting.doubt
        if isinstance(self.likelihood, HeteroscedasticGaussian):
            pairs = -1, 2, doubt.shape[-1]  # of means and of log noises
            if few:
                share = (1 - _squares(inverse)).reshape(pairs)[:, 0]
            else:
                each = (x["weights"] * scale for x in self._batches("roots", mode.weights))
                rows = (x.reshape(*pairs, len(scale))[:, 0].reshape(-1, len(scale)) for x in each)
                share = np.concatenate([_squares(inverse @ x.T) for x in rows])[: doubt.size]
            log_noise = np.split(mode.outputs, 2, axis=-1)[1]
            doubt = share.reshape(doubt.shape) * np.exp(log_noise)
        cov = np.empty(0)
        if whole:
            prior_sd = precision[self.of] ** -0.5
            cov = half.T @ half * prior_sd[:, None] * prior_sd
            cov = np.diag(prior_sd**2) - cov if few else cov
        return Estimate(mode.weights, cov, receipt, Setting(following, noise, doubt))

    def _batches(self, name: str, weights: np.ndarray) -> Iterator[Any]:
        """What this method of `Curvature` gives for one batch of examples after the other."""
        split: list[Any] = [*nnx.split(self._at(jnp.asarray(weights)), FLOATING, ...), np.ones(1)]
        graph, *frame = split
        shapes, rows = (("weights", (weights.size, 1)),), max(1, min(256, NUMBERS // weights.size))
        of = Curvature(Static(graph), self.kind, shapes, rows, math.prod(self.shape))
        return of.batches(getattr(of, name), tuple(frame), self.inputs, max(1, rows // of.count))

    def _begun(self, weights: Array, rate: float, steps: int) -> tuple[Training, Any]:
        return Training.of(self._at(weights), _adam(rate, steps), Loss(self.kind))

    def _at(self, weights: Array) -> Raveled:
        network = nnx.clone(self.network)
        network.weights.set_value(weights)
        return network


def anew(rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
    """An array of two axes or more, drawn with its mean and its spread: another start."""
    return x if x.ndim < 2 else rng.normal(x.mean(), x.std(), x.shape)


def by_evidence(
    network: nnx.Module, likelihood: Any, inputs: tuple[np.ndarray, ...], targets: np.ndarray,
    shape: tuple[int, ...], *, members: int, steps: int, rate: float, seed: int,
    tell: Callable[[int, float], None],
) -> tuple[list[Bayesian], tuple[LaplaceReceipt, ...]]:  # fmt: skip
    """The models for columns in their own units, and their receipts; see `fit` and `maximised`."""
    of_inputs = list(map(standardised.columns_of, inputs))
    known, of_targets, units = likelihood, None, 0.0
    learned = likelihood == Gaussian()
    if isinstance(likelihood, REAL):
        varies = (targets != targets[:1]).reshape(-1, targets.shape[-1]).any(axis=0)
        mend = "Leave it out: a constant needs no network."
        need("fit", varies.all(), "targets that vary", "a column of one value", mend)
        centre, spread = standardised.columns(targets)
        if isinstance(likelihood, Gaussian) and not learned:  # of all outputs, which share a scale
            spread = np.full_like(spread, np.sqrt(np.mean(spread**2)))
            known = Gaussian(float(likelihood.noise_variance / spread[0] ** 2))
        of_targets = standardised.of_outputs(likelihood, centre, spread)
        units = float(targets.size * np.mean(np.log(spread)))
    network = standardised.brought_along(
        network, likelihood, inputs, targets, of_inputs, of_targets
    )
    if of_targets:
        targets = (targets - centre) / spread
    pairs = zip(inputs, of_inputs, strict=True)
    scaled = tuple(x if of is None else (x - of[0]) / of[1] for x, of in pairs)
    check_network("fit", nnx.split(network, FLOATING, ...), scaled)
    evidence = Evidence(Raveled(network), known, scaled, targets, shape)
    found = evidence.maximised(members, steps, rate, seed, lambda n, x: tell(n, x - units))
    models = []
    for mean, cov, receipt, _ in found:
        noise = Gaussian(jnp.asarray(receipt.noise_variance * spread**2)) if learned else likelihood
        whole = Raveled(standardised.Standardised(network, of_inputs, of_targets))
        joint: Any = jnp.asarray(mean, whole.weights[...].dtype), cov
        beliefs = {"weights": FullNormal(*joint)}
        models.append(Bayesian(whole, noise, beliefs=beliefs, linearised=True))
    receipts = (x.receipt._replace(log_evidence=x.receipt.log_evidence - units) for x in found)
    return models, tuple(receipts)


@functools.cache
def _adam(rate: float, steps: int) -> optax.GradientTransformation:
    """One object for equal trainings, which are compiled once."""
    return optax.adam(optax.cosine_decay_schedule(rate, steps, 0.05))


@functools.lru_cache(maxsize=8)
def _side_by_side(training: Training) -> Any:
    """Updates of all members, each with its own key, precisions and noise."""
    axes = 0, (0, None, None, 0, 0, 0), None, None
    return jax.jit(jax.vmap(training.advance, in_axes=axes))
