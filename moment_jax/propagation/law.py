"""The first law: with all variances at zero a pass is the network."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moment_jax.posterior.base import is_belief, mean_params
from moment_jax.propagation import regions
from moment_jax.propagation.errors import PropagationError, where
from moment_jax.propagation.graph import Node

CLOSE = 1e-4
"""Most difference of a mean from the network, over the network's mean size, that is always taken.

In float32 60 right networks of up to twelve layers are within 5e-5, most within 1e-6.
"""

ROUNDINGS = 10.0
"""What more is taken: so many times the network's own change by one rounding of weights and inputs.

In half precision that is 1 to 3 %, and in float32 it lets ill-conditioned networks pass.
"""

KINDS = {"bf16": jnp.bfloat16, "f16": jnp.float16, "f32": jnp.float32, "f64": jnp.float64}
PRODUCTS = {"gpu": 2.0**-10, "tpu": 2.0**-7}  # rounding units of float32 products, unless asked for


def rounding(network: Any) -> float:
    """The largest rounding unit in a network, given as a jaxpr."""
    kinds = set(re.findall(r"\b(bf16|f16|f32|f64)\[", str(network)))
    units = [float(jnp.finfo(KINDS[kind]).eps) for kind in kinds]
    if jax.config.values["jax_default_matmul_precision"] not in ("highest", "float32"):
        units.append(PRODUCTS.get(jax.default_backend(), 0.0))
    return max(units, default=0.0)


def rounded(tree: Any, unit: float) -> Any:
    """All floating arrays with half a rounding unit more or less, at random."""
    rng = np.random.default_rng(0)

    def other(x: Any) -> Any:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        signs = rng.choice(np.array([-1, 1], np.int8), x.shape)
        return placed_as(np.asarray(np.asarray(x) * (1 + unit / 2 * signs), x.dtype), x)

    return jax.tree.map(other, tree)


def placed_as(value: np.ndarray, x: Any) -> Any:
    """An array on the devices of another one, so that programs of that take it."""
    committed = isinstance(x, jax.Array) and x.committed
    return jax.device_put(value, x.sharding) if committed else jnp.asarray(value)


def deviation(found: Any, plain: Any) -> float:
    """The largest difference of an array from the network's, over the network's mean size."""
    found, plain = np.asarray(found, np.float64), np.asarray(plain, np.float64)
    same = (found == plain) | (np.isnan(found) & np.isnan(plain))
    known = np.abs(plain[np.isfinite(plain)])
    size = known.mean() if known.size and known.any() else 1.0
    with np.errstate(invalid="ignore"):
        off = np.where(same, 0, np.abs(found - plain))
    return float(np.where(np.isnan(off), np.inf, off).max(initial=0) / size)


def first_off(bound: float, plan: Callable[..., Any], params: Any, inputs: Any) -> str:
    """A sentence that names the first operation whose mean is off; `params` have no noise.

    `plan` gives the output and the propagator of parameters and inputs.
    """

    def operations(params: Any, inputs: Any) -> list[Any]:
        _, propagator = plan(params, inputs, unrolls=True)
        planned = sorted(propagator.planned.items(), key=lambda pair: pair[0].index)
        known: dict[Any, Any] = {n: m.array() for n, m in planned if n.op in ("given", "loop")}
        nodes.extend(n for n, _ in planned)
        means = [m.array() for _, m in planned]
        return list(zip(means, regions.compute(nodes, known), strict=True))

    nodes: list[Node] = []
    pairs = zip(jax.jit(operations)(params, inputs), list(nodes), strict=False)
    off = next((n for pair, n in pairs if deviation(*pair) > bound), None)
    if off is None:
        return ""
    return f" The first operation that is off is `{off.op}` at {where(off.source)}."


def hold_function(
    fn: Callable[..., Any], params: Any, inputs: Any, plan: Callable[..., Any]
) -> None:
    """Hold `propagate(fn)` at these parameters to `fn`; see `first_off`."""

    def certain(x: Any) -> Any:  # of the same family, which rules tell apart
        spread = (name for name in ("variance", "cov") if hasattr(x, name))
        none = {name: jnp.zeros_like(getattr(x, name)) for name in spread}
        return dataclasses.replace(x, **none) if is_belief(x) else x

    at = mean_params(params)
    params = jax.tree.map(certain, params, is_leaf=is_belief)
    plain = jnp.asarray(fn(at, *inputs))

    def own() -> float:
        unit = rounding(jax.make_jaxpr(fn)(at, *inputs))
        near, given = rounded((at, inputs), unit)
        return deviation(fn(near, *given), plain)

    found = jax.jit(lambda *both: plan(*both)[0].moments[0])(params, inputs)
    hold_to_network(
        found.reshape(plain.shape), plain, own, lambda bound: first_off(bound, plan, params, inputs)
    )


def hold_to_network(
    found: Any, plain: Any, own: Callable[[], float], culprit: Callable[[float], str]
) -> None:
    """Raise a PropagationError if the mean of a pass without noise is not the network's output.

    `own` is the network's own deviation by one rounding; `culprit` names the first operation that is
    off by more than a bound.
    """
    off = deviation(found, plain)
    if off <= CLOSE:
        return
    bound = max(CLOSE, ROUNDINGS * own())
    if off <= bound:
        return
    raise PropagationError(
        f"A pass without noise is the network. This one is off by {off:.2g} of the output's mean size, "
        f"more than {bound:.2g}.{culprit(bound)} Please report it; until then use "
        "mj.Bayesian(network, linearised=True)."
    )
