"""Value, gradient and curvature factors of a loss that tells the predictive distribution."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array

from moment_jax.optim.blocks import Factors
from moment_jax.optim.taps import CurvatureTap, reported_factors, required_blocks, tap


class Prediction(abc.ABC):
    """A predictive distribution of a batch, whose arrays have the N examples as their first axis."""

    @property
    def num_examples(self) -> int:
        """N."""
        return jax.tree.leaves(self)[0].shape[0]

    @abc.abstractmethod
    def sampled_loss(self, key: Array) -> Array:
        """sum_n -log p(y_n), nats, with y_n drawn from the prediction and held fixed."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CategoricalPrediction(Prediction):
    """Classes with these logits (N, ..., C); axes in between are further targets, such as tokens."""

    logits: Array

    def sampled_loss(self, key: Array) -> Array:
        """Cross-entropy with sampled labels, summed over all targets."""
        labels = jax.random.categorical(key, jax.lax.stop_gradient(self.logits))
        return jnp.sum(optax.softmax_cross_entropy_with_integer_labels(self.logits, labels))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BernoulliPrediction(Prediction):
    """Independent binary targets with these logits, (N, ...)."""

    logits: Array

    def sampled_loss(self, key: Array) -> Array:
        """Binary cross-entropy with sampled labels, summed over all targets."""
        labels = jax.random.bernoulli(key, jax.nn.sigmoid(jax.lax.stop_gradient(self.logits)))
        labels = labels.astype(self.logits.dtype)
        return jnp.sum(optax.sigmoid_binary_cross_entropy(self.logits, labels))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NormalPrediction(Prediction):
    """Independent Gaussian targets.

    Args:
      mean: (N, ...).
      scale: their standard deviation. For the squared error 1/2 |y - mean|^2 it is 1; for the mean
        squared error over D outputs, sqrt(D / 2).
    """

    mean: Array
    scale: float = dataclasses.field(default=1.0, metadata={"static": True})

    def sampled_loss(self, key: Array) -> Array:
        """1/2 |(y - mean) / scale|^2 with sampled y, summed over all targets."""
        noise = jax.random.normal(key, self.mean.shape, self.mean.dtype)
        target = jax.lax.stop_gradient(self.mean) + self.scale * noise
        return jnp.sum((target - self.mean) ** 2) / (2 * self.scale**2)


def value_grad_and_factors(
    loss_fn: Callable[..., Any], *, wrt: Any = nnx.Param, dtype: jnp.dtype | type = jnp.float32
) -> Callable[..., tuple[Array, Any, Factors]]:
    """A function (model, *batch) -> (value, grads, factors).

    F is the true Fisher matrix, of targets drawn from the prediction that the loss returns. Its factors
    take a second backward pass, through the layers' outputs only, and a second forward pass, which a
    compiled program without `when` shares with the first one. Memory does not grow with the number of
    rows. Value, gradients and the model's other changes are those of `nnx.value_and_grad`.

    Every token is a row: A = avg a a^T over all rows, G = 1/N sum g g^T, with a the inputs of a layer
    and g the gradients of each example's own -log p by its outputs. This reads theta = g^T v a^T of
    Algorithm 1 over all pairs of rows; with one token per example F V is (a^T a) V (g^T g) / N^2.

    The factors of an `mj.Bayesian` are those of its plain network at the means, whose output in that
    pass is `model(x)` with a covariance of zero.

    The function has two more keyword arguments: `key`, the random key of the sampled targets (None:
    derived from the bits of the loss, so that runs repeat), and `when`, a boolean array; where it is
    false no curvature is computed and the factors have weight 0.

    Args:
      loss_fn: (model, *batch) -> (scalar, prediction), such as a mean and a `CategoricalPrediction`.
      wrt: filter of the parameters to differentiate by.
      dtype: of the summed statistics.

    Raises:
      TypeError: if the loss returns no prediction. ValueError: if it is not a scalar, or does not call a
        layer, which is named.

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
    dtype = jnp.dtype(dtype)

    def evaluate(model: nnx.Module, batch: tuple[Any, ...]) -> tuple[Array, Prediction]:
        result = loss_fn(model, *batch)
        value, prediction = result if isinstance(result, tuple) else (result, None)
        if not isinstance(prediction, Prediction):
            raise TypeError(
                "The Fisher matrix needs the predictive distribution: let the loss return (loss, "
                "prediction) with a prediction such as mj.optim.CategoricalPrediction(logits). Got "
                f"{type(prediction).__name__}."
            )
        if jnp.shape(value) != ():
            raise ValueError(
                f"The loss must be a scalar. Got shape {jnp.shape(value)}; take its mean."
            )
        return value, prediction

    def compute(
        model: nnx.Module, *batch: Any, key: Array | None = None, when: Array | None = None
    ) -> tuple[Array, Any, Factors]:
        blocks = required_blocks("value_grad_and_factors", model, wrt)
        copy: Any = nnx.merge(*nnx.split(model), copy=True)  # before the loss changes the model
        called = tap(copy, blocks, dtype)
        split: Any = nnx.split(copy, CurvatureTap, ...)  # mypy miscounts it
        graph, taps, rest = split
        grad = nnx.value_and_grad(
            lambda model: evaluate(model, batch)[0], argnums=nnx.DiffState(0, wrt)
        )
        value, grads = grad(model)

        def sampled_loss(taps: Any) -> tuple[Array, int]:
            prediction = evaluate(nnx.merge(graph, taps, rest, copy=True), batch)[1]
            drawn = _key_of(value) if key is None else key
            return prediction.sampled_loss(drawn), prediction.num_examples

        def factors() -> Factors:
            sums, num_examples = jax.grad(sampled_loss, has_aux=True)(taps)
            for block in blocks:
                if block.name not in called:
                    raise ValueError(
                        f"The loss does not call layer {block.name!r}, so it has no curvature. Leave "
                        f"its parameters ({', '.join(block.leaves)}) out of `wrt`, or call it."
                    )
            return reported_factors(blocks, sums, num_examples)

        if when is None:
            return value, grads, factors()
        none = {block.name: block.no_factor(dtype, block.count) for block in blocks}
        return value, grads, jax.lax.cond(jnp.asarray(when, bool), factors, lambda: none)

    return compute


def _key_of(value: Array) -> Array:
    """A key from the bits of the loss: new at each step, the same in each run."""
    value = jax.lax.stop_gradient(value).astype(jnp.float32)
    return jax.random.fold_in(jax.random.key(0), jax.lax.bitcast_convert_type(value, jnp.uint32))
