"""Layers that report their curvature, through an observing identity at their output.

A tapped copy of a model has layers of subclasses made here, with dummy arguments as variables of their
own. Whatever the model does with its layers (remat, scan over stacked layers, vmap, jit) it therefore
does with the dummies too, and no graph has to be matched.

In a Bayesian layer the input a is the MEAN of its random input, and g the gradient of the loss with
respect to the MEAN of its output. How the kernel's mean enters the covariance of the output is ignored.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from moment_jax import nn
from moment_jax.layers import DenseParams, NormParams
from moment_jax.optim.layer_blocks import (
    Blocks,
    EmbeddingBlock,
    LayerBlock,
    NormBlock,
    dense_block,
    row_block,
)
from moment_jax.optim.patches import conv_rows, is_plain_conv
from moment_jax.optim.statistics import Statistic, observe
from moment_jax.optim.trees import flatten

Array = jax.Array


class CurvatureTap(nnx.Param):
    """A zero dummy argument of a layer; its cotangent is a statistic of the layer.

    A subclass of `nnx.Param`, so that a model that scans over its parameters scans over it too.
    """


# (layer, inputs, output) of a call -> inputs (N, T, in) and output (N, T, out)
Arrange = Callable[[Any, Array, Array], tuple[Array, Array]]


def _examples(array: Array, num_features: int) -> Array:
    """(N, ..., features) -> (N, T, features), the last `num_features` axes made one."""
    lead = array.shape[: array.ndim - num_features]
    width = math.prod(array.shape[array.ndim - num_features :])
    first = lead[0] if lead else 1
    return array.reshape(first, math.prod(lead[1:]), width)


def _linear(layer: Any, inputs: Array, output: Array) -> tuple[Array, Array]:
    del layer
    return _examples(inputs, 1), _examples(output, 1)


def _linear_general(layer: Any, inputs: Array, output: Array) -> tuple[Array, Array]:
    axes = layer.axis
    moved = jnp.moveaxis(inputs, axes, range(-len(axes), 0))
    return _examples(moved, len(axes)), _examples(output, len(layer.out_features))


def _embed(layer: Any, inputs: Array, output: Array) -> tuple[Array, Array]:
    del layer
    lead = inputs.shape[:1] or (1,)
    return inputs.reshape(lead[0], math.prod(inputs.shape[1:])), _examples(output, 1)


def _norm(layer: Any, inputs: Array, output: Array) -> tuple[Array, Array]:
    x = inputs.astype(jnp.promote_types(inputs.dtype, jnp.float32))
    if isinstance(layer, nnx.LayerNorm):
        centred, square = (
            x - jnp.mean(x, axis=-1, keepdims=True),
            jnp.var(x, axis=-1, keepdims=True),
        )
    else:
        centred, square = x, jnp.mean(x**2, axis=-1, keepdims=True)
    normal = centred * jax.lax.rsqrt(square + layer.epsilon)
    return _examples(normal, 1), _examples(output, 1)


ARRANGE: dict[type[nnx.Module], Arrange] = {
    nnx.Linear: _linear,
    nnx.LinearGeneral: _linear_general,
    nnx.Embed: _embed,
    nnx.LayerNorm: _norm,
    nnx.RMSNorm: _norm,
    nnx.Conv: conv_rows,
}
"""Observed layers, and how a call of each is arranged; add a new layer here."""


def find_blocks(model: nnx.Module, wrt: Any = nnx.Param) -> Blocks:
    """The curvature blocks of a model: one for each layer whose factors can be captured.

    Supported are `nnx.Linear`, `LinearGeneral` (hence the projections of `MultiHeadAttention`), `Embed`,
    `LayerNorm`, `RMSNorm`, ungrouped `Conv`, subclasses of these that keep `__call__`, and the layers of
    `mj.nn`. A layer whose parameters are not all among `wrt`, or are shared with an earlier layer, has
    no block; leave such parameters to another optimiser.

    Args:
      model: an NNX module.
      wrt: filter of the trained parameters.
    """
    available = set(flatten(nnx.state(model, wrt)))
    blocks = []
    for _, block in _layers(model):
        if set(block.leaves) <= available:
            available -= set(block.leaves)
            blocks.append(block)
    return tuple(blocks)


def tap(model: nnx.Module, statistics: Mapping[str, Statistic], dtype: jnp.dtype) -> None:
    """Make the named layers of a model report their statistics, in place: pass a copy."""
    for layer, block in list(_layers(model)):
        if block.name in statistics:
            statistic = statistics[block.name]
            cls: Any = type(layer)
            # Flax's own assignment would look for variables in the class.
            object.__setattr__(layer, "__class__", _tapped(cls))
            layer.statistic = statistic
            for name, zeros in statistic.zeros(dtype).items():
                setattr(layer, f"tap_{name}", CurvatureTap(zeros))


def _layers(model: nnx.Module) -> Iterator[tuple[Any, LayerBlock]]:
    for path, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Module):
            block = _block("/".join(map(str, path)), node)
            if block is not None:
                yield node, block


def _known(cls: type) -> type[nnx.Module] | None:
    """The observed layer that a class is, or is a subclass of without overriding its call."""
    for base in ARRANGE:
        if issubclass(cls, base) and cls.__call__ is base.__call__:
            return base
    return None


def _block(name: str, layer: Any) -> LayerBlock | None:
    prefix = f"{name}/" if name else ""
    name = name or "model"
    if isinstance(layer, nn.Dense | nn.LayerNorm):
        return _bayesian_block(name, prefix, layer)
    base = _known(type(layer))
    if base is None:
        return None
    if base is nnx.Embed:
        shape = layer.embedding.shape
        return row_block(EmbeddingBlock, name, [f"{prefix}embedding"], [shape], shape[:-2])
    if base in (nnx.LayerNorm, nnx.RMSNorm):
        return _norm_block(name, prefix, layer)
    present = [leaf for leaf in ("kernel", "bias") if getattr(layer, leaf) is not None]
    shapes = [tuple(getattr(layer, leaf).shape) for leaf in present]
    num_outputs, num_axes = 1, 2
    if base is nnx.LinearGeneral:
        if layer.batch_axis:
            return None
        num_outputs = len(layer.out_features)
        num_axes = num_outputs + len(layer.in_features)
    elif base is nnx.Conv:
        if not is_plain_conv(layer):
            return None
        num_axes = len(layer.kernel_size) + 2
    stack = shapes[0][: len(shapes[0]) - num_axes]
    return dense_block(name, [prefix + leaf for leaf in present], shapes, num_outputs, stack)


def _norm_block(name: str, prefix: str, layer: Any) -> LayerBlock | None:
    if layer.axis_name is not None or (layer.reduction_axes, layer.feature_axes) != (-1, -1):
        return None
    present = [leaf for leaf in ("scale", "bias") if getattr(layer, leaf, None) is not None]
    if not present:
        return None
    shapes = [tuple(getattr(layer, leaf).shape) for leaf in present]
    return row_block(NormBlock, name, [prefix + leaf for leaf in present], shapes, shapes[0][:-1])


def _bayesian_block(name: str, prefix: str, layer: nn.Dense | nn.LayerNorm) -> LayerBlock:
    """The means of a layer's beliefs."""
    first = "kernel" if isinstance(layer, nn.Dense) else "scale"
    present = [leaf for leaf in (first, "bias") if getattr(layer, leaf) is not None]
    leaves = [f"{prefix}{leaf}/mean" for leaf in present]
    shapes = [tuple(getattr(layer, leaf).mean.shape) for leaf in present]
    if isinstance(layer, nn.LayerNorm):
        return row_block(NormBlock, name, leaves, shapes, shapes[0][:-1])
    return dense_block(name, leaves, shapes, 1, shapes[0][:-2])


@dataclasses.dataclass(frozen=True)
class _Observed:
    """Mixed into parameters: reports inputs and output gradients of their mean output."""

    statistic: Statistic = dataclasses.field(kw_only=True, metadata={"static": True})
    dummies: dict[str, Array] = dataclasses.field(kw_only=True)

    def mean_output(self, inputs: Array) -> Array:
        """The mean output, observed; one sequence (T, D) is one example."""
        plain: Any = super()
        identity = observe(self.statistic, self.dummies["rows"].dtype)
        output, inputs = plain.mean_output(inputs), jax.lax.stop_gradient(inputs)
        return identity(output[None], inputs[None], self.dummies)[0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ObservedDense(_Observed, DenseParams):
    """`DenseParams`, observed at their inputs."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ObservedNorm(_Observed, NormParams):
    """`NormParams`, observed at their normalised inputs."""


def _observed_params(params: Any, statistic: Statistic, dummies: dict[str, Array]) -> Any:
    if isinstance(params, DenseParams):
        return ObservedDense(params.kernel, params.bias, statistic=statistic, dummies=dummies)
    return ObservedNorm(params.scale, params.bias, statistic=statistic, dummies=dummies)


def _dummies(layer: Any) -> dict[str, Array]:
    names = layer.statistic.zeros()
    return {name: getattr(layer, f"tap_{name}")[...] for name in names}


@functools.cache
def _tapped(cls: type) -> type:
    """A subclass whose instances report the statistics of their calls."""
    if issubclass(cls, nn.Dense | nn.LayerNorm):
        plain: Any = cls.params  # a property

        def params(self: Any) -> Any:
            return _observed_params(plain.fget(self), self.statistic, _dummies(self))

        return type(f"Tapped{cls.__name__}", (cls,), {"params": property(params)})
    base = _known(cls)
    assert base is not None
    arrange = ARRANGE[base]

    def call(self: Any, inputs: Array, *args: Any, **kwargs: Any) -> Array:
        output = cls.__call__(self, inputs, *args, **kwargs)
        dummies = _dummies(self)
        dtype = dummies["rows"].dtype
        rows, observed = arrange(self, inputs, output)
        observed = observe(self.statistic, dtype)(observed, jax.lax.stop_gradient(rows), dummies)
        return observed.reshape(output.shape)

    return type(f"Tapped{cls.__name__}", (cls,), {"__call__": call})
