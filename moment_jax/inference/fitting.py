"""`fit`: from data to a predictive distribution, in one call."""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

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
from moment_jax.inference.fitted import Fitted, held_out_scores, output_moments, scores
from moment_jax.inference.table_network import TableNetwork
from moment_jax.inference.variational import STEPS_AT_ONCE, Belief, Spec, Training
from moment_jax.nn import DEFAULT_STRUCTURE
from moment_jax.objectives import Categorical, Gaussian

Array = jax.Array
WARM_UP = 3.0  # steps in which the weight of the KL rises, times the learning rate
TABLE_RATE, MODEL_RATE = 1e-2, 1e-3
NOISE_FACTORS = np.geomspace(1.0, 20.0, 61)  # of the noise variance, tried on held-out data


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
    """Train a belief about a model's weights by the analytic ELBO, with nothing to be set.

    All weights are independent Gaussians (`Factorized`). The scale of each array's prior is learned (the
    best one, in closed form), and so is the noise of a Gaussian likelihood. Training stops where the
    negative log predictive density of held-out data has not improved for `patience` times 50 steps, and
    its best point is kept. The noise is raised where the held-out data ask for more of it, never
    lowered: a cold posterior (`kl_weight` below 1) has been seen to take its training error for it.

    Args:
      model: a Flax NNX module in inference mode, inputs to outputs (N, D); it is not changed. None for
        tables (N, D): a linear model with a hidden layer beside it, of inputs (and real targets) that
        are standardised.
      data: inputs, an array (N, ...) or a tuple of them, and targets, (N,) integers from 0 for
        Categorical, (N,) or (N, D) numbers for Gaussian.
      likelihood: `mj.objectives.Categorical`, or `Gaussian`, whose noise is learned, one variance for
        each target; `Gaussian(noise_variance)` for a known one, in squared units of the targets.
      num_hidden: hidden units of a table's network.
      validation: share of the data that is held out, or held-out (inputs, targets). Of fewer than 10
        examples nothing is held out, and training takes `max_steps`.
      max_steps: at most so many steps of Adam, in batches of up to 256.
      patience: so many evaluations, 50 steps apart, without improvement end the training.
      refit: train on with all data for as many steps as were best; None for tables only.
      learning_rate: None for 0.01 for tables, 0.001 for a given model.
      kl_weight: of the KL divergence; 1 is the ELBO.
      relative_scale: initial standard deviation of weights over their root mean square.
      structure: of covariances; None for `Diagonal` for tables (there it is exact but for covariances
        between outputs), `mj.DEFAULT_STRUCTURE` for a given model.
      seed: of the initial weights, the held-out data and the batches.
      progress: show a progress bar (with tqdm, on stderr); None where stderr is a terminal.

    Returns:
      A `Fitted`, with `predict`, `predict_proba` and `log_prob`.

    Raises:
      TypeError, ValueError: if model, data or likelihood are not of the above.

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
    y_scaling = Scaling.of(targets) if table and name is Gaussian else None
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
    # Of a network of one's own that is large for the data, the ELBO would leave little; a table's has
    # its linear part. So only there points from before the end of the warm-up may be the best.
    counts_from = spec.warm_up if table else 0
    state = variational.start(nnx.to_pure_dict(params), relative_scale, log_noise)
    run = _Run(spec, (params, rest), rate, seed, max_steps, patience, counts_from, progress)
    state, history = run.train(state, train, held)
    noisy = name is Gaussian and spec.learn_noise and held is not None
    floor = run.noise_of(state.belief, held) if noisy else -jnp.inf
    if held is not None and (table if refit is None else refit):
        state, _ = run.train(state, everything, None, int(state.step))
    belief = state.belief._replace(log_noise=jnp.maximum(state.belief.log_noise, floor))
    noise = None
    if name is Gaussian:
        noise = np.exp(np.asarray(belief.log_noise, np.float64))
        noise = noise if y_scaling is None else noise * y_scaling.scale**2
    return Fitted(
        model, variational.posterior(belief), noise, history, spec, belief, (params, rest),
        x_scaling, y_scaling,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Run:
    """The training loop and its settings."""

    spec: Spec
    frame: Any
    rate: float
    seed: int
    max_steps: int
    patience: int
    counts_from: int  # the step from which on points compete on held-out data
    progress: bool | None

    def train(
        self, state: Training, data: Any, held: Any, max_steps: int | None = None
    ) -> tuple[Training, list[tuple[int, float, float]]]:
        """To the best point on held-out data; without any, for all steps."""
        limit = self.max_steps if max_steps is None else max_steps
        size = len(data[1])
        batches = shuffled(data, size, self.seed)
        best, best_nll, since, history = state, math.inf, 0, []
        with _bar(limit, self.progress) as bar:
            for _ in range(math.ceil(limit / STEPS_AT_ONCE)):
                inputs, targets = next(batches)
                state, loss = variational.train(
                    self.spec, state, self.frame, inputs, targets, float(size), self.rate
                )
                nll = math.nan if held is None else self._nll(state.belief, held)
                history.append((int(state.step), float(loss), nll))
                bar.update(STEPS_AT_ONCE)
                bar.set_postfix(loss=f"{float(loss):.3f}", held_out=f"{nll:.3f}")
                if held is None or int(state.step) <= self.counts_from:
                    best = state
                elif nll < best_nll - 1e-3:
                    best, best_nll, since = state, nll, 0
                else:
                    since += int(state.step) > self.spec.warm_up
                    if since >= self.patience:
                        break
        return best, history

    def noise_of(self, belief: Belief, held: Any) -> Array:
        """Log noise variance, the learned one or more: the best on held-out data."""
        logs = [
            jnp.asarray(belief.log_noise + np.log(f), belief.log_noise.dtype) for f in NOISE_FACTORS
        ]
        mean, cov = output_moments(self.spec, belief, self.frame, held[0])
        found = [
            np.mean(scores(self.spec, belief._replace(log_noise=log), held[1], mean, cov))
            for log in logs
        ]
        return logs[int(np.argmax(found))]

    def _nll(self, belief: Belief, held: Any) -> float:
        return -float(np.mean(held_out_scores(self.spec, belief, self.frame, *held)))


def _initial_noise(
    targets: np.ndarray, known: float | None, scaling: Scaling | None, name: type
) -> Array:
    """Log noise variances (D,): the known one, or the variance of the targets."""
    if name is Categorical:
        return jnp.zeros(1)
    if known is None:
        return jnp.log(jnp.maximum(jnp.asarray(targets.var(axis=0), jnp.float32), 1e-6))
    scale = np.ones(targets.shape[1]) if scaling is None else scaling.scale
    return jnp.asarray(np.log(known / scale**2), jnp.float32)


def _bar(total: int, wanted: bool | None) -> Any:
    """A progress bar where it is wanted, by default on a terminal, and tqdm is there."""
    shown = sys.stderr.isatty() if wanted is None else wanted
    try:
        from tqdm import tqdm
    except ImportError:
        return _NoBar()
    return tqdm(total=total, unit="step", leave=False, disable=not shown)


class _NoBar:
    """Takes what a bar takes."""

    def __enter__(self) -> _NoBar:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def update(self, steps: int) -> None:
        """Nothing."""

    def set_postfix(self, **values: str) -> None:
        """Nothing."""
