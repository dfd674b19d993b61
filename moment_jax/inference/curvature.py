"""The generalised Gauss-Newton matrix of a model on a data set: Kronecker factors and diagonals."""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from moment_jax.objectives import Bernoulli, Gaussian
from moment_jax.optim import KroneckerExpand, value_grad_and_factors
from moment_jax.optim.layer_blocks import Blocks, LayerBlock, flatten, unflatten
from moment_jax.optim.taps import count_rows

Inputs = tuple[Array, ...]
Frame = tuple[Any, ...]  # the model's parameters, and the rest of its state
EXAMPLES_AT_ONCE = 16  # the diagonal holds the gradients of each example


def root_column(likelihood: type, outputs: Array, index: Array | int) -> Array:
    """Column k of S, with S S^T the Hessian of -log p in the outputs (..., C) at noise variance 1."""
    one = jax.nn.one_hot(index, outputs.shape[-1], dtype=outputs.dtype)
    one = jnp.broadcast_to(one, outputs.shape)
    if likelihood is Gaussian:
        return one
    if likelihood is Bernoulli:
        p = jax.nn.sigmoid(outputs)
        return one * jnp.sqrt(p * (1 - p))
    p = jax.nn.softmax(outputs)
    own = jnp.sum(one * p, axis=-1, keepdims=True)
    return jnp.sqrt(own) * (one - p)


def signs(outputs: Array) -> Array:
    """Random signs for the targets of an example (N, ..., C), so that their cross terms average out."""
    if outputs.ndim <= 2:
        return jnp.ones((), outputs.dtype)
    shape = (*outputs.shape[:-1], 1)
    return jax.random.rademacher(jax.random.key(0), shape, outputs.dtype)


@dataclasses.dataclass(frozen=True)
class Column:
    """A `Prediction` whose loss gradient is one column of the Hessian's root."""

    outputs: Array
    likelihood: type
    index: Array

    @property
    def num_examples(self) -> int:
        """N."""
        return self.outputs.shape[0]

    def sampled_loss(self, key: Array) -> Array:
        """<column, outputs>, summed over examples; deterministic."""
        del key
        column = root_column(self.likelihood, self.outputs, self.index) * signs(self.outputs)
        return jnp.sum(jax.lax.stop_gradient(column) * self.outputs)


@dataclasses.dataclass(frozen=True)
class Curvature:
    """GGN of a model in inference mode, summed over examples, at noise variance 1.

    The arrays of the model are a frame, an argument of the compiled programs.
    """

    graph: Any  # of the model
    likelihood: type  # Categorical, Bernoulli or Gaussian
    blocks: Blocks  # the dense layers with Kronecker factors
    diagonal: tuple[str, ...]  # paths of the parameters whose diagonal is wanted

    def model(self, frame: Frame) -> Any:
        """The model, with new variables that a trace may write to."""
        merged: Any = nnx.merge(self.graph, *jax.tree.map(lambda x: x, frame), copy=True)
        return merged

    @partial(jax.jit, static_argnums=0)
    def outputs(self, frame: Frame, inputs: Inputs) -> Array:
        """The model's outputs for a batch, (N, ..., C)."""
        return self.model(frame)(*inputs)

    @partial(jax.jit, static_argnums=0)
    def sums(self, frame: Frame, inputs: Inputs) -> Any:
        """Of a batch of N: (N A, sum g g^T) of every block, and squares of the other parameters."""
        columns = jnp.arange(jax.eval_shape(lambda: self.model(frame)(*inputs)).shape[-1])
        factors: dict[str, Any] = {}
        if self.blocks:
            each = jax.lax.map(lambda k: self._column(frame, inputs, k), columns)
            size = len(inputs[0])
            factors = {name: (size * a[0], size * g.sum(0)) for name, (a, g) in each.items()}
        squares: dict[str, Any] = {}
        if self.diagonal:
            squares_of = partial(self._squares, frame, columns)
            each = jax.lax.map(squares_of, inputs, batch_size=EXAMPLES_AT_ONCE)
            squares = jax.tree.map(lambda x: x.sum(0), each)
        return factors, squares

    def _column(self, frame: Frame, inputs: Inputs, index: Array) -> dict[str, tuple[Array, Array]]:
        """Kronecker factors of each block, of one column of the Hessian's root."""

        def loss(model: Any, *inputs: Array) -> tuple[Array, Column]:
            return jnp.zeros(()), Column(model(*inputs), self.likelihood, index)

        dtype = jnp.result_type(*jax.tree.leaves(frame[0]))
        compute = value_grad_and_factors(loss, reading=KroneckerExpand(), dtype=dtype)
        factors: Any = compute(self.model(frame), *inputs, key=jax.random.key(0))[2]
        return {
            b.name: (factors[b.name].inputs[0], factors[b.name].outputs[0]) for b in self.blocks
        }

    def _squares(self, frame: Frame, columns: Array, one: Inputs) -> dict[str, Array]:
        """The diagonal's squared gradients of one example, summed over columns of the Hessian's root."""
        params, rest = frame
        known = flatten(params)

        def output(leaves: dict[str, Array]) -> Array:
            filled = unflatten(params, known | leaves)
            return self.model((filled, rest))(*(x[None] for x in one))

        outputs, pull = jax.vjp(output, {path: known[path] for path in self.diagonal})

        def column(index: Array) -> Any:
            root = root_column(self.likelihood, outputs, index) * signs(outputs)
            return jax.tree.map(jnp.square, pull(root)[0])

        return jax.tree.map(lambda x: x.sum(0), jax.vmap(column)(columns))


def of_batches(fn: Callable[[Inputs], Any], inputs: Inputs, batch_size: int) -> Iterator[Any]:
    """`fn` of every batch, in double precision."""
    for start in range(0, len(inputs[0]), batch_size):
        result = fn(tuple(x[start : start + batch_size] for x in inputs))
        yield jax.tree.map(lambda x: np.asarray(x, np.float64), result)


def last_block(model: nnx.Module, blocks: Blocks, inputs: Inputs) -> LayerBlock:
    """The layer called last, which a backward pass reaches first."""
    order = count_rows(model, blocks, lambda copy: jnp.sum(copy(*(x[:1] for x in inputs))))
    if not order:
        raise ValueError(
            '`laplace(kind="last_layer")` needs a model that ends in a known layer, such as '
            f'nnx.Linear. Got {type(model).__name__}. Use kind="diagonal".'
        )
    first = next(iter(order))
    return next(block for block in blocks if block.name == first)
