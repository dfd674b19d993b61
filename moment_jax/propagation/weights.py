"""Weights as models use them: reshaped, transposed, sliced, scaled; and networks linearised in them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from moment_jax.covariance import Covariance, Diagonal, Full
from moment_jax.covariance.fields import need
from moment_jax.covariance.numerics import safe_sqrt
from moment_jax.linalg import psd_cholesky
from moment_jax.posterior import (
    Factorized,
    FullNormal,
    KroneckerEigen,
    OutputShared,
    Point,
    Posterior,
)
from moment_jax.propagation import arrays, primitives
from moment_jax.propagation.arrays import Axes, Base
from moment_jax.propagation.derivatives import check_derivatives


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Weight(arrays.View):
    """A view of a belief's weights."""

    posterior: Posterior
    places: arrays.InBelief
    root: Posterior | None = None  # the belief of which `posterior` is a row or a multiple
    rows: tuple[range, ...] = ()  # which rows of `root`, axis by axis

    @classmethod
    def of(cls, posterior: Posterior) -> Weight:
        """The belief's whole array."""
        return cls(posterior.matrix, arrays.numbered(posterior.shape))

    @property
    def origin(self) -> Posterior:
        """The belief that the user gave."""
        return self.posterior if self.root is None else self.root

    @property
    def dtype(self) -> Any:
        """Dtype of the weights."""
        return self.posterior.mean.dtype

    @property
    def is_stack(self) -> bool:
        """Whether this is a whole stack of beliefs, with an independent one for each row."""
        p = self.posterior
        dims = 2 * p.mean.ndim - p.cov.ndim if isinstance(p, FullNormal) else p.mean.ndim - 2
        return (isinstance(p, Point | Factorized) or dims > 0) and self.is_whole

    @property
    def is_whole(self) -> bool:
        """Whether this is all of a belief, in its order."""
        return np.array_equal(self.places.ravel(), np.arange(self.posterior.mean.size))

    def row(self, i: int) -> Weight:
        """Row i, with a belief of its own if this is a stack of beliefs."""
        if not self.is_stack:
            return dataclasses.replace(self, places=self.places[i])
        return self.of_rows(jax.tree.map(lambda a: a[i], self.posterior), range(i, i + 1))

    def of_rows(self, belief: Posterior, rows: range) -> Weight:
        """A row of a stack of beliefs, given its belief, that stands for these rows."""
        places = arrays.numbered(self.shape[1:])
        return Weight(belief, places, self.origin, (*self.rows, rows))

    def apart(self, other: Weight) -> bool:
        """Whether this view and another are independent."""
        if self.origin is not other.origin:
            return True
        rows = zip(self.rows, other.rows, strict=False)
        if any(max(a.start, b.start) >= min(a.stop, b.stop) for a, b in rows):
            return True
        entrywise = isinstance(self.posterior, Factorized | OutputShared)
        same = self.posterior is other.posterior
        return entrywise and same and not (self.held() & other.held()).any()

    def held(self) -> np.ndarray:
        """Which of the belief's entries are in this view."""
        held = np.zeros(self.posterior.mean.size, bool)
        held[self.places[self.places >= 0]] = True
        return held

    def vector(self, axes: Axes) -> Posterior | None:
        """The belief about a vector along these axes, if the view is constant along all others."""
        rest = tuple(i for i in range(self.ndim) if i not in axes)
        rows = arrays.as_rows(self.places, rest, axes)
        same = (rows == rows[:1]).all()
        return select(self.posterior, rows[0], repeats=True) if same else None

    def affine(self, scale: Any, shift: Any) -> Weight | None:
        """The belief about scale * w + shift, or None if the family cannot express it."""
        if all(np.ndim(x) == 0 and primitives.is_known(x) for x in (scale, shift)) and shift == 0:
            if scale == 1:
                return self
            posterior = rescaled(self.posterior, scale)
            return dataclasses.replace(self, posterior=posterior, root=self.origin)
        chosen = select(self.posterior, self.places)
        if not isinstance(chosen, Point | Factorized):
            return None
        mean = chosen.mean * scale + shift
        if mean.shape != self.shape:  # broadcasting would make copies independent
            return None
        if isinstance(chosen, Point):
            return Weight.of(Point(mean))
        variance = jnp.broadcast_to(chosen.variance * jnp.square(scale), mean.shape)
        found = Weight.of(Factorized(mean, variance))
        return dataclasses.replace(found, root=self.origin, rows=self.rows)

    def base(self, structure: type[Covariance], landmarks: int | None) -> Base:
        """The belief's whole array as a random sequence."""
        posterior = self.posterior
        mean = jnp.reshape(posterior.mean, (-1, (posterior.shape or (1,))[-1]))
        if isinstance(posterior, Point):
            cov: Any = structure.zeros(mean.shape, mean.dtype, landmarks)
        elif posterior.uncorrelated:
            cov = structure.independent(jnp.reshape(posterior.marginal_variance(), mean.shape))
        else:
            dense = covariance_with(posterior, jnp.eye(mean.size, dtype=mean.dtype))
            cov = structure.project(dense.reshape(*mean.shape, *mean.shape))
        return Base(mean.shape, lambda: (mean, cov.at_landmarks(landmarks)), node=self)


def stack(values: Sequence[Any]) -> Any:
    """Beliefs, all of them whole, or certain arrays as the rows of one."""
    if not isinstance(values[0], Weight):
        return jnp.stack(values)
    posterior = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(w.posterior for w in values))
    return Weight(posterior, arrays.numbered((len(values), *values[0].shape)))


def overlap(left: Iterable[Weight], right: Iterable[Weight]) -> bool:
    """Whether any weight is in both."""
    both = {id(w.origin) for w in left} & {id(w.origin) for w in right}
    left, right = ([w for w in side if id(w.origin) in both] for side in (left, right))
    return any(not a.apart(b) for a in left for b in right)


def affine(name: str, operands: list[Any]) -> Weight | None:
    """A weight combined with a certain array by a primitive, or None if no family expresses it."""
    if name == "neg":
        return operands[0].affine(-1.0, 0.0)
    first = isinstance(operands[0], Weight)
    if name not in ("mul", "add", "sub", "div") or (name == "div" and not first):
        return None
    weight, other = operands if first else operands[::-1]
    constant = primitives.uniform(other)
    other = other if constant is None else constant
    if name in ("mul", "div"):
        return weight.affine(other if name == "mul" else 1 / other, 0.0)
    if name == "sub":
        return weight.affine(1.0, -other) if first else weight.affine(-1.0, other)
    return weight.affine(1.0, other)


def rescaled(posterior: Posterior, factor: Any) -> Posterior:
    """The belief about the weights times a number."""
    belief: Any = posterior
    spread = (name for name in ("variance", "cov") if hasattr(belief, name))
    scaled = {name: getattr(belief, name) * jnp.square(factor) for name in spread}
    result: Posterior = dataclasses.replace(belief, mean=belief.mean * factor, **scaled)
    return result


def select(posterior: Posterior, places: np.ndarray, *, repeats: bool = False) -> Posterior | None:
    """The belief about these weights in this arrangement, or None if the family cannot express it.

    Only a `Point` can repeat a weight, because two copies are not independent. With `repeats`, a
    `Factorized` vector becomes a `FullNormal`, and a kernel takes the copies as independent all the
    same. Place -1 is a certain zero, which other families cannot express.
    """
    if arrays.in_order(places, posterior.shape):
        return posterior
    mean = arrays.take(posterior.mean, places)
    if isinstance(posterior, Point):
        return Point(mean)
    known = places[places >= 0]
    repeated = len(np.unique(known)) != known.size
    if isinstance(posterior, Factorized) and (repeats or not repeated):
        variance = arrays.take(posterior.variance, places)
        if repeated and places.ndim == 1:
            same = places[:, None] == places
            return FullNormal(mean, jnp.where(same, variance[:, None], 0))
        return Factorized(mean, variance)
    if repeated or known.size < places.size:
        return None
    if isinstance(posterior, FullNormal):
        n = posterior.mean.size
        flat = places.ravel()
        cov = posterior.cov.reshape(n, n)[flat[:, None], flat[None]]
        return FullNormal(mean, cov.reshape(*places.shape * 2))
    return _part_of_matrix(posterior, places)


def _part_of_matrix(posterior: Posterior, places: np.ndarray) -> Posterior | None:
    """Rows and columns of a kernel belief with row and column covariances."""
    if places.ndim != 2 or len(posterior.shape) != 2:
        return None
    rows, columns = np.divmod(places, posterior.shape[1])
    if (rows == rows[:, :1]).all() and (columns == columns[:1]).all():
        r, c = rows[:, 0], columns[0]
        mean = posterior.mean[r][:, c]
        if isinstance(posterior, OutputShared):
            return OutputShared(mean, posterior.variance[c])
        if isinstance(posterior, KroneckerEigen):
            return posterior.part(r, c)
    if (rows == rows[:1]).all() and (columns == columns[:, :1]).all():
        transposed = _part_of_matrix(posterior, places.T)
        return None if transposed is None else transposed.transpose()
    return None


LARGEST = 2**28  # most entries of a `Full` covariance, 1 GiB in float32


def linearised(
    fn: Callable[..., Array], *, structure: type[Full] | type[Diagonal] = Full
) -> Callable[..., tuple[Array, Any]]:
    """Mean and covariance of fn(mean) + J (w - mean), the function linearised in its weights.

    A Laplace approximation is a posterior of the linearised network, so this is its predictive
    distribution; that of the network itself is too wide. For posteriors trained by the ELBO, use
    `propagate`. Costs one backward pass per output. `Full` has the square of the output's size: for 64
    tokens of 1,000 logits 4e9 numbers. `Diagonal` keeps the variances alone, from 64 outputs at a time.

    Assumes that weight arrays are independent of each other.

    Args:
      fn: `fn(params, *inputs)`, differentiable in `params`, returning one array.
      structure: of the covariance, `mj.Full` or `mj.Diagonal`.

    Returns:
      A function of `params`, a pytree with a `Posterior` for each random array, and of the inputs. It
      returns fn at the means as a sequence (T, D), with D the last axis, and its covariance.

    Raises:
      ValueError: if a `Full` covariance would have more than 2^28 entries, or a derivative is not that
        of the values: behind `stop_gradient`, a straight-through estimate, a reversed gradient.

    >>> import jax.numpy as jnp, moment_jax as mj
    >>> belief = mj.posterior.Factorized(jnp.ones((2, 1)), jnp.full((2, 1), 0.5))
    >>> mean, cov = mj.linearised(lambda w, x: x @ w)(belief, jnp.ones(2))
    >>> print(mean, cov.variance())
    [[2.]] [[1.]]
    """
    rule, came = "a function fn(params, x)", type(fn).__name__
    need("linearised(fn)", callable(fn), rule, came, error=TypeError)
    right, came = structure in (Full, Diagonal), repr(structure)
    need("linearised", right, "mj.Full or mj.Diagonal", came, error=TypeError)

    def predict(params: Any, *inputs: Any) -> tuple[Array, Any]:
        leaves, treedef = jax.tree.flatten(params, is_leaf=lambda x: isinstance(x, Posterior))
        beliefs = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Posterior)}
        means = {i: belief.mean for i, belief in beliefs.items()}

        def filled(means: dict[int, Array]) -> Any:
            return jax.tree.unflatten(treedef, [means.get(i, x) for i, x in enumerate(leaves)])

        mean = fn(filled(means), *inputs)
        check_derivatives("linearised", lambda at: fn(filled(at), *inputs), means)
        shape = (-1, mean.shape[-1]) if mean.ndim else (1, 1)
        if structure is Diagonal:
            _, backward = jax.vjp(lambda at: fn(filled(at), *inputs).ravel(), means)

            def variance(i: Array) -> Array:
                (rows,) = backward(jax.nn.one_hot(i, mean.size, dtype=mean.dtype))
                parts = (carried(beliefs[k], row.reshape(1, -1)) for k, row in rows.items())
                return sum((part.reshape(()) for part in parts), jnp.zeros((), mean.dtype))

            variances = jax.lax.map(variance, jnp.arange(mean.size), batch_size=64)
            return mean.reshape(shape), Diagonal(variances.reshape(shape))
        rule, came = "outputs of at most 2^28 covariances", f"{mean.size} outputs {mean.shape}"
        mend = "Use structure=mj.Diagonal for variances, or a function of fewer outputs."
        need("linearised", mean.size**2 <= LARGEST, rule, came, mend)
        total = jnp.zeros((mean.size, mean.size), mean.dtype)
        for i, jacobian in jax.jacrev(lambda at: fn(filled(at), *inputs))(means).items():
            total = total + carried(beliefs[i], jacobian.reshape(mean.size, -1))
        mean = mean.reshape(shape)
        return mean, Full(total.reshape(*mean.shape, *mean.shape))

    return predict


def root_of(belief: Posterior) -> Callable[[Array], Array]:
    """The map of J (N, size of the array) to J R (N, ...), where R R^T is the array's covariance."""
    if isinstance(belief, FullNormal):
        root = psd_cholesky(belief.cov.reshape(belief.mean.size, -1))
        return lambda jacobian: jacobian @ root
    if isinstance(belief, KroneckerEigen):
        sd = safe_sqrt(belief.variance)[None]
        return lambda jacobian: (_in_bases(belief, jacobian) * sd).reshape(len(jacobian), -1)
    sds = safe_sqrt(belief.marginal_variance()).reshape(1, -1)
    return lambda jacobian: jacobian * sds


def _in_bases(belief: KroneckerEigen, jacobian: Array) -> Array:
    """J in a belief's eigenbases, (N, in, out)."""
    kernels = jacobian.reshape(-1, *belief.matrix.shape)
    return jnp.einsum("nio,ia,ob->nab", kernels, belief.in_basis, belief.out_basis)


def carried(belief: Posterior, jacobian: Array) -> Array:
    """J Cov J^T of one weight array, for J of shape (N, size of the array)."""
    if isinstance(belief, Point):
        return jnp.zeros((), jacobian.dtype)
    return covariance_with(belief, jacobian) @ jacobian.T


def covariance_with(belief: Posterior, jacobian: Array) -> Array:
    """J Cov, the covariance of J w and w, (N, size of the array)."""
    if isinstance(belief, FullNormal):
        n = belief.mean.size
        return jacobian @ belief.cov.reshape(n, n)
    if isinstance(belief, KroneckerEigen):
        u, w = belief.in_basis, belief.out_basis
        in_bases = _in_bases(belief, jacobian) * belief.variance[None]
        found = jnp.einsum("nab,ia,ob->nio", in_bases, u, w)
        return found.reshape(jacobian.shape)
    return jacobian * belief.marginal_variance().reshape(1, -1)
