"""Compile a train step for a mesh, and describe the program."""

import dataclasses
import math
import time
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from experiments.scale import hlo, work
from experiments.scale.layout import Layout
from experiments.scale.networks import Size, make_step


def compile_step(size: Size, structure: str, layout: Layout) -> dict[str, Any]:
    """Compile a step for a mesh whose devices need not be here: memory, work and traffic of one."""
    step, state = make_step(size, structure, layout)
    rows = NamedSharding(layout.mesh, PartitionSpec("data"))
    batch = [
        jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=rows)
        for array in size.batch(layout.rows)
    ]
    start = time.perf_counter()
    program = jax.jit(step, donate_argnums=0).lower(layout.shapes(state), *batch).compile()
    seconds = time.perf_counter() - start
    module = hlo.parse(program.as_text() or "")
    devices = layout.mesh.size
    return {
        "structure": structure,
        "devices": devices,
        "rows": layout.rows,
        "batch": size.per_row * layout.rows,
        "seconds_compiling": seconds,
        "memory": _memory(program),
        "flops": work.matrix_flops(module),
        "model_flops": model_flops(size, structure) * layout.rows / devices,
        "hbm_bytes": work.hbm_bytes(module),
        "collectives": work.collectives(module, devices),
    }


def _memory(program: Any) -> dict[str, float]:
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
    once = dataclasses.replace(size, remat=False, chunks=1)
    step, state = make_step(once, structure, Layout.one_device())
    return _products(jax.make_jaxpr(step)(state, *once.batch(1)))


def _products(jaxpr: Any) -> float:
    total = 0.0
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        inner = [_products(leaf) for leaf in jax.tree.leaves(params) if hasattr(leaf, "eqns")]
        if name == "dot_general":
            (contracted, _), _ = params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            out = math.prod(equation.outvars[0].aval.shape)
            total += 2.0 * out * math.prod(left[i] for i in contracted)
        elif name in ("cond", "platform_index"):
            total += max(inner, default=0.0)
        else:
            total += (params["length"] if name == "scan" else 1) * sum(inner)
    return total
