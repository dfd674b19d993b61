"""Compiled forwards and train steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import moment_jax as mj
from experiments import draws
from experiments.frontier.passes import Head, classify, encoder_of, moments
from experiments.frontier.problem import Problem
from experiments.programs import Program, compile_program

Array = jax.Array
DATASET_SIZE = 1000  # weighs the KL divergence in the train step; its cost does not depend on it


def compiled(function: Callable[..., Any], *arguments: Any) -> Program:
    """Trace and compile, and bind the arguments."""
    program = compile_program(function, *arguments)
    return program._replace(call=partial(program.call, *arguments))


def moment_forward(problem: Problem, structure: type[mj.Covariance]) -> Program:
    """The moments of tokens and logits, of the problem's beliefs."""
    encoder = encoder_of(problem.spec, structure)
    return compiled(partial(moments, encoder), (problem.each_block(), None), *certain(problem))


def plain_forward(problem: Problem) -> Program:
    """Tokens and logits of the library's plain encoder at the means."""
    encoder = encoder_of(problem.spec, mj.Diagonal)
    at_means = draws.means(problem.each_block())

    def forward(arrays: Any, head: Head, x: Array) -> tuple[Array, Array]:
        tokens = encoder.network((arrays, None))(x)
        return tokens, classify(tokens, head)

    return compiled(forward, at_means, *certain(problem))


def moment_step(problem: Problem, structure: type[mj.Covariance]) -> Program:
    """The negative ELBO, its gradient for all variational parameters, and Adam's update."""
    graph, params = nnx.split(encoder_of(problem.spec, structure))
    fit_of = partial(mj.objectives.expected_log_likelihood, mj.objectives.Categorical())

    def loss(trained: tuple[Any, Head], x: Array, labels: Array) -> Array:
        encoder = nnx.merge(graph, trained[0])
        output = moments(encoder, encoder.params, trained[1], x)
        fits = jax.vmap(fit_of)(labels, output.logit_mean, output.logit_cov)
        bound = mj.objectives.elbo(fits, encoder.kl(), dataset_size=DATASET_SIZE)
        return -bound / DATASET_SIZE

    return _step(problem, params, loss)


def plain_step(problem: Problem) -> Program:
    """Cross-entropy of the same plain network, its gradient, and Adam's update."""
    graph, params = nnx.split(encoder_of(problem.spec, mj.Diagonal).mean_network())

    def loss(trained: tuple[Any, Head], x: Array, labels: Array) -> Array:
        logits = classify(nnx.merge(graph, trained[0])(x), trained[1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return _step(problem, params, loss)


def _step(problem: Problem, params: Any, loss: Callable[..., Array]) -> Program:
    """Compile one update of these parameters and the head; the result is (loss, state)."""
    optimizer = optax.adam(1e-3)
    head, x = certain(problem)
    trained = params, head

    def step(trained: Any, state: Any, x: Array, labels: Array) -> Any:
        value, grads = jax.value_and_grad(loss)(trained, x, labels)
        changes, state = optimizer.update(grads, state, trained)
        return value, optax.apply_updates(trained, changes), state

    return compiled(step, trained, optimizer.init(trained), x, jnp.asarray(problem.labels))


def all_finite(result: Any) -> bool:
    """Whether every number of a step's result is finite."""
    return all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(result))


def certain(problem: Problem) -> tuple[Head, Array]:
    """Head and inputs as arrays."""
    head = jnp.asarray(problem.head[0]), jnp.asarray(problem.head[1])
    return head, jnp.asarray(problem.inputs)
