"""Train many copies of one network: splits, seeds, members of an ensemble."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from experiments.progress import Progress
from experiments.training import clipped_adam

Loss = Callable[[Any, Any, Array, Array], Array]
Score = Callable[[Any, Any], Array]

CHUNK = 50  # updates in one compiled call


class SideBySide:
    """Adam with a cosine schedule on every copy, compiled once for all calls of equal shapes.

    Args:
      loss: (params, given, key, step) -> the loss of one copy; it draws its own mini-batch.
      num_steps: updates.
      learning_rate: peak of the schedule.
      weight_decay: AdamW's.
      in_turn: train one copy after the other. XLA for CPU is slow at products of small matrices in
        batches, so there this is faster for all but the smallest networks.
      validate: (params, given) -> a score of one copy, lower is better; then the best parameters seen,
        every 50 updates, are kept, not the last.
    """

    def __init__(
        self, loss: Loss, num_steps: int, learning_rate: float, weight_decay: float = 0.0,
        *, in_turn: bool = False, validate: Score | None = None,
    ) -> None:  # fmt: skip
        self.loss, self.num_steps, self.validate = loss, num_steps, validate
        self.optimizer = clipped_adam(learning_rate, num_steps, weight_decay=weight_decay)
        self.in_turn = in_turn
        over = (lambda fn, axes: fn) if in_turn else jax.vmap
        self._chunk = jax.jit(over(self._steps, (0, None, 0, 0)))
        self._init = jax.jit(over(self._start, 0))

    def fit(self, params: Any, given: Any, keys: Array, label: str) -> Any:
        """The parameters of every copy after training."""
        given = jax.tree.map(jnp.asarray, given)
        if not self.in_turn:
            return self._fit(params, given, keys, label)
        done = []
        for i in range(len(keys)):
            name = f"{label}, {i + 1} of {len(keys)}"
            one, data, key = jax.tree.map(lambda leaf, i=i: leaf[i], (params, given, keys))
            done.append(self._fit(one, data, key, name))
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *done)

    def _fit(self, params: Any, given: Any, keys: Array, label: str) -> Any:
        carry = self._init(params)
        size = min(CHUNK, self.num_steps)
        progress = Progress(label, self.num_steps)
        for first in range(0, self.num_steps, size):
            carry = jax.block_until_ready(self._chunk(carry, jnp.int32(first), given, keys))
            progress.update(min(size, self.num_steps - first))
        return carry[0] if self.validate is None else carry[2][0]

    def _start(self, params: Any) -> Any:
        """Parameters, state of the optimiser, and the best parameters so far with their score."""
        # Weak types, as of Python's numbers, would compile the update a second time.
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf, leaf.dtype), params)
        best = None if self.validate is None else (params, jnp.full((), jnp.inf, jnp.float32))
        return params, self.optimizer.init(params), best

    def _steps(self, carry: Any, first: Array, given: Any, key: Array) -> Any:
        """A chunk of updates of one copy (none beyond the last), and its score."""

        def update(carry: Any, step: Array) -> tuple[Any, None]:
            params, state = carry
            grads = jax.grad(self.loss)(params, given, jax.random.fold_in(key, step), step)
            changes, state = self.optimizer.update(grads, state, params)
            changed = optax.apply_updates(params, changes), state
            return jax.tree.map(partial(jnp.where, step < self.num_steps), changed, carry), None

        steps = first + jnp.arange(min(CHUNK, self.num_steps))
        (params, state), _ = jax.lax.scan(update, carry[:2], steps)
        best = carry[2]
        if self.validate is not None:
            score = self.validate(params, given)
            best = jax.tree.map(partial(jnp.where, score < best[1]), (params, score), best)
        return params, state, best
