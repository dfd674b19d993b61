"""Layers that report their curvature, through an observing identity at their output.

A tapped copy of a model has layers of subclasses made here, with dummy arguments as variables of their
own. Whatever the model does with its layers (remat, scan over stacked layers, vmap, jit) it therefore
does with the dummies too, and no graph has to be matched.

The curvature of an `mj.Bayesian` is that of its plain network at the means: a tapped copy holds that
network, and nothing in it is random. How means enter the covariance of the output is ignored.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.nn.linear import canonicalize_padding
from jax import Array

from moment_jax.nn.bayesian import Bayesian
from moment_jax.optim import blocks as layers
from moment_jax.optim.blocks import Blocks, DiagonalFactor, EmbeddingFactor, Factor, KroneckerFactor

KINDS = {"kernel": KroneckerFactor, "embedding": EmbeddingFactor, "scale": DiagonalFactor}

Report = Callable[[Array, Array], Factor]  # inputs (N, T, in) and output gradients (N, T, out)


class CurvatureTap(nnx.Param):
    """A dummy argument; a `nnx.Param`, so that a model that scans over its parameters scans over it."""

    def __getitem__(self, key: Any) -> Any:
        """All of it for `[...]`, also where it is a tuple of arrays."""
        return self.get_value() if key is Ellipsis else super().__getitem__(key)


# (layer, inputs, output) of a call -> inputs (N, T, in) and output (N, T, out)
Arrange = Callable[[Any, Array, Array], tuple[Array, Array]]


def _examples(array: Array, num_features: int) -> Array:
    """(N, ..., features) -> (N, T, features), the last `num_features` axes made one."""
    first, *lead = array.shape[: array.ndim - num_features] or (1,)
    width = math.prod(array.shape[array.ndim - num_features :])
    return array.reshape(first, math.prod(lead), width)


def _dense(layer: Any, inputs: Array, output: Array) -> tuple[Array, Array]:
    axes = getattr(layer, "axis", (-1,))
    moved = jnp.moveaxis(inputs, axes, range(-len(axes), 0))
    return _examples(moved, len(axes)), _examples(output, _length(layer.out_features))


def _norm(layer: Any, inputs: Array, output: Array) -> tuple[Array, Array]:
    x = inputs.astype(jnp.promote_types(inputs.dtype, jnp.float32))
    if isinstance(layer, nnx.LayerNorm):
        x = x - jnp.mean(x, axis=-1, keepdims=True)
    square = jnp.mean(x**2, axis=-1, keepdims=True)
    return _examples(x * jax.lax.rsqrt(square + layer.epsilon), 1), _examples(output, 1)


def _conv(layer: Any, inputs: Array, output: Array) -> tuple[Array, Array]:
    """Patches (N, T, height * width * channels) in the kernel's order, and the output (N, T, out)."""
    rank, channels = len(layer.kernel_size), inputs.shape[-1]
    first = inputs.shape[0] if inputs.ndim > rank + 1 else 1
    images = inputs.reshape(-1, *inputs.shape[-rank - 1 :])
    strides, dilation, kernel_dilation = (
        np.broadcast_to(value or 1, rank).tolist()
        for value in (layer.strides, layer.input_dilation, layer.kernel_dilation)
    )
    patches = jax.lax.conv_general_dilated_patches(
        jnp.moveaxis(images, -1, 1),
        layer.kernel_size,
        strides,
        canonicalize_padding(layer.padding, rank),
        lhs_dilation=dilation,
        rhs_dilation=kernel_dilation,
    )
    # (M, channels * kernel, *places) -> (M, places, kernel * channels)
    rows = patches.reshape(len(images), channels, math.prod(layer.kernel_size), -1)
    rows = rows.transpose(0, 3, 2, 1).reshape(first, -1, channels * rows.shape[2])
    return rows, output.reshape(first, -1, output.shape[-1])


def _length(size: int | tuple[int, ...]) -> int:
    """The number of axes of a layer's `in_features` or `out_features`."""
    return len(size) if isinstance(size, tuple) else 1


ARRANGE: dict[type[nnx.Module], Arrange] = {
    nnx.Linear: _dense,
    nnx.LinearGeneral: _dense,
    nnx.Embed: lambda _, ids, output: (_examples(ids, 0), _examples(output, 1)),
    nnx.LayerNorm: _norm,
    nnx.RMSNorm: _norm,
    nnx.Conv: _conv,
}
"""Observed layers, and how a call of each is arranged; add a new layer here."""


def find_blocks(model: nnx.Module, wrt: Any = nnx.Param) -> Blocks:
    """The curvature blocks of a model: one for each layer whose factors can be captured.

    Supported are `nnx.Linear`, `LinearGeneral` (hence the projections of `MultiHeadAttention`), `Embed`,
    `LayerNorm`, `RMSNorm`, ungrouped `Conv`, and subclasses of these that keep `__call__`. An
    `mj.Bayesian`, alone or as part of the model, has the blocks of its network at the means; their
    parameters are the means of its beliefs, and weights that are certain. A layer whose parameters are
    not all trained, as the filter `wrt` tells, or are shared with an earlier layer, has no block; leave
    such parameters to another optimiser. The model may be abstract, as in `nnx.eval_shape`.
    """
    available = set(layers.flatten(nnx.state(model, wrt)))
    blocks = []
    for _, block in _layers(model):
        if set(block.leaves) <= available:
            available -= set(block.leaves)
            blocks.append(block)
    return tuple(blocks)


def required_blocks(name: str, model: nnx.Module, wrt: Any) -> Blocks:
    """The same; raises where there are none."""
    blocks = find_blocks(model, wrt)
    if not blocks:
        raise ValueError(
            f"`{name}` needs a model with layers that have curvature factors, such as nnx.Linear. Got "
            f"{type(model).__name__} without any; they are listed in mj.optim.find_blocks."
        )
    return blocks


def tap(model: nnx.Module, blocks: Blocks, dtype: jnp.dtype) -> set[str]:
    """Make the layers of a model report, in place: pass a copy.

    An `mj.Bayesian` holds its plain network at the means then. Returns the names of the layers that
    have reported, which fills when a backward pass is traced.
    """
    networks: list[tuple[Bayesian, Any]] = []
    names, called = {block.name for block in blocks}, set[str]()

    def at_means(bayesian: Bayesian) -> Any:
        networks.append((bayesian, bayesian.at_means()))
        return networks[-1][1]

    for layer, block in list(_layers(model, at_means)):
        if block.name in names:
            # Flax's own assignment would look for variables in the class.
            object.__setattr__(layer, "__class__", _tapped(layer.__class__))
            layer.report = _reporter(block, dtype, called)
            zeros: Any = jnp.zeros(block.stack, dtype)
            layer.tap = CurvatureTap(block.no_factor(dtype, *block.stack)._replace(weight=zeros))
    for bayesian, network in networks:
        bayesian.make_certain(network)
    return called


def _reporter(block: layers.LayerBlock, dtype: jnp.dtype, called: set[str]) -> Report:
    """What the backward pass of a layer returns, from inputs a (N, T, in) and gradients g (N, T, out).

    It is a factor of sums over rows, and its weight the number of rows. Inputs are (N, T) symbols for a
    table, normalised for a normalisation.
    """

    def report(inputs: Array, grads: Array) -> Factor:
        called.add(block.name)
        grads = grads.astype(dtype)
        # Ones that depend on the gradients: under vmap, constant ones would count a single example.
        ones = ((grads[..., 0] == 0) | True).astype(dtype)
        g, count = grads.reshape(-1, grads.shape[-1]), jnp.sum(ones)
        if block.factor is EmbeddingFactor:
            seen = jnp.zeros((block.rows,), dtype).at[inputs.reshape(-1)].add(ones.reshape(-1))
            return EmbeddingFactor(seen, g.T @ g, count)
        a = inputs.reshape(-1, inputs.shape[-1]).astype(dtype)
        if block.factor is DiagonalFactor:
            by_leaf = {"scale": g * a, "bias": g}
            each = [by_leaf[leaf.removesuffix("/mean").rpartition("/")[2]] for leaf in block.leaves]
            return DiagonalFactor(jnp.stack([jnp.sum(row**2, axis=0) for row in each]), count)
        gram = a.T @ a
        if len(block.leaves) == 2:  # with a one appended to rows, which would copy them
            total, size = jnp.sum(a, axis=0)[:, None], jnp.full((1, 1), len(a), dtype)
            gram = jnp.block([[gram, total], [total.T, size]])
        return KroneckerFactor(gram, g.T @ g, count)

    return report


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def observe(report: Report, output: Array, inputs: Array, dummies: Any) -> Array:
    """The output; its backward pass returns report(inputs, gradients) as the cotangent of the dummies.

    The output's cotangent passes unchanged and the inputs get none, so gradients stay the same. JAX
    treats the report like the gradient of any parameter: it is summed over vmap, scan, remat and
    devices.
    """
    del report, inputs, dummies
    return output


observe.defvjp(
    lambda _report, output, inputs, _dummies: (output, inputs),
    lambda report, inputs, grads: (grads, None, report(inputs, grads)),
)


def reported_factors(blocks: Blocks, taps: Any, num_examples: int) -> layers.Factors:
    """The factors of the layers, from the cotangent of the taps."""
    variables = layers.flatten(taps, lambda x: isinstance(x, CurvatureTap))
    sums = {path.rpartition("/")[0] or "model": tap.get_value() for path, tap in variables.items()}

    def factor(block: layers.LayerBlock, sums: Factor) -> Factor:
        *arrays, count = (x.reshape(block.count, *x.shape[len(block.stack) :]) for x in sums)
        if block.factor is not DiagonalFactor:  # an average over rows, and a sum divided by N
            arrays[0] = jax.vmap(jnp.divide)(arrays[0], jnp.maximum(count, 1))
        arrays[-1] = arrays[-1] / num_examples
        return block.factor(*arrays, jnp.ones((), count.dtype))

    return {block.name: factor(block, sums[block.name]) for block in blocks}


def _shapes_at_means(bayesian: Bayesian) -> Any:
    """The plain network with shapes for arrays, which may be all that the model itself has."""

    def network(bayesian: Bayesian) -> Any:
        plain = bayesian.at_means()
        return plain if isinstance(plain, nnx.Module) else ()  # one of linen has no layers of NNX

    return nnx.eval_shape(network, bayesian)


def _layers(
    model: Any, at_means: Callable[[Bayesian], Any] = _shapes_at_means
) -> Iterator[tuple[Any, layers.LayerBlock]]:
    """The observed layers; those of an `mj.Bayesian` are the layers of `at_means` of it."""
    for path, node in nnx.iter_graph(model):
        if isinstance(node, Bayesian):
            for layer, block in _layers(at_means(node)):
                yield layer, _of_means(block, path, node)
        elif isinstance(node, nnx.Module):
            found = _block("/".join(map(str, path)), node)
            if found is not None:
                yield node, found


def _of_means(
    block: layers.LayerBlock, path: tuple[Any, ...], bayesian: Bayesian
) -> layers.LayerBlock:
    """The block of a plain network's layer, of the variables that a Bayesian at this path has for it."""
    owned = {"/".join(map(str, own)): belief for own, belief in bayesian.owned.items()}
    prefix = "/".join(map(str, (*path, "weights")))
    leaves, shapes = list(block.leaves), list(block.shapes)
    for i, leaf in enumerate(block.leaves):
        leaves[i] = f"{prefix}/{leaf}"
        if leaf in owned:  # the mean of a family of matrices is a matrix
            leaves[i], shapes[i] = f"{leaves[i]}/mean", tuple(owned[leaf].mean.shape)
    name = f"{prefix}/{block.leaves[0]}".rpartition("/")[0]
    return dataclasses.replace(block, name=name, leaves=tuple(leaves), shapes=tuple(shapes))


def _known(cls: Any) -> Any:
    """The observed layer that a class is, or is a subclass of without overriding its call; or None."""
    bases = (b for b in ARRANGE if issubclass(cls, b) and cls.__call__ is b.__call__)
    return next(bases, None)


def _block(name: str, layer: Any) -> layers.LayerBlock | None:
    """The parameters of a layer, or None if it is not observed."""
    if _known(type(layer)) is None or not _is_plain(layer):
        return None
    leaves = [leaf for leaf in (*KINDS, "bias") if getattr(layer, leaf, None) is not None]
    if not leaves:
        return None
    paths = tuple(f"{name}/{leaf}" if name else leaf for leaf in leaves)
    shapes = tuple(tuple(getattr(layer, leaf).shape) for leaf in leaves)
    kind, shape = KINDS.get(leaves[0], DiagonalFactor), shapes[0]  # a norm may have biases alone
    outputs, own = 1, 2 if kind is EmbeddingFactor else 1
    if kind is KroneckerFactor:
        outputs = _length(getattr(layer, "out_features", 1))
        inputs = _length(getattr(layer, "in_features", 1)) + len(getattr(layer, "kernel_size", ()))
        own = inputs + outputs
    columns = math.prod(shape[len(shape) - outputs :])
    return layers.LayerBlock(
        name or "model", paths, shapes, columns, shape[: len(shape) - own], kind
    )


def _is_plain(layer: Any) -> bool:
    """Whether a layer of Flax has no option that its arrangement leaves out."""
    if isinstance(layer, nnx.LinearGeneral):
        return not layer.batch_axis
    if isinstance(layer, nnx.LayerNorm | nnx.RMSNorm):
        axes = (layer.reduction_axes, layer.feature_axes)
        return layer.axis_name is None and axes == (-1, -1)
    if isinstance(layer, nnx.Conv):
        plain = layer.feature_group_count == 1 and getattr(layer, "mask", None) is None
        return plain and (not isinstance(layer.padding, str) or layer.padding in ("SAME", "VALID"))
    return True


@functools.cache
def _tapped(cls: Any) -> type:
    """A subclass whose instances report on their calls."""
    arrange = ARRANGE[_known(cls)]

    def call(self: Any, inputs: Array, *args: Any, **kwargs: Any) -> Array:
        output = cls.__call__(self, inputs, *args, **kwargs)
        rows, observed = arrange(self, inputs, output)
        rows = jax.lax.stop_gradient(rows)
        return observe(self.report, observed, rows, self.tap.get_value()).reshape(output.shape)

    return type(f"Tapped{cls.__name__}", (cls,), {"__call__": call})
