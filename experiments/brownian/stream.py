"""The residual stream of a model: recorded, predicted by propagation, and sampled."""

import copy
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

import moment_jax as mj


def residual_stream(module: Any, inputs: Array) -> Array:
    """Tokens before the first block and after every block: (L + 1, N, T, D).

    The module is called once, with its blocks recorded. A Bayesian module of `mj.nn` is used at its
    means.

    Args:
      module: a callable with `blocks`, a sequence of callables whose first argument and output are the
        tokens, each called once in that order; or with an `encoder` that has. A module of `mj.nn`, any
        Flax NNX module.
      inputs: what the module takes, with a leading batch axis N.
    """
    network = module.mean_network() if hasattr(module, "mean_network") else module
    stream: list[Array] = []
    _recording(network, stream)(inputs)
    shapes = {tuple(jnp.shape(x)) for x in stream}
    if len(shapes) != 1 or len(next(iter(shapes))) != 3:
        raise ValueError(
            "`residual_stream` needs blocks that are called and return tokens (N, T, D) of one shape, "
            f"for inputs with a leading batch axis. Got the shapes {sorted(shapes) or 'of no block'}."
        )
    return jnp.stack(stream)


def blocks_of(module: Any) -> Any:
    """The owner of the blocks: the module or its encoder."""
    for owner in (module, getattr(module, "encoder", None)):
        if owner is not None and hasattr(owner, "blocks") and len(owner.blocks):
            return owner
    raise TypeError(
        f"A residual stream needs a module with `blocks`, or with an `encoder` that has. Got "
        f"{type(module).__name__}."
    )


class _Recorder:
    """A block that records its inputs and outputs."""

    def __init__(self, block: Any, stream: list[Array]) -> None:
        self.block = block
        self.stream = stream

    def __call__(self, x: Array, *args: Any, **options: Any) -> Any:
        if not self.stream:
            self.stream.append(x)
        result = self.block(x, *args, **options)
        self.stream.append(result)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.block, name)


def _recording(network: Any, stream: list[Array]) -> Any:
    """A shallow copy of the network with recorders in place of its blocks."""
    owner = blocks_of(network)
    watched = copy.copy(owner)
    # Modules reject attributes that are no modules, so bypass their check.
    object.__setattr__(watched, "blocks", [_Recorder(block, stream) for block in owner.blocks])
    if owner is network:
        return watched
    outer = copy.copy(network)
    object.__setattr__(outer, "encoder", watched)
    return outer


class StreamMoments(NamedTuple):
    """Mean and variance of the residual stream, (L + 1, N, T, D) each, from the weights' randomness."""

    mean: Array
    variance: Array


def predicted_stream(module: Any, inputs: Array) -> StreamMoments:
    """Moments of an `Encoder`'s or a `VisionTransformer`'s residual stream, for certain inputs."""
    owner = blocks_of(module)
    if not all(hasattr(block, "moments") for block in owner.blocks):
        raise TypeError(
            "`predicted_stream` needs a Bayesian module of mj.nn, whose blocks propagate moments. Got "
            f"{type(module).__name__}."
        )

    def one(x: Array) -> StreamMoments:
        points = [enter(module, x)]
        for block in owner.blocks:
            points.append(block.moments(*points[-1], block.params, None))
        means, variances = zip(*((mean, cov.variance()) for mean, cov in points), strict=True)
        return StreamMoments(jnp.stack(means, axis=0), jnp.stack(variances, axis=0))

    per_input = jax.jit(lambda batch: jax.lax.map(one, batch))(inputs)
    return StreamMoments(*(jnp.swapaxes(part, 0, 1) for part in per_input))


def enter(module: Any, x: Array) -> tuple[Array, mj.Covariance]:
    """Moments of the tokens that enter the first block, for one certain input."""
    mean = module.sequence(x)
    cov = module.settings.structure.zeros((mean.shape[0], mean.shape[1]), mean.dtype)
    # What has an encoder has an embedding before it: its first stage.
    return (mean, cov) if blocks_of(module) is module else module.stages[0].moments(mean, cov)


def sampled_stream(module: Any, inputs: Array, key: Array, num_samples: int) -> StreamMoments:
    """Moments of the residual stream over sampled networks.

    Standard errors are sd / sqrt(num_samples) of a mean and 1 / sqrt(2 num_samples) of a sd.
    """
    if num_samples < 2:
        raise ValueError(f"`sampled_stream` needs num_samples >= 2. Got {num_samples}.")

    def run(inputs: Array) -> tuple[Array, Array]:
        def add(total: tuple[Array, Array, Array], key: Array) -> tuple[Any, None]:
            count, mean, squares = total
            stream = residual_stream(module.sample(key), inputs)
            change = stream - mean
            mean = mean + change / (count + 1)
            return (count + 1, mean, squares + change * (stream - mean)), None

        start = jnp.zeros_like(residual_stream(module, inputs))
        first = jnp.zeros((), start.dtype), start, start
        (_, mean, squares), _ = jax.lax.scan(add, first, jax.random.split(key, num_samples))
        return mean, squares / (num_samples - 1)

    return StreamMoments(*jax.jit(run)(inputs))
