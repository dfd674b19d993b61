"""Whether derivatives are those of the values: not behind stop_gradient or a custom rule."""

from collections.abc import Callable, Iterator
from itertools import takewhile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from moment_jax.propagation.errors import where


def check_derivatives(caller: str, fn: Callable[[Any], Any], args: Any) -> None:
    """Raise a ValueError if derivatives are not those of what the function computes.

    If there is a stop_gradient or a rule that is not JAX's own, and no half precision, all arrays move
    in a random direction, three times; where they are traced, from random values. Differences that agree
    at two steps but not with the derivative refute it; where they do not agree, it is believed.
    """
    closed, rng = jax.make_jaxpr(fn)(args), np.random.default_rng(0)
    odd = ", ".join(list(dict.fromkeys(_odd(closed.jaxpr, ())))[:3])
    if not odd or "f16[" in str(closed.jaxpr):
        return

    def known(x: Any, moved: float) -> Any:
        traced, real = isinstance(x, jax.core.Tracer), jnp.issubdtype(x.dtype, jnp.floating)
        noise = rng.normal(size=x.shape) * (np.prod(x.shape[:-1]) ** -0.5 if real else 0)
        return jnp.asarray(noise if traced else x + moved * noise, x.dtype)

    def refuted(at: list[Any]) -> bool:
        ways = [known(0 * x, (float(jnp.mean(x**2)) or 1.0) ** 0.5) for x in at]
        step = float(jnp.finfo(row.dtype).eps) ** (1 / 3)
        given = float(sum(map(jnp.vdot, jax.grad(run)(at), ways)))
        far = {
            s: run([x + s * step * ways[i] for i, x in enumerate(at)]) for s in (1, -1, 0.5, -0.5)
        }
        wide, near = (float((far[s] - far[-s]) / (2 * s * step)) for s in (1, 0.5))
        return abs(given - near) > 10 * abs(wide - near) + 0.02 * max(abs(given), abs(near))

    with jax.ensure_compile_time_eval():
        of = core.jaxpr_as_fun(core.ClosedJaxpr(closed.jaxpr, [known(x, 0) for x in closed.consts]))
        row = known(jnp.zeros_like(closed.out_avals[0]), 1.0)
        run = jax.jit(lambda at: jnp.vdot(row, of(*at)[0]))
        leaves = jax.tree.leaves(args)
        if not all(refuted([known(x, 0.01) for x in leaves]) for _ in range(3)):  # off kinks
            return
    raise ValueError(
        f"`{caller}` needs derivatives of what the network computes. Got {odd}. Take it out, make the "
        "weights before it certain by random=, or use moments: mj.propagate, linearised=False."
    )


def _odd(jaxpr: Any, calls: tuple[Any, ...]) -> Iterator[str]:
    """Equations whose derivative may be another one, with their lines."""
    for eqn in jaxpr.eqns:
        sources, name, own = (eqn.source_info, *calls), eqn.primitive.name, True
        if name in ("custom_jvp_call", "custom_vjp_call"):
            file = eqn.params["call_jaxpr"].jaxpr.debug_info.func_filename or ""
            own = name == "custom_jvp_call" and "/jax/_src/nn/" in file
        elif name == "stop_gradient":
            files = (x.file_name for x in getattr(eqn.source_info.traceback, "frames", ()))
            inner = " ".join(takewhile(lambda file: "/jax/_src/" in file, files))
            own = any(f"/_src/{part}/" in inner for part in ("nn", "numpy", "ops", "scipy"))
        else:
            for part in core.jaxprs_in_params(eqn.params):
                yield from _odd(part, sources)
        if not own:
            yield f"{name} at {where(sources)}"
