"""Whether derivatives are those of the values: not behind stop_gradient or a custom rule.

A network linearised in its weights is right only if its Jacobian is that of what it computes.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from moment_jax.propagation.errors import where

_CUSTOM = ("custom_jvp_call", "custom_vjp_call")
_OWN = ("/jax/_src/nn/", "/jax/_src/numpy/", "/jax/_src/ops/", "/jax/_src/scipy/")
_BETWEEN = (
    "source_info_util.py",
    "partial_eval.py",
    "batching.py",
    "core.py",
    "lax.py",
    "tree_util.py",
)


def check_derivatives(caller: str, closed: Any, args: Any) -> None:
    """Raise if a derivative by `args` is not that of the values.

    Of custom rules and stop_gradient that are not JAX's own, a gradient in a random direction is taken
    once as they say, and once by differentiating what they compute. Where arrays are traced, at random
    values in their place. What cannot be differentiated by JAX itself, a kernel say, is believed.

    Args:
      caller: the public function.
      closed: a closed jaxpr of one output, floating.
      args: its arguments.

    Raises:
      ValueError: names the line.
    """
    odd = list(_odd(closed.jaxpr, ()))
    if not odd:
        return
    rng = np.random.default_rng(0)

    def known(x: Any) -> Any:
        if not isinstance(x, jax.core.Tracer):
            return x
        real = jnp.issubdtype(x.dtype, jnp.floating)
        return jnp.asarray(rng.normal(size=x.shape) if real else np.zeros(x.shape), x.dtype)

    with jax.ensure_compile_time_eval():
        consts, args = [known(x) for x in closed.consts], [known(x) for x in args]
        out = closed.out_avals[0]
        row = jnp.asarray(rng.normal(size=out.shape), out.dtype)

        def gradients(chosen: set[int]) -> Any:
            def fn(args: Any) -> Any:
                return _evaluated(closed.jaxpr, chosen, *consts, *args)[0]

            return jax.jit(lambda args: jax.vjp(fn, args)[1](row))(args)

        given = jax.tree.leaves(gradients(set()))

        def changed(eqns: list[Any]) -> bool:
            own = jax.tree.leaves(gradients(set(map(id, eqns))))
            return _differ(given, own)

        try:
            if not changed([eqn for eqn, _ in odd]):
                return
            eqn, sources = next((pair for pair in odd if changed([pair[0]])), odd[0])
        except NotImplementedError:
            return
    raise ValueError(
        f"`{caller}` needs derivatives of what the network computes. Got {eqn.primitive.name} at "
        f"{where(sources)}, which changes them. Take it out, make the weights before it certain by "
        "random=, or use moments: mj.propagate, mj.calibrate, mj.Bayesian(network, linearised=False)."
    )


def _odd(jaxpr: Any, calls: tuple[Any, ...]) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Equations whose derivative may be another one, and their sources, innermost first."""
    for eqn in jaxpr.eqns:
        sources = (eqn.source_info, *calls)
        if eqn.primitive.name == "stop_gradient":
            files = [x.file_name for x in getattr(eqn.source_info.traceback, "frames", ())]
            own = [any(x in file for x in _OWN) for file in files if not file.endswith(_BETWEEN)]
            if not any(own[:1]):
                yield eqn, sources
        elif eqn.primitive.name in _CUSTOM:
            info = eqn.params["call_jaxpr"].jaxpr.debug_info
            if eqn.primitive.name != _CUSTOM[0] or _OWN[0] not in (info.func_filename or ""):
                yield eqn, sources
        else:
            for inner in jax.tree.leaves(eqn.params, is_leaf=_is_jaxpr):
                if _is_jaxpr(inner):
                    yield from _odd(getattr(inner, "jaxpr", inner), sources)


def _is_jaxpr(x: Any) -> bool:
    return isinstance(x, core.Jaxpr | core.ClosedJaxpr)


def _evaluated(jaxpr: Any, chosen: set[int], *args: Any) -> list[Any]:
    """Outputs of an open jaxpr of constants and arguments, the chosen equations as they compute."""
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], args, strict=True))

    def inner(x: Any) -> Any:
        if not _is_jaxpr(x):
            return x
        opened, consts = getattr(x, "jaxpr", x), getattr(x, "consts", ())
        shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in opened.invars]
        new = jax.make_jaxpr(lambda *a: _evaluated(opened, chosen, *consts, *a))(*shapes)
        return new if isinstance(x, core.ClosedJaxpr) else new.jaxpr

    for eqn in jaxpr.eqns:
        values = [v.val if isinstance(v, core.Literal) else env[v] for v in eqn.invars]
        if id(eqn) in chosen and eqn.primitive.name in _CUSTOM:
            called = eqn.params["call_jaxpr"]
            found = _evaluated(called.jaxpr, chosen, *called.consts, *values)
        elif id(eqn) in chosen:
            found = values
        else:
            same = eqn.primitive.name in _CUSTOM
            params = eqn.params if same else jax.tree.map(inner, eqn.params, is_leaf=_is_jaxpr)
            found = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(params))
            found = found if eqn.primitive.multiple_results else [found]
        env.update(zip(eqn.outvars, found, strict=True))
    return [v.val if isinstance(v, core.Literal) else env[v] for v in jaxpr.outvars]


def _differ(given: list[Any], own: list[Any]) -> bool:
    """Whether an array's gradients differ by more than rounding, which is that of the largest array."""
    sizes = [max(float(jnp.max(jnp.abs(x))) for x in pair) for pair in zip(given, own, strict=True)]
    gaps = [float(jnp.max(jnp.abs(a - b))) for a, b in zip(given, own, strict=True)]
    tolerance = max(float(jnp.finfo(x.dtype).eps) for x in given) ** 0.5
    floor = 0.03 * max(sizes)
    return any(gap > tolerance * max(size, floor) for gap, size in zip(gaps, sizes, strict=True))
