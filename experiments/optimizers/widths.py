"""Memory and time of one update against the width of the Transformer."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.optimizers.runs import Method, Settings, Spent, make_update
from experiments.optimizers.tasks import transformer
from experiments.programs import needed_bytes

CURVATURE_EVERY, REFRESH_EVERY = 5, 10  # the defaults, which all methods here have
ROUNDS = 3
# States of the optimiser: next update with new inverses, with new curvature alone, with neither.
KINDS = {
    "inverses": {"due": True, "age": REFRESH_EVERY, "interval": REFRESH_EVERY},
    "curvature": {"due": True, "age": 0, "interval": REFRESH_EVERY},
    "neither": {"due": False, "age": 0, "interval": REFRESH_EVERY},
}


class Cost(NamedTuple):
    """One update of one method at one width."""

    width: int
    method: str
    megabytes: float  # arguments, results in their place (donated), and what is held between
    inverses: Spent  # with new curvature and new inverses
    curvature: Spent  # with new curvature
    neither: Spent  # with what there is

    @property
    def mean(self) -> Spent:
        """Over the updates between two refreshes of the inverses."""
        shares = [
            1 / REFRESH_EVERY,
            1 / CURVATURE_EVERY - 1 / REFRESH_EVERY,
            1 - 1 / CURVATURE_EVERY,
        ]
        return Spent(*np.average([self.inverses, self.curvature, self.neither], 0, shares).tolist())


def cost_of_update(width: int, name: str, method: Method, settings: Settings) -> Cost:
    """Compile the update of the Transformer of this width, and time all kinds of it in turn."""
    task = transformer(width)
    tx, update = make_update(task, method, task.num_steps, settings)
    params: Any = nnx.split(task.create(0))[1]
    state = tx.init(nnx.as_pure(params))
    key, step = jax.random.key(0), jnp.int32(0)
    compiled = jax.jit(update, donate_argnums=(0, 1)).lower(params, state, key, step).compile()
    memory = compiled.memory_analysis()
    assert memory is not None  # every backend here has the analysis
    held = needed_bytes(compiled) - memory.alias_size_in_bytes
    params, state = compiled(params, state, key, step)  # the first call of a program is slower
    spent: dict[str, list[Spent]] = {kind: [] for kind in KINDS}
    for _ in range(ROUNDS):
        for kind, values in KINDS.items():
            state = _with(state, values)
            jax.block_until_ready((params, state))
            began = Spent.now()
            params, state = compiled(params, state, key, step)
            jax.block_until_ready((params, state))
            spent[kind].append(Spent.since(began))
    medians = [Spent(*np.median(each, axis=0).tolist()) for each in spent.values()]
    return Cost(width, name, held / 1e6, *medians)


def _with(state: Any, values: dict[str, Any]) -> Any:
    """An optimiser's state with some scalars replaced by name."""

    def replaced(path: tuple[Any, ...], leaf: Any) -> Any:
        name = getattr(path[-1], "name", None) if path else None
        return jnp.asarray(values[name], leaf.dtype) if name in values else leaf

    return jax.tree_util.tree_map_with_path(replaced, state)
