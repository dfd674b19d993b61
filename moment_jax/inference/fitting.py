"""`fit`: from data to a predictive distribution, in one call."""

import dataclasses
import math
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from moment_jax.covariance import Covariance, Diagonal
from moment_jax.inference import variational
from moment_jax.inference.data import (
    Scaling,
    checked_data,
    checked_likelihood,
    divided,
    one_table,
    scaled,
    shuffled,
)
from moment_jax.inference.fitted import Fitted, Network
from moment_jax.inference.variational import STEPS_AT_ONCE, Belief, Spec, Training
from moment_jax.nn import DEFAULT_STRUCTURE
from moment_jax.objectives import Categorical, Gaussian

WARM_UP = 3.0  # steps of KL warm-up, times the learning rate
TABLE_RATE, MODEL_RATE = 1e-2, 1e-3
NOISE_FACTORS = np.geomspace(1.0, 20.0, 61)  # of the noise variance, compared on held-out data


def fit(
    model: nnx.Module | None,
    data: tuple[Any, Any],
    likelihood: Any,
    *,
    num_hidden: int = 32,
    validation: float | tuple[Any, Any] = 0.15,
    max_steps: int = 3000,
    patience: int = 6,
    refit: bool | None = None,
    learning_rate: float | None = None,
    kl_weight: float = 1.0,
    relative_scale: float = 0.05,
    structure: type[Covariance] | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> Fitted:
    """Train a belief about a model's weights by the analytic ELBO; needs no tuning.

    All weights are independent Gaussians (`Factorized`). The prior scale of each array is learned (the
    optimum has a closed form), and so is the noise of a Gaussian likelihood. Training stops when the
    negative log predictive density of held-out data has not improved for `patience` times 50 steps, and
    keeps the best point. Held-out data may then raise the noise but never lower it: a cold posterior
    (`kl_weight` below 1) can mistake its training error for the noise.

    Args:
      model: a Flax NNX module in inference mode, inputs to outputs (N, D); it is not changed. None for
        tables (N, D): a linear model with a hidden layer beside it, on standardised inputs (and
        standardised real targets).
      data: inputs, an array (N, ...) or a tuple of them, and targets: (N,) integers from 0 for
        Categorical, (N,) or (N, D) numbers for Gaussian.
      likelihood: `mj.objectives.Categorical`, or `Gaussian` to learn one noise variance per target;
        `Gaussian(noise_variance)` if it is known, in squared units of the targets.
      num_hidden: hidden units of a table's network.
      validation: share of the data to hold out, or held-out (inputs, targets). If the share is fewer
        than 10 examples, nothing is held out and training takes `max_steps`.
      max_steps: largest number of Adam steps, in batches of up to 256.
      patience: stop after this many evaluations, 50 steps apart, without improvement.
      refit: continue training on all data for the best number of steps; None means only for tables.
      learning_rate: None means 0.01 for tables and 0.001 for a given model.
      kl_weight: of the KL divergence; 1 is the ELBO.
      relative_scale: initial standard deviation of weights relative to their root mean square.
      structure: of covariances; None means `Diagonal` for tables (exact there except for covariances
        between outputs) and `mj.DEFAULT_STRUCTURE` for a given model.
      seed: of the initial weights, the held-out split and the batches.
      progress: show a progress bar (tqdm, on stderr); None means if stderr is a terminal.

    Returns:
      A `Fitted`, with `predict`, `predict_proba` and `log_prob`.

    Raises:
      TypeError, ValueError: if model, data or likelihood are invalid.

    >>> import moment_jax as mj
    >>> x = np.linspace(-1, 1, 60)[:, None]
    >>> noise = np.random.default_rng(0).normal(size=60)
    >>> fitted = fit(None, (x, 2 * x[:, 0] + 0.1 * noise), mj.objectives.Gaussian, max_steps=600)
    >>> mean, sd = fitted.predict(x)
    >>> mean.shape, bool(0.05 < sd.mean() < 0.2)
    ((60, 1), True)
    """
    name, known_noise = checked_likelihood("fit", likelihood, (Categorical, Gaussian))
    inputs, targets = checked_data(data, name)
    table = model is None
    x_scaling = Scaling.of(one_table(inputs)) if table else None
    y_scaling = Scaling.of(targets) if table and name is Gaussian else Scaling()
    if model is None:
        outputs = int(targets.max()) + 1 if name is Categorical else targets.shape[1]
        model = TableNetwork(
            inputs[0].shape[1], max(outputs, 2) if name is Categorical else outputs, num_hidden,
            rngs=nnx.Rngs(seed),
        )  # fmt: skip
    elif not isinstance(model, nnx.Module):
        raise TypeError(f"`fit` needs a Flax NNX module, or None. Got {type(model).__name__}.")
    everything = scaled((inputs, targets), x_scaling, y_scaling)
    if not isinstance(validation, tuple):
        train, held = divided(everything, float(validation), seed)
    else:
        train, held = everything, scaled(checked_data(validation, name), x_scaling, y_scaling)

    rate = learning_rate if learning_rate is not None else (TABLE_RATE if table else MODEL_RATE)
    split: Any = nnx.split(model, nnx.Param, ...)
    graph, params, rest = split
    spec = Spec(
        graph,
        structure or (Diagonal if table else DEFAULT_STRUCTURE),
        name,
        known_noise is None,
        kl_weight,
        warm_up=min(round(WARM_UP / rate), max_steps // 2),
    )
    log_noise = _initial_noise(everything[1], known_noise, y_scaling, name)
    # In a large network with little data the full ELBO can erase the fit, so points from during the
    # warm-up may be the best. A table's network keeps its linear part.
    counts_from = spec.warm_up if table else 0
    state = variational.start(nnx.to_pure_dict(params), relative_scale, log_noise)
    network = Network(spec, (params, rest))
    run = _Run(network, rate, seed, max_steps, patience, counts_from, progress)
    state, history = run.train(state, train, held)
    noisy = name is Gaussian and spec.learn_noise and held is not None
    floor = run.noise_of(state.belief, held) if noisy else -jnp.inf
    if held is not None and (table if refit is None else refit):
        state, _ = run.train(state, everything, None, int(state.step))
    belief = state.belief._replace(log_noise=jnp.maximum(state.belief.log_noise, floor))
    noise = None
    if name is Gaussian:
        noise = np.exp(np.asarray(belief.log_noise, np.float64)) * y_scaling.scale**2
    beliefs = variational.posterior(belief)
    return Fitted(model, beliefs, noise, history, network, belief, x_scaling, y_scaling)


class TableNetwork(nnx.Module):
    """x -> x W + b + gelu(x U + c) V; the learned prior scales keep it linear if the data are.

    With independent weights and certain inputs the hidden units are independent, so `mj.Diagonal` is
    exact for each output.

    Args:
      num_inputs: D.
      num_outputs: size of the last axis of the result.
      num_hidden: hidden units.
      rngs: Flax's.
    """

    def __init__(
        self, num_inputs: int, num_outputs: int, num_hidden: int = 32, *, rngs: nnx.Rngs
    ) -> None:
        zeros = nnx.initializers.zeros
        small = nnx.initializers.variance_scaling(1.0, "fan_in", "normal")
        self.linear = nnx.Linear(num_inputs, num_outputs, kernel_init=zeros, rngs=rngs)
        wide = nnx.initializers.normal(1.0)  # spreads where the hidden units bend
        self.hidden = nnx.Linear(num_inputs, num_hidden, bias_init=wide, rngs=rngs)
        self.head = nnx.Linear(
            num_hidden, num_outputs, use_bias=False, kernel_init=small, rngs=rngs
        )

    def __call__(self, x: Array) -> Array:
        """(N, D) -> (N, num_outputs)."""
        hidden = nnx.gelu(self.hidden(jnp.asarray(x)), approximate=False)
        return self.linear(x) + self.head(hidden)


@dataclasses.dataclass(frozen=True)
class _Run:
    """Settings of the training loop."""

    network: Network
    rate: float
    seed: int
    max_steps: int
    patience: int
    counts_from: int  # first step that is compared on held-out data
    progress: bool | None

    def train(
        self, state: Training, data: Any, held: Any, max_steps: int | None = None
    ) -> tuple[Training, list[tuple[int, float, float]]]:
        """Train to the best point on held-out data, or for all steps if there are none."""
        spec, frame = self.network.spec, self.network.frame
        limit = self.max_steps if max_steps is None else max_steps
        size = float(len(data[1]))
        best, best_nll, since, history = state, math.inf, 0, []
        bar = _bar(limit, self.progress)
        starts = range(0, limit, STEPS_AT_ONCE)
        for _, batch in zip(starts, shuffled(data, len(data[1]), self.seed), strict=False):
            state, loss = variational.train(spec, state, frame, *batch, size, self.rate)
            nll = math.nan
            if held is not None:
                moments = self.network.moments(state.belief, held[0])
                nll = -float(np.mean(self.network.scores(state.belief, held[1], moments)))
            history.append((int(state.step), float(loss), nll))
            if bar is not None:
                bar.update(STEPS_AT_ONCE)
                bar.set_postfix(loss=f"{float(loss):.3f}", held_out=f"{nll:.3f}")
            if held is None or int(state.step) <= self.counts_from:
                best = state
            elif nll < best_nll - 1e-3:
                best, best_nll, since = state, nll, 0
            else:
                since += int(state.step) > spec.warm_up
                if since >= self.patience:
                    break
        if bar is not None:
            bar.close()
        return best, history

    def noise_of(self, belief: Belief, held: Any) -> Array:
        """Log noise variance that is best on held-out data, at least the learned one."""
        dtype = belief.log_noise.dtype
        logs = [jnp.asarray(belief.log_noise + np.log(f), dtype) for f in NOISE_FACTORS]
        moments = self.network.moments(belief, held[0])
        beliefs = [belief._replace(log_noise=log) for log in logs]
        found = [np.mean(self.network.scores(one, held[1], moments)) for one in beliefs]
        return logs[int(np.argmax(found))]


def _initial_noise(targets: np.ndarray, known: float | None, scaling: Scaling, name: type) -> Array:
    """Initial log noise variances (D,): the known one, or the variance of the targets."""
    if name is Categorical:
        return jnp.zeros(1)
    if known is None:
        return jnp.log(jnp.maximum(jnp.asarray(targets.var(axis=0), jnp.float32), 1e-6))
    variance = np.full(targets.shape[1], known) / scaling.scale**2
    return jnp.asarray(np.log(variance), jnp.float32)


def _bar(total: int, wanted: bool | None) -> Any:
    """A tqdm progress bar, hidden unless wanted (by default on a terminal); None without tqdm."""
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    shown = sys.stderr.isatty() if wanted is None else wanted
    return tqdm(total=total, unit="step", leave=False, disable=not shown)
