"""A case's network compiled: moments in a structure, plain, linearised, and sampled."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

import moment_jax as mj
from experiments import draws
from experiments.accuracy.cases import Case

Outputs = tuple[Any, Any]
"""Mean and sd of the output, (N, T, O), and of the logits, (N, C) or (N, T C); None without a head."""
Forward = Callable[[], Any]

BYTES = 4  # float32


def moments(case: Case, structure: type[mj.Covariance]) -> Forward:
    """The moment pass over the case's inputs: `Outputs`."""

    def batch(model: mj.Bayesian, inputs: Array) -> Outputs:
        def of(x: Array) -> Outputs:
            output, logits = case.outputs(model, x)
            return (output.mean, output.sd), logits and _rows(logits)

        if structure is not mj.Full:
            return of(inputs)
        # One sequence at a time: its memory is T^4 and (T D)^2.
        found = jax.lax.map(of, inputs[:, None])
        return jax.tree.map(lambda part: part[:, 0], found)

    return _compiled(batch, case, case.model.replace(structure=structure))


def plain(case: Case) -> Forward:
    """The plain network at the mean weights, to compare times with."""
    return _compiled(case.outputs, case, case.model.at_means())


def linearised(case: Case, which: int) -> Forward:
    """Mean and sd of the output (0) or the logits (1) of the network linearised at its means."""

    def batch(model: mj.Bayesian, x: Array) -> tuple[Array, Array]:
        found = model(x, logits=bool(which))
        return _rows(found) if which else (found.mean, found.sd)

    model = case.model.replace(structure=mj.Diagonal, linearised=True)
    return _compiled(batch, case, model)


def sampled(case: Case, count: int, key: Array) -> Forward:
    """`Outputs` by so many sampled networks, each for all inputs."""

    def batch(model: mj.Bayesian, x: Array) -> Outputs:
        apply = draws.function_of(model.at_means())

        def outputs(arrays: Any) -> Array:
            return jnp.concatenate(
                [part.ravel() for part in case.outputs(partial(apply, arrays), x)]
            )

        found = mj.monte_carlo(outputs, model.beliefs, key, count, batch_size=1)
        parts = [jnp.split(part, [x.size]) for part in (found.mean, found.standard_deviation)]
        (output, logits), (sd, logit_sd) = parts
        return (output.reshape(x.shape), sd.reshape(x.shape)), (
            logits.reshape(len(x), -1),
            logit_sd.reshape(len(x), -1),
        )

    return _compiled(batch, case, case.model)


def _rows(found: Any) -> tuple[Array, Array]:
    """Mean and sd, each token's logits beside the others'."""
    return found.mean.reshape(len(found.mean), -1), found.sd.reshape(len(found.mean), -1)


def _compiled(fn: Callable[..., Any], case: Case, network: nnx.Module) -> Forward:
    """`fn(network, inputs)`, the network's weights given."""
    graph, state = nnx.split(network)
    arguments = state, jnp.asarray(case.inputs)
    program = jax.jit(lambda state, x: fn(nnx.merge(graph, state), x)).lower(*arguments).compile()
    return lambda: jax.block_until_ready(program(*arguments))


def full_gib(case: Case) -> float:
    """The largest arrays that `Full` needs for one sequence, in GiB.

    They are the covariances of all scores, H^2 T^4, and of all hidden units, (T F)^2.
    """
    network = case.model.at_means()
    blocks = getattr(network, "blocks", [])
    heads = blocks[0].attention.num_heads if blocks else 0
    layers = [block.hidden for block in blocks] or network.layers
    widest = max(layer.out_features for layer in layers)
    tokens = case.inputs.shape[1]
    return max(heads**2 * tokens**4, (tokens * widest) ** 2) * BYTES / 2**30
