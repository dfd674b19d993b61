"""Predictions of a `mj.Bayesian` in batches: the model's graph and the network's options are static."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


def predicted(
    model: nnx.Module, inputs: Any, options: dict[str, Any], batch_size: int, axes: int
) -> Any:
    """`model.likelihood(model(*inputs, **options))`, batch by batch where there are batch axes.

    The last batch is filled up with its first example.
    """
    if batch_size < 1:
        raise ValueError(f"`predict` needs batch_size >= 1. Got {batch_size}.")
    graph, state = nnx.split(model)
    known = _Static(options)
    size = jax.tree.leaves(inputs)[0].shape[0] if axes and inputs else 0
    if size <= batch_size:
        return _predicted(graph, state, inputs, known=known)
    parts = []
    for first in range(0, size, batch_size):
        rows = np.arange(first, first + batch_size)
        rows = np.where(rows < size, rows, first)
        batch = jax.tree.map(lambda x, rows=rows: jnp.asarray(x)[rows], inputs)
        part = _predicted(graph, state, batch, known=known)
        parts.append(jax.tree.map(lambda x, left=size - first: x[:left], part))
    return jax.tree.map(lambda *each: jnp.concatenate(each), *parts)


class _Static:
    """Keyword arguments as a static argument: arrays count by their values, and stay known."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        leaves, tree = jax.tree.flatten(options)
        arrays = jax.Array | np.ndarray
        known = [
            (np.asarray(x).tobytes(), x.shape, str(x.dtype)) if isinstance(x, arrays) else x
            for x in leaves
        ]
        self.key = tree, *known

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Static) and self.key == other.key


@partial(jax.jit, static_argnums=0, static_argnames="known")
def _predicted(graph: Any, state: Any, inputs: Any, *, known: _Static) -> Any:
    model: Any = nnx.merge(graph, state)
    return model.likelihood(model(*inputs, **known.options))
