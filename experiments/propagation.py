"""A case's network in both forms, compiled: moments in a given structure, and Flax's own layers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import moment_jax as mj
from experiments import draws
from experiments.cases import Case
from experiments.programs import GIB

Forward = Callable[[], Any]

EPSILON = 1e-5
BYTES = 4  # float32


def moments(case: Case, structure: type[mj.Covariance]) -> Forward:
    """Compile the moment pass over the case's inputs.

    Returns:
      A function of nothing that gives the output's mean and standard deviation, (N, T, O), and the
      logits', (N, C), or None where the case has no head.
    """
    options: dict[str, Any] = {"norm_first": True, "activation": mj.gelu, "epsilon": EPSILON}
    options["num_heads"] = case.num_heads

    def one(x: Array, params: tuple[Any, Any, Any]) -> Any:
        layers, blocks, head = params
        mean, cov = x, structure.zeros((x.shape[0], x.shape[1]), x.dtype)
        for i, layer in enumerate(layers):
            mean, cov = mj.dense(mean, cov, layer)
            if i + 1 < len(layers):
                mean, cov = mj.relu(mean, cov)
        for block in blocks:
            mean, cov = mj.encoder_block(mean, cov, block, **options)
        output = mean, jnp.sqrt(cov.variance())
        if head is None:
            return output, None
        logits, logit_cov = mj.dense(*mj.mean_pool(mean, cov), head)
        return output, (logits[0], jnp.sqrt(logit_cov.variance()[0]))

    def batch(inputs: Array, params: tuple[Any, Any, Any]) -> Any:
        def run(x: Array) -> Any:
            return one(x, params)

        if structure is mj.Full:  # one sequence at a time: its memory is T^4 and (T D)^2
            return jax.lax.map(run, inputs)
        return jax.vmap(run)(inputs)

    return _compiled(batch, case.inputs, (case.layers, case.blocks, case.head))


def plain_block(arrays: Any, num_heads: int) -> mj.nn.PlainEncoderBlock:
    """A case's block in Flax's layers, of arrays in place of its beliefs."""
    gelu = mj.nn.find_activation("gelu").plain
    return mj.nn.PlainEncoderBlock(
        arrays, num_heads=num_heads, norm_first=True, activation=gelu, epsilon=EPSILON
    )


def deterministic(case: Case) -> Forward:
    """Compile the same network in Flax's layers at the mean weights, to compare times with."""

    def batch(x: Array, params: tuple[Any, Any, Any]) -> Array:
        layers, blocks, head = params
        if layers:
            relu = mj.nn.find_activation("relu").plain
            return mj.nn.PlainMLP([mj.nn.plain_linear(layer) for layer in layers], relu)(x)
        for block in blocks:
            x = plain_block(block, case.num_heads)(x)
        return x if head is None else mj.nn.plain_linear(head)(x.mean(axis=1))

    return _compiled(batch, case.inputs, draws.means((case.layers, case.blocks, case.head)))


def _compiled(fn: Callable[[Array, Any], Any], inputs: np.ndarray, params: Any) -> Forward:
    arguments = (jnp.asarray(inputs), params)
    compiled = jax.jit(fn).lower(*arguments).compile()
    return lambda: jax.block_until_ready(compiled(*arguments))


def full_gib(num_tokens: int, hidden_features: int, num_heads: int) -> float:
    """The largest arrays that `Full` needs for one sequence, in GiB.

    They are the covariances of all scores, H^2 T^4, and of all hidden units, (T F)^2.
    """
    largest = max(num_heads**2 * num_tokens**4, (num_tokens * hidden_features) ** 2)
    return largest * BYTES / GIB
