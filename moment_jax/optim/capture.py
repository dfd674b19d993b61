"""Value, gradient and curvature factors of a loss, by one forward and the backward passes they need."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from moment_jax.optim.factors import Factors
from moment_jax.optim.fisher import Fisher, SampledFisher
from moment_jax.optim.passes import LossFn, Passes, batch_size
from moment_jax.optim.statistics import KroneckerExpand, PerSample, PerToken, Reading
from moment_jax.optim.taps import find_blocks

Array = jax.Array


def value_grad_and_factors(
    loss_fn: LossFn,
    *,
    reading: Reading | None = None,
    fisher: Fisher | None = None,
    wrt: Any = nnx.Param,
    dtype: jnp.dtype | type = jnp.float32,
) -> Callable[..., tuple[Array, Any, Factors]]:
    """A function (model, *batch) -> (value, grads, factors), by one forward and one backward pass.

    The true Fisher matrix takes a second backward pass, to the layers' outputs alone. The gradients are
    those of `nnx.grad` to the bit. The model is not changed, apart from what the loss itself changes in
    it, such as batch statistics.

    Args:
      loss_fn: (model, *batch) -> scalar, or (scalar, prediction) for `SampledFisher`. With the readings
        `PerSample` and `PerToken`, it must take batches of one example.
      reading: of the curvature: `KroneckerExpand()` (default), `KroneckerReduce()`, `PerSample()` or
        `PerToken()`; the first two take memory that does not grow with the batch.
      fisher: `SampledFisher()` (default) or `EmpiricalFisher()`.
      wrt: filter of the parameters to differentiate by.
      dtype: in which statistics are summed.

    Returns:
      A function of the model and the batch, with two more keyword arguments: `key`, the JAX random key
      of the sampled targets (None: one is made from the bits of the loss, so that runs repeat), and
      `when`, a boolean array; the curvature is computed where it is true, else the factors have weight
      0.

    Raises:
      TypeError: if the loss returns no prediction where one is needed, or reading or fisher is of
        another kind. ValueError: if the loss does not call a layer (its name is given), or calls one
        more than once with `PerSample` or `PerToken`.

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
            "`value_grad_and_factors` needs a reading such as KroneckerExpand() and a fisher such as "
            f"SampledFisher(), made objects. Got {reading!r} and {fisher!r}."
        )
    passes = Passes(loss_fn, reading, fisher, wrt, jnp.dtype(dtype))

    def compute(
        model: nnx.Module, *batch: Any, key: Array | None = None, when: Array | None = None
    ) -> tuple[Array, Any, Factors]:
        return _capture(passes, model, batch, key, when)

    return compute


def _capture(
    passes: Passes,
    model: nnx.Module,
    batch: tuple[Any, ...],
    key: Array | None,
    when: Array | None,
) -> tuple[Array, Any, Factors]:
    """By one forward pass where the whole batch always has its curvature taken, else by one more."""
    blocks = find_blocks(model, passes.wrt)
    if not blocks:
        raise ValueError(
            "`value_grad_and_factors` needs a model with layers it knows, such as nnx.Linear. Got "
            f"{type(model).__name__} without any; see mj.optim.find_blocks for those there are."
        )
    size = batch_size(batch)
    by_rows = isinstance(passes.reading, PerSample | PerToken)
    examples = passes.fisher.examples
    if by_rows or when is not None or (examples is not None and examples < size):
        value, grads, rest, key = passes.plain(model, batch, key)
        part = jax.tree.map(lambda x: x[:examples], batch)
        compute = partial(
            passes.rows_alone if by_rows else passes.factors_alone, model, blocks, part, key
        )
        factors = compute() if when is None else _only_when(when, compute)
    else:
        value, grads, rest, factors = passes.together(model, blocks, batch, key)
    nnx.update(model, rest)
    return value, grads, factors


def _only_when(when: Array, compute: Callable[[], Factors]) -> Factors:
    """The factors where `when` is true, else zeros of weight 0."""
    shapes = jax.eval_shape(compute)
    zeros = partial(jax.tree.map, lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return jax.lax.cond(jnp.asarray(when, bool), compute, zeros)
