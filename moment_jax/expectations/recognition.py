"""What a function of a scalar is: its closed form, its linear pieces, or how to integrate it."""

from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import Literal

from moment_jax.covariance.fields import need
from moment_jax.expectations.activations import (
    ElementwiseMoments,
    Formula,
    gelu,
    piecewise_linear,
    rectified,
)
from moment_jax.expectations.quadrature import ScalarFunction, at, elementwise, resolving
from moment_jax.xla import inlined

# Closed forms by name, and the functions of a scalar by which they are recognised.
CLOSED_FORMS: dict[str, tuple[Formula, ScalarFunction]] = {
    "relu": (rectified, jax.nn.relu),
    "gelu": (gelu, partial(jax.nn.gelu, approximate=False)),
}

_MOST = 32  # places at which a function bends or jumps
_BENDS = {"abs", "clamp", "max", "min"}
_STEPS = {
    "and", "ceil", "eq", "floor", "ge", "gt", "is_finite", "le", "lt", "ne", "not", "or", "round",
    "sign",
}  # fmt: skip
_SAME = {"convert_element_type", "reduce_precision", "stop_gradient"}  # but for rounding
_LINEAR = _BENDS | _SAME | {
    "add", "add_any", "broadcast_in_dim", "copy", "copy_p", "neg", "rem", "reshape", "select_n",
    "squeeze", "sub",
}  # fmt: skip


class Pieces(NamedTuple):
    """A piecewise linear function, in the arguments of `piecewise_linear`."""

    kinks: list[float]
    slopes: list[float]
    value: float
    steps: list[tuple[float, float]]

    def __call__(self, mean: Array, variance: Array) -> ElementwiseMoments:
        """Its moments."""
        return piecewise_linear(mean, variance, *self)


class _Read:
    """A function of a scalar, read as JAX writes it. Those written alike are equal.

    `fn` is the function, without half precision and with all of its derivatives. `sides` tells on which
    side of each comparison, step and bend a number lies, (N,), and `bends` whether there are any. By its
    `operations` a function of `degree` 0 is piecewise constant, and of 1 piecewise linear.
    """

    def __init__(self, fn: ScalarFunction, dtype: Any) -> None:
        number = jax.ShapeDtypeStruct((), dtype)
        self.traced = jax.make_jaxpr(fn)(number)
        self.text = f"{self.traced} {[np.asarray(x).tolist() for x in self.traced.consts]}"
        self.dtype, self.eps = dtype, float(jnp.finfo(dtype).eps)
        self.operations: set[str] = set()
        self.fn, self.sides = (inlined(lambda x, i=i: self._values(x)[i]) for i in (0, 1))
        jax.eval_shape(self.fn, number)

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Read) and self.text == other.text

    def _values(self, x: Array) -> tuple[Array, Array]:
        sides = [jnp.zeros(1, x.dtype)]
        ((out, self.degree),) = self._run(self.traced, [(x, 1)], sides)
        self.bends = len(sides) > 1
        return jnp.asarray(out, x.dtype), jnp.nan_to_num(jnp.concatenate(sides))

    def _run(self, called: Any, inputs: list[Any], sides: list[Array]) -> list[Any]:
        """Outputs of an open or closed jaxpr, each with its degree."""
        jaxpr, consts = getattr(called, "jaxpr", called), getattr(called, "consts", ())
        given = [*((c, 0) for c in consts), *inputs]
        known = dict(zip([*jaxpr.constvars, *jaxpr.invars], given, strict=True))

        def read(atoms: Any) -> list[Any]:
            return [(x.val, 0) if isinstance(x, Literal) else known[x] for x in atoms]

        for eqn in jaxpr.eqns:
            inner = [eqn.params[k] for k in ("jaxpr", "call_jaxpr", "fun_jaxpr") if k in eqn.params]
            if inner and eqn.primitive.name != "scan":
                out = self._run(inner[0], read(eqn.invars), sides)
            else:
                out = self._apply(eqn, read(eqn.invars), sides)
            known.update(zip(eqn.outvars, out, strict=True))
        return read(jaxpr.outvars)

    def _apply(self, eqn: Any, inputs: list[Any], sides: list[Array]) -> list[Any]:
        """Results of an operation, each with its degree."""
        name, dtype, degrees = eqn.primitive.name, sides[0].dtype, [degree for _, degree in inputs]
        values = [jnp.asarray(x) for x, _ in inputs]
        values = [x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in values]
        real = jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating)
        if name in _SAME and real:
            out = values[0].astype(dtype)
        else:
            out = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
        outs = list(out) if eqn.primitive.multiple_results else [out]
        if not any(degrees):
            return [(x, 0) for x in outs]
        name = "floor" if name in _SAME and not real else name  # to integers
        self.operations.add(name)
        degree, new = 2, []
        if name in _STEPS:
            degree, new = 0, outs
        elif name in _LINEAR:
            degree = max(degrees)
            new = [jnp.sign(out - x) for x in values] if name in _BENDS else []
            new += [jnp.trunc(values[0] / values[1])] if name == "rem" else []
        elif name == "mul" or (name == "div" and not degrees[1]):
            degree = min(sum(degrees), 2)
        sides += [x.astype(dtype).ravel() for x in new]
        return [(x, degree) for x in outs]


def _breaks(found: _Read) -> np.ndarray | None:
    """Where a function bends or jumps, in order; None if at more places than `_MOST`.

    There one of its comparisons, steps or bends changes sides, as shows between points far apart too.
    """
    if not found.bends:
        return np.zeros(0, found.dtype)
    x = np.geomspace(1e-4, 1e4, 120)
    x = np.concatenate([-x[::-1], [0.0], x]).astype(found.dtype)
    sides = at(found.sides, x)
    while True:
        changed = (sides[1:] != sides[:-1]).any(1)
        wide = np.diff(x) > 2 * found.eps * (np.abs(x[1:]) + 1e-3)
        cells = np.flatnonzero(changed & wide)
        middle = (x[cells] + x[cells + 1]) / 2
        if not 0 < len(cells) <= 2 * _MOST:
            break
        x, order = np.unique(np.concatenate([x, middle]), return_index=True)
        sides = np.concatenate([sides, at(found.sides, middle)])[order]
    places = ((x[1:] + x[:-1]) / 2)[changed]
    places = np.where(np.abs(places) < 2e-3 * found.eps, 0, places)
    apart = np.diff(places, prepend=-np.inf) > 16 * found.eps * (np.abs(places) + 1e-3)
    return places[apart] if apart.sum() <= _MOST and not len(cells) else None


def _beside(places: np.ndarray) -> np.ndarray:
    """How far to both sides of each place nothing else is, at most as far as it is from zero, or 1."""
    gaps = np.diff(places, prepend=-np.inf, append=np.inf)
    return np.minimum(np.minimum(gaps[1:], gaps[:-1]) / 2, np.maximum(np.abs(places), 1))


def _pieces(found: _Read, places: np.ndarray) -> Pieces | None:
    """The pieces of a piecewise linear function with these breaks; None if it is not finite."""
    places = places if len(places) else np.zeros(1, found.dtype)
    aside, both = _beside(places), inlined(jax.value_and_grad(found.fn))
    found_there = at(both, np.concatenate([places - aside, places + aside]))
    values, slopes = (y.astype(float).reshape(2, -1) for y in found_there)
    if not (np.isfinite(values).all() and np.isfinite(slopes).all()):
        return None
    before, after = values + slopes * [[1.0], [-1.0]] * aside
    close, steep = 64 * found.eps, np.abs(slopes).max()
    size = np.abs(before) + np.abs(after) + steep * (np.abs(places) + aside)
    jump = np.flatnonzero(np.abs(after - before) > close * size)
    bend = np.flatnonzero(np.abs(np.diff(slopes, axis=0)[0]) > close * steep)
    kinks = places[bend].tolist()
    value = before[0] + slopes[0, 0] * ((kinks or [0.0])[0] - float(places[0]))
    steps = [(float(places[i]), float(after[i] - before[i])) for i in jump]
    return Pieces(kinks, [float(slopes[0, 0]), *slopes[1, bend].tolist()], float(value), steps)


def _jumps(found: _Read, places: np.ndarray | None) -> bool:
    """Whether a function jumps at one of these places, or may at too many to tell."""
    if places is None:
        return not found.operations.isdisjoint(_STEPS | {"rem", "select_n"})
    # Across a jump a function changes by more than beside it.
    beside = 4 * found.eps * (1 + np.abs(places))
    near = np.concatenate([places + i * beside for i in (-3, -1, 1, 3)])
    a, b, c, d = at(found.fn, near).reshape(4, -1)
    least = 1e3 * found.eps * (1 + np.abs(b) + np.abs(c))
    return bool((np.abs(c - b) > least + 2 * (np.abs(b - a) + np.abs(d - c))).any())


def recognised(fn: ScalarFunction, dtype: Any = float) -> tuple[str, Formula | None, str]:
    """The name of a function of a scalar, its moments, and what these assume.

    It is known by its operations and, between its breaks, by its values, computed in `dtype` or in
    float32 if that is more precise. Piecewise linear functions (`Pieces`) and those of `CLOSED_FORMS`
    are exact, all others quadratures with as many nodes as they need. The moments of one that jumps
    between curved pieces are None.
    """
    found = _Read(fn, jnp.promote_types(jnp.result_type(dtype), jnp.float32))
    name, moments, assumes = _recognised(found)
    if name == "quadrature":
        whole = "f16[" in found.text or "stop_gradient" in found.operations
        moments = partial(moments, found.fn if whole else fn)
    return name, moments, assumes


@lru_cache(maxsize=256)
def _recognised(found: _Read) -> tuple[str, Any, str]:
    """As `recognised`; moments by quadrature take the function before mean and variance."""
    places, gaussian = _breaks(found), "its input Gaussian"
    pieces = None if places is None or found.degree > 1 else _pieces(found, places)
    if pieces is not None and pieces != ([0.0], [0.0, 1.0], 0.0, []):
        if not pieces.kinks and not pieces.steps:
            return "linear", pieces, ""
        return "steps" if pieces.steps else "piecewise linear", pieces, gaussian
    if places is not None:
        x = np.concatenate([np.linspace(0, 6, 25), np.geomspace(8, 1e4, 12)])
        near = places + np.outer([-1, -0.1, 0.1, 1], _beside(places))
        x = np.concatenate([-x, x, near.ravel()]).astype(found.dtype)
        # Half precision rounds the constants.
        y, atol = at(found.fn, x), 2e-4 if "f16[" in found.text else 32 * found.eps
        for name, (moments, fn) in CLOSED_FORMS.items():
            if np.allclose(y, at(inlined(fn), x), rtol=1e-5, atol=atol):
                return name, moments, gaussian
    if _jumps(found, places):
        return "jump", None, gaussian
    num_nodes, width = resolving(found.fn, found.dtype, bends=found.bends)
    if num_nodes is None:
        return "quadrature", _inside_domain, gaussian
    if width < 2:
        gaussian += f", of sd up to {width:g}: beyond it the function is too narrow"
    return "quadrature", partial(elementwise, num_nodes=num_nodes, bends=found.bends), gaussian


def _inside_domain(fn: ScalarFunction, mean: Array, variance: Array) -> ElementwiseMoments:
    """By quadrature; to first order where nodes leave the domain, as a logarithm's near zero do."""
    moments = elementwise(fn, mean, variance)
    value, slope = jnp.vectorize(jax.value_and_grad(fn))(mean)
    first = value, slope**2 * variance, slope, jnp.zeros_like(mean)
    known = jnp.isfinite(moments.mean) & jnp.isfinite(moments.variance)
    return jax.tree.map(lambda a, b: jnp.where(known, a, b), moments, ElementwiseMoments(*first))


def of(activation: str | ScalarFunction) -> Formula:
    """The moments of an activation, a function (mean, variance) -> `ElementwiseMoments`.

    The activation is "relu", "gelu" (the exact one, x Phi(x)), or a JAX function of a scalar, which is
    read by its operations (`recognised`): piecewise linear functions and these two are exact. ValueError
    or TypeError if the name is unknown, or the function does not map a scalar to one, or jumps between
    curved pieces.

    >>> of(jax.nn.relu) is of("relu")
    True
    """
    given, mend = repr(activation), "Give a function, such as jnp.tanh."
    if isinstance(activation, str):
        rule = f"a function of a scalar, or one of {', '.join(map(repr, CLOSED_FORMS))}"
        need("activation", activation in CLOSED_FORMS, rule, given, mend)
        return CLOSED_FORMS[activation][0]
    try:
        out = jax.eval_shape(activation, jax.ShapeDtypeStruct((), jnp.float32))
    except (TypeError, ValueError, AttributeError) as error:
        out = error
    right, came = getattr(out, "shape", None) == (), f"{given}, which makes {out!r} of one"
    need("activation", right, "a function of a scalar", came, mend, TypeError)
    moments: Any = recognised(activation)[1]
    mend = "Smooth its jumps, or give its `ElementwiseMoments` to cov.elementwise."
    need("activation", moments is not None, "linear pieces where it jumps", given, mend)
    return moments
