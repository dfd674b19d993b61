"""Value, gradient and curvature factors of a loss, from the forward and backward passes they need."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from moment_jax.optim.factors import Factors
from moment_jax.optim.layer_blocks import Blocks
from moment_jax.optim.predictions import EmpiricalFisher, Fisher, Prediction, SampledFisher
from moment_jax.optim.statistics import (
    KroneckerExpand,
    PerSample,
    Reading,
    Statistic,
    factors_of,
    row_factors_of,
)
from moment_jax.optim.taps import CurvatureTap, count_rows, find_blocks, tap, tapped_statistics

LossFn = Callable[..., Any]
Batch = tuple[Any, ...]


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
        it must accept batches of one example.
      reading: of the curvature: `KroneckerExpand()` (default), whose memory does not grow with the
        batch, or `PerSample()`.
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
        `PerSample`; the layer is named.

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
        parts = passes.tapped(model, blocks, batch)
        if when is None and not passes.exact:
            value, grads, rest, factors = passes.together(parts, blocks, batch, key)
        else:
            value, grads, rest = passes.plain(passes.split(model), batch)
            take = partial(passes.alone, parts, blocks, batch, _key(key, value))
            if when is None:
                factors = take()
            else:
                shapes = jax.eval_shape(take)
                zeros = partial(jax.tree.map, lambda x: jnp.zeros(x.shape, x.dtype), shapes)
                factors = jax.lax.cond(jnp.asarray(when, bool), take, zeros)
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

    @property
    def exact(self) -> bool:
        """Whether rows are kept, which takes batches of one."""
        return isinstance(self.reading, PerSample)

    def split(self, model: nnx.Module) -> Any:
        """Graph, taps, parameters and the rest of a model; untyped: mypy miscounts `nnx.split`."""
        return nnx.split(model, CurvatureTap, self.wrt, ...)

    def tapped(self, model: nnx.Module, blocks: Blocks, batch: Batch) -> Any:
        """The same of a tapped copy; raises unless the loss calls every layer."""
        batch_size(batch)
        if self.exact:
            batch = jax.tree.map(lambda x: x[:1], batch)

        def loss(model: Any) -> Array:
            value, prediction = self._evaluate(model, batch)
            return self._target(value, prediction, jax.random.key(0), 1)[0]

        counts = count_rows(model, blocks, loss)
        for block in blocks:
            calls = len(counts.get(block.name, ()))
            if not calls:
                raise ValueError(
                    f"The loss does not call layer {block.name!r}, so it has no curvature. Leave its "
                    f"parameters ({', '.join(block.leaves)}) out of `wrt`, or call it."
                )
            if self.exact and calls > 1:
                raise ValueError(
                    f"{self.reading} needs a loss that calls every layer once. Layer {block.name!r} "
                    f"is called {calls} times; take KroneckerExpand(), or leave the layer out of `wrt`."
                )
        copy, kept = nnx.merge(*nnx.split(model), copy=True), (self.reading, self.dtype)
        tap(copy, {b.name: Statistic(b, *kept, counts[b.name][0]) for b in blocks})
        return self.split(copy)

    def plain(self, parts: Any, batch: Batch) -> tuple[Array, Any, Any]:
        """Value, gradients and the rest of the model without taps."""

        def loss(params: Any) -> tuple[Array, Any]:
            value, _, rest = self._run(parts, parts[1], params, batch)
            return value, rest

        (value, rest), grads = jax.value_and_grad(loss, has_aux=True)(parts[2])
        return value, grads, rest

    def together(
        self, parts: Any, blocks: Blocks, batch: Batch, key: Array | None
    ) -> tuple[Array, Any, Any, Factors]:
        """Value, gradients, the rest of the model and factors from one forward pass."""
        size = batch_size(batch)

        def loss(taps: Any, params: Any) -> tuple[Any, Any]:
            value, prediction, rest = self._run(parts, taps, params, batch)
            target, count = self._target(value, prediction, key, size)
            return (value, target), (rest, count)

        (value, target), pull, (rest, count) = jax.vjp(loss, *parts[1:3], has_aux=True)
        sums, grads = pull((jnp.ones_like(value), jnp.zeros_like(target)))
        correction = size  # of the gradients of an average
        if isinstance(self.fisher, SampledFisher):
            sums, _ = pull((jnp.zeros_like(value), jnp.ones_like(target)))
            correction = 1 / count
        return value, grads, rest, factors_of(blocks, tapped_statistics(sums), correction)

    def alone(self, parts: Any, blocks: Blocks, batch: Batch, key: Array) -> Factors:
        """Factors from passes of their own: of the batch, or by vmap over batches of one for rows."""

        def sums(key: Array, batch: Batch) -> Any:
            def target(taps: Any) -> Any:
                value, prediction, _ = self._run(parts, taps, parts[2], batch)
                return self._target(value, prediction, key, batch_size(batch))

            return jax.grad(target, has_aux=True)(parts[1])

        if not self.exact:
            taps, size = sums(key, batch)
            return factors_of(blocks, tapped_statistics(taps), 1 / size)
        keys = jax.random.split(key, batch_size(batch))
        taps, _ = jax.vmap(sums)(keys, jax.tree.map(lambda x: x[:, None], batch))
        return row_factors_of(blocks, tapped_statistics(taps))

    def _run(self, parts: Any, taps: Any, params: Any, batch: Batch) -> tuple[Array, Any, Any]:
        """Value, prediction and the rest of the model after a forward pass."""
        model = nnx.merge(parts[0], taps, params, parts[3], copy=True)
        return *self._evaluate(model, batch), self.split(model)[3]

    def _evaluate(self, model: nnx.Module, batch: Batch) -> tuple[Array, Any]:
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

    def _target(self, value: Array, prediction: Any, key: Array | None, size: int) -> Any:
        """The sum of -log p to differentiate for the curvature, and its number of examples."""
        if isinstance(self.fisher, EmpiricalFisher):
            return value * size, size
        return prediction.sampled_loss(_key(key, value)), prediction.num_examples


def batch_size(batch: Batch) -> int:
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
