"""The plain network and the pass of moments of a problem, and what is compiled of them."""

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
from experiments.frontier.problem import EPSILON, Problem, Spec
from experiments.programs import Program, compile_program

Head = tuple[Array, Array]
DATASET_SIZE = 1000  # weighs the KL divergence in the train step; its cost does not depend on it


class Moments(NamedTuple):
    """Of the last block's output, (..., T, D), and of the logits, (..., C) and (..., C, C)."""

    mean: Array
    sd: Array
    logit_mean: Array
    logit_cov: Array


def encoder_of(spec: Spec, structure: type[mj.Covariance], seed: int = 0) -> mj.nn.Encoder:
    """The library's own encoder."""
    options: dict[str, Any] = {"norm_first": True, "activation": "gelu", "epsilon": EPSILON}
    options |= {"hidden_features": spec.hidden_features, "structure": structure}
    encoder = mj.nn.Encoder(
        spec.num_blocks, spec.num_features, spec.num_heads, rngs=nnx.Rngs(seed), **options
    )
    encoder.final_norm = None  # the case files' networks end with the last block
    return encoder


def classify(tokens: Array, head: Head) -> Array:
    """The head on the mean over tokens: (..., T, D) -> (..., C)."""
    return tokens.mean(axis=-2) @ head[0] + head[1]


def classified(mean: Array, cov: mj.Covariance, head: Head) -> Moments:
    """The moments of one sequence (T, D) and of its logits."""
    certain = mj.DenseParams(*(mj.posterior.Point(part) for part in head))
    pooled, pooled_cov = mj.mean_pool(mean, cov)
    # The head sees this image's own feature covariance, whatever the structure: see VisionTransformer.
    logits, logit_cov = mj.dense(pooled, mj.TokenBlock(pooled_cov.token_blocks()), certain)
    return Moments(mean, jnp.sqrt(cov.variance()), logits[0], logit_cov.token_blocks()[0])


def moments(encoder: mj.nn.Encoder, params: Any, head: Head, x: Array) -> Moments:
    """The moment pass of a batch (N, T, D) with beliefs in the form of `encoder.params`."""
    structure = encoder.settings.structure

    def one(x: Array) -> Moments:
        start = structure.zeros((x.shape[0], x.shape[1]), x.dtype)
        return classified(*encoder.moments(x, start, params, None), head)

    # `Full` takes one sequence at a time: its memory is T^4 and (T D)^2.
    return jax.lax.map(one, x) if structure is mj.Full else jax.vmap(one, axis_name="batch")(x)


def plain_tokens(spec: Spec, blocks: Any, x: Array) -> Array:
    """The output of the last block, (..., T, D), of Flax's own layers, scanned over stacked arrays."""
    gelu = mj.nn.find_activation("gelu").plain

    def step(x: Array, arrays: Any) -> tuple[Array, None]:
        block = mj.nn.PlainEncoderBlock(
            arrays, num_heads=spec.num_heads, norm_first=True, activation=gelu, epsilon=EPSILON
        )
        return block(x), None

    return jax.lax.scan(step, x, blocks)[0]


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
