"""The first law: with all variances at zero a pass is the network."""

import re
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.covariance import Covariance
from moment_jax.propagation import regions
from moment_jax.propagation.errors import PropagationError, where
from moment_jax.propagation.graph import Node
from moment_jax.propagation.propagator import plan

CLOSE = 1e3
"""Most difference of a mean from the network, in units of rounding, of the output's mean size."""


KINDS = {"bf16": jnp.bfloat16, "f16": jnp.float16, "f32": jnp.float32, "f64": jnp.float64}


def rounding(network: Any) -> float:
    """The largest rounding unit in a network, given as a jaxpr."""
    kinds = set(re.findall(r"\b(bf16|f16|f32|f64)\[", str(network)))
    return max((float(jnp.finfo(KINDS[kind]).eps) for kind in kinds), default=0.0)


def check_mean(found: Array, plain: Array, unit: float) -> str | None:
    """What is wrong with the mean of a pass without noise, beside the network's output; None: nothing.

    The bound is `CLOSE` of the network's rounding units: 1e-4 in float32, where 60 networks tried were
    within 5e-5; in half precision a tenth, for there a network is within 1 to 3 % of itself.
    """
    size = jnp.nanmean(jnp.abs(plain)) + jnp.finfo(plain.dtype).tiny
    both = jnp.isnan(found) & jnp.isnan(plain)
    off = float(jnp.max(jnp.where(both, 0, jnp.abs(found - plain))) / size)
    bound = min(CLOSE * unit, 0.1)
    return (
        None
        if off <= bound
        else f"off by {off:.2g} of the output's mean size, more than {bound:.2g}"
    )


def refuse_deviation(
    what: str, unit: float, fn: Any, params: Any, inputs: Any, structure: type[Covariance],
    landmarks: int | None,
) -> None:  # fmt: skip
    """Raise for a pass that is not the network, and name the first operation that is off.

    `params` have variances of zero.
    """

    def operations(params: Any, inputs: Any) -> list[Any]:
        _, propagator = plan(fn, params, inputs, structure, landmarks)
        planned = sorted(propagator.planned.items(), key=lambda pair: pair[0].index)
        known: dict[Any, Any] = {n: m.array() for n, m in planned if n.op in ("given", "loop")}
        nodes.extend(n for n, _ in planned)
        return list(
            zip((m.array() for _, m in planned), regions.compute(nodes, known), strict=True)
        )

    nodes: list[Node] = []
    pairs = zip(jax.jit(operations)(params, inputs), list(nodes), strict=False)
    off = next((n for (mean, value), n in pairs if check_mean(mean, value, unit)), None)
    at = (
        ""
        if off is None
        else f" The first operation that is off is `{off.op}` at {where(off.source)}."
    )
    raise PropagationError(
        f"A pass without noise is the network. This one is {what}.{at} Please report it; until then use "
        "mj.Bayesian(network, linearised=True)."
    )
