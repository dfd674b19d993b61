"""The layers of a traced function: products with parameters, lookups in them, vectors that act on rows.

Its operations are carried out one by one; loops, branches, `jax.jit` and `jax.checkpoint` are entered.
The first use of a parameter, however rearranged, makes it a layer. Given dummy arguments, layers are
observed: what they report is the gradient by the dummies.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.extend import core

from moment_jax.optim.blocks import LayerBlock, Shape, Steps, flatten
from moment_jax.optim.curvature import DiagonalFactor, EmbeddingFactor, Factor, KroneckerFactor

UNMOVED = {"convert_element_type", "copy", "name", "reduce_precision", "sharding_constraint"}


@dataclasses.dataclass(frozen=True)
class View:
    """A parameter, or one row of a stack of them, as an operation has it."""

    leaf: str
    shape: Shape  # 1 along axes over which it is repeated
    dummies: Any  # None where it is not observed
    steps: Steps  # from the parameter to (*lead, *shape)
    lead: Shape = ()  # axes over which it is scanned

    def moved(self, shape: Sequence[int], order: Sequence[int] | None = None) -> "View":
        """Reshaped, then transposed."""
        order, k = range(len(shape)) if order is None else order, len(self.lead)
        step = (*self.lead, *shape), (*range(k), *(k + i for i in order))
        new = tuple(shape[i] for i in order)
        return dataclasses.replace(self, shape=new, steps=(*self.steps, step))

    def row(self, dummies: Any) -> "View":
        """What one step of a scan has of it."""
        return View(self.leaf, self.shape[1:], dummies, self.steps, (*self.lead, self.shape[0]))


Seen = list[Any]  # what each array is: a view, a layer's output as (view, axes of columns), or None


class Layers:
    """The layers of a function of a model, as `blocks`."""

    def __init__(self, fn: Callable[[Any], Any], model: Any, wrt: Any) -> None:
        graph, state = nnx.split(model)
        trained = flatten(nnx.state(model, wrt) if isinstance(model, nnx.Module) else state)
        call = jax.make_jaxpr(lambda x: fn(nnx.merge(graph, x, copy=True)), return_shape=True)
        self.program, self.output = call(state)
        self.arrays = flatten(state)
        self.trained = {path: self.arrays[path] for path in trained}
        self.found: dict[str, LayerBlock] = {}  # by each of their parameters
        jax.eval_shape(lambda: self({}, {}))
        self.blocks = tuple(dict.fromkeys(self.found.values()))

    def __call__(self, trained: Mapping[str, Array], dummies: Mapping[str, Factor]) -> Any:
        """The function of trained parameters, its layers observed."""
        seen: Seen = []
        for path, x in self.arrays.items():
            step = tuple(x.shape), tuple(range(x.ndim))
            view = View(path, step[0], dummies.get(path), (step,))
            seen.append(view if path in self.trained else None)
        args = [trained.get(path, x) for path, x in self.arrays.items()]
        results, _ = self._run(self.program.jaxpr, self.program.consts, args, seen)
        return jax.tree.unflatten(jax.tree.structure(self.output), results)

    def _run(self, jaxpr: Any, consts: Any, args: Any, seen: Seen) -> tuple[list[Any], Seen]:
        """The results, and what each is."""
        env = dict(zip(jaxpr.constvars, ((x, None) for x in consts), strict=True))
        env |= dict(zip(jaxpr.invars, zip(args, seen, strict=True), strict=True))

        def read(atoms: Any) -> Any:
            each = [(v.val, None) if isinstance(v, core.Literal) else env[v] for v in atoms]
            return [x for x, _ in each], [x for _, x in each]

        for eqn in jaxpr.eqns:
            results = zip(*self._equation(eqn, *read(eqn.invars)), strict=True)
            env |= dict(zip(eqn.outvars, results, strict=True))
        return read(jaxpr.outvars)

    def _inside(self, jaxpr: Any, seen: Seen) -> Callable[..., list[Any]]:
        """An inner program as a function."""
        body, consts = getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())
        return lambda *args: self._run(body, consts, args, seen)[0]

    def _equation(self, eqn: Any, values: list[Any], seen: Seen) -> tuple[list[Any], Seen]:
        p, found = eqn.params, [None] * len(eqn.outvars)
        name = eqn.primitive.name if any(seen) else None  # without parameters, as it is
        if name in ("jit", "pjit"):
            return self._run(p["jaxpr"].jaxpr, p["jaxpr"].consts, values, seen)
        if name in ("remat2", "checkpoint"):
            options = {key: p[key] for key in ("policy", "prevent_cse")}
            return jax.checkpoint(self._inside(p["jaxpr"], seen), **options)(*values), found
        if name == "cond":
            branches = [self._inside(branch, seen[1:]) for branch in p["branches"]]
            return jax.lax.switch(values[0], branches, *values[1:]), found
        if name == "scan":
            return self._scan(eqn, values, seen), found
        if name in ("add", "sub", "mul", "div"):
            values = [self._on_rows(eqn, values[i], seen[i], seen[1 - i]) for i in range(2)]
        results = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(p))
        if eqn.primitive.multiple_results:
            return results, found
        for i, view in enumerate(map(_whole, seen, values)):
            if view and name in PRODUCTS:
                layer = PRODUCTS[name](eqn, values, i)
                output, of = self._layer(view, results, *layer) if layer else (results, None)
                return [output], [of]
        return [results], [_moved(eqn, seen[0]) if name else None]

    def _scan(self, eqn: Any, values: list[Any], seen: Seen) -> list[Any]:
        p, inner = eqn.params, eqn.params["jaxpr"].jaxpr
        # What is scanned over or stacked has one axis more outside.
        end, carry = (
            sum(v.aval.ndim == w.aval.ndim for v, w in zip(outside, within, strict=True))
            for outside, within in ((eqn.invars, inner.invars), (eqn.outvars, inner.outvars))
        )
        rows, fixed = values[end:], values[: end - carry]
        views = list(map(_whole, seen[end:], rows))

        def step(state: Any, over: Any) -> Any:
            each = [v and v.row(x) for v, x in zip(views, over[1], strict=True)]
            body = self._inside(p["jaxpr"], [*seen[: end - carry], *[None] * carry, *each])
            results = body(*fixed, *state, *over[0])
            return results[:carry], results[carry:]

        options = {key: p[key] for key in ("length", "reverse", "unroll")}
        over = rows, [v and v.dummies for v in views]
        state, stacked = jax.lax.scan(step, values[end - carry : end], over, **options)
        return [*state, *stacked]

    def _layer(
        self, view: View, output: Array, kind: Any, rows: Any, order: Any, batch: int, columns: Any
    ) -> Any:
        """The output, observed, and what it is, if this use of a parameter is its layer.

        Of the view's axes, `order` has those of a batch, of rows and of columns; batch axes are first.
        """
        view, lead = view.moved(view.shape, order), output.shape[:batch]
        width = math.prod(output.shape[i] for i in columns)
        block = LayerBlock(view.leaf, (view.leaf,), (view.steps,), width, (*view.lead, *lead), kind)
        block = self.found.setdefault(view.leaf, block)
        if (block.factor, block.steps[0]) != (kind, view.steps):
            return output, None
        if view.dummies is not None:
            like = jax.eval_shape(lambda: view.dummies)

            def report(rows: Array, grads: Array) -> Factor:
                grads = jnp.moveaxis(grads, columns, range(-len(columns), 0))
                return reported(block, like, rows, grads.reshape(math.prod(lead), -1, width))

            output = observe(report, output, jax.lax.stop_gradient(rows), view.dummies)
        return output, (view, (*range(batch), *columns))

    def _on_rows(self, eqn: Any, value: Any, view: Any, other: Any) -> Any:
        """An operand of a sum or product, which is a layer if it acts on each row.

        A vector does, such as a gain, and a matrix that is added to each example, such as positions,
        whose rows are as those of a table.
        """
        if not isinstance(view, View):
            return value
        shape, name = eqn.outvars[0].aval.shape, eqn.primitive.name
        axes, most = [i for i, n in enumerate(view.shape) if n > 1], 1 + (name in ("add", "sub"))
        bias = name == "add" and self._is_bias(view, other, shape)
        if bias or not 0 < len(axes) < len(shape) or len(axes) > most:
            return value
        rows = jnp.zeros(())
        if len(axes) > 1:
            rest = [n for i, n in enumerate(shape) if i != axes[1]]
            rows = jax.lax.broadcasted_iota(jnp.int32, rest, axes[0]).reshape(1, -1, 1)
        layer = EmbeddingFactor if rows.ndim else DiagonalFactor, rows, range(len(shape))
        return self._layer(view, jnp.broadcast_to(value, shape), *layer, 0, axes[-1:])[0]

    def _is_bias(self, view: View, other: Any, shape: Shape) -> bool:
        """Whether a sum adds the bias of a dense layer, which gets it if it has none."""
        if not isinstance(other, tuple):
            return False
        (kernel, axes), layer = other, self.found[other[0].leaf]
        others = [i for i in range(len(shape)) if i not in axes]
        sizes = tuple(1 if i in others else n for i, n in enumerate(shape))
        if (layer.factor, view.shape, view.lead) != (KroneckerFactor, sizes, kernel.lead):
            return False
        if len(layer.leaves) == 1 and view.leaf not in self.found:
            leaves = layer.name, view.leaf
            steps = *layer.steps, view.moved(sizes, (*axes, *others)).steps
            layer = dataclasses.replace(layer, leaves=leaves, steps=steps)
            self.found |= dict.fromkeys(leaves, layer)
        return self.found.get(view.leaf) is layer


def _whole(x: Any, value: Any) -> View | None:
    """A view that is not repeated."""
    return x if isinstance(x, View) and x.shape == np.shape(value) else None


def _moved(eqn: Any, x: Any) -> Any:
    """What the result of an operation is, if it rearranges a parameter or an output."""
    name, p, after = eqn.primitive.name, eqn.params, eqn.outvars[0].aval.shape
    if x is None or name in UNMOVED:
        return x
    if isinstance(x, tuple):
        return (x[0], tuple(map(p["permutation"].index, x[1]))) if name == "transpose" else None
    if x.shape != eqn.invars[0].aval.shape:
        return None
    if name == "broadcast_in_dim":
        sizes = dict(zip(p["broadcast_dimensions"], x.shape, strict=True))
        return x.moved([sizes.get(i, 1) for i in range(len(after))])
    if name == "transpose":
        return x.moved(x.shape, p["permutation"])
    return x.moved(after) if name in ("reshape", "squeeze") else None


# -- products, of which operand i is a parameter: (kind of curvature, rows (B, R, in), order of its axes,
# number of batch axes, columns of the output) as in `_layer`, or None. Add a new product here. --


def _dot(eqn: Any, values: list[Any], i: int) -> Any:
    over, batch = eqn.params["dimension_numbers"]
    free = [
        [axis for axis in range(x.ndim) if axis not in (*a, *b)]
        for x, a, b in zip(values, over, batch, strict=True)
    ]
    data, j, count = values[1 - i], 1 - i, len(batch[0])
    rows = data.transpose(*batch[j], *free[j], *over[j])
    parts, width = math.prod(rows.shape[:count]), math.prod(data.shape[axis] for axis in over[j])
    first, order = count + len(free[0]) * i, (*batch[i], *over[i], *free[i])
    columns = range(first, first + len(free[i]))
    return KroneckerFactor, rows.reshape(parts, -1, width), order, count, tuple(columns)


def _conv(eqn: Any, values: list[Any], i: int) -> Any:
    p, spec = eqn.params, eqn.params["dimension_numbers"]
    if i == 0 or (p["feature_group_count"], p["batch_group_count"]) != (1, 1):
        return None
    outputs, *inputs = spec.rhs_spec
    sizes = [values[1].shape[axis] for axis in inputs[1:]]
    same = "window_strides", "padding", "lhs_dilation", "rhs_dilation", "dimension_numbers"
    options = {key: p[key] for key in same}
    patches = jax.lax.conv_general_dilated_patches(values[0], sizes, **options)
    rows = jnp.moveaxis(patches, spec.out_spec[1], -1)
    rows = rows.reshape(1, -1, rows.shape[-1])
    return KroneckerFactor, rows, (*inputs, outputs), 0, (spec.out_spec[1],)


def _lookup(eqn: Any, values: list[Any], i: int) -> Any:
    d, last = eqn.params["dimension_numbers"], (eqn.outvars[0].aval.ndim - 1,)
    axes = d.offset_dims, d.collapsed_slice_dims, d.start_index_map, d.operand_batching_dims
    width = math.prod(values[0].shape[1:])
    if i or axes != (last, (0,), (0,), ()) or tuple(eqn.params["slice_sizes"]) != (1, width):
        return None
    return EmbeddingFactor, values[1].reshape(1, -1, 1), (0, 1), 0, last


PRODUCTS = {"dot_general": _dot, "conv_general_dilated": _conv, "gather": _lookup}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def observe(report: Any, output: Array, rows: Array, dummies: Any) -> Array:
    """The output; its backward pass returns report(rows, gradients) as the cotangent of the dummies.

    JAX treats that like the gradient of any parameter: it is summed over scan, remat and devices.
    """
    return output


observe.defvjp(
    lambda _report, output, rows, _dummies: (output, rows),
    lambda report, rows, grads: (grads, None, report(rows, grads)),
)


def reported(block: LayerBlock, like: Factor, rows: Array, grads: Array) -> Factor:
    """A factor of sums over rows, its weight their number: of (B, R, in) and gradients (B, R, out).

    Its arrays have the shapes and types of `like`.
    """
    dtype = like.weight.dtype
    g, (down, across), (height, width) = grads.astype(dtype), block.parts, block.part

    def grams(rows: Array, parts: int, size: int) -> Array:
        """Of each part of the rows, or of all of them for each part of the matrix."""
        cut = jnp.pad(rows, ((0, 0), (0, 0), (0, parts * size - rows.shape[2])))
        cut = jnp.swapaxes(cut.reshape(*cut.shape[:2], parts, size), 1, 2)
        if cut.shape[:2] == (1, 1):  # XLA for CPU would copy the transpose of a batch of one
            each = jnp.matmul(cut[0, 0].T, cut[0, 0])[None, None]
        else:
            each = jnp.matmul(jnp.swapaxes(cut, 2, 3), cut)
        return jnp.broadcast_to(each, (len(each), down * across, size, size))

    if block.factor is DiagonalFactor:
        arrays = [jnp.sum(g**2, axis=1)]
    elif block.factor is EmbeddingFactor:
        seen = jnp.zeros((block.rows,), dtype).at[rows.reshape(-1)].add(jnp.ones((), dtype))
        arrays = [seen, grams(g, across, width)]
    else:
        bias = (0, 0), (0, 0), (0, len(block.leaves) - 1)
        a = jnp.pad(rows.astype(dtype), bias, constant_values=1)
        arrays = [grams(a, down, height), grams(g, across, width)]
    shaped = (x.reshape(y.shape) for x, y in zip(arrays, like[:-1], strict=True))
    return block.factor(*shaped, jnp.full(like.weight.shape, g.shape[1], dtype))
