"""Layers that report their curvature, through an observing identity at their output.

A tapped copy of a model has layers of subclasses made here, with dummy arguments as variables of their
own. Whatever the model does with its layers (remat, scan over stacked layers, vmap, jit) it therefore
does with the dummies too, and no graph has to be matched.

In a Bayesian layer the input a is the MEAN of its random input, and g the gradient of the loss with
respect to the MEAN of its output. How the kernel's mean enters the covariance of the output is ignored.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.linear import canonicalize_padding
from jax import Array

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
from moment_jax.optim.statistics import KroneckerExpand, RowCounter, Statistic, observe
from moment_jax.optim.trees import flatten


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
        centred = x - jnp.mean(x, axis=-1, keepdims=True)
        square = jnp.var(x, axis=-1, keepdims=True)
    else:
        centred, square = x, jnp.mean(x**2, axis=-1, keepdims=True)
    normal = centred * jax.lax.rsqrt(square + layer.epsilon)
    return _examples(normal, 1), _examples(output, 1)


def _conv(layer: Any, inputs: Array, output: Array) -> tuple[Array, Array]:
    """Patches (N, T, height * width * channels) in the kernel's order, and the output (N, T, out)."""
    rank = len(layer.kernel_size)
    lead = inputs.shape[: inputs.ndim - rank - 1]
    images = inputs.reshape(-1, *inputs.shape[inputs.ndim - rank - 1 :])
    patches = jax.lax.conv_general_dilated_patches(
        jnp.moveaxis(images, -1, 1),
        layer.kernel_size,
        _each(layer.strides, rank),
        canonicalize_padding(layer.padding, rank),
        lhs_dilation=_each(layer.input_dilation, rank),
        rhs_dilation=_each(layer.kernel_dilation, rank),
    )
    # (M, channels * kernel, *places) -> (M, places, kernel * channels)
    places = math.prod(patches.shape[2:])
    channels = images.shape[-1]
    patches = patches.reshape(images.shape[0], channels, -1, places)
    rows = patches.transpose(0, 3, 2, 1).reshape(images.shape[0], places, -1)
    first = lead[0] if lead else 1
    return rows.reshape(first, -1, rows.shape[-1]), output.reshape(first, -1, output.shape[-1])


def _each(value: Any, rank: int) -> tuple[int, ...]:
    if value is None or isinstance(value, int):
        return (1 if value is None else value,) * rank
    return tuple(value)


ARRANGE: dict[type[nnx.Module], Arrange] = {
    nnx.Linear: _linear,
    nnx.LinearGeneral: _linear_general,
    nnx.Embed: _embed,
    nnx.LayerNorm: _norm,
    nnx.RMSNorm: _norm,
    nnx.Conv: _conv,
}
"""Observed layers, and how a call of each is arranged; add a new layer here."""
NORMS = (nnx.LayerNorm, nnx.RMSNorm)


def find_blocks(model: nnx.Module, wrt: Any = nnx.Param) -> Blocks:
    """The curvature blocks of a model: one for each layer whose factors can be captured.

    Supported are `nnx.Linear`, `LinearGeneral` (hence the projections of `MultiHeadAttention`), `Embed`,
    `LayerNorm`, `RMSNorm`, ungrouped `Conv`, subclasses of these that keep `__call__`, and the layers of
    `mj.nn`. A layer whose parameters are not all trained, as the filter `wrt` tells, or are shared with
    an earlier layer, has no block; leave such parameters to another optimiser.
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


def count_rows(
    model: nnx.Module, blocks: Blocks, fn: Callable[[Any], Array]
) -> dict[str, list[int]]:
    """The rows that each layer sees at each call in a backward pass of fn(model), in its order.

    Nothing is computed. A layer that is not called is missing.
    """
    copy: Any = nnx.merge(*nnx.split(model), copy=True)
    counts: dict[str, list[int]] = {}
    counters = {b.name: RowCounter(b, KroneckerExpand(), counts=counts) for b in blocks}
    tap(copy, counters, jnp.dtype("float32"))
    split: Any = nnx.split(copy, CurvatureTap, ...)
    graph, taps, rest = split
    jax.eval_shape(jax.grad(lambda taps: fn(nnx.merge(graph, taps, rest, copy=True))), taps)
    return counts


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
    """The parameters of a layer (of its beliefs, the means), or None if it is not observed."""
    cls, prefix, suffix = _known(type(layer)), f"{name}/" if name else "", ""
    if isinstance(layer, nn.Dense | nn.LayerNorm):
        cls, suffix = layer.flax_type, "/mean"
    elif cls is None or not _is_plain(cls, layer):
        return None
    names = ("scale", "bias") if cls in NORMS else ("kernel", "embedding", "bias")
    found = {leaf: getattr(layer, leaf, None) for leaf in names}
    arrays = {leaf: x.mean if suffix else x for leaf, x in found.items() if x is not None}
    if not arrays:
        return None
    leaves = [f"{prefix}{leaf}{suffix}" for leaf in arrays]
    shapes = [tuple(array.shape) for array in arrays.values()]
    name, first = name or "model", shapes[0]
    if cls is nnx.Embed:
        return row_block(EmbeddingBlock, name, leaves, shapes, first[:-2])
    if cls in NORMS:
        return row_block(NormBlock, name, leaves, shapes, first[:-1])
    num_inputs, num_outputs = 1, 1
    if cls is nnx.LinearGeneral:
        num_inputs, num_outputs = len(layer.in_features), len(layer.out_features)
    elif cls is nnx.Conv:
        num_inputs = len(layer.kernel_size) + 1
    stack = first[: len(first) - num_inputs - num_outputs]
    return dense_block(name, leaves, shapes, num_outputs, stack)


def _is_plain(cls: type, layer: Any) -> bool:
    """Whether a layer of Flax has no option that its arrangement leaves out."""
    if cls is nnx.LinearGeneral:
        return not layer.batch_axis
    if cls in NORMS:
        axes = (layer.reduction_axes, layer.feature_axes)
        return layer.axis_name is None and axes == (-1, -1)
    if cls is nnx.Conv:
        plain = layer.feature_group_count == 1 and getattr(layer, "mask", None) is None
        return plain and (not isinstance(layer.padding, str) or layer.padding in ("SAME", "VALID"))
    return True


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


def _dummies(layer: Any) -> dict[str, Array]:
    names = layer.statistic.zeros()
    return {name: getattr(layer, f"tap_{name}")[...] for name in names}


@functools.cache
def _tapped(cls: type) -> type:
    """A subclass whose instances report the statistics of their calls."""
    if issubclass(cls, nn.Dense | nn.LayerNorm):
        plain: Any = cls.params  # a property

        def params(self: Any) -> Any:
            own = plain.fget(self)
            observed = ObservedDense if isinstance(own, DenseParams) else ObservedNorm
            return observed(**vars(own), statistic=self.statistic, dummies=_dummies(self))

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
