"""The forward and backward passes that value, gradient and curvature factors are taken from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from moment_jax.optim.collect import as_factors, as_row_factors, check_called
from moment_jax.optim.factors import Factors
from moment_jax.optim.fisher import EmpiricalFisher, Fisher, SampledFisher
from moment_jax.optim.layer_blocks import Blocks
from moment_jax.optim.predictions import Prediction
from moment_jax.optim.row_counts import RowCounter, check_counts
from moment_jax.optim.statistics import PerToken, Reading, Statistic
from moment_jax.optim.taps import CurvatureTap, tap

Array = jax.Array
LossFn = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Passes:
    """Passes through a model and its loss, with the settings of `value_grad_and_factors`."""

    loss_fn: LossFn
    reading: Reading
    fisher: Fisher
    wrt: Any
    dtype: jnp.dtype

    def _evaluate(self, model: nnx.Module, batch: tuple[Any, ...]) -> tuple[Array, Any]:
        """Value and prediction."""
        result = self.loss_fn(model, *batch)
        value, prediction = result if isinstance(result, tuple) else (result, None)
        if isinstance(self.fisher, SampledFisher) and not isinstance(prediction, Prediction):
            raise TypeError(
                "The true Fisher matrix needs the predictive distribution: let the loss return (loss, "
                "prediction) with a prediction such as mj.optim.CategoricalPrediction(logits), or take "
                f"fisher=mj.optim.EmpiricalFisher(). Got {type(prediction).__name__}."
            )
        if jnp.shape(value) != ():
            raise ValueError(
                f"The loss must be a scalar. Got shape {jnp.shape(value)}; take its mean."
            )
        return value, prediction

    def plain(
        self, model: nnx.Module, batch: tuple[Any, ...], key: Array | None
    ) -> tuple[Array, Any, Any, Array]:
        """Value and gradients without taps, and the key for what comes next."""
        graph, params, rest = split(model, self.wrt)

        def loss(params: Any) -> tuple[Array, Any]:
            copy = nnx.merge(graph, params, rest, copy=True)
            value, _ = self._evaluate(copy, batch)
            return value, split(copy, self.wrt)[2]

        (value, rest), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return value, grads, rest, _key(key, value)

    def _tapped(self, model: nnx.Module, statistics: Mapping[str, Statistic]) -> Any:
        """Graph, taps, parameters and the rest of a tapped copy."""
        copy = nnx.merge(*nnx.split(model), copy=True)
        tap(copy, statistics, self.dtype)
        return split(copy, CurvatureTap, self.wrt)

    def _statistics(self, blocks: Blocks, rows: dict[str, int] | None = None) -> dict[str, Any]:
        return {
            block.name: Statistic(block, self.reading, 0 if rows is None else rows[block.name])
            for block in blocks
        }

    def _target(self, value: Array, prediction: Any, key: Array | None, size: int) -> Any:
        """What is differentiated for the curvature, and by how much outer products are too small."""
        if isinstance(self.fisher, EmpiricalFisher):
            return value * size, size
        return prediction.sampled_loss(_key(key, value)), prediction.num_examples

    def together(
        self, model: nnx.Module, blocks: Blocks, batch: tuple[Any, ...], key: Array | None
    ) -> tuple[Array, Any, Any, Factors]:
        """All with one forward pass."""
        graph, taps, params, rest = self._tapped(model, self._statistics(blocks))
        empirical = isinstance(self.fisher, EmpiricalFisher)
        counts = []

        def loss(taps: Any, params: Any) -> tuple[Any, Any]:
            copy = nnx.merge(graph, taps, params, rest, copy=True)
            value, prediction = self._evaluate(copy, batch)
            new_rest = split(copy, CurvatureTap, self.wrt)[3]
            if empirical:
                return value, new_rest
            target, size = self._target(value, prediction, key, 0)
            counts.append(size)
            return (value, target), new_rest

        values, pull, rest = jax.vjp(loss, taps, params, has_aux=True)
        if empirical:
            stats, grads = pull(jnp.ones_like(values))
            size = batch_size(batch)
            factors = as_factors(blocks, stats, size)
            value = values
        else:
            value, target = values
            grads = pull((jnp.ones_like(value), jnp.zeros_like(target)))[1]
            stats = pull((jnp.zeros_like(value), jnp.ones_like(target)))[0]
            factors = as_factors(blocks, stats, 1 / counts[0])
        check_called(blocks, stats, partial(_second, loss), taps, params)
        return value, grads, rest, factors

    def factors_alone(
        self, model: nnx.Module, blocks: Blocks, batch: tuple[Any, ...], key: Array
    ) -> Factors:
        """Factors by a forward and a backward pass of their own."""
        graph, taps, params, rest = self._tapped(model, self._statistics(blocks))
        size = batch_size(batch)
        counts = []

        def loss(taps: Any, params: Any) -> Array:
            copy = nnx.merge(graph, taps, params, rest, copy=True)
            target, count = self._target(*self._evaluate(copy, batch), key, size)
            counts.append(count)
            return target

        stats = jax.grad(loss)(taps, params)
        check_called(blocks, stats, loss, taps, params)
        return as_factors(blocks, stats, 1 / counts[0])

    def rows_alone(
        self, model: nnx.Module, blocks: Blocks, batch: tuple[Any, ...], key: Array
    ) -> Factors:
        """Rows of every example, by vmap over batches of one."""
        rows = self._count_rows(model, blocks, batch)
        graph, taps, params, rest = self._tapped(model, self._statistics(blocks, rows))
        size = batch_size(batch)

        def one(key: Array, example: tuple[Any, ...]) -> Any:
            def loss(taps: Any) -> Array:
                copy = nnx.merge(graph, taps, params, rest, copy=True)
                alone = jax.tree.map(lambda x: x[None], example)
                return self._target(*self._evaluate(copy, alone), key, 1)[0]

            return jax.grad(loss)(taps)

        stats = jax.vmap(one)(jax.random.split(key, size), batch)
        return as_row_factors(blocks, stats, size, isinstance(self.reading, PerToken))

    def _count_rows(
        self, model: nnx.Module, blocks: Blocks, batch: tuple[Any, ...]
    ) -> dict[str, int]:
        """How many rows one example has in every layer, found without computing anything."""
        counts: dict[str, list[int]] = {block.name: [] for block in blocks}
        statistics = {block.name: RowCounter(block, self.reading, counts) for block in blocks}
        graph, taps, params, rest = self._tapped(model, statistics)

        def loss(taps: Any, params: Any) -> Array:
            copy = nnx.merge(graph, taps, params, rest, copy=True)
            alone = jax.tree.map(lambda x: x[:1], batch)
            return self._target(*self._evaluate(copy, alone), jax.random.key(0), 1)[0]

        jax.eval_shape(jax.grad(loss), taps, params)
        check_counts(self.reading, counts)
        return {name: rows[0] for name, rows in counts.items()}


def split(model: nnx.Module, *filters: Any) -> Any:
    """Graph, one state for each filter, and the rest; type checkers lose count of `nnx.split`'s."""
    return nnx.split(model, *filters, ...)


def _second(loss: Callable[..., Any], taps: Any, params: Any) -> Any:
    """The values without the rest of the model."""
    return loss(taps, params)[0]


def batch_size(batch: tuple[Any, ...]) -> int:
    """N, the first axis of the first array."""
    leaves = [leaf for leaf in jax.tree.leaves(batch) if jnp.ndim(leaf) > 0]
    if not leaves:
        raise ValueError(
            "The curvature needs a batch whose first array has an axis of examples. Got "
            f"{jax.tree.map(jnp.shape, batch)}."
        )
    return leaves[0].shape[0]


def _key(key: Array | None, value: Array) -> Array:
    """The key, or one made from the bits of the loss: a new one each step, the same in each run."""
    if key is not None:
        return key
    value = jax.lax.stop_gradient(value).astype(jnp.float32)
    return jax.random.fold_in(jax.random.key(0), jax.lax.bitcast_convert_type(value, jnp.uint32))
