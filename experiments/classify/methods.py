"""Training and prediction of each method, for one copy per seed."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import moment_jax as mj
from experiments import draws
from experiments.classify.networks import BayesianNetwork, Params
from experiments.side_by_side import SideBySide

Predict = Callable[[Params, Array, Array], Array]
"""(parameters, key, inputs (N, ...)) -> class probabilities (N, C)."""

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
    """Trained parameters of every copy, and seconds in total."""

    params: Params
    seconds: float

    def first(self, count: int) -> Trained:
        """The first copies alone, and their share of the time."""
        share = count / len(jax.tree.leaves(self.params)[0])
        params = jax.tree.map(lambda leaf: leaf[:count], self.params)
        return Trained(params, share * self.seconds)

    def members(self, seeds: int) -> Trained:
        """Copies (members * seeds, ...) as (seeds, members, ...)."""
        params = jax.tree.map(
            lambda leaf: leaf.reshape(-1, seeds, *leaf.shape[1:]).swapaxes(0, 1), self.params
        )
        return self._replace(params=params)


def stacked(part: tuple[np.ndarray, np.ndarray], copies: int) -> tuple[np.ndarray, np.ndarray]:
    """The same training inputs and labels for every copy."""
    inputs, labels = (np.broadcast_to(array, (copies, *array.shape)) for array in part)
    return inputs, labels


@dataclasses.dataclass(frozen=True)
class Trainer:
    """Trains copies of the network on a stack of training sets (L, N, ...)."""

    network: BayesianNetwork  # with Separable moments
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

    def start(self) -> Params:
        """Untrained copies."""
        return jax.vmap(self.network.start)(self.keys)

    def plain(self, label: str = "plain networks") -> Trained:
        """Cross-entropy at the means, with weight decay."""
        return self._means(lambda params, key, x: self.network.mean_logits(params, x), label)

    def noisy(self, kind: Callable[[Any], draws.Draw], label: str, groups: int = GROUPS) -> Trained:
        """Cross-entropy of networks that `kind` draws around the means, with weight decay."""

        def logits(params: Params, key: Array, inputs: Array) -> Array:
            draw = kind(self.network.module(params).beliefs)
            return self.network.drawn_logits(draw, params, key, inputs, groups)

        return self._means(logits, label)

    def elbo(self, kl_weight: float, plain: Params, label: str) -> Trained:
        """The ELBO of drawn networks, from the plain ones' weights; a prior learned for each array."""
        network, steps = self.network, self.budget.steps

        def loss(params: Params, given: Any, key: Array, step: Array) -> Array:
            key, inputs, labels = self._batch(given, key)
            params = _faster(params, SPEED)
            beliefs = network.module(params).beliefs
            outputs = network.drawn_logits(draws.weights(beliefs), params, key, inputs, GROUPS)
            weight = mj.objectives.kl_warmup(step, steps // 3, kl_weight)
            penalty = weight * draws.learned_prior_kl(beliefs) / given[1].size
            return penalty + _cross_entropy(outputs, labels)

        training = SideBySide(loss, steps, self.budget.rate, in_turn=True)
        start = _faster(plain._replace(spreads=self.start().spreads), 1 / SPEED)
        trained = self._fit(training, start, self.given, label)
        return trained._replace(params=_faster(trained.params, SPEED))

    def _means(self, logits: Callable[[Params, Array, Array], Array], label: str) -> Trained:
        start, budget = self.start(), self.budget

        def loss(means: Any, given: Any, key: Array, step: Array) -> Array:
            key, inputs, labels = self._batch(given[0], key)
            return _cross_entropy(logits(Params(means, given[1]), key, inputs), labels)

        def validate(means: Any, given: Any) -> Array:
            assert self.validation is not None
            inputs, labels = (jnp.asarray(part) for part in self.validation)
            return _cross_entropy(self.network.mean_logits(Params(means, given[1]), inputs), labels)

        training = SideBySide(
            loss, budget.plain_steps, budget.plain_rate, budget.weight_decay, in_turn=True,
            validate=None if self.validation is None else validate,
        )  # fmt: skip
        trained = self._fit(training, start.means, (self.given, start.spreads), label)
        return trained._replace(params=start._replace(means=trained.params))

    def _fit(self, training: SideBySide, start: Any, given: Any, label: str) -> Trained:
        begin = time.perf_counter()
        params = training.fit(start, given, self.keys, label)
        return Trained(params, time.perf_counter() - begin)

    def _batch(self, given: Any, key: Array) -> tuple[Array, Array, Array]:
        key, order_key, own_key = jax.random.split(key, 3)
        inputs, labels = given
        chosen = jax.random.randint(order_key, (self.budget.batch_size,), 0, labels.size)
        part = inputs[chosen]
        return key, part if self.augment is None else self.augment(own_key, part), labels[chosen]


def _cross_entropy(logits: Array, labels: Array) -> Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _faster(params: Params, factor: float) -> Params:
    """Scale the stored spreads; Adam's steps do not depend on scale, so this sets their speed."""
    return params._replace(spreads=jax.tree.map(lambda raw: factor * raw, params.spreads))


def relative(params: Params, spread: float) -> Params:
    """Set standard deviations to `spread` times the means' magnitude; `Factorized` beliefs only."""
    tiny = jnp.finfo(jnp.float32).tiny
    stored = [
        jnp.log(jnp.expm1(jnp.maximum(spread * jnp.abs(mean), tiny)))
        for mean in jax.tree.leaves(params.means)
    ]
    return params._replace(spreads=jax.tree.unflatten(jax.tree.structure(params.spreads), stored))


def by_means(network: BayesianNetwork) -> Predict:
    """The plain network's softmax."""
    return lambda params, key, inputs: jax.nn.softmax(network.mean_logits(params, inputs))


def by_moments(network: BayesianNetwork) -> Predict:
    """E[softmax] from one pass of moments."""
    return lambda params, key, inputs: _expected_softmax(network.moments(params, inputs))


def _expected_softmax(moments: tuple[Array, Array]) -> Array:
    return jax.vmap(mj.objectives.class_probabilities)(*moments)


def _average(members: Params, fn: Callable[[Params], Any]) -> Any:
    """Over the members, the leading axis of the parameters."""
    return jax.tree.map(lambda part: part.mean(axis=0), jax.lax.map(fn, members))


def by_average(predict: Predict) -> Predict:
    """The average of the members' predictions; members are the leading axis of the parameters."""
    return lambda members, key, x: _average(members, lambda params: predict(params, key, x))


def by_average_logits(network: BayesianNetwork) -> Predict:
    """The softmax of the plain members' average logits."""
    return lambda members, key, inputs: jax.nn.softmax(
        _average(members, lambda params: network.mean_logits(params, inputs))
    )


def by_average_moments(network: BayesianNetwork) -> Predict:
    """E[softmax] of logits with the members' average mean and average covariance.

    What members differ by, having begun elsewhere, is taken as an error that averages out; what is left
    is the doubt that each has about its own weights.
    """
    return lambda members, key, inputs: _expected_softmax(
        _average(members, lambda params: network.moments(params, inputs))
    )


def by_draws(network: BayesianNetwork, kind: Callable[[Any], draws.Draw], count: int) -> Predict:
    """The average softmax of `count` drawn networks."""

    def predict(params: Params, key: Array, inputs: Array) -> Array:
        draw = kind(network.module(params).beliefs)
        logits = network.many_logits(draw, params, key, inputs, count)
        return jax.nn.softmax(logits).mean(axis=0)

    return predict


@dataclasses.dataclass(frozen=True)
class Answers:
    """Predictor: inputs (L, N, ...) -> class probabilities (L, N, C), each copy with its own inputs."""

    predict: Callable[..., Array]  # of one copy; its last argument are inputs
    copies: list[Any]  # for each copy its other arguments, alike in shape

    @classmethod
    def of(cls, predict: Predict, params: Params, keys: Array) -> Answers:
        """Of parameters and keys that are stacks."""
        stack = params, keys
        return cls(
            predict, [jax.tree.map(lambda leaf, i=i: leaf[i], stack) for i in range(len(keys))]
        )

    def __call__(self, inputs: np.ndarray) -> np.ndarray:
        """The probabilities, chunk by chunk."""
        count = inputs.shape[1]
        rows = np.minimum(np.arange(-(-count // CHUNK) * CHUNK), count - 1).reshape(-1, CHUNK)
        program = jax.jit(self.predict)  # compiled once for all that share the predictor
        parts = [
            [
                np.asarray(program(*copy, own[chunk]))
                for copy, own in zip(self.copies, inputs, strict=True)
            ]
            for chunk in rows
        ]
        return np.concatenate([np.stack(part) for part in parts], axis=1)[:, :count]
