"""`fit`: from data to a predictive distribution in one call, by the analytic ELBO."""

import dataclasses
import math
import numbers
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array

from moment_jax import objectives
from moment_jax.covariance import Covariance
from moment_jax.inference.data import (
    Data,
    Inputs,
    as_inputs,
    checked_data,
    checked_likelihood,
    examples,
)
from moment_jax.nn import DEFAULT_STRUCTURE, bayesian
from moment_jax.objectives import Categorical, Gaussian
from moment_jax.objectives.moments import logits_cov
from moment_jax.posterior import Factorized

WARM_UP = 3.0  # steps of KL warm-up, times the learning rate
STEPS_AT_ONCE = 50  # between two evaluations, in one compiled program
BATCH_SIZES = (32, 64, 128, 256)  # few, so that data of other sizes need no other programs
# Of outputs in a batch: with 300 classes, batches of 64 take a quarter of the time.
MOST_PAIRS = 2**23
FEWEST_HELD_OUT = 10


class Belief(NamedTuple):
    """The learned quantities: independent Gaussian weights, and the noise."""

    mean: Any
    log_scale: Any
    log_noise: Array  # log variance, (D,)

    def posterior(self) -> Any:
        """The belief as a tree of `Factorized`."""
        mean, log_scale = nnx.to_pure_dict(self.mean), nnx.to_pure_dict(self.log_scale)
        return jax.tree.map(lambda m, s: Factorized(m, jnp.exp(2 * s)), mean, log_scale)

    def kl(self) -> Array:
        """KL to priors N(0, s^2), one s per array, at the best s^2: the average of mean^2 + variance."""
        total = jnp.zeros(())
        for mean, log_scale in zip(*map(jax.tree.leaves, self[:2]), strict=True):
            best = jnp.mean(mean**2 + jnp.exp(2 * log_scale))
            total += 0.5 * mean.size * jnp.log(best) - jnp.sum(log_scale)
        return total


class Training(NamedTuple):
    """The state of the training."""

    belief: Belief
    optimizer: Any
    step: Array


def start(params: Any, relative_scale: float, log_noise: Array) -> Training:
    """The initial state: the model's weights, with standard deviations relative to each array's size."""

    def scale(w: Array) -> Array:
        size = jnp.maximum(jnp.sqrt(jnp.mean(w**2)), 0.1)
        return jnp.full(w.shape, jnp.log(relative_scale * size), w.dtype)

    belief = Belief(params, jax.tree.map(scale, params), log_noise)
    return Training(belief, optax.adam(1.0).init(belief), jnp.zeros((), jnp.int32))


@dataclasses.dataclass(frozen=True)
class Objective:
    """What the compiled programs depend on besides the shapes of their arrays.

    `rest` is the state of the model besides its parameters.
    """

    graph: Any  # of the model
    structure: Any  # of the covariances
    likelihood: type  # Categorical or Gaussian
    learn_noise: bool
    kl_weight: float  # after the warm-up
    warm_up: int  # number of steps over which the KL weight rises

    @partial(jax.jit, static_argnums=0)
    def moments(self, belief: Belief, rest: Any, inputs: Any) -> tuple[Array, Array]:
        """Mean (N, D) of the model's outputs, and covariance (N, D, D); (N, D) in `Diagonal`."""
        model: Any = nnx.merge(self.graph, belief.mean, rest, copy=True)
        mean, cov = bayesian(model, belief.posterior(), structure=self.structure)(*inputs)
        return mean, logits_cov("fit", mean, cov)

    def num_outputs(self, params: Any, rest: Any, inputs: Any) -> int:
        """D of the model's outputs (N, D)."""
        call = partial(nnx.merge, self.graph, copy=True)
        output = jax.eval_shape(lambda: call(params, rest)(*inputs))
        shape: Any = getattr(output, "shape", type(output).__name__)
        if len(shape) != 2 or shape[0] != 1:
            raise ValueError(
                f"`fit` needs a model with outputs (N, D), one row per example. Got {shape} for one "
                "example. For sequences, write the ELBO with mj.bayesian and mj.objectives.elbo."
            )
        return int(shape[1])

    def _of_each(self, fn: Any, belief: Belief, rest: Any, inputs: Any, targets: Array) -> Array:
        """`fn` of the likelihood, and of each example's target, mean and covariance, (N,)."""
        likelihood: Any = Categorical()
        if self.likelihood is Gaussian:
            log_noise = belief.log_noise
            known = log_noise if self.learn_noise else jax.lax.stop_gradient(log_noise)
            likelihood = Gaussian(jnp.exp(known))
        moments = self.moments(belief, rest, inputs)
        return jax.vmap(fn, (None, 0, 0, 0))(likelihood, targets, *moments)

    @partial(jax.jit, static_argnums=0)
    def log_densities(self, belief: Belief, rest: Any, inputs: Any, targets: Array) -> Array:
        """Log predictive density of each target, (N,), in nats."""
        return self._of_each(objectives.log_marginal, belief, rest, inputs, targets)

    @partial(jax.jit, static_argnums=0)
    def train(
        self, state: Training, rest: Any, inputs: Any, targets: Array, size: Array, rate: Array
    ) -> tuple[Training, Array]:
        """The state after an Adam step on -ELBO / size for each batch, and its average in nats.

        Batches have a leading axis of steps.
        """
        optimizer = optax.adam(rate)

        def loss(belief: Belief, inputs: Any, targets: Array, step: Array) -> Array:
            fit = self._of_each(objectives.expected_log_likelihood, belief, rest, inputs, targets)
            weight = self.kl_weight * objectives.kl_warmup(step, self.warm_up)
            return -jnp.mean(fit) + weight * belief.kl() / size

        def one(state: Training, batch: Any) -> tuple[Training, Array]:
            value, gradient = jax.value_and_grad(loss)(state.belief, *batch, state.step)
            updates, opt = optimizer.update(gradient, state.optimizer, state.belief)
            belief: Any = optax.apply_updates(state.belief, updates)
            return Training(belief, opt, state.step + 1), value

        state, values = jax.lax.scan(one, state, (inputs, targets))
        return state, jnp.mean(values)


@dataclasses.dataclass(frozen=True)
class Fitted:
    """A fitted model and its predictions.

    Args:
      model: the network.
      posterior: beliefs about its weights, for `mj.bayesian(model, posterior)`.
      noise_variance: (D,), of a Gaussian likelihood, in squared units of the targets; else None.
      history: for each evaluation, the number of steps, -ELBO / N and the held-out NLL (NaN without
        held-out data), both in nats.
    """

    model: nnx.Module
    posterior: Any
    noise_variance: np.ndarray | None
    history: list[tuple[int, float, float]]
    _objective: Objective
    _belief: Belief
    _rest: Any
    _trained_on: Inputs  # one example
    _num_outputs: int

    def predict(self, inputs: Any) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of the targets, noise included, (N, D) each."""
        self._needs(Gaussian, "predict", "predict_proba")
        mean, cov = self._moments(inputs)
        noise = np.exp(np.asarray(self._belief.log_noise))
        variance = cov if cov.ndim == 2 else np.diagonal(cov, axis1=1, axis2=2)
        return mean, np.sqrt(variance + noise)

    def predict_proba(self, inputs: Any) -> np.ndarray:
        """Predictive probabilities of the classes, (N, C)."""
        self._needs(Categorical, "predict_proba", "predict")
        fn = jax.jit(lambda moments: objectives.class_probabilities(*moments))
        return in_batches(fn, self._moments(inputs), self._num_outputs)

    def log_prob(self, inputs: Any, targets: Any) -> np.ndarray:
        """Log predictive density of each example, (N,), in nats."""
        likelihood, outputs = self._objective.likelihood, self._num_outputs
        data = checked_data((inputs, targets), likelihood, outputs, self._trained_on)
        return log_densities(self._objective, self._belief, self._rest, data, outputs)

    def _needs(self, likelihood: type, method: str, other: str) -> None:
        known = self._objective.likelihood
        if known is not likelihood:
            raise TypeError(
                f"`{method}` needs the likelihood {likelihood.__name__}. Got {known.__name__}. Use "
                f"`{other}`."
            )

    def _moments(self, inputs: Any) -> tuple[np.ndarray, np.ndarray]:
        moments = partial(self._objective.moments, self._belief, self._rest)
        return in_batches(moments, as_inputs(inputs, self._trained_on), self._num_outputs)


def fit(
    model: nnx.Module,
    data: tuple[Any, Any],
    likelihood: Any,
    *,
    validation: float | tuple[Any, Any] = 0.15,
    max_steps: int = 3000,
    patience: int = 6,
    learning_rate: float = 1e-3,
    kl_weight: float = 1.0,
    relative_scale: float = 0.05,
    structure: type[Covariance] = DEFAULT_STRUCTURE,
    seed: int = 0,
    progress: bool | None = None,
) -> Fitted:
    """Train a belief about a model's weights by the analytic ELBO, with Adam.

    All weights are independent Gaussians (`Factorized`). The prior scale of each array is learned (the
    optimum has a closed form), and so is the noise of a Gaussian likelihood. Training stops when the
    negative log predictive density of held-out data has not improved for `patience` times 50 steps, and
    keeps the best point. In a large network with little data the full ELBO can erase the fit, so points
    from during the KL's warm-up may be the best.

    Args:
      model: a Flax NNX module in inference mode, inputs to outputs (N, D); it is not changed.
      data: inputs, an array (N, ...) or a tuple of them, and targets: (N,) integers from 0 for
        Categorical, (N,) or (N, D) numbers for Gaussian. Numbers of about unit size train best.
      likelihood: `mj.objectives.Categorical`, or `Gaussian` to learn one noise variance per target;
        `Gaussian(noise_variance)` if it is known.
      validation: share of the data to hold out, or held-out (inputs, targets). If the share is fewer
        than 10 examples, nothing is held out and training takes `max_steps`.
      max_steps: largest number of Adam steps, at least 1, in batches of up to 256.
      patience: stop after this many evaluations, 50 steps apart, without improvement.
      learning_rate: of Adam.
      kl_weight: of the KL divergence; 1 is the ELBO.
      relative_scale: initial standard deviation of weights relative to their root mean square.
      structure: of the covariances.
      seed: of the held-out split and the batches.
      progress: show a progress bar (tqdm, on stderr); None means if stderr is a terminal.

    Returns:
      A `Fitted`, with `predict`, `predict_proba` and `log_prob`.

    Raises:
      TypeError, ValueError: if model, data, likelihood or a setting is invalid, a label has no output,
        or the training diverges.

    >>> import moment_jax as mj
    >>> x = np.linspace(-1, 1, 60)[:, None]
    >>> y = 2 * x + 0.1 * np.random.default_rng(0).normal(size=x.shape)
    >>> net = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    >>> fitted = fit(net, (x, y), mj.objectives.Gaussian, learning_rate=0.05, max_steps=600)
    >>> mean, sd = fitted.predict(x)
    >>> mean.shape, bool(0.05 < sd.mean() < 0.2)
    ((60, 1), True)
    """
    name, known_noise = checked_likelihood("fit", likelihood, (Categorical, Gaussian))
    if not isinstance(model, nnx.Module):
        raise TypeError(f"`fit` needs a Flax NNX module. Got {type(model).__name__}.")
    for setting, value, least in (
        ("max_steps", max_steps, 1), ("patience", patience, 1), ("kl_weight", kl_weight, 0),
        ("learning_rate", learning_rate, 1e-30), ("relative_scale", relative_scale, 1e-30),
    ):  # fmt: skip
        if not least <= value < math.inf:
            wanted = f">= {least}" if least in (0, 1) else "> 0"
            raise ValueError(f"`fit` needs {setting} {wanted}. Got {value}.")
    split: Any = nnx.split(model, nnx.Param, ...)
    graph, params, rest = split
    if not jax.tree.leaves(params):
        raise ValueError(
            f"`fit` needs a model with parameters. Got {type(model).__name__} without."
        )
    warm_up = min(round(WARM_UP / learning_rate), max_steps // 2)
    objective = Objective(graph, structure, name, known_noise is None, kl_weight, warm_up)
    one = tuple(x[:1] for x in as_inputs(examples("fit", data)[0]))
    outputs = objective.num_outputs(params, rest, one)
    train, held = checked_data(data, name, outputs), None
    if isinstance(validation, numbers.Real):
        train, held = divided(train, float(validation), seed)
    else:
        held = checked_data(validation, name, outputs, one)
    if name is Categorical:
        log_noise = jnp.zeros(1)
    elif known_noise is None:
        log_noise = jnp.log(jnp.maximum(jnp.asarray(train[1].var(axis=0)), 1e-6))
    else:
        log_noise = jnp.full(train[1].shape[1], math.log(known_noise), jnp.float32)
    state = start(params, relative_scale, log_noise)
    best, best_nll, since, history, nll = state, math.inf, 0, [], math.nan
    size, batches = float(len(train[1])), shuffled(train, seed, outputs)
    bar = _bar(max_steps, progress)
    for first in range(0, max_steps, STEPS_AT_ONCE):
        steps = min(STEPS_AT_ONCE, max_steps - first)
        batch = jax.tree.map(lambda x, steps=steps: x[:steps], next(batches))
        state, loss = objective.train(state, rest, *batch, size, learning_rate)
        if held is not None:
            nll = -float(np.mean(log_densities(objective, state.belief, rest, held, outputs)))
        history.append((int(state.step), float(loss), nll))
        if bar is not None:
            bar.update(steps)
            bar.set_postfix(loss=f"{float(loss):.3f}", held_out=f"{nll:.3f}")
        if not math.isfinite(loss) or (held is not None and not math.isfinite(nll)):
            raise ValueError(
                f"`fit` diverged: after {int(state.step)} steps -ELBO / N is {float(loss)}, the NLL "
                f"{nll}. Standardise inputs and targets, or take a learning_rate below {learning_rate}."
            )
        if held is None or nll < best_nll - 1e-3:
            best, best_nll, since = state, nll, 0
        else:
            since += int(state.step) > warm_up
            if since >= patience:
                break
    if bar is not None:
        bar.close()
    belief = best.belief
    noise = np.exp(np.asarray(belief.log_noise, np.float64)) if name is Gaussian else None
    return Fitted(model, belief.posterior(), noise, history, objective, belief, rest, one, outputs)


def divided(data: Data, share: float, seed: int) -> tuple[Data, Data | None]:
    """Split the data at random into training and held-out data."""
    size = len(data[1])
    if not 0 <= share < 1:
        raise ValueError(
            f"`fit` needs validation as a share from 0 to below 1, or as data. Got {share}."
        )
    held = round(share * size)
    if held < FEWEST_HELD_OUT:
        return data, None
    order = np.random.default_rng(seed).permutation(size)
    train, apart = (jax.tree.map(lambda x, r=r: x[r], data) for r in (order[held:], order[:held]))
    return train, apart


def batch_size(size: int, num_outputs: int) -> int:
    """The smallest of `BATCH_SIZES` that holds all examples, else the largest within `MOST_PAIRS`."""
    enough = next((b for b in BATCH_SIZES if b >= size), BATCH_SIZES[-1])
    pairs = MOST_PAIRS // num_outputs**2
    return min(enough, max((b for b in BATCH_SIZES if b <= pairs), default=BATCH_SIZES[0]))


def shuffled(data: Data, seed: int, num_outputs: int) -> Iterator[Data]:
    """Endless groups of `STEPS_AT_ONCE` batches, (steps, batch, ...), from successive permutations.

    Every example occurs equally often, so batch averages are unbiased.
    """
    rng, size = np.random.default_rng(seed), len(data[1])
    shape = (STEPS_AT_ONCE, batch_size(size, num_outputs))
    order = np.empty(0, np.int64)
    while True:
        while order.size < shape[0] * shape[1]:
            order = np.concatenate([order, rng.permutation(size)])
        rows, order = order[: shape[0] * shape[1]].reshape(shape), order[shape[0] * shape[1] :]
        yield jax.tree.map(lambda x, rows=rows: x[rows], data)


def in_batches(fn: Callable[[Any], Any], arrays: Any, num_outputs: int) -> Any:
    """A function of arrays (N, ...) by batches; the last one is padded with its first example."""
    size, parts = len(jax.tree.leaves(arrays)[0]), []
    step = batch_size(size, num_outputs)
    for first in range(0, size, step):
        rows = np.arange(first, first + step)
        rows = np.where(rows < size, rows, first)
        result = fn(jax.tree.map(lambda x, rows=rows: x[rows], arrays))
        parts.append(jax.tree.map(lambda x, left=size - first: np.asarray(x)[:left], result))
    return jax.tree.map(lambda *batches: np.concatenate(batches), *parts)


def log_densities(
    objective: Objective, belief: Belief, rest: Any, data: Data, num_outputs: int
) -> np.ndarray:
    """Log predictive density of every example, (N,), in nats, by batches."""
    return in_batches(lambda xy: objective.log_densities(belief, rest, *xy), data, num_outputs)


def _bar(total: int, wanted: bool | None) -> Any:
    """A tqdm progress bar, hidden unless wanted (by default on a terminal); None without tqdm."""
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    shown = sys.stderr.isatty() if wanted is None else wanted
    return tqdm(total=total, unit="step", leave=False, disable=not shown)
