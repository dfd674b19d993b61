"""The generalised Gauss-Newton matrix of a model on data, from the exact Jacobian of its outputs."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from moment_jax.covariance import Full, Moments
from moment_jax.nn.static import Static
from moment_jax.objectives import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian
from moment_jax.progress import bar
from moment_jax.propagation.derivatives import check_derivatives

# The random weights, the rest of the model's state, and units of the outputs (C,) or (1,).
Frame = tuple[nnx.State, nnx.State, Any]
Arrays = dict[str, Any]  # by path; of bases: (U, W), None for the entries, () before they are known


def check_network(caller: str, split: Any, inputs: Any) -> None:
    """Raise if derivatives by the weights are not those of the values."""
    graph, weights, *rest = split
    one = tuple(x[:1] for x in inputs)
    check_derivatives(caller, lambda at: nnx.merge(graph, at, *rest, copy=True)(*one), weights)


def by_path(tree: Any) -> Arrays:
    """All arrays of a state or a tree of parameters."""
    pure = nnx.to_pure_dict(tree) if isinstance(tree, nnx.State) else tree
    flat = nnx.traversals.flatten_mapping(pure)
    return {"/".join(map(str, path)): x for path, x in flat.items() if x is not None}


def root_columns(likelihood: Any, outputs: Array, columns: Array) -> Array:
    """Columns (N, R, C) of a root of the Hessian of -log p in outputs (N, R, C), at noise variance 1.

    Where the network predicts the noise, of its expectation over targets.
    """
    one = jax.nn.one_hot(columns, outputs.shape[-1], dtype=outputs.dtype)[None]
    if isinstance(likelihood, Categorical):
        p = jax.nn.softmax(outputs)
        return jnp.sqrt(jnp.sum(one * p, axis=-1, keepdims=True)) * (one - p)
    if isinstance(likelihood, Bernoulli):
        return one * jnp.sqrt(jax.nn.sigmoid(outputs) * jax.nn.sigmoid(-outputs))
    if isinstance(likelihood, HeteroscedasticGaussian):
        log_noise = outputs[..., outputs.shape[-1] // 2 :]
        roots = jnp.exp(-log_noise / 2), jnp.full_like(log_noise, 0.5**0.5)
        return one * jnp.concatenate(roots, axis=-1)
    return jnp.broadcast_to(one, outputs.shape)


@dataclasses.dataclass(frozen=True)
class Curvature:
    """Sums over examples, at noise variance 1. The model's arrays are arguments of compiled programs."""

    graph: Static  # of the model
    likelihood: Any  # without noise
    shapes: tuple[tuple[str, tuple[int, int]], ...]  # every array as a matrix (in, out), by path
    rows: int  # of the Jacobian at once, of all examples together
    count: int  # outputs of one example
    progress: bool | None = dataclasses.field(default=None, compare=False)  # whether a bar is shown

    @partial(jax.jit, static_argnums=0)
    def outputs(self, frame: Frame, _: Array, inputs: Any) -> Array:
        """Of each example by itself, (N, M, C), with M tokens."""
        return jax.vmap(lambda one: self._of_one(frame, one))(inputs)

    @partial(jax.jit, static_argnums=0)
    def sums(self, frame: Frame, weight: Array, inputs: Any, bases: Arrays) -> Arrays:
        """Sums of V V^T and V^T V, or in bases of (U^T V W)^2, over examples with a weight, by path.

        V is the gradient of <column of the likelihood's root, outputs> by an array (in, out).
        """
        outputs, gradients = self._jacobian(frame, inputs)

        def of_rows(rows: Array) -> Arrays:
            v = self._roots(weight, outputs, gradients, rows)
            return {path: _moments(v[path], basis) for path, basis in bases.items()}

        return _summed(of_rows, self.count, self.rows)

    @partial(jax.jit, static_argnums=0)
    def roots(self, frame: Frame, weight: Array, inputs: Any) -> Arrays:
        """V of all examples with a weight, (N M C, size) by path: V^T V is the whole matrix."""
        outputs, gradients = self._jacobian(frame, inputs)
        found = self._roots(weight, outputs, gradients, jnp.arange(self.count))
        return {path: v.reshape(-1, math.prod(v.shape[2:])) for path, v in found.items()}

    def _roots(self, weight: Array, outputs: Array, gradients: Any, rows: Array) -> Arrays:
        """V of these columns of the likelihood's root, (N, R, in, out) by path."""
        size, tokens, classes = outputs.shape
        column = root_columns(self.likelihood, outputs[:, rows // classes], rows % classes)
        column = column * weight.astype(column.dtype)[:, None, None]
        at = jnp.zeros((size, len(rows), tokens, classes), outputs.dtype)
        found: Arrays = gradients(at.at[:, jnp.arange(len(rows)), rows // classes].set(column))
        return found

    @partial(jax.jit, static_argnums=0)
    def log_densities(
        self, frame: Frame, weight: Array, data: Any, bases: Arrays, variances: Arrays, noise: Array
    ) -> Array:
        """Log predictive density of the linearised network with each of Q posteriors, (Q,)."""
        outputs, gradients = self._jacobian(frame, data[0])
        size, tokens, classes = outputs.shape
        labels = isinstance(self.likelihood, Categorical)
        targets = data[1].reshape(*outputs.shape[:2], *(() if labels else (-1,)))

        def of_tokens(chosen: Array) -> Array:
            at = jnp.zeros((size, len(chosen), tokens, classes, classes), outputs.dtype)
            eye = jnp.eye(classes, dtype=at.dtype)[None, None]
            at = at.at[:, jnp.arange(len(chosen)), chosen].set(eye).swapaxes(2, 3)
            v = gradients(at.reshape(size, -1, tokens, classes))
            turned = {p: _turned(v[p], b).reshape(*at.shape[:3], -1) for p, b in bases.items()}
            valid = (weight[:, None] > 0) & (chosen < tokens)[None]

            def score(posterior: Any) -> Array:
                known = ((x, posterior[0][p].ravel()) for p, x in turned.items())
                cov: Any = sum(jnp.einsum("nrck,k,nrdk->nrcd", x, v, x) for x, v in known)
                of = Gaussian(posterior[1]) if self.likelihood == Gaussian() else self.likelihood
                cov = Full(cov[:, :, None, :, None].astype(outputs.dtype))
                moments = Moments(outputs[:, chosen], cov)
                return jnp.sum(jnp.where(valid, of(moments).log_prob(targets[:, chosen]), 0))

            return jax.lax.map(score, (variances, noise))

        return _summed(of_tokens, tokens, max(1, self.rows // classes))

    def _of_one(self, frame: Frame, one: Any) -> Array:
        # On new variables, which the model may write to while traced.
        model: Any = nnx.merge(self.graph.value, *jax.tree.map(lambda x: x, frame[:2]), copy=True)
        outputs = model(*(x[None] for x in one))
        wide = jnp.promote_types(outputs.dtype, jnp.float32)
        outputs = outputs.reshape(-1, outputs.shape[-1]).astype(wide)
        return outputs / jnp.asarray(frame[2], wide)[None]

    def _jacobian(self, frame: Frame, inputs: Any) -> tuple[Array, Callable[[Array], Arrays]]:
        """Outputs (N, M, C), and a map of N rows (R, M, C) to gradients (N, R, in, out) by path."""

        def of_example(one: Any) -> Any:
            return jax.vjp(lambda weights: self._of_one((weights, *frame[1:]), one), frame[0])

        outputs, pulls = jax.vmap(of_example)(inputs)

        def gradients(rows: Array) -> Arrays:
            known = by_path(jax.vmap(lambda pull, r: jax.vmap(pull)(r)[0])(pulls, rows))
            lead, dtype = rows.shape[:2], rows.dtype
            return {p: known[p].reshape(*lead, *shape).astype(dtype) for p, shape in self.shapes}

        return outputs, gradients

    def spectrum(self, frame: Frame, inputs: Any, small: list[str]) -> tuple[Arrays, Arrays]:
        """Bases by path, of both partial traces if in `small`, else None; the diagonal in them."""
        bases: Arrays = {path: () if path in small else None for path, _ in self.shapes}
        squares = self.total(self.sums, frame, inputs, bases)
        known = by_path(frame[0])
        for path in small:
            dtype = jnp.promote_types(known[path].dtype, jnp.float32)
            bases[path] = tuple(jnp.asarray(np.linalg.eigh(x)[1], dtype) for x in squares[path])
        if small:
            squares |= self.total(self.sums, frame, inputs, {path: bases[path] for path in small})
        return bases, squares

    def total(self, fn: Any, frame: Frame, data: Any, *more: Any) -> Any:
        """The sum of `fn` over batches."""
        parts = self.batches(fn, frame, data, max(1, self.rows // self.count), *more)
        return functools.reduce(functools.partial(jax.tree.map, np.add), parts)

    def batches(self, fn: Any, frame: Frame, data: Any, size: int, *more: Any) -> Iterator[Any]:
        """`fn` of batches, the last one filled up with examples of weight zero, in double precision."""
        count = len(jax.tree.leaves(data)[0])
        for start in bar(self.progress, "batch", range(0, count, size)):
            index = np.arange(start, start + size)
            batch = jax.tree.map(lambda x, i=index: x[np.minimum(i, count - 1)], data)
            with jax.default_matmul_precision("highest"):
                found = fn(frame, jnp.asarray(index < count, float), batch, *more)
            yield jax.tree.map(lambda x: np.asarray(x, np.float64), found)


def _turned(v: Array, basis: Any) -> Array:
    return v if basis is None else jnp.einsum("nrio,ia,ob->nrab", v, *basis)


def _moments(v: Array, basis: Any) -> Any:
    if basis == ():
        return jnp.einsum("nrio,nrjo->ij", v, v), jnp.einsum("nrio,nrip->op", v, v)
    return jnp.sum(_turned(v, basis) ** 2, axis=(0, 1))


def _summed(fn: Callable[[Array], Any], count: int, size: int) -> Any:
    """The sum of fn(indices) over `size` indices at a time; the last ones may reach beyond `count`."""
    if count <= size:
        return fn(jnp.arange(count))
    indices = jnp.arange(-(-count // size) * size).reshape(-1, size)
    zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(fn, indices[0]))
    return jax.lax.scan(lambda sum, i: (jax.tree.map(jnp.add, sum, fn(i)), None), zeros, indices)[0]
