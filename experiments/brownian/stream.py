"""The residual stream of a model, recorded."""

import copy
from functools import partial
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
    owner, stream = blocks_of(network), list[Array]()

    def recorded(block: Any, x: Array, *args: Any, **options: Any) -> Array:
        stream.extend([] if stream else [x])
        stream.append(block(x, *args, **options))
        return stream[-1]

    # Shallow copies. Modules reject attributes that are no modules, so bypass their check.
    watched, outer = copy.copy(owner), copy.copy(network)
    object.__setattr__(watched, "blocks", [partial(recorded, block) for block in owner.blocks])
    object.__setattr__(outer, "encoder", watched)
    (watched if owner is network else outer)(inputs)
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
        if len(getattr(owner, "blocks", ())):
            return owner
    raise TypeError(
        "A residual stream needs a module with `blocks`, or with an `encoder` that has. Got "
        f"{type(module).__name__}."
    )
