"""Compiled functions: their size, compilation, memory and times."""

import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

GIB = 2**30


class Skip(Exception):  # noqa: N818 (it is no error)
    """A program does not fit; the message says why."""


def failure(error: Exception) -> dict[str, str]:
    """Status and reason of a program that did not run; too little memory is no failure."""
    message = " ".join(str(error).split())[:300]
    if isinstance(error, Skip) or "RESOURCE_EXHAUSTED" in message:
        return {"status": "skipped", "reason": message}
    return {"status": "failed", "reason": f"{type(error).__name__}: {message}"}


def check_memory(needed: int, limit: float) -> None:
    """Raise `Skip` if `needed` bytes are more than `limit` GiB."""
    if needed > limit * GIB:
        raise Skip(f"{needed / GIB:.3g} GiB of memory are over the limit of {limit:g}")


class Size(NamedTuple):
    """Size of a program before optimisation; the body of a loop counts once."""

    operations: int  # of StableHLO, with functions counted wherever they are called
    products: int  # how many of them are matrix products


class Program(NamedTuple):
    """A compiled function."""

    call: Callable[..., Any]  # returns before its result is ready
    seconds: float  # what tracing and compiling took
    bytes: int  # of arguments, results and temporaries
    lowered: jax.stages.Lowered  # before the compiler, for `size_of`

    def figures(self) -> dict[str, float]:
        """Seconds to compile, memory, and size."""
        sizes = size_of(self.lowered)._asdict()
        return {"compile_seconds": self.seconds, "bytes": self.bytes, **sizes}


def compile_program(
    function: Callable[..., Any], *arguments: Any, options: dict[str, Any] | None = None
) -> Program:
    """Trace and compile a function, which may be under `jit` already.

    The arguments may be shapes and types alone. `options` are XLA's.
    """
    start = time.perf_counter()
    lowered = (function if hasattr(function, "lower") else jax.jit(function)).lower(*arguments)
    program = lowered.compile(compiler_options=options)
    seconds = time.perf_counter() - start
    return Program(program, seconds, needed_bytes(program), lowered)


def needed_bytes(program: jax.stages.Compiled) -> int:
    """Bytes of a compiled function's arguments, results and temporaries."""
    memory: Any = program.memory_analysis()
    sizes = memory.temp_size_in_bytes, memory.argument_size_in_bytes, memory.output_size_in_bytes
    return int(sum(sizes))


def warm_up() -> None:
    """Start the compiler, so that the first timed compilation does not."""
    compile_program(lambda x: jax.nn.gelu(x @ x), jnp.ones((8, 8)))


def size_of(lowered: jax.stages.Lowered) -> Size:
    """Count what `jax.jit(function).lower(...)` gives.

    >>> size_of(jax.jit(lambda x: (x @ x) @ x + 1).lower(jnp.ones((2, 2))))
    Size(operations=5, products=2)
    """
    module: Any = lowered.compiler_ir()
    functions = {op.attributes["sym_name"].value: op for op in module.body}

    def operations(op: Any) -> Iterator[Any]:
        for inner in (inner for region in op.regions for block in region for inner in block):
            if inner.name == "func.call":
                yield from operations(functions[inner.attributes["callee"].value])
            elif len(inner.results):  # the others end a function or the body of a loop
                yield inner
                yield from operations(inner)

    found = [*operations(functions["main"])]
    return Size(len(found), sum(op.name == "stablehlo.dot_general" for op in found))


def interleaved(
    functions: dict[str, Callable[[], Any]], repeats: int, limit: float = math.inf
) -> dict[str, float]:
    """Median seconds of each function; they take turns, so that what slows the machine slows all.

    Args:
      functions: each returns when its result is there.
      repeats: timed runs of each, after one that is not counted.
      limit: seconds that the timed runs of one function may take; after three they end there.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    for i in range(repeats):
        for name, function in functions.items():
            if i < 3 or sum(times[name]) < limit:
                start = time.perf_counter()
                function()
                times[name].append(time.perf_counter() - start)
    return {name: float(np.median(taken)) for name, taken in times.items()}
