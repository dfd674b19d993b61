"""`calibrate`: how far to doubt a trained network, in one number from held-out data."""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

from moment_jax.covariance import Covariance, Separable
from moment_jax.inference import data as checks
from moment_jax.inference.laplace_approximation import log_likelihood
from moment_jax.nn.bayesian import Bayesian
from moment_jax.nn.belief import selected
from moment_jax.nn.likelihood import LogNoise
from moment_jax.nn.modules import as_nnx
from moment_jax.objectives import Bernoulli, Categorical, Gaussian
from moment_jax.posterior import Factorized
from moment_jax.progress import bar

LOG_FACTORS = math.log(2) * np.arange(-10, 1)  # of an array's root mean square: .001 to 1
FEWEST = 100  # examples
_need, _warn = (partial(fn, "calibrate") for fn in (checks.need, checks.warn))


class CalibrationReceipt(NamedTuple):
    """What held-out data say; log densities are in nats an example."""

    factor: float  # f
    log_density: float  # of the model
    log_density_plain: float  # with the least noise
    temperature: float | None  # which logits are best divided by
    log_density_temperature: float | None
    accuracy: float | None  # of the model's labels
    accuracy_plain: float | None  # of the network's


def calibrate(
    network: nnx.Module | linen.Module, likelihood: Any, held_out: tuple[Any, Any], *,
    random: Any = nnx.Param, structure: type[Covariance] = Separable,
    landmarks: int | None = None, batch_size: int = 256, receipt: bool = False,
    progress: bool | None = None, output: Callable[[Any], Any] | None = None,
) -> Any:  # fmt: skip
    """A trained network with noise on its weights, as much as held-out data call for.

    Every weight has the standard deviation f s, s the root mean square of its array, independent of all
    others. The one number f maximises the predictive log density of data that the network has not seen,
    predicted in one pass. No training data are needed, no gradient and no Jacobian: the price is 19
    passes over the held-out data and one compilation, which `model.predict` then shares.

    It makes a network less sure where its output is sensitive to the weights, so it is a temperature
    with a little more, and no ensemble; the receipt has the temperature to compare. A network that is
    not overconfident keeps the least noise. Of classes, a factor whose labels are right less often, by
    more than two standard errors of the difference, is not taken.

    Args:
      network: a Flax NNX module in inference mode (`network.eval()`), or a linen module bound to its
        variables; with outputs (N, ..., C) for a batch. It is not changed.
      likelihood: `mj.Categorical()`, `mj.Bernoulli()`, `mj.Gaussian(noise_variance)`, a number, or
        `mj.Gaussian()` to estimate the noise of each output together with f.
      held_out: inputs, an array (N, ...) or a tuple of them, and targets: (N, ...) integers for
        Categorical, else the outputs' shape; from 0 to 1 for Bernoulli. Some 200 examples will do. Don't
        test on them.
      random: an NNX filter of the random weights, such as `nnx.PathContains("head")`; the others are
        certain, and so is an array of zeros.
      structure: of the covariances.
      landmarks: see `mj.Bayesian`.
      output: see `mj.Bayesian`.
      batch_size: examples in one pass.
      receipt: also return a `CalibrationReceipt`.
      progress: show a bar (tqdm, on stderr); None means if stderr is a terminal.

    Returns:
      A `mj.Bayesian` with `Factorized` beliefs.

    Raises:
      TypeError, ValueError: if an argument is invalid, the network in training mode, or labels are worse
        with every f, which tells of a wrong pass, or real outputs spread otherwise than their targets
        (a warning where the noise is given). It warns of fewer than 100 examples, if f gains nothing, is
        1, the largest that is tried, or was kept small for the labels' sake.
    """
    checks.likelihood("calibrate", likelihood)
    checks.positive("calibrate", batch_size=batch_size)
    plain = as_nnx(network, output)
    inputs, targets, _ = checks.data("calibrate", plain, likelihood, held_out)
    arrays = {path: x[...] for path, x in nnx.to_flat_state(nnx.state(plain, nnx.Param))}
    arrays |= {path: _noisy(x) for path, x in selected("calibrate", plain, random).items()}
    beliefs = nnx.traversals.unflatten_mapping(arrays)
    model = Bayesian(plain, likelihood, beliefs=beliefs, structure=structure, landmarks=landmarks)
    batches = [[x[i : i + batch_size] for x in inputs] for i in range(0, len(targets), batch_size)]
    outputs = np.concatenate([checks.outputs_of(plain, tuple(x)) for x in batches])
    _need(np.isfinite(outputs).all(), "a network with finite outputs", "NaN or infinity")
    if len(targets) < FEWEST:
        _warn(f"{len(targets)} examples choose a factor roughly: give {FEWEST} or more.")
    classes = isinstance(likelihood, Categorical | Bernoulli)
    harmful = [-math.inf]  # densities with factors that lose accuracy

    def right(labels: Any) -> np.ndarray:
        return np.asarray(labels == np.round(targets) if classes else [1.0], float)

    plainly = right(outputs.argmax(-1) if isinstance(likelihood, Categorical) else outputs > 0)

    def at(log_factor: float) -> tuple[float, Bayesian, Any]:
        """Log density of the held-out data, the model with this factor, its predictions."""
        scaled = model.scaled(math.exp(log_factor))
        if isinstance(scaled.noise, LogNoise):
            scaled.noise.set_value(jnp.full(targets.shape[-1:], -jnp.inf))
            found = scaled.predict(*inputs, batch_size=batch_size)
            scaled.noise.set_value(jnp.asarray(_log_noises(targets - found.mean, found.variance)))
        found = scaled.predict(*inputs, batch_size=batch_size)
        density = float(np.asarray(found.log_prob(targets), np.float64).sum()) / len(targets)
        lost = plainly - right(getattr(found, "label", None))
        if lost.mean() > 2 * lost.std() / math.sqrt(lost.size):
            harmful.append(density)
            density = -math.inf
        return (-math.inf if math.isnan(density) else density), scaled, found

    grid = bar(progress, "factor", LOG_FACTORS)
    best = _highest(lambda x: at(x)[0], grid, refined=6)
    (density, found, predicted), (least, *_) = at(best), at(LOG_FACTORS[0])
    now = right(getattr(predicted, "label", None))
    rule = "finite predictions as right as the network's, see mj.Bayesian(network).check(x)"
    came = f"accuracy {now.mean():.3f} for {plainly.mean():.3f}"
    _need(np.isfinite(density), rule, came)
    factor, gain = math.exp(best), density - least
    if max(harmful) > density:
        _warn(f"the factor is {factor:.3g}: more noise has a higher density, but lowers accuracy.")
    elif gain < 1e-4 or best == LOG_FACTORS[-1]:
        what = "is not overconfident" if gain < 1e-4 else "knows little about these data"
        chose = f"held-out data chose the factor {factor:.3g} of the range from .001 to 1"
        _warn(f"{chose}, which gains {gain:.2g} nats an example: the network {what}.")
    if isinstance(likelihood, Gaussian):
        squares = ((targets - predicted.mean) ** 2).reshape(-1, targets.shape[-1]).mean(axis=0)
        ratios = predicted.variance.reshape(-1, targets.shape[-1]).mean(axis=0) / squares
        odd = int(np.argmax(np.abs(np.log(ratios))))
        came = f"{ratios[odd]:.3g} times it for output {odd}"
        mend = "Bring outputs to one unit, or use mj.laplace."
        fits = 1 / 4 < ratios[odd] < 4
        if likelihood.noise_variance is None:
            rule = "one factor that suits all outputs, whose variance is the mean squared residual"
            _need(fits, rule, came, mend)
        elif not fits:
            _warn(f"the variance should be the mean squared residual. It is {came}. {mend}")
    if not receipt:
        return found

    def tempered(log: float) -> float:
        return log_likelihood(likelihood, outputs / math.exp(log), targets, 1.0) / len(targets)

    facts: Any = [None] * 4
    if classes:
        log = _highest(tempered, np.linspace(-3, 3, 25), refined=12)
        facts = math.exp(log), tempered(log), float(now.mean()), float(plainly.mean())
    return found, CalibrationReceipt(factor, density, least, *facts)


def _noisy(x: Any) -> Any:
    """A belief with the root mean square as standard deviation; zeros as they are."""
    size = jnp.mean(jnp.square(x))
    return x if size == 0 else Factorized(x, jnp.full_like(x, size))


def _log_noises(residuals: Any, variances: Any) -> list[float]:
    """Log variances (D,) of the noise with which residuals (..., D), N(0, v + noise), are likeliest."""
    pairs = (np.asarray(x, float).reshape(-1, x.shape[-1]).T for x in (residuals**2, variances))

    def of_output(squares: np.ndarray, variances: np.ndarray) -> float:
        def density(log_noise: float) -> float:
            total = np.maximum(variances, 0) + math.exp(log_noise)
            return -float(np.sum(np.log(total) + squares / total))

        most = math.log(max(np.mean(squares), np.finfo(np.float32).tiny))
        return _highest(density, most - np.arange(0, 12, 0.5), refined=12)

    return list(map(of_output, *pairs))


def _highest(fn: Callable[[float], float], grid: Iterable[float], refined: int) -> float:
    """The best of the grid's points, and of further ones in the wider gap beside the best so far."""
    known = {float(x): fn(float(x)) for x in grid}
    for _ in range(refined):
        points = sorted(known)
        i = int(np.argmax([known[x] for x in points]))
        far = max(points[max(i - 1, 0) : i + 2], key=lambda x: abs(x - points[i]))
        middle = points[i] + 0.38 * (far - points[i])
        known[middle] = fn(middle)
    return max(known, key=lambda x: known[x])
