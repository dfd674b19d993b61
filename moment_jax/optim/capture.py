"""Value, gradient and curvature factors of a loss, from the forward and backward passes they need."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from moment_jax.nn.bayesian import Bayesian
from moment_jax.optim.factors import Factors
from moment_jax.optim.layer_blocks import Blocks
from moment_jax.optim.predictions import Fisher, Prediction, SampledFisher
from moment_jax.optim.statistics import KroneckerExpand, PerSample, Reading, Statistic, factors_of
from moment_jax.optim.taps import CurvatureTap, count_rows, find_blocks, tap, tapped_reports

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
    equal those of `nnx.grad` bit for bit. The model changes only as the loss itself changes it.

    The factors of an `mj.Bayesian` are those of its plain network at the means: they take passes of
    their own, in which `model(x)` is that network's output with a covariance of zero.

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
    exact, sampled = isinstance(reading, PerSample), isinstance(fisher, SampledFisher)
    passes = _Passes(loss_fn, exact, sampled, wrt, jnp.dtype(dtype))

    def compute(
        model: nnx.Module, *batch: Any, key: Array | None = None, when: Array | None = None
    ) -> tuple[Array, Any, Factors]:
        blocks = find_blocks(model, wrt)
        if not blocks:
            raise ValueError(
                "`value_grad_and_factors` needs a model with supported layers, such as nnx.Linear. Got "
                f"{type(model).__name__} without any; they are listed in mj.optim.find_blocks."
            )
        _batch_size(batch)  # raises without examples
        parts = passes.tapped(model, blocks, batch)
        random = any(isinstance(node, Bayesian) for _, node in nnx.iter_graph(model))
        if when is None and not exact and not random:
            value, grads, rest, factors = passes.together(parts, blocks, batch, key)
            nnx.update(model, rest)
            return value, grads, factors
        grad = nnx.value_and_grad(
            lambda model: passes.evaluate(model, batch)[0], argnums=nnx.DiffState(0, wrt)
        )
        value, grads = grad(model)
        take = partial(passes.alone, parts, blocks, batch, _key(key, value))
        if when is None:
            return value, grads, take()
        shapes = jax.eval_shape(take)
        zeros = partial(jax.tree.map, lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return value, grads, jax.lax.cond(jnp.asarray(when, bool), take, zeros)

    return compute


@dataclasses.dataclass(frozen=True)
class _Passes:
    """Passes through a tapped model and its loss, with the settings of `value_grad_and_factors`."""

    loss_fn: LossFn
    exact: bool  # whether rows are kept, which takes batches of one
    sampled: bool  # whether targets are drawn from the prediction
    wrt: Any
    dtype: jnp.dtype

    def tapped(self, model: nnx.Module, blocks: Blocks, batch: Batch) -> Any:
        """Graph, taps, parameters and the rest of a tapped copy; raises unless all layers are called."""
        if self.exact:
            batch = jax.tree.map(lambda x: x[:1], batch)
        counts = count_rows(model, blocks, lambda model: self.evaluate(model, batch)[1])
        reports = {}
        for block in blocks:
            calls = len(counts.get(block.name, ()))
            if not calls:
                raise ValueError(
                    f"The loss does not call layer {block.name!r}, so it has no curvature. Leave its "
                    f"parameters ({', '.join(block.leaves)}) out of `wrt`, or call it."
                )
            if self.exact and calls > 1:
                raise ValueError(
                    f"PerSample() needs a loss that calls every layer once. Layer {block.name!r} is "
                    f"called {calls} times; take KroneckerExpand(), or leave the layer out of `wrt`."
                )
            statistic = Statistic(block, self.exact, self.dtype, counts[block.name][0])
            reports[block.name] = statistic, statistic.zeros()
        copy = nnx.merge(*nnx.split(model), copy=True)
        tap(copy, reports)
        return self._split(copy)

    def together(
        self, parts: Any, blocks: Blocks, batch: Batch, key: Array | None
    ) -> tuple[Array, Any, Any, Factors]:
        """Value, gradients, the rest of the model and factors from one forward pass."""

        def loss(taps: Any, params: Any) -> tuple[Any, Any]:
            model = nnx.merge(parts[0], taps, params, parts[3], copy=True)
            value, target, size = self.evaluate(model, batch, key)
            return (value, target), (self._split(model)[3], size)

        (value, target), pull, (rest, size) = jax.vjp(loss, *parts[1:3], has_aux=True)
        sums, grads = pull((jnp.ones_like(value), jnp.zeros_like(target)))
        correction = size  # of the gradients of an average
        if self.sampled:
            sums, _ = pull((jnp.zeros_like(value), jnp.ones_like(target)))
            correction = 1 / size
        return value, grads, rest, factors_of(blocks, tapped_reports(sums), correction)

    def alone(self, parts: Any, blocks: Blocks, batch: Batch, key: Array) -> Factors:
        """Factors from passes of their own: of the batch, or by vmap over batches of one for rows."""

        def sums(key: Array, batch: Batch) -> Any:
            def target(taps: Any) -> Any:
                model = nnx.merge(parts[0], taps, *parts[2:], copy=True)
                return self.evaluate(model, batch, key)[1:]

            return jax.grad(target, has_aux=True)(parts[1])

        if not self.exact:
            taps, size = sums(key, batch)
        else:
            size = _batch_size(batch)
            keys, singles = jax.random.split(key, size), jax.tree.map(lambda x: x[:, None], batch)
            taps, _ = jax.vmap(sums)(keys, singles)
        return factors_of(blocks, tapped_reports(taps), 1 / size)

    def _split(self, model: nnx.Module) -> Any:
        """Untyped, because mypy miscounts `nnx.split`."""
        return nnx.split(model, CurvatureTap, self.wrt, ...)

    def evaluate(self, model: nnx.Module, batch: Batch, key: Array | None = None) -> Any:
        """Value, the sum of -log p to differentiate for the curvature, and its number of examples."""
        result = self.loss_fn(model, *batch)
        value, prediction = result if isinstance(result, tuple) else (result, None)
        if self.sampled and not isinstance(prediction, Prediction):
            raise TypeError(
                "The true Fisher matrix needs the predictive distribution: let the loss return (loss, "
                "prediction) with a prediction such as mj.optim.CategoricalPrediction(logits), or take "
                f"fisher=mj.optim.EmpiricalFisher(). Got {type(prediction).__name__}."
            )
        if jnp.shape(value) != ():
            raise ValueError(
                f"The loss must be a scalar. Got shape {jnp.shape(value)}; take its mean."
            )
        if not self.sampled:
            return value, value * _batch_size(batch), _batch_size(batch)
        return value, prediction.sampled_loss(_key(key, value)), prediction.num_examples


def _batch_size(batch: Batch) -> int:
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
