"""`calibrate`: how far to doubt a trained network, in one number from held-out data."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

from moment_jax.covariance import Covariance, Separable
from moment_jax.inference import data as checks
from moment_jax.nn.bayesian import Bayesian
from moment_jax.nn.likelihood import LogNoise
from moment_jax.nn.plain import as_nnx, is_floating
from moment_jax.posterior import Factorized

LOG_FACTORS = math.log(2) * np.arange(-10, 1)  # of an array's root mean square: .001 to 1


def calibrate(
    network: nnx.Module | linen.Module,
    likelihood: Any,
    held_out: tuple[Any, Any],
    *,
    random: Any = nnx.Param,
    structure: type[Covariance] = Separable,
    landmarks: int | None = None,
    batch_size: int = 256,
) -> Bayesian:
    """A trained network with noise on its weights, as much as held-out data call for.

    Every weight has the standard deviation f s, s the root mean square of its array, independent of all
    others. The one number f maximises the predictive log density of data that the network has not seen,
    predicted in one pass. No training data are needed, no gradient and no Jacobian: the price is 19
    passes over the held-out data and one compilation, which `model.predict` then shares.

    It makes a network less sure where its output is sensitive to the weights, so it is a temperature
    with a little more, and no ensemble. A network that is not overconfident keeps the least noise.

    Args:
      network: a Flax NNX module in inference mode (`network.eval()`), or a linen module bound to its
        variables; with outputs (N, ..., C) for a batch. It is not changed.
      likelihood: `mj.Categorical()`, `mj.Bernoulli()`, `mj.Gaussian(noise_variance)`, a number, or
        `mj.Gaussian()` to estimate the noise of each output: with each f the one of the highest density,
        so both maximise it together.
      held_out: inputs, an array (N, ...) or a tuple of them, and targets: (N, ...) integers for
        Categorical, else the outputs' shape; from 0 to 1 for Bernoulli. Some 200 examples will do. Don't
        test on them.
      random: an NNX filter of the random weights, such as `nnx.PathContains("head")`; the others are
        certain, and so is an array of zeros.
      structure: in which covariances are kept.
      landmarks: see `mj.Bayesian`.
      batch_size: examples in one pass.

    Returns:
      A `mj.Bayesian` with `Factorized` beliefs.

    Raises:
      TypeError, ValueError: if an argument is invalid or the network in training mode. It warns if f
        gains nothing, or is 1, the largest that is tried.

    >>> import jax, moment_jax as mj
    >>> x = jax.random.normal(jax.random.key(0), (40, 2))
    >>> network = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    >>> y = network(x) * jnp.where(jnp.arange(40)[:, None] % 2, 0.6, 1.4)  # its slope is uncertain
    >>> model = mj.calibrate(network, mj.Gaussian(0.01), (x, y))
    >>> sd = model.beliefs["kernel"].variance.mean() ** 0.5 / jnp.mean(network.kernel[...] ** 2) ** 0.5
    >>> 0.2 < float(sd) < 0.6
    True
    """
    checks.likelihood("calibrate", likelihood)
    checks.positive("calibrate", batch_size=batch_size)
    plain = as_nnx(network)
    inputs, targets, _ = checks.data("calibrate", plain, likelihood, held_out)
    params = dict(nnx.to_flat_state(nnx.state(plain, nnx.Param)))
    chosen = {path for path, _ in nnx.to_flat_state(nnx.state(plain, nnx.All(nnx.Param, random)))}
    tree = {p: _noisy(x[...]) if p in chosen else x[...] for p, x in params.items()}
    rule = "weights that `random` selects, not all of them zero"
    came = "none of " + ", ".join("/".join(map(str, path)) for path in params)
    mend = "Give a filter such as nnx.PathContains('head')."
    checks.need(
        "calibrate", any(isinstance(x, Factorized) for x in tree.values()), rule, came, mend
    )
    options: Any = {"structure": structure, "landmarks": landmarks}
    beliefs = nnx.traversals.unflatten_mapping(tree)
    model = Bayesian(network, likelihood, beliefs=beliefs, **options)

    def at(log_factor: float) -> tuple[float, Bayesian]:
        """Log density of the held-out data, and the model with this factor and its best noise."""
        scaled = model.scaled(math.exp(log_factor))
        if isinstance(scaled.noise, LogNoise):
            scaled.noise.set_value(jnp.full(targets.shape[-1:], -jnp.inf))
            found = scaled.predict(*inputs, batch_size=batch_size)
            if not np.isfinite(found.variance).all():
                return -math.inf, scaled
            squares, variances = (targets - np.asarray(found.mean)) ** 2, np.asarray(found.variance)
            pairs = (x.reshape(-1, x.shape[-1]).T.astype(float) for x in (squares, variances))
            scaled.noise.set_value(jnp.asarray([*map(_log_noise, *pairs)]))
        found = scaled.predict(*inputs, batch_size=batch_size)
        density = float(np.asarray(found.log_prob(targets), np.float64).sum())
        return (-math.inf if math.isnan(density) else density), scaled

    best = _highest(lambda x: at(x)[0], LOG_FACTORS, refined=6)
    (density, found), (least, _) = at(best), at(LOG_FACTORS[0])
    rule = "a network with finite outputs"
    checks.need("calibrate", np.isfinite(density), rule, f"a log density of {density}")
    gain = (density - least) / len(targets)
    if gain < 1e-4 or best == LOG_FACTORS[-1]:
        what = "is not overconfident" if gain < 1e-4 else "knows little about these data"
        warnings.warn(
            f"`calibrate`: held-out data chose the factor {math.exp(best):.3g} of the range from .001 "
            f"to 1, which gains {gain:.2g} nats an example: the network {what}.",
            stacklevel=2,
        )
    return found


def _noisy(x: Any) -> Any:
    """A belief with the root mean square as standard deviation; zeros and integers as they are."""
    size = jnp.mean(jnp.square(x)) if is_floating(x) else 0
    return x if size == 0 else Factorized(x, jnp.full_like(x, size))


def _log_noise(squares: np.ndarray, variances: np.ndarray) -> float:
    """The log variance of the noise for which an output's residuals, N(0, v + noise), are likeliest.

    From their squares (N,).
    """
    most = math.log(max(np.mean(squares), np.finfo(np.float32).tiny))

    def density(log_noise: float) -> float:
        total = np.maximum(variances, 0) + math.exp(log_noise)
        return -float(np.sum(np.log(total) + squares / total))

    return _highest(density, most - np.arange(0, 12, 0.5), refined=12)


def _highest(fn: Callable[[float], float], grid: np.ndarray, refined: int) -> float:
    """The best of the grid's points, and of further ones in the wider gap beside the best so far."""
    known = {float(x): fn(float(x)) for x in grid}
    for _ in range(refined):
        points = sorted(known)
        i = int(np.argmax([known[x] for x in points]))
        far = max(points[max(i - 1, 0) : i + 2], key=lambda x: abs(x - points[i]))
        middle = points[i] + 0.38 * (far - points[i])
        known[middle] = fn(middle)
    return max(known, key=lambda x: known[x])
