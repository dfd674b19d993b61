"""Training and prediction of each method, for one copy per seed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array

import moment_jax as mj
from experiments import draws
from experiments.training import Task, clipped_adam, fit

Forward = Callable[[mj.Bayesian, Array, Array], Any]
"""(model, key, inputs (N, ...)) -> logits, their moments, or class probabilities."""

GROUPS = 8  # drawn networks that share a mini-batch
SPEED = 10.0  # of the spreads, over the means: they begin far from where they end
CHUNK = 50  # inputs at a time in prediction


class Budget(NamedTuple):
    """Numbers of updates and peak learning rates of plain and Bayesian networks."""

    plain_steps: int = 2200
    plain_rate: float = 5e-3
    steps: int = 1200
    rate: float = 3e-3
    batch_size: int = 32
    weight_decay: float = 0.3


class Trained(NamedTuple):
    """The trained copies, and seconds in total."""

    models: list[mj.Bayesian]
    seconds: float

    def first(self, count: int) -> Trained:
        """The first copies alone, and their share of the time."""
        return Trained(self.models[:count], count / len(self.models) * self.seconds)

    def members(self, seeds: int) -> list[list[mj.Bayesian]]:
        """The members of each seed: copies are the first members of all seeds, the second, and so on."""
        return [self.models[seed::seeds] for seed in range(seeds)]


def stacked(part: tuple[np.ndarray, np.ndarray], copies: int) -> tuple[np.ndarray, np.ndarray]:
    """The same training inputs and labels for every copy."""
    inputs, labels = (np.broadcast_to(array, (copies, *array.shape)) for array in part)
    return inputs, labels


@dataclasses.dataclass(frozen=True)
class Trainer:
    """Trains copies of the network on a stack of training sets (L, N, ...)."""

    build: Callable[[Array], mj.Bayesian]  # of a key
    given: tuple[np.ndarray, np.ndarray]  # inputs (L, N, ...) and labels (L, N)
    budget: Budget
    keys: Array  # a random key for each copy
    augment: Callable[[Array, Array], Array] | None = None
    """(key, inputs (n, ...)) -> a random variant of them, for a mini-batch; None for themselves."""
    validation: tuple[np.ndarray, np.ndarray] | None = None
    """By whose NLL at the means plain networks and those with dropout stop; None: the last update."""

    def first(self, count: int) -> Trainer:
        """The trainer of the first copies alone."""
        given = self.given[0][:count], self.given[1][:count]
        return dataclasses.replace(self, given=given, keys=self.keys[:count])

    def plain(self, label: str = "plain networks") -> Trained:
        """Cross-entropy at the means, with weight decay."""
        return self._means(mean_logits, label)

    def noisy(self, kind: Callable[[Any], draws.Draw], label: str, groups: int = GROUPS) -> Trained:
        """Cross-entropy of networks that `kind` draws around the means, with weight decay."""

        def logits(model: mj.Bayesian, key: Array, inputs: Array) -> Array:
            network = draws.function_of(model.at_means())
            return draws.outputs(network, kind(model.beliefs), key, inputs, groups)

        return self._means(logits, label)

    def elbo(self, kl_weight: float, plain: list[mj.Bayesian], label: str) -> Trained:
        """The ELBO of drawn networks, from the plain ones' means; a prior learned for each array."""
        steps = self.budget.steps

        def loss(model: mj.Bayesian, given: Any, step: Array) -> Array:
            key, inputs, labels = self._batch(given, step)
            model = _faster(nnx.clone(model), SPEED)
            network = draws.function_of(model.at_means())
            outputs = draws.outputs(network, draws.weights(model.beliefs), key, inputs, GROUPS)
            weight = mj.objectives.kl_warmup(step, steps // 3, kl_weight)
            penalty = weight * draws.learned_prior_kl(model.beliefs) / given[2].size
            return penalty + _cross_entropy(outputs, labels)

        models = [self.build(key) for key in self.keys]
        for model, own in zip(models, plain, strict=True):
            nnx.update(_faster(model, 1 / SPEED), nnx.state(own, mj.nn.VariationalMean))
        trained = self._fit(Task(label, loss, clipped_adam(self.budget.rate, steps), steps), models)
        return trained._replace(models=[_faster(model, SPEED) for model in trained.models])

    def _means(self, logits: Forward, label: str) -> Trained:
        budget = self.budget

        def loss(model: mj.Bayesian, given: Any, step: Array) -> Array:
            key, inputs, labels = self._batch(given, step)
            return _cross_entropy(logits(model, key, inputs), labels)

        def validate(model: mj.Bayesian, _: Any) -> Array:
            assert self.validation is not None
            inputs, labels = (jnp.asarray(part) for part in self.validation)
            return _cross_entropy(model.at_means()(inputs), labels)

        adam = clipped_adam(budget.plain_rate, budget.plain_steps, weight_decay=budget.weight_decay)
        best = None if self.validation is None else validate
        wrt = mj.nn.VariationalMean
        task = Task(label, loss, adam, budget.plain_steps, best, wrt)
        return self._fit(task, [self.build(key) for key in self.keys])

    def _fit(self, task: Task, models: list[mj.Bayesian]) -> Trained:
        """One copy after the other: XLA for CPU is slow at small products in batches."""
        given = zip(self.keys, *map(jnp.asarray, self.given), strict=True)
        fitted = []
        for number, (model, own) in enumerate(zip(models, given, strict=True), 1):
            named = dataclasses.replace(task, name=f"{task.name}, {number} of {len(models)}")
            fitted.append(fit(named, model, own))
        return Trained([one.model for one in fitted], sum(one.seconds for one in fitted))

    def _batch(self, given: Any, step: Array) -> tuple[Array, Array, Array]:
        """A key, and the inputs and labels of an update."""
        key, inputs, labels = given
        key, order_key, own_key = jax.random.split(jax.random.fold_in(key, step), 3)
        chosen = jax.random.randint(order_key, (self.budget.batch_size,), 0, labels.size)
        part = inputs[chosen]
        return key, part if self.augment is None else self.augment(own_key, part), labels[chosen]


def _cross_entropy(logits: Array, labels: Array) -> Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _faster(model: mj.Bayesian, factor: float) -> mj.Bayesian:
    """Scale the stored spreads; Adam's steps do not depend on scale, so this sets their speed."""
    for belief in model.owned.values():
        belief.raw["scale"].set_value(factor * belief.raw["scale"][...])
    return model


def relative(model: mj.Bayesian, spread: float) -> mj.Bayesian:
    """Set standard deviations to `spread` times the means' magnitude; `Factorized` beliefs only."""
    tiny = jnp.finfo(jnp.float32).tiny
    return draws.with_spreads(model, lambda mean: jnp.maximum(spread * jnp.abs(mean), tiny))


def mean_logits(model: mj.Bayesian, key: Array, inputs: Array) -> Array:
    """Of the plain network at the means."""
    logits: Array = model.at_means()(inputs)
    return logits


def mean_softmax(model: mj.Bayesian, key: Array, inputs: Array) -> Array:
    """Of the plain network at the means."""
    return jax.nn.softmax(mean_logits(model, key, inputs))


def moments(model: mj.Bayesian, key: Array, inputs: Array) -> tuple[Array, Array]:
    """Mean (N, C) and covariance (N, C, C) of the logits."""
    logits = model(inputs)
    return logits.mean, logits.features


def expected_softmax(moments: tuple[Array, Array]) -> Array:
    """E[softmax] from the logits' moments."""
    return jax.vmap(mj.objectives.class_probabilities)(*moments)


def mean_of_draws(kind: Callable[[Any], draws.Draw], count: int) -> Forward:
    """The average softmax of `count` drawn networks."""

    def predict(model: mj.Bayesian, key: Array, inputs: Array) -> Array:
        network = draws.function_of(model.at_means())
        logits = draws.many(network, kind(model.beliefs), key, inputs, count)
        return jax.nn.softmax(logits).mean(axis=0)

    return predict


@dataclasses.dataclass(frozen=True)
class Answers:
    """Predictor: inputs (L, N, ...) -> class probabilities (L, N, C), each copy with its own inputs.

    Args:
      forward: of one model.
      copies: the members of each copy, whose results are averaged. Of moments: what members differ by,
        having begun elsewhere, is taken as an error that averages out; what is left is the doubt that
        each has about its own weights.
      keys: of each copy.
      last: from the average to the probabilities.
    """

    forward: Forward
    copies: list[list[mj.Bayesian]]
    keys: Array
    last: Callable[[Any], Array] = lambda found: found

    def __call__(self, inputs: np.ndarray) -> np.ndarray:
        """The probabilities, chunk by chunk."""
        count = inputs.shape[1]
        rows = np.minimum(np.arange(-(-count // CHUNK) * CHUNK), count - 1).reshape(-1, CHUNK)
        programs = [self.program(number) for number in range(len(self.copies))]
        pairs = list(zip(programs, inputs, strict=True))
        parts = [np.stack([np.asarray(of(x[chunk])) for of, x in pairs]) for chunk in rows]
        return np.concatenate(parts, axis=1)[:, :count]

    def program(self, number: int) -> Callable[[Any], Array]:
        """Inputs (n, ...) -> class probabilities of this copy, compiled once for all that are alike."""
        members, key = [nnx.split(model) for model in self.copies[number]], self.keys[number]

        def of(chunk: Any) -> Array:
            each = [_compiled(self.forward, graph, *own, key, chunk) for graph, *own in members]
            return _together(self.last, each)

        return of


@partial(jax.jit, static_argnums=(0, 1))
def _compiled(forward: Forward, graph: Any, state: Any, key: Array, chunk: Array) -> Any:
    return forward(nnx.merge(graph, state), key, chunk)


@partial(jax.jit, static_argnums=0)
def _together(last: Callable[[Any], Array], each: list[Any]) -> Array:
    return last(jax.tree.map(lambda *x: sum(x) / len(x), *each))
