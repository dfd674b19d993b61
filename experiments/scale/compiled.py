"""Compile a train step for a mesh, and describe the program."""

import dataclasses
import math
import time
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from experiments.scale import hlo, work
from experiments.scale.layout import Layout
from experiments.scale.networks import Size, make_step


def compile_step(size: Size, structure: str, layout: Layout) -> dict[str, Any]:
    """Compile a step for a mesh whose devices need not be here: memory, work and traffic of one."""
    step = make_step(size, structure, layout)
    state = layout.shapes(step.state)
    rows = NamedSharding(layout.mesh, PartitionSpec("data"))
    batch = [
        jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=rows)
        for array in size.batch(layout.rows)
    ]
    start = time.perf_counter()
    lowered = jax.jit(step.fn, donate_argnums=0).lower(state, *batch)
    middle = time.perf_counter()
    program = lowered.compile()
    end = time.perf_counter()
    module = hlo.parse(program.as_text() or "")
    devices = layout.mesh.size
    return {
        "structure": structure,
        "devices": devices,
        "rows": layout.rows,
        "batch": size.per_row * layout.rows,
        "seconds_lowering": middle - start,
        "seconds_compiling": end - middle,
        "memory": memory(program),
        "flops": work.matrix_flops(module),
        "all_flops": float((program.cost_analysis() or {}).get("flops", math.nan)),
        "model_flops": model_flops(size, structure) * layout.rows / devices,
        "hbm_bytes": work.hbm_bytes(module),
        "collectives": work.by_kind(work.collectives(module, devices)),
    }


def memory(program: Any) -> dict[str, float]:
    """Bytes of a device: arguments (results take their place), temporaries, their sum, and the peak.

    The sum is what the program reserves; the peak is what of it is in use at one moment.
    """
    known = program.memory_analysis()
    results = known.output_size_in_bytes - known.alias_size_in_bytes
    return {
        "arguments": known.argument_size_in_bytes,
        "temporaries": known.temp_size_in_bytes,
        "reserved": known.argument_size_in_bytes + results + known.temp_size_in_bytes,
        "peak": getattr(known, "peak_memory_in_bytes", 0),
    }


def model_flops(size: Size, structure: str) -> float:
    """Operations of the matrix products of a step on the examples of one row, nothing computed twice."""
    step = make_step(
        dataclasses.replace(size, remat=False, chunks=1), structure, Layout.one_device()
    )
    traced = jax.make_jaxpr(step.fn)(step.state, *size.batch(1))
    return _products(traced.jaxpr)


def _products(jaxpr: Any) -> float:
    total = 0.0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            out = math.prod(equation.outvars[0].aval.shape)
            total += 2.0 * out * math.prod(left[i] for i in contracted)
        elif equation.primitive.name in ("cond", "platform_index"):
            branches = equation.params.get("branches", ())
            total += max((_products(branch.jaxpr) for branch in branches), default=0.0)
        else:
            times = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
            total += times * sum(_products(inner) for inner in _inner(equation.params))
    return total


def _inner(params: dict[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            if isinstance(one, jax.extend.core.ClosedJaxpr):
                yield one.jaxpr
            elif isinstance(one, jax.extend.core.Jaxpr):
                yield one
