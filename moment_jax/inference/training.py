"""The training loop: updates of a model by its optimizer, many of them in one compiled program."""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array

STEPS_AT_ONCE = 50  # in one compiled program; what looks at a training does so in between

State = Any  # of a model and its optimizer: a pytree of arrays, to save, to stack, to go on from


@dataclasses.dataclass(frozen=True)
class Training:
    """The loop of `fit` for any Flax module and any loss; compiled once for all of equal fields.

    Args:
      graph: of the model and its `nnx.Optimizer`, as `Training.of` gives it.
      loss: (model, data, step) -> a scalar.
      finish: what is done to the model after each update.

    >>> model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    >>> def loss(model, data, step):
    ...     return jnp.mean((model(data[0]) - data[1]) ** 2)
    >>> x = jnp.arange(4.0)[:, None]
    >>> training, state = Training.of(model, optax.adam(0.1), loss)
    >>> for step, state, value in training.run(state, lambda step: (x, 2 * x), 300):
    ...     pass
    >>> step, bool(value < 0.01), round(float(training.model(state)(x)[3, 0]))
    (300, True, 6)
    """

    graph: Any
    loss: Callable[[Any, Any, Array], Array]
    finish: Callable[[Any], None] | None = None

    @classmethod
    def of(
        cls, model: nnx.Module, optimizer: optax.GradientTransformation, loss: Any,
        *, wrt: Any = nnx.Param, finish: Any = None,
    ) -> tuple[Self, State]:  # fmt: skip
        """The training of a model's variables that the filter `wrt` selects, and its first state."""
        graph, state = nnx.split((model, nnx.Optimizer(model, optimizer, wrt=wrt)))
        return cls(graph, loss, finish), state

    def model(self, state: State) -> Any:
        """A new model with the variables of a state."""
        return nnx.merge(self.graph, state, copy=True)[0]

    @partial(jax.jit, static_argnums=0)
    def advance(self, state: State, data: Any, first: Array, count: Array) -> tuple[State, Array]:
        """The state after updates number first, ..., first + count - 1, and their mean loss."""

        def update(step: Array, carry: tuple[State, Array]) -> tuple[State, Array]:
            model, optimizer = nnx.merge(self.graph, carry[0], copy=True)
            wrt = nnx.DiffState(0, optimizer.wrt)
            value, gradient = nnx.value_and_grad(self.loss, argnums=wrt)(model, data, step)
            optimizer.update(model, gradient)
            if self.finish is not None:
                self.finish(model)
            total = carry[1] + (value / count).astype(carry[1].dtype)
            return nnx.state((model, optimizer)), total

        zero = jnp.zeros((), jnp.float32)
        return jax.lax.fori_loop(first, first + count, update, (state, zero))

    def run(
        self, state: State, data: Callable[[int], Any], num_steps: int,
        *, first: int = 0, advance: Any = None,
    ) -> Iterator[tuple[int, State, Any]]:  # fmt: skip
        """The number of updates made, the state and the mean loss, after every 50 updates.

        Args:
          state: after `first` updates.
          data: the number of updates made -> what the loss takes in the next ones.
          num_steps: number of the last update.
          first: number of updates made before.
          advance: what carries out the updates, `self.advance` compiled or under `vmap`, say.
        """
        advance = advance or self.advance
        for start in range(first, num_steps, STEPS_AT_ONCE):
            count = min(STEPS_AT_ONCE, num_steps - start)
            state, loss = advance(state, data(start), jnp.int32(start), jnp.int32(count))
            yield start + count, state, loss
