"""A case's network compiled: moments in a structure, Flax's own layers, linearised, and sampled."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import moment_jax as mj
from experiments import draws
from experiments.accuracy.cases import Case

Outputs = tuple[Any, Any]
"""Mean and sd of the output, (N, T, O), and of the logits, (N, C), or None where there is no head."""
Forward = Callable[[], Any]

EPSILON = 1e-5
BYTES = 4  # float32


def moments(case: Case, structure: type[mj.Covariance]) -> Forward:
    """The moment pass over the case's inputs: `Outputs`."""
    options: dict[str, Any] = {"norm_first": True, "activation": mj.gelu, "epsilon": EPSILON}
    options["num_heads"] = case.num_heads

    def one(x: Array, params: Any) -> Outputs:
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

    def batch(inputs: Array, params: Any) -> Outputs:
        if structure is mj.Full:  # one sequence at a time: its memory is T^4 and (T D)^2
            return jax.lax.map(lambda x: one(x, params), inputs)
        return jax.vmap(lambda x: one(x, params))(inputs)

    return _compiled(batch, case, _params(case))


def plain(case: Case) -> Forward:
    """The same network in Flax's layers at the mean weights, to compare times with."""

    def batch(x: Array, params: Any) -> Array:
        output, logits = _plain(case, params, x)
        return output if logits is None else logits

    return _compiled(batch, case, draws.means(_params(case)))


def linearised(case: Case, which: int) -> Forward:
    """Mean and sd of the output (0) or the logits (1) of the network linearised at its means."""

    def batch(inputs: Array, params: Any) -> tuple[Array, Array]:
        predict = mj.linearised(lambda arrays, x: _plain(case, arrays, x[None])[which][0])

        def one(x: Array) -> tuple[Array, Array]:
            mean, cov = predict(params, x)
            return mean, jnp.sqrt(cov.variance())

        mean, sd = jax.lax.map(one, inputs)
        return (mean[:, 0], sd[:, 0]) if which else (mean, sd)

    return _compiled(batch, case, _params(case))


def sampled(case: Case, count: int, key: Array) -> Forward:
    """`Outputs` by so many sampled networks, each for all inputs."""

    def batch(x: Array, params: Any) -> Outputs:
        def outputs(arrays: Any) -> Array:
            return jnp.concatenate([part.ravel() for part in _plain(case, arrays, x)])

        found = mj.monte_carlo(outputs, params, key, count, batch_size=1)
        parts = [jnp.split(part, [x.size]) for part in (found.mean, found.standard_deviation)]
        (output, logits), (sd, logit_sd) = parts
        return (output.reshape(x.shape), sd.reshape(x.shape)), (
            logits.reshape(len(x), -1),
            logit_sd.reshape(len(x), -1),
        )

    return _compiled(batch, case, _params(case))


def plain_blocks(blocks: Any, num_heads: int, x: Array) -> Array:
    """Sequences (N, T, D) through pre-norm blocks of Flax's layers, of arrays."""
    gelu = mj.nn.find_activation("gelu").plain
    options: dict[str, Any] = {"norm_first": True, "activation": gelu, "epsilon": EPSILON}
    for arrays in blocks:
        x = mj.nn.PlainEncoderBlock(arrays, num_heads=num_heads, **options)(x)
    return x


def _plain(case: Case, arrays: Any, x: Array) -> tuple[Any, Any]:
    """Output and logits (None without a head) of inputs (N, T, D), at given weights."""
    layers, blocks, head = arrays
    if layers:
        relu = mj.nn.find_activation("relu").plain
        return mj.nn.PlainMLP([mj.nn.plain_linear(layer) for layer in layers], relu)(x), None
    x = plain_blocks(blocks, case.num_heads, x)
    return x, None if head is None else mj.nn.plain_linear(head)(x.mean(axis=1))


def _params(case: Case) -> Any:
    return case.layers, case.blocks, case.head


def _compiled(fn: Callable[[Array, Any], Any], case: Case, params: Any) -> Forward:
    arguments = jnp.asarray(case.inputs), params
    compiled = jax.jit(fn).lower(*arguments).compile()
    return lambda: jax.block_until_ready(compiled(*arguments))


def full_gib(case: Case) -> float:
    """The largest arrays that `Full` needs for one sequence, in GiB.

    They are the covariances of all scores, H^2 T^4, and of all hidden units, (T F)^2.
    """
    hidden = [block.feed_forward.hidden for block in case.blocks] + case.layers
    widest = max(layer.kernel.shape[1] for layer in hidden)
    tokens = case.inputs.shape[1]
    return max(case.num_heads**2 * tokens**4, (tokens * widest) ** 2) * BYTES / 2**30
