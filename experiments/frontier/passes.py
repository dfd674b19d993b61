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
from experiments.frontier.problem import Problem, Spec
from experiments.programs import Program, compile_program
from experiments.propagation import EPSILON, plain_block

Head = tuple[Array, Array]
DATASET_SIZE = 1000  # weighs the KL divergence in the train step; its cost does not depend on it


class Moments(NamedTuple):
    """Of the last block's output, (..., T, D), and of the logits, (..., C) and (..., C, C)."""

    mean: Any
    sd: Any
    logit_mean: Any
    logit_cov: Any


def encoder_of(spec: Spec, structure: type[mj.Covariance]) -> mj.nn.Encoder:
    """The library's own encoder."""
    options: dict[str, Any] = {"norm_first": True, "activation": "gelu", "epsilon": EPSILON}
    options |= {"hidden_features": spec.hidden_features, "structure": structure}
    encoder = mj.nn.Encoder(
        spec.num_blocks, spec.num_features, spec.num_heads, rngs=nnx.Rngs(0), **options
    )
    encoder.final_norm = None  # the case files' networks end with the last block
    return encoder


def classify(tokens: Array, head: Head) -> Array:
    """The head on the mean over tokens: (..., T, D) -> (..., C)."""
    return tokens.mean(axis=-2) @ head[0] + head[1]


def moments(encoder: mj.nn.Encoder, params: Any, head: Head, x: Array) -> Moments:
    """The moment pass of a batch (N, T, D) with beliefs in the form of `encoder.params`."""
    structure = encoder.settings.structure
    certain = mj.DenseParams(*(mj.posterior.Point(part) for part in head))

    def one(x: Array) -> Moments:
        start = structure.zeros((x.shape[0], x.shape[1]), x.dtype)
        mean, cov = encoder.moments(x, start, params, None)
        pooled, pooled_cov = mj.mean_pool(mean, cov)
        # As in VisionTransformer, the head sees this image's own feature covariance.
        logits, logit_cov = mj.dense(pooled, mj.TokenBlock(pooled_cov.token_blocks()), certain)
        return Moments(mean, jnp.sqrt(cov.variance()), logits[0], logit_cov.token_blocks()[0])

    # `Full` takes one sequence at a time: its memory is T^4 and (T D)^2.
    return jax.lax.map(one, x) if structure is mj.Full else jax.vmap(one, axis_name="batch")(x)


def plain_tokens(spec: Spec, blocks: Any, x: Array) -> Array:
    """The output of the last block, (..., T, D), of Flax's own layers, scanned over stacked arrays."""

    def step(x: Array, arrays: Any) -> tuple[Array, None]:
        return plain_block(arrays, spec.num_heads)(x), None

    return jax.lax.scan(step, x, blocks)[0]


def _compiled(function: Callable[..., Any], *arguments: Any) -> Program:
    """Trace and compile, and bind the arguments."""
    program = compile_program(function, *arguments)
    return program._replace(call=partial(program.call, *arguments))


def moment_forward(problem: Problem, structure: type[mj.Covariance]) -> Program:
    """The moments of tokens and logits, of the problem's beliefs."""
    forward = partial(moments, encoder_of(problem.spec, structure))
    return _compiled(forward, (problem.each_block(), None), problem.head, problem.inputs)


def plain_forward(problem: Problem) -> Program:
    """Tokens and logits of the library's plain encoder at the means."""
    encoder = encoder_of(problem.spec, mj.Diagonal)

    def forward(arrays: Any, head: Head, x: Array) -> tuple[Array, Array]:
        tokens = encoder.network((arrays, None))(x)
        return tokens, classify(tokens, head)

    return _compiled(forward, draws.means(problem.each_block()), problem.head, problem.inputs)


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
    trained = params, problem.head

    def step(trained: Any, state: Any, x: Array, labels: Array) -> Any:
        value, grads = jax.value_and_grad(loss)(trained, x, labels)
        changes, state = optimizer.update(grads, state, trained)
        return value, optax.apply_updates(trained, changes), state

    given = problem.inputs, jnp.asarray(problem.labels)
    return _compiled(step, trained, optimizer.init(trained), *given)


def all_finite(result: Any) -> bool:
    """Whether every number of a step's result is finite."""
    return all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(result))


def linearised(problem: Problem) -> Program:
    """Mean (N, C) and covariance (N, C, C) of the logits of the network linearised at the means."""

    def forward(blocks: Any, head: Head, x: Array) -> tuple[Array, Array]:
        logits = mj.linearised(
            lambda arrays, x: classify(plain_tokens(problem.spec, arrays, x), head)
        )

        def one(x: Array) -> tuple[Array, Array]:
            mean, cov = logits(blocks, x)
            return mean[0], cov.to_dense()[0, :, 0]

        return jax.lax.map(one, x)

    return _compiled(forward, problem.blocks, problem.head, problem.inputs)


def linearised_tokens(problem: Problem) -> tuple[Array, Array]:
    """Mean and sd of the linearised network's tokens, (N, T, D); one backward pass for each entry."""
    means, beliefs = draws.means(problem.blocks), draws.beliefs(problem.blocks)
    variances = [belief.marginal_variance() for belief in beliefs]

    def one(x: Array) -> tuple[Array, Array]:
        tokens, pull = jax.vjp(lambda means: plain_tokens(problem.spec, means, x), means)

        def variance(entry: Array) -> Array:
            (row,) = pull(jnp.zeros(x.size, x.dtype).at[entry].set(1).reshape(x.shape))
            leaves = zip(jax.tree.leaves(row), variances, strict=True)
            return jnp.stack([jnp.sum(slope**2 * v) for slope, v in leaves]).sum()

        sd = jnp.sqrt(jax.lax.map(variance, jnp.arange(x.size), batch_size=32))
        return tokens, sd.reshape(x.shape)

    return jax.jit(lambda x: jax.lax.map(one, x))(problem.inputs)
