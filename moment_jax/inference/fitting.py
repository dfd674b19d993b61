"""`fit`: a `Bayesian` from data in one call, trained by the analytic ELBO."""

import functools
import math
import numbers
import sys
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from jax import Array

from moment_jax import objectives
from moment_jax.covariance import Covariance
from moment_jax.inference import data as checks
from moment_jax.inference.training import STEPS_AT_ONCE, Training
from moment_jax.nn import PriorScale
from moment_jax.nn import likelihood as likelihoods
from moment_jax.nn.bayesian import Bayesian
from moment_jax.nn.plain import as_nnx
from moment_jax.objectives import Gaussian

Data = tuple[tuple[np.ndarray, ...], np.ndarray]

TRAINED = nnx.All(nnx.Param, nnx.Not(PriorScale))  # the prior's optimum has a closed form
ADAM = functools.cache(optax.adam)  # one object for each rate: trainings alike are compiled once
WARM_UP = 3.0  # steps of KL warm-up, times the learning rate
BATCH_SIZES = (32, 64, 128, 256)  # few, so that data of other sizes need no other programs
# Of outputs in a batch: with 300 classes, batches of 64 take a quarter of the time.
MOST_PAIRS = 2**23
FEWEST_HELD_OUT = 10


class FitReceipt(NamedTuple):
    """The course of a training: an evaluation gives steps, -ELBO / N and the held-out NLL, in nats."""

    history: list[tuple[int, float, float]]  # NaN without held-out data
    converged: bool  # whether the held-out NLL improved no more


class Standardised(nnx.Module):
    """A network for columns in their own units: its inputs are standardised, its outputs scaled back.

    Args:
      network: any network; it is shared, not copied.
      inputs: mean and standard deviation of each input's columns, or None for an input as it is.
      outputs: those of the targets, or None.
    """

    def __init__(self, network: nnx.Module, inputs: Any, outputs: Any) -> None:
        self.network = network
        constants = jax.tree.map(lambda x: nnx.Variable(jnp.asarray(x)), (tuple(inputs), outputs))
        self.inputs, self.outputs = map(nnx.data, constants)

    def __call__(self, *inputs: Any, **options: Any) -> Array:
        """The network's output, in the targets' units."""
        pairs = zip(inputs, self.inputs, strict=True)
        scaled = [x if of is None else (x - of[0][...]) / of[1][...] for x, of in pairs]
        found: Any = self.network
        output = found(*scaled, **options)
        return output if self.outputs is None else self.outputs[0] + self.outputs[1] * output


def fit(
    network: nnx.Module | linen.Module | Bayesian,
    likelihood: Any,
    data: tuple[Any, Any],
    *,
    held_out: float | tuple[Any, Any] = 0.15,
    random: Any = None,
    max_steps: int = 3000,
    patience: int = 6,
    learning_rate: float = 1e-3,
    kl_weight: float = 1.0,
    relative_scale: float | None = None,
    structure: type[Covariance] | None = None,
    seed: int = 0,
    progress: bool | None = None,
    receipt: bool = False,
) -> Any:
    """Train a belief about a network's weights by the analytic ELBO, with Adam.

    All weights are independent Gaussians (`Factorized`). The prior scale of each array is learned, and
    so is the noise of `mj.Gaussian()`. Training stops when the negative log predictive density of
    held-out data has not improved for `patience` times 50 steps, and keeps the best point. In a large
    network with little data the full ELBO can erase the fit, so points from during the KL's warm-up may
    be the best.

    Columns may be in any unit: floating inputs (N, D) and the targets of a Gaussian likelihood are
    brought to mean 0 and standard deviation 1 inside the model, whose network is then a `Standardised`.
    Images, sequences and integers stay as they are: scale them to about one.

    Args:
      network: a Flax network in inference mode, with outputs (N, ..., C), which is not changed; or a
        `mj.Bayesian`, which is trained in place, as it is: nothing is standardised.
      likelihood: `mj.Categorical()`, `mj.Bernoulli()`, `mj.Gaussian()` to learn the noise of each
        output, or `mj.Gaussian(noise_variance)`, a number. Of a `Bayesian` None, for its own.
      data: inputs, an array (N, ...) or a tuple of them, and targets: (N, ...) integers from 0 for
        Categorical, else numbers in the outputs' shape.
      held_out: share of the data to hold out, or (inputs, targets). If the share is fewer than 10
        examples, nothing is held out and training takes `max_steps`.
      random: an NNX filter of the random weights; None for all. The others are trained too.
      max_steps: largest number of Adam steps, at least 1, in batches of up to 256.
      patience: stop after this many evaluations, 50 steps apart, without improvement.
      learning_rate: of Adam.
      kl_weight: of the KL divergence; 1 is the ELBO, 0 leaves it out.
      relative_scale: initial standard deviation of a weight, over the root mean square of its array;
        None for .05.
      structure: of the covariances; None for `mj.Separable`.
      seed: of the held-out split and the batches.
      progress: show a progress bar (tqdm, on stderr); None means if stderr is a terminal.
      receipt: also return a `FitReceipt`: the history, and whether it converged.

    Returns:
      A `mj.Bayesian`: `model.predict(x)`, `model.log_prob(x, y)`, `model.likelihood`.

    Raises:
      TypeError, ValueError: if an argument is invalid, or the training diverges. It warns if `max_steps`
        ended while the held-out density was still improving.

    >>> import moment_jax as mj
    >>> x = np.linspace(-100, 100, 60)[:, None]
    >>> y = 2 * x + 5 * np.random.default_rng(0).normal(size=x.shape)
    >>> net = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    >>> model = mj.fit(net, mj.Gaussian(), (x, y), learning_rate=0.05, held_out=0, max_steps=600)
    >>> prediction = model.predict(x)
    >>> prediction.mean.shape, bool(3 < prediction.sd.mean() < 8)
    ((60, 1), True)
    """
    settings = {"patience": patience, "learning_rate": learning_rate, "kl_weight": kl_weight or 1}
    checks.positive("fit", max_steps=max_steps, **settings)
    if isinstance(network, Bayesian) and network.kind is not None:
        likelihood = _own_likelihood(network, likelihood)
    else:
        checks.likelihood("fit", likelihood)
    plain = as_nnx(network.at_means() if isinstance(network, Bayesian) else network)
    inputs, targets, shape = checks.data("fit", plain, likelihood, data)
    if isinstance(held_out, numbers.Real):
        (inputs, targets), held = _divided((inputs, targets), float(held_out), seed)
    else:
        held = checks.data("fit", plain, likelihood, held_out, inputs)[:2]
    columns = [_columns(x) if x.ndim == 2 and x.dtype.kind == "f" else None for x in inputs]
    of_targets = _columns(targets) if isinstance(likelihood, Gaussian) else None
    given = {"random": random, "relative_scale": relative_scale, "structure": structure}
    options = {name: value for name, value in given.items() if value is not None}
    if isinstance(network, Bayesian):
        model = _as_it_is(network, options, columns)
    else:
        if any(columns) or of_targets:
            plain = Standardised(plain, columns, of_targets)
        model = Bayesian(plain, **{"relative_scale": 0.05, "learn_prior": True, **options})
    if model.kind is None:
        model.kind, model.noise = likelihoods.stored(likelihood)
        if isinstance(model.noise, likelihoods.LogNoise) and of_targets:
            model.noise.set_value(jnp.asarray(2 * np.log(of_targets[1])))

    warm_up, size = min(round(WARM_UP / learning_rate), max_steps // 2), len(targets)
    batch = _batch_size(size, shape[-1])
    batches = _shuffled((inputs, targets), seed, batch)

    def chunk(first: int) -> Any:
        weights = objectives.kl_warmup(first + jnp.arange(STEPS_AT_ONCE), warm_up, kl_weight)
        return *next(batches), jnp.broadcast_to(weights, STEPS_AT_ONCE), float(size)

    _fit_priors(model)
    adam = ADAM(learning_rate)
    training, start = Training.of(model, adam, _loss, wrt=TRAINED, finish=_fit_priors)
    best, best_nll, best_at, nll, history = start, math.inf, 0, math.nan, []
    bar = _bar(max_steps, progress)
    for step, state, value in training.run(start, chunk, max_steps):
        loss = float(value)
        if held is not None and math.isfinite(loss):
            log_probs = training.model(state).log_prob(*held, batch_size=batch)
            nll = -float(log_probs.sum()) / len(held[1])
        history.append((step, loss, nll))
        if bar is not None:
            bar.update(step - bar.n)
            bar.set_postfix(loss=f"{loss:.3f}", held_out=f"{nll:.3f}")
        if not math.isfinite(loss) or (held is not None and not math.isfinite(nll)):
            raise ValueError(
                f"`fit` diverged: after {step} steps -ELBO / N is {loss}, the NLL {nll}. Standardise "
                f"inputs and targets, or take a learning_rate below {learning_rate}."
            )
        if held is None or nll < best_nll - 1e-3:
            best, best_nll, best_at = state, nll, len(history)
        elif sum(done > warm_up for done, *_ in history[best_at:]) >= patience:
            break
    if bar is not None:
        bar.close()
    converged = len(history) - best_at >= patience
    if held is not None and not converged:
        warnings.warn(
            "`fit` stopped without having converged: the held-out density was still improving at the "
            f"end of {max_steps} steps. Take more max_steps, or a larger learning_rate.",
            stacklevel=2,
        )
    nnx.update(model, best[0])
    return (model, FitReceipt(history, converged)) if receipt else model


def _loss(model: Bayesian, data: Any, step: Array) -> Array:
    """-ELBO for each example of the data, of one of the batches (steps, batch, ...)."""
    *batches, size = data
    inputs, targets, weight = jax.tree.map(lambda x: x[step % STEPS_AT_ONCE], batches)
    count = len(targets)
    # A batch may hold more examples than the data, some of them twice.
    weighted = weight * count / size
    return -model.elbo(inputs, targets, dataset_size=count, kl_weight=weighted)


def _fit_priors(model: Bayesian) -> None:
    for belief in model.owned.values():
        belief.fit_prior()


def _as_it_is(model: Bayesian, options: dict[str, Any], columns: list[Any]) -> Bayesian:
    """The model that is trained in place; warns of columns in other units."""
    if options or model.batch_axes != 1:
        raise ValueError(
            f"`fit` trains a Bayesian as it is, of batch_axes=1. Got batch_axes={model.batch_axes}"
            f"{''.join(f', {name}' for name in options)}. Set them in mj.Bayesian()."
        )
    odd = [sd for each in columns if each for sd in each[1] if not 0.1 <= sd <= 10]
    if odd:
        warnings.warn(
            "`fit` trains a Bayesian on inputs as they are. Got a column of standard deviation "
            f"{odd[0]:.3g}. Bring columns to about one, or give the plain network.",
            stacklevel=3,
        )
    return model


def _own_likelihood(model: Bayesian, likelihood: Any) -> Any:
    """The likelihood of a `Bayesian`, which the given one has to be."""
    own = Gaussian() if isinstance(model.noise, likelihoods.LogNoise) else model.likelihood
    flat: Any = map(jax.tree.flatten, (own, own if likelihood is None else likelihood))
    (one, kind), (other, same) = flat
    if not isinstance(own, checks.KINDS) or kind != same or not all(map(np.allclose, one, other)):
        raise ValueError(
            "`fit` trains a Bayesian with its own likelihood: mj.Categorical, mj.Bernoulli or "
            f"mj.Gaussian. Got {likelihood!r}, and {own} of the model. Give None for its own."
        )
    return own


def _columns(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of each feature (..., D), the latter 1 for a constant."""
    rows = np.asarray(x, np.float64).reshape(-1, x.shape[-1])
    sd = rows.std(axis=0)
    sd = np.where(sd > 1e-7 * np.abs(rows).max(axis=0), sd, 1.0)
    return rows.mean(axis=0).astype(np.float32), sd.astype(np.float32)


def _divided(data: Data, share: float, seed: int) -> tuple[Data, Data | None]:
    """Split the data at random into training and held-out data."""
    if not 0 <= share < 1:
        raise ValueError(
            f"`fit` needs held_out as data, or a share from 0 to below 1. Got {share}."
        )
    held = round(share * len(data[1]))
    if held < FEWEST_HELD_OUT:
        return data, None
    order = np.random.default_rng(seed).permutation(len(data[1]))
    train, apart = (jax.tree.map(lambda x, r=r: x[r], data) for r in (order[held:], order[:held]))
    return train, apart


def _batch_size(size: int, num_outputs: int) -> int:
    """The smallest of `BATCH_SIZES` that holds all examples, else the largest within `MOST_PAIRS`."""
    fit = [b for b in BATCH_SIZES if b * num_outputs**2 <= MOST_PAIRS] or BATCH_SIZES[:1]
    return next((b for b in fit if b >= size), fit[-1])


def _shuffled(data: Data, seed: int, batch: int) -> Iterator[Data]:
    """Endless groups of `STEPS_AT_ONCE` batches, (steps, batch, ...), from successive permutations.

    Every example occurs equally often, so batch averages are unbiased.
    """
    rng, count, order = np.random.default_rng(seed), STEPS_AT_ONCE * batch, np.empty(0, np.int64)
    while True:
        while order.size < count:
            order = np.append(order, rng.permutation(len(data[1])))
        rows, order = order[:count].reshape(STEPS_AT_ONCE, batch), order[count:]
        yield jax.tree.map(lambda x, rows=rows: x[rows], data)


def _bar(total: int, wanted: bool | None) -> Any:
    """A tqdm progress bar, hidden unless wanted (by default on a terminal); None without tqdm."""
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    shown = sys.stderr.isatty() if wanted is None else wanted
    return tqdm(total=total, unit="step", leave=False, disable=not shown)
