"""The residual stream of a model, recorded."""

import copy
from typing import Any

import jax.numpy as jnp
from jax import Array

import moment_jax as mj


def residual_stream(module: Any, inputs: Array) -> Array:
    """Tokens before the first block and after every block: (L + 1, N, T, D).

    The module is called once, with its blocks recorded. A `mj.Bayesian` is used at its means.

    Args:
      module: a callable with `blocks`, a sequence of callables whose first argument and output are the
        tokens, each called once in that order; or with an `encoder` that has.
      inputs: what the module takes, with a leading batch axis N.
    """
    network = module.at_means() if isinstance(module, mj.Bayesian) else module
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
        self.stream.append(self.block(x, *args, **options))
        return self.stream[-1]

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
