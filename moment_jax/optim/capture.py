"""Value, gradient and curvature factors of a loss that tells the predictive distribution.

A copy of the model has tapped layers: of subclasses made here, which report their curvature through an
observing identity at their output, with dummy arguments as variables of their own, with which the model
does what it does with its layers (remat, scan, vmap, jit). In place of an `mj.Bayesian` the copy holds
its plain network at the means: how means enter the covariance of the output is ignored.
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array

from moment_jax.nn.bayesian import Bayesian
from moment_jax.optim import blocks as layers
from moment_jax.optim import curvature
from moment_jax.optim.blocks import Blocks, LayerBlock
from moment_jax.optim.curvature import Factor, Factors

Report = Callable[[Array, Array], Factor]  # inputs (N, T, in) and output gradients (N, T, out)


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


def value_grad_and_factors(
    loss_fn: Callable[..., Any], *, wrt: Any = nnx.Param, dtype: jnp.dtype | type = jnp.float32
) -> Callable[..., tuple[Array, Any, Factors]]:
    """A function (model, *batch) -> (value, grads, factors).

    F is the true Fisher matrix, of targets drawn from the prediction that the loss returns. Its factors
    take a forward and a backward pass of their own, the latter through the layers' outputs only, in
    which the output of an `mj.Bayesian` has no covariance. The rest is as of `nnx.value_and_grad`.

    Every token is a row: A = avg a a^T over all rows, G = 1/N sum g g^T, with a the inputs of a layer
    and g the gradients of each example's own -log p by its outputs. This reads theta = g^T v a^T of
    Algorithm 1 over all pairs of rows; with one token per example F V is (a^T a) V (g^T g) / N^2.

    The function has two more keyword arguments: `key`, the random key of the sampled targets (None:
    derived from the bits of the loss, so that runs repeat), and `when`, a boolean array; where it is
    false no curvature is computed and the factors have weight 0.

    Args:
      loss_fn: (model, *batch) -> (scalar, prediction), such as a mean and a `CategoricalPrediction`.
      wrt: filter of the parameters to differentiate by.
      dtype: of the summed statistics.

    TypeError if the loss returns no prediction, ValueError if it is no scalar or does not call a layer.
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
        if jnp.shape(value):
            raise ValueError(f"The loss must be a scalar. Got {jnp.shape(value)}; take its mean.")
        return value, prediction

    def compute(
        model: nnx.Module, *batch: Any, key: Array | None = None, when: Array | None = None
    ) -> tuple[Array, Any, Factors]:
        blocks = layers.find_blocks(model, wrt)
        copy: Any = nnx.merge(*nnx.split(model), copy=True)  # before the loss changes the model
        called = tap(copy, blocks, dtype)
        split: Any = nnx.split(copy, CurvatureTap, ...)  # mypy miscounts it
        graph, taps, rest = split
        differ = nnx.value_and_grad(lambda m: evaluate(m, batch)[0], argnums=nnx.DiffState(0, wrt))
        value, grads = differ(model)

        def sampled_loss(taps: Any) -> tuple[Array, int]:
            prediction = evaluate(nnx.merge(graph, taps, rest, copy=True), batch)[1]
            # Of the bits of the loss: new at each step, the same in each run.
            bits = jax.lax.bitcast_convert_type(value.astype(jnp.float32), jnp.uint32)
            drawn = jax.random.fold_in(jax.random.key(0), bits) if key is None else key
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


# -- what a tapped layer reports -----------------------------------------------------------------------


class CurvatureTap(nnx.Param):
    """A dummy argument; a `nnx.Param`, so that a model that scans over its parameters scans over it."""

    def __getitem__(self, key: Any) -> Any:
        """All of it for `[...]`, also where it is a tuple of arrays."""
        return self.get_value() if key is Ellipsis else super().__getitem__(key)


def tap(model: nnx.Module, blocks: Blocks, dtype: jnp.dtype) -> set[str]:
    """Make the layers of a copy report, in place; those that did, by name, once a pass is traced."""
    networks: list[tuple[Bayesian, Any]] = []
    names, called = {block.name for block in blocks}, set[str]()

    def at_means(bayesian: Bayesian) -> Any:
        networks.append((bayesian, bayesian.at_means()))
        return networks[-1][1]

    for layer, block in list(layers.observed(model, at_means)):
        if block.name in names:
            # Flax's own assignment would look for variables in the class.
            object.__setattr__(layer, "__class__", _tapped(layer.__class__))
            layer.report = functools.partial(_report, block, dtype, called)
            zeros: Any = jnp.zeros(block.stack, dtype)
            layer.tap = CurvatureTap(block.no_factor(dtype, *block.lead)._replace(weight=zeros))
    for bayesian, network in networks:
        bayesian.make_certain(network)
    return called


@functools.cache
def _tapped(cls: Any) -> type:
    """A subclass whose instances report on their calls."""
    arrange = layers.ARRANGE[layers.known(cls)]

    def call(self: Any, inputs: Array, *args: Any, **kwargs: Any) -> Array:
        output = cls.__call__(self, inputs, *args, **kwargs)
        rows, observed = arrange(self, inputs, output)
        rows = jax.lax.stop_gradient(rows)
        return observe(self.report, observed, rows, self.tap.get_value()).reshape(output.shape)

    return type(f"Tapped{cls.__name__}", (cls,), {"__call__": call})


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def observe(report: Report, output: Array, inputs: Array, dummies: Any) -> Array:
    """The output; its backward pass returns report(inputs, gradients) as the cotangent of the dummies.

    JAX treats that like the gradient of any parameter: it is summed over vmap, scan, remat and devices.
    """
    return output


observe.defvjp(
    lambda _report, output, inputs, _dummies: (output, inputs),
    lambda report, inputs, grads: (grads, None, report(inputs, grads)),
)


def _report(
    block: LayerBlock, dtype: jnp.dtype, called: set[str], inputs: Array, grads: Array
) -> Factor:
    """What the backward pass of a layer returns: a factor of sums over rows, its weight their number."""
    called.add(block.name)
    grads = grads.astype(dtype)
    # Ones that depend on the gradients: under vmap, constant ones would count a single example.
    ones = ((grads[..., 0] == 0) | True).astype(dtype)
    g, count = grads.reshape(-1, grads.shape[-1]), jnp.sum(ones)
    if block.factor is curvature.EmbeddingFactor:
        seen = jnp.zeros((block.rows,), dtype).at[inputs.reshape(-1)].add(ones.reshape(-1))
        return curvature.EmbeddingFactor(seen, g.T @ g, count)
    a = inputs.reshape(-1, inputs.shape[-1]).astype(dtype)
    if block.factor is curvature.DiagonalFactor:
        by_leaf = {"scale": g * a, "bias": g}
        each = [by_leaf[leaf.removesuffix("/mean").rpartition("/")[2]] for leaf in block.leaves]
        return curvature.DiagonalFactor(jnp.stack([jnp.sum(x**2, axis=0) for x in each]), count)
    a = jnp.pad(a, ((0, 0), (0, len(block.leaves) - 1)), constant_values=1)  # for the bias

    def grams(rows: Array, parts: int, size: int) -> Array:
        """Of each part of the rows, or of all of them for each part of the matrix."""
        cut = jnp.pad(rows, ((0, 0), (0, parts * size - rows.shape[1]))).reshape(-1, parts, size)
        each = jnp.einsum("npi,npj->pij", cut, cut)
        return jnp.broadcast_to(each if lead else each[0], (*lead, size, size))

    lead = block.lead[len(block.stack) :]
    by_inputs, by_outputs = map(grams, (a, g), block.parts, block.part)
    return curvature.KroneckerFactor(by_inputs, by_outputs, count)


def reported_factors(blocks: Blocks, taps: Any, num_examples: int) -> Factors:
    """The factors of the layers, from the cotangent of the taps."""
    variables = layers.flatten(taps, lambda x: isinstance(x, CurvatureTap))
    sums = {path.rpartition("/")[0] or "model": tap.get_value() for path, tap in variables.items()}

    def factor(block: LayerBlock, sums: Factor) -> Factor:
        arrays = [x.reshape(block.count, *x.shape[len(block.lead) :]) for x in sums[:-1]]
        count = jnp.repeat(sums.weight.reshape(-1), math.prod(block.parts))
        # Of two arrays, the first is an average over rows; the last is a sum divided by N.
        if block.factor is not curvature.DiagonalFactor:
            arrays[0] = jax.vmap(jnp.divide)(arrays[0], jnp.maximum(count, 1))
        arrays[-1] = arrays[-1] / num_examples
        return block.factor(*arrays, jnp.ones((), count.dtype))

    return {block.name: factor(block, sums[block.name]) for block in blocks}
