"""How many rows one example has in each layer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from moment_jax.optim.statistics import Reading, Statistic

Array = jax.Array


class RowCounter(Statistic):
    """A statistic that notes how many rows a layer sees."""

    counts: dict[str, list[int]]

    def __init__(self, block: Any, reading: Reading, counts: dict[str, list[int]]) -> None:
        super().__init__(block, reading)
        object.__setattr__(self, "counts", counts)

    def __eq__(self, other: object) -> bool:
        """No two are alike: what one has noted must not answer for another in a cache."""
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def zeros(self, dtype: jnp.dtype | type = jnp.float32) -> dict[str, Array]:
        """As `Statistic.zeros`, of the row count alone."""
        return {"rows": jnp.zeros(self.block.stack, dtype)}

    def __call__(self, inputs: Array, grads: Array) -> dict[str, Array]:
        """Note the number of rows."""
        self.counts[self.block.name].append(grads.shape[0] * grads.shape[1])
        return {"rows": jnp.zeros((), grads.dtype)}


def check_counts(reading: Reading, counts: dict[str, list[int]]) -> None:
    """Raise unless every layer was called once."""
    for name, rows in counts.items():
        if len(rows) != 1:
            raise ValueError(
                f"{reading} needs a loss that calls every layer once. Layer {name!r} is called "
                f"{len(rows)} times; take KroneckerExpand(), or leave the layer out of `wrt`."
            )
