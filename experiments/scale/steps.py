"""A whole train step, of moments or of plain weights: loss, gradient, and Adam's update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
from flax import nnx

import moment_jax as mj
from experiments.scale.layout import Layout
from experiments.scale.networks import Classifier, PlainClassifier, Size

Array = jax.Array

DATASET_SIZE = 1_281_167  # ImageNet's; it only weighs the KL
LEARNING_RATE = 1e-3
PLAIN = "plain"


class Step(NamedTuple):
    """A train step and what it takes."""

    fn: Callable[..., Any]  # (state, inputs, labels) -> (state, loss)
    state: Any  # shapes of the parameters and of the optimizer's state


def negative_elbo(network: Any, inputs: Array, labels: Array, layout: Layout) -> Array:
    """The negative ELBO for each example; the data term by its closed lower bound.

    With a thousand classes the points of a cubature would cost more than the network.
    """
    fits = jax.vmap(mj.objectives.expected_log_likelihood_bound)(labels, *network(inputs, layout))
    return -mj.objectives.elbo(fits, network.kl(), dataset_size=DATASET_SIZE) / DATASET_SIZE


def cross_entropy(network: Any, inputs: Array, labels: Array, layout: Layout) -> Array:
    """Of the plain network."""
    logits = network(inputs, layout)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def make_step(size: Size, structure: str, layout: Layout) -> Step:
    """The step of moments in a structure, or of the plain network.

    It is made of shapes alone: no array is allocated, however large the network.
    """
    plain = structure == PLAIN
    loss = cross_entropy if plain else negative_elbo

    def make() -> Any:
        rngs = nnx.Rngs(0)
        if plain:
            return PlainClassifier(size, rngs=rngs)
        return Classifier(size, rngs=rngs, structure=mj.STRUCTURES[structure])

    graph, params = nnx.split(nnx.eval_shape(make))
    optimizer = optax.adam(LEARNING_RATE)

    def step(state: Any, inputs: Array, labels: Array) -> Any:
        params, moments = state

        def objective(params: Any) -> Array:
            return loss(nnx.merge(graph, params), inputs, labels, layout)

        value, gradient = jax.value_and_grad(objective)(params)
        updates, moments = optimizer.update(gradient, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return Step(step, (params, jax.eval_shape(optimizer.init, params)))
