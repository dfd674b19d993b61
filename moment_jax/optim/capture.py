"""Value, gradient and curvature factors of a loss, from the forward and backward passes they need."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from moment_jax.optim.factors import Factors, as_factors, as_row_factors, check_called
from moment_jax.optim.layer_blocks import Blocks
from moment_jax.optim.predictions import EmpiricalFisher, Fisher, Prediction, SampledFisher
from moment_jax.optim.statistics import KroneckerExpand, PerSample, PerToken, Reading, Statistic
from moment_jax.optim.taps import CurvatureTap, count_rows, find_blocks, tap

LossFn = Callable[..., Any]


def value_grad_and_factors(
    loss_fn: LossFn,
    *,
    reading: Reading | None = None,
    fisher: Fisher | None = None,
    wrt: Any = nnx.Param,
    dtype: jnp.dtype | type = jnp.float32,
) -> Callable[..., tuple[Array, Any, Factors]]:
    """A function (model, *batch) -> (value, grads, factors), by one forward and one backward pass.

    The true Fisher matrix takes a second backward pass, through the layers' outputs only. The gradients
    equal those of `nnx.grad` bit for bit. The model changes only as the loss itself changes it, for
    instance in its batch statistics.

    Args:
      loss_fn: (model, *batch) -> scalar, or (scalar, prediction) for `SampledFisher`. With `PerSample`
        and `PerToken` it must accept batches of one example.
      reading: of the curvature: `KroneckerExpand()` (default), `KroneckerReduce()`, `PerSample()` or
        `PerToken()`. The memory of the first two does not grow with the batch.
      fisher: `SampledFisher()` (default) or `EmpiricalFisher()`.
      wrt: filter of the parameters to differentiate by.
      dtype: of the summed statistics.

    Returns:
      A function of the model and the batch with two more keyword arguments: `key`, the random key of the
      sampled targets (None: derived from the bits of the loss, so that runs repeat), and `when`, a
      boolean array; where it is false no curvature is computed and the factors have weight 0.

    Raises:
      TypeError: if the loss returns no prediction where one is needed, or `reading` or `fisher` is of
        another type. ValueError: if the loss does not call a layer, or calls one more than once with
        `PerSample` or `PerToken`; the layer is named.

    >>> import jax, jax.numpy as jnp, optax
    >>> from flax import nnx
    >>> import moment_jax as mj
    >>> model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    >>> def loss(model, x, labels):
    ...     logits = model(x)
    ...     losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    ...     return losses.mean(), mj.optim.CategoricalPrediction(logits)
    >>> compute = mj.optim.value_grad_and_factors(loss)
    >>> value, grads, factors = compute(model, jnp.ones((5, 3)), jnp.zeros(5, int))
    >>> factors["model"].inputs.shape, factors["model"].outputs.shape
    ((1, 4, 4), (1, 2, 2))
    """
    reading = KroneckerExpand() if reading is None else reading
    fisher = SampledFisher() if fisher is None else fisher
    if not isinstance(reading, Reading) or not isinstance(fisher, Fisher):
        raise TypeError(
            "`value_grad_and_factors` needs instances: a reading such as KroneckerExpand() and a fisher "
            f"such as SampledFisher(). Got {reading!r} and {fisher!r}."
        )
    passes = _Passes(loss_fn, reading, fisher, wrt, jnp.dtype(dtype))

    def compute(
        model: nnx.Module, *batch: Any, key: Array | None = None, when: Array | None = None
    ) -> tuple[Array, Any, Factors]:
        blocks = find_blocks(model, wrt)
        if not blocks:
            raise ValueError(
                "`value_grad_and_factors` needs a model with supported layers, such as nnx.Linear. Got "
                f"{type(model).__name__} without any; they are listed in mj.optim.find_blocks."
            )
        size, examples = batch_size(batch), fisher.examples
        by_rows = isinstance(reading, PerSample | PerToken)
        if by_rows or when is not None or (examples is not None and examples < size):
            value, grads, rest, key = passes.plain(model, batch, key)
            batch = jax.tree.map(lambda x: x[:examples], batch)
            alone = passes.rows_alone if by_rows else passes.factors_alone
            take = partial(alone, model, blocks, batch, key)
            if when is None:
                factors = take()
            else:
                shapes = jax.eval_shape(take)
                zeros = partial(jax.tree.map, lambda x: jnp.zeros(x.shape, x.dtype), shapes)
                factors = jax.lax.cond(jnp.asarray(when, bool), take, zeros)
        else:
            value, grads, rest, factors = passes.together(model, blocks, batch, key)
        nnx.update(model, rest)
        return value, grads, factors

    return compute


@dataclasses.dataclass(frozen=True)
class _Passes:
    """Passes through a model and its loss, with the settings of `value_grad_and_factors`."""

    loss_fn: LossFn
    reading: Reading
    fisher: Fisher
    wrt: Any
    dtype: jnp.dtype

    def plain(
        self, model: nnx.Module, batch: tuple[Any, ...], key: Array | None
    ) -> tuple[Array, Any, Any, Array]:
        """Value, gradients and the rest of the model without taps, and the key of the targets."""
        graph, params, rest = split(model, self.wrt)

        def loss(params: Any) -> tuple[Array, Any]:
            copy = nnx.merge(graph, params, rest, copy=True)
            value, _ = self._evaluate(copy, batch)
            return value, split(copy, self.wrt)[2]

        (value, rest), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return value, grads, rest, _key(key, value)

    def together(
        self, model: nnx.Module, blocks: Blocks, batch: tuple[Any, ...], key: Array | None
    ) -> tuple[Array, Any, Any, Factors]:
        """Value, gradients, the rest of the model and factors from one forward pass."""
        graph, taps, params, rest = self._tapped(model, blocks)
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
            value, correction = values, batch_size(batch)
        else:
            value, target = values
            grads = pull((jnp.ones_like(value), jnp.zeros_like(target)))[1]
            stats = pull((jnp.zeros_like(value), jnp.ones_like(target)))[0]
            correction = 1 / counts[0]
        check_called(blocks, stats, lambda *args: loss(*args)[0], taps, params)
        return value, grads, rest, as_factors(blocks, stats, correction)

    def factors_alone(
        self, model: nnx.Module, blocks: Blocks, batch: tuple[Any, ...], key: Array
    ) -> Factors:
        """Factors from a forward and a backward pass of their own."""
        graph, taps, params, rest = self._tapped(model, blocks)
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
        graph, taps, params, rest = self._tapped(model, blocks, rows)
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
        """How many rows one example has in every layer, which has to be called once."""
        alone = jax.tree.map(lambda x: x[:1], batch)

        def loss(model: Any) -> Array:
            return self._target(*self._evaluate(model, alone), jax.random.key(0), 1)[0]

        counts = count_rows(model, blocks, loss)
        for block in blocks:
            calls = len(counts.get(block.name, ()))
            if calls != 1:
                raise ValueError(
                    f"{self.reading} needs a loss that calls every layer once. Layer {block.name!r} "
                    f"is called {calls} times; take KroneckerExpand(), or leave the layer out of `wrt`."
                )
        return {name: rows[0] for name, rows in counts.items()}

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

    def _tapped(
        self, model: nnx.Module, blocks: Blocks, rows: Mapping[str, int] | None = None
    ) -> Any:
        """Graph, taps, parameters and the rest of a tapped copy."""
        copy = nnx.merge(*nnx.split(model), copy=True)
        statistics = {
            b.name: Statistic(b, self.reading, (rows or {}).get(b.name, 0)) for b in blocks
        }
        tap(copy, statistics, self.dtype)
        return split(copy, CurvatureTap, self.wrt)

    def _target(self, value: Array, prediction: Any, key: Array | None, size: int) -> Any:
        """The sum of -log p to differentiate for the curvature, and its number of examples."""
        if isinstance(self.fisher, EmpiricalFisher):
            return value * size, size
        return prediction.sampled_loss(_key(key, value)), prediction.num_examples


def split(model: nnx.Module, *filters: Any) -> Any:
    """Graph, one state for each filter, and the rest; untyped, because mypy miscounts `nnx.split`."""
    return nnx.split(model, *filters, ...)


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
    """The key, or one derived from the bits of the loss: new at each step, the same in each run."""
    if key is not None:
        return key
    value = jax.lax.stop_gradient(value).astype(jnp.float32)
    return jax.random.fold_in(jax.random.key(0), jax.lax.bitcast_convert_type(value, jnp.uint32))
