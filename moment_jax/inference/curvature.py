"""The generalised Gauss-Newton matrix of a model on a data set: Kronecker factors and diagonals."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moment_jax.objectives import Bernoulli, Gaussian
from moment_jax.optim import KroneckerExpand, find_blocks, value_grad_and_factors
from moment_jax.optim.layer_blocks import Blocks, DenseBlock
from moment_jax.optim.statistics import RowCounter
from moment_jax.optim.taps import CurvatureTap, tap
from moment_jax.optim.trees import flatten, unflatten

Array = jax.Array
Inputs = tuple[Array, ...]
EXAMPLES_AT_ONCE = 16  # of the diagonal, which holds every example's gradients


def root_column(likelihood: type, outputs: Array, index: Array | int) -> Array:
    """Column k of S with S S^T = the Hessian of -log p in the outputs (..., C), noise variance 1."""
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
    """Random signs of the targets of one example (N, ..., C), so that they add up as independent."""
    if outputs.ndim <= 2:
        return jnp.ones((), outputs.dtype)
    shape = (*outputs.shape[:-1], 1)
    return jax.random.rademacher(jax.random.key(0), shape, outputs.dtype)


@dataclasses.dataclass(frozen=True)
class Column:
    """A `Prediction` whose loss has one column of the Hessian's root as its gradient."""

    outputs: Array
    likelihood: type
    index: Array

    @property
    def num_examples(self) -> int:
        """N."""
        return self.outputs.shape[0]

    def sampled_loss(self, key: Array) -> Array:
        """<column, outputs>, summed over examples; nothing is drawn."""
        del key
        column = root_column(self.likelihood, self.outputs, self.index) * signs(self.outputs)
        return jnp.sum(jax.lax.stop_gradient(column) * self.outputs)


class Curvature:
    """GGN of a model in inference mode, summed over examples, at noise variance 1.

    Args:
      model: the model.
      likelihood: its type, Categorical, Bernoulli or Gaussian.
      blocks: the dense layers with Kronecker factors.
      diagonal: paths of the parameters whose diagonal is wanted.
    """

    def __init__(
        self, model: nnx.Module, likelihood: type, blocks: Blocks, diagonal: list[str]
    ) -> None:
        split: Any = nnx.split(model, nnx.Param, ...)
        self.graph, self.params, self.rest = split
        self.likelihood, self.blocks, self.diagonal = likelihood, blocks, diagonal
        self.outputs = jax.jit(lambda inputs: self._model(self.params)(*inputs))
        self._of_batch = jax.jit(self._compute)

    def _model(self, params: Any) -> Any:
        params, rest = jax.tree.map(lambda x: x, (params, self.rest))
        merged: Any = nnx.merge(self.graph, params, rest, copy=True)
        return merged

    def sums(self, inputs: Inputs, batch_size: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """(A, N G) of every block, and the squares of every other parameter, over all examples."""
        size = len(inputs[0])
        total: Any = None
        for start in range(0, size, batch_size):
            batch = tuple(x[start : start + batch_size] for x in inputs)
            part = jax.tree.map(lambda x: np.asarray(x, np.float64), self._of_batch(batch))
            total = part if total is None else jax.tree.map(np.add, total, part)
        factors, squares = total
        return {name: (a / size, g) for name, (a, g) in factors.items()}, squares

    def _compute(self, inputs: Inputs) -> Any:
        """Of one batch of N: (N A, sum g g^T) of every block, and squares of the other parameters."""
        size = len(inputs[0])
        num_outputs = jax.eval_shape(lambda: self._model(self.params)(*inputs)).shape[-1]
        factors: dict[str, Any] = {}
        if self.blocks:
            each = jax.lax.map(lambda k: self._column(inputs, k), jnp.arange(num_outputs))
            factors = {
                block.name: (size * each[block.name][0][0], size * each[block.name][1].sum(0))
                for block in self.blocks
            }
        squares = {}
        if self.diagonal:
            each = jax.lax.map(
                lambda one: self._squares(one, num_outputs), inputs, batch_size=EXAMPLES_AT_ONCE
            )
            squares = jax.tree.map(lambda x: x.sum(0), each)
        return factors, squares

    def _column(self, inputs: Inputs, index: Array) -> dict[str, tuple[Array, Array]]:
        def loss(model: Any, *inputs: Array) -> tuple[Array, Column]:
            outputs = model(*inputs)
            return jnp.zeros(()), Column(outputs, self.likelihood, index)

        dtype = jnp.result_type(*jax.tree.leaves(self.params))
        compute = value_grad_and_factors(loss, reading=KroneckerExpand(), dtype=dtype)
        factors: Any = compute(self._model(self.params), *inputs, key=jax.random.key(0))[2]
        return {
            b.name: (factors[b.name].inputs[0], factors[b.name].outputs[0]) for b in self.blocks
        }

    def _squares(self, one: Inputs, num_outputs: int) -> dict[str, Array]:
        known = flatten(self.params)

        def output(leaves: dict[str, Array]) -> Array:
            params = unflatten(self.params, known | leaves)
            return self._model(params)(*(x[None] for x in one))

        outputs, pull = jax.vjp(output, {path: known[path] for path in self.diagonal})

        def column(index: Array) -> Any:
            root = root_column(self.likelihood, outputs, index) * signs(outputs)
            return jax.tree.map(jnp.square, pull(root)[0])

        return jax.tree.map(lambda x: x.sum(0), jax.vmap(column)(jnp.arange(num_outputs)))


def dense_blocks(model: nnx.Module) -> Blocks:
    """The dense layers of a model that have Kronecker factors, stacks of layers left out."""
    return tuple(b for b in find_blocks(model) if isinstance(b, DenseBlock) and not b.stack)


def last_block(model: nnx.Module, blocks: Blocks, inputs: Inputs) -> DenseBlock:
    """The layer that is called last: backward passes reach it first."""
    copy: Any = nnx.merge(*nnx.split(model), copy=True)
    order: dict[str, list[int]] = defaultdict(list)
    tap(
        copy,
        {b.name: RowCounter(b, KroneckerExpand(), order) for b in blocks},
        jnp.dtype("float32"),
    )
    split: Any = nnx.split(copy, CurvatureTap, ...)
    graph, taps, rest = split

    def loss(taps: Any) -> Array:
        model: Any = nnx.merge(graph, taps, rest, copy=True)
        return jnp.sum(model(*(x[:1] for x in inputs)))

    jax.eval_shape(jax.grad(loss), taps)
    if not order:
        raise ValueError(
            '`laplace(kind="last_layer")` needs a model that ends in a layer it knows, such as '
            f'nnx.Linear. Got {type(model).__name__}. Use kind="diagonal".'
        )
    first = next(iter(order))
    found = next(b for b in blocks if b.name == first)
    assert isinstance(found, DenseBlock)
    return found
