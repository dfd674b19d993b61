"""Value, gradient and curvature factors of a loss that tells the predictive distribution.

The prediction is traced, with the plain network at the means in the place of an `mj.Bayesian`: how means
enter the covariance of its output is ignored. `taps.py` observes its layers.
"""

import abc
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array

from moment_jax.nn.bayesian import Bayesian
from moment_jax.optim import curvature
from moment_jax.optim.blocks import Blocks, LayerBlock, path_name
from moment_jax.optim.curvature import Factor, Factors
from moment_jax.optim.taps import Layers


class Prediction(abc.ABC):
    """A predictive distribution of a batch, whose arrays have the N examples as their first axis."""

    @abc.abstractmethod
    def sampled_loss(self, key: Array) -> Array:
        """sum_n -log p(y_n), nats, with y_n drawn from the prediction and held fixed."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CategoricalPrediction(Prediction):
    """Classes with these logits (N, ..., C); axes in between are further targets, such as tokens.

    A binary target of logit f is a class of two, with the logits `jnp.stack([0 * f, f], axis=-1)`.
    """

    logits: Array

    def sampled_loss(self, key: Array) -> Array:
        """Cross-entropy with sampled labels, summed over all targets."""
        labels = jax.random.categorical(key, jax.lax.stop_gradient(self.logits))
        return jnp.sum(optax.softmax_cross_entropy_with_integer_labels(self.logits, labels))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NormalPrediction(Prediction):
    """Independent Gaussian targets (N, ...), `scale` their standard deviation.

    It is 1 for the squared error 1/2 |y - mean|^2, sqrt(D / 2) for the mean squared error of D outputs.
    """

    mean: Array
    scale: float = dataclasses.field(default=1.0, metadata={"static": True})

    def sampled_loss(self, key: Array) -> Array:
        """1/2 |(y - mean) / scale|^2 with sampled y, summed over all targets."""
        noise = jax.random.normal(key, self.mean.shape, self.mean.dtype)
        target = jax.lax.stop_gradient(self.mean) + self.scale * noise
        return jnp.sum((target - self.mean) ** 2) / (2 * self.scale**2)


def find_blocks(
    loss_fn: Callable[..., Any], model: Any, *batch: Any, wrt: Any = nnx.Param
) -> Blocks:
    """The curvature blocks of a model: one for each layer that the loss uses.

    A layer is a product with a trained parameter, by whatever function: of a dense layer or an ungrouped
    convolution, with its bias; a lookup of rows in a table; a matrix added to each example, such as
    positions; or a vector that multiplies each row or is added to it, such as the gain of a norm.
    Parameters may be reshaped, transposed and cast before, and layers scanned over. The first use of a
    parameter counts. Of an `mj.Bayesian` it is the means of beliefs, and weights that are certain.

    Arguments are those of `value_grad_and_factors`. Shapes are enough, such as `nnx.eval_shape` of the
    model, or `jax.ShapeDtypeStruct`. ValueError without any block, TypeError for what is no such loss.
    """
    if isinstance(loss_fn, nnx.Module) or not callable(loss_fn):
        came = type(loss_fn).__name__
        raise TypeError(
            f"Layers are found in a loss: give (loss, model, *batch). Got {came} first."
        )
    graph, state = nnx.split(model)
    found: list[Layers] = []

    def find(state: Any, batch: Any) -> None:
        found.append(layers_of(loss_fn, nnx.merge(graph, state), batch, wrt))

    jax.eval_shape(find, state, batch)
    return found[0].blocks


def bayesian_parts(model: Any) -> list[Bayesian]:
    """The Bayesian networks of a model."""
    return [node for _, node in nnx.iter_graph(model) if isinstance(node, Bayesian)]


def layers_of(loss_fn: Any, model: Any, batch: Any, wrt: Any) -> Layers:
    """The layers of ((loss, prediction), state after it), of a Bayesian network at its means."""

    def run(model: Any) -> tuple[tuple[Array, Prediction], Any]:
        for node in bayesian_parts(model):
            node.make_certain(node.at_means())
        result = loss_fn(model, *batch)
        value, prediction = result if isinstance(result, tuple) else (result, None)
        if not isinstance(prediction, Prediction):
            raise TypeError(
                "The Fisher matrix needs the predictive distribution: let the loss return (loss, "
                "prediction) with a prediction such as mj.optim.CategoricalPrediction(logits). Got "
                f"{type(prediction).__name__}."
            )
        if jnp.shape(value):
            raise ValueError(f"The loss must be a scalar. Got {jnp.shape(value)}; take its mean.")
        return (value, prediction), nnx.split(model)[1]

    layers = Layers(run, model, wrt)
    if not layers.blocks:
        raise ValueError(
            "A second-order method needs products with trained parameters, see mj.optim.find_blocks. "
            f"Got {type(model).__name__} without any."
        )
    return layers


def value_grad_and_factors(
    loss_fn: Callable[..., Any], *, wrt: Any = nnx.Param, dtype: jnp.dtype | type = jnp.float32
) -> Callable[..., tuple[Array, Any, Factors]]:
    """A function (model, *batch) -> (value, grads, factors).

    F is the true Fisher matrix, of targets drawn from the prediction that the loss returns. Its factors
    take one more backward pass, through the layers' outputs only; with an `mj.Bayesian` that of the
    network at the means, whose forward pass comes in addition. The rest is as of `nnx.value_and_grad`.

    Every token is a row: A = avg a a^T over all rows, G = 1/N sum g g^T, with a the inputs of a layer
    and g the gradients of each example's own -log p by its outputs. This reads theta = g^T v a^T of
    Algorithm 1 over all pairs of rows; with one token per example F V is (a^T a) V (g^T g) / N^2.
    That ignores correlations of T tokens, so that F is too small by up to T; a table's, which has few
    to ignore, is divided by sqrt(T), between the two.

    The function has two more keyword arguments: `key`, the random key of the sampled targets (None:
    derived from the bits of the loss, so that runs repeat), and `when`, a boolean array; where it is
    false no curvature is computed and the factors have weight 0.

    Args:
      loss_fn: (model, *batch) -> (scalar, prediction), such as a mean and a `CategoricalPrediction`.
      wrt: filter of the parameters to differentiate by.
      dtype: of the summed statistics.

    TypeError if the loss returns no prediction, ValueError if it is no scalar or has no layer.
    """
    dtype = jnp.dtype(dtype)

    def compute(
        model: Any, *batch: Any, key: Array | None = None, when: Array | None = None
    ) -> tuple[Array, Any, Factors]:
        layers = layers_of(loss_fn, model, batch, wrt)
        blocks, random = layers.blocks, bayesian_parts(model)
        dummies = {b.name: b.no_factor(dtype, *b.lead, counts=b.stack) for b in blocks}
        (graph, state), with_path = nnx.split(model), jax.tree_util.tree_map_with_path

        def run(trained: Any, dummies: Any) -> Any:
            if not random:
                return layers(trained, dummies)
            own = with_path(lambda path, x: trained.get(path_name(path), x), state)
            own = nnx.merge(graph, own, copy=True)
            (_, prediction), _ = layers(jax.lax.stop_gradient(trained), dummies)
            return (loss_fn(own, *batch)[0], prediction), nnx.split(own)[1]

        (value, prediction), backward, after = jax.vjp(run, layers.trained, dummies, has_aux=True)
        none = jax.tree.map(jax.custom_derivatives.zero_from_primal, prediction)
        grads, _ = backward((jnp.ones_like(value), none))
        like = model
        if isinstance(model, nnx.Module):
            like = nnx.state(model, wrt)
            nnx.update(model, after)
        grads = with_path(lambda path, _: grads[path_name(path)], like)

        def factors() -> Factors:
            # Of the bits of the loss: new at each step, the same in each run.
            bits = jax.lax.bitcast_convert_type(value.astype(jnp.float32), jnp.uint32)
            drawn = jax.random.fold_in(jax.random.key(0), bits) if key is None else key
            sampled = jax.grad(lambda prediction: prediction.sampled_loss(drawn), allow_int=True)
            _, sums = backward((jnp.zeros_like(value), sampled(prediction)))
            num_examples = len(jax.tree.leaves(prediction)[0])
            return {block.name: averaged(block, sums[block.name], num_examples) for block in blocks}

        if when is None:
            return value, grads, factors()
        no_factors = {block.name: block.no_factor(dtype, block.count) for block in blocks}
        return value, grads, jax.lax.cond(jnp.asarray(when, bool), factors, lambda: no_factors)

    return compute


def averaged(block: LayerBlock, sums: Factor, num_examples: int) -> Factor:
    """The factor of a layer, from what was reported."""
    arrays = [x.reshape(block.count, *x.shape[len(block.lead) :]) for x in sums[:-1]]
    count = jnp.repeat(sums.weight.reshape(-1), math.prod(block.parts))
    if block.factor is curvature.EmbeddingFactor:  # by sqrt(T), see above
        count *= jnp.sqrt(jnp.maximum(count / num_examples, 1))
    # Of two arrays, the first is an average over rows; the last is a sum divided by N.
    if block.factor is not curvature.DiagonalFactor:
        arrays[0] = jax.vmap(jnp.divide)(arrays[0], jnp.maximum(count, 1))
    arrays[-1] = arrays[-1] / num_examples
    return block.factor(*arrays, jnp.ones((), count.dtype))
