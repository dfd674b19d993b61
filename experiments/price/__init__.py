"""Cost of a moment pass on this machine over the plain network's: time, memory, compilation, program.

One pre-norm encoder block with Gaussian beliefs about all weights, and each of its layers, in every
structure: a forward, and the gradient by parameters and inputs. Inputs have a covariance of the
structure and all of the output's covariance is wanted, as in the midst of a stack. Times are medians of
runs that take turns with the plain network's. The table says too how many sampled networks (drawing the
weights included) cost one moment pass. What needs more than the memory of an accelerator, or 4 GiB
without one, is not run.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax

import moment_jax as mj
from experiments.command_line import Parser, PartError
from experiments.outputs import aligned, duration, write_json
from experiments.price import parts
from experiments.price.parts import PARTS, PLAIN, SAMPLED, Shape
from experiments.programs import GIB, check_memory, compile_program, failure, interleaved, warm_up

Record = dict[str, Any]

KINDS: dict[str, Callable[..., Any]] = {
    "forward": lambda forward: forward,
    "gradient": parts.gradient_of,
}
DEFAULT = Shape(64, 128, 4, 4)
QUEUED = 20  # calls that an accelerator is given before the host waits
SLOW = 4.0  # seconds for the timed runs of one function, unless three take longer
CPU_GIB = 4.0  # memory limit without an accelerator
OVER_PLAIN = {"time": "seconds", "memory": "bytes", "compilation": "compile_seconds"}
COUNTS = {"operations": "operations", "products": "products"}


def add_arguments(parser: Parser) -> None:
    """Which structures and shapes, how often they are timed, and where the figures go."""
    parser.choice("--structure", mj.STRUCTURES, None, "structures")
    parser.add_argument(
        "--shape", type=_shape, nargs="+", action="extend", metavar="T,D,HEADS,BATCH",
        help=f"tokens, features, heads and sequences (default: {','.join(map(str, DEFAULT))}; a block "
        "of ViT-B is 196,768,12,16)",
    )  # fmt: skip
    parser.whole("--repeats", 10, "timed runs of each function, in turn; slow ones have fewer")
    parser.json()


def _shape(text: str) -> Shape:
    try:
        shape = Shape(*map(int, text.split(",")))
    except (TypeError, ValueError):
        shape = Shape(0, 0, 0, 0)
    if min(shape) < 1 or shape.features % shape.heads:
        raise argparse.ArgumentTypeError(
            f"needs T,D,HEADS,BATCH, whole numbers above 0, and heads that divide D; got {text!r}"
        )
    return shape


def run(args: argparse.Namespace) -> None:
    """Measure shape by shape; print each table and write the figures so far."""
    device = jax.devices()[0]
    machine = {"device": device.device_kind, "cores": os.cpu_count()}
    has = (device.memory_stats() or {}).get("bytes_limit", CPU_GIB * GIB)
    print(f"{machine['device']}, {machine['cores']} cores, jax {jax.__version__}", flush=True)
    warm_up()
    records: list[Record] = []
    for shape in dict.fromkeys(args.shape or [DEFAULT]):
        found = [
            record
            for part in PARTS
            for kind in KINDS
            for record in measure(shape, part, kind, args.structure, args.repeats, has / GIB)
        ]
        print(f"\n{shape}\n{table(found)}", flush=True)
        records += found
        write_json(args.json, {**machine, "jax": jax.__version__, "records": records})
    if any(record["status"] == "failed" for record in records):
        raise PartError("some functions failed; the reasons are below their tables")


def measure(
    shape: Shape, part: str, kind: str, structures: list[str], repeats: int, limit: float
) -> list[Record]:
    """A record for the plain part, for each structure, and for sampled networks."""
    start = time.perf_counter()
    names = [PLAIN, *dict.fromkeys(structures)]
    if (part, kind) == ("block", "forward"):
        names.append(SAMPLED)
    calls = 1 if jax.default_backend() == "cpu" else QUEUED  # a CPU runs queued calls side by side
    records: dict[str, Record] = {}
    runs: dict[str, Callable[[], None]] = {}
    for name in names:
        record: Record = {"shape": shape._asdict(), "structure": name, "part": part, "kind": kind}
        records[name] = record | {"status": "ok"}
        arguments = partial(parts.arguments_of, name, PARTS[part], shape)
        function = KINDS[kind](parts.forward_of(name, PARTS[part], shape))
        try:
            shapes = jax.eval_shape(arguments)
            # The compiler itself ends the process where a size overflows.
            check_memory(sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(shapes)), limit)
            program = compile_program(function, *shapes)
            records[name] |= program.figures()
            check_memory(program.bytes, limit)
            runs[name] = partial(_queued, program.call, arguments(), calls)
            runs[name]()
        except Exception as error:  # keep the other structures' figures
            records[name] |= failure(error)
            runs.pop(name, None)
    for name, seconds in interleaved(runs, repeats, SLOW).items():
        records[name]["seconds"] = seconds / calls / (parts.NETWORKS if name == SAMPLED else 1)
    print(f"{part}, {kind}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    return list(records.values())


def _queued(function: Any, arguments: tuple[Any, ...], calls: int) -> None:
    for _ in range(calls):
        result = function(*arguments)
    jax.block_until_ready(result)


def table(records: list[Record]) -> str:
    """Forward / gradient of the plain network, and over it; the reasons of what is missing below."""
    found = {(r["structure"], r["part"], r["kind"]): r for r in records}
    names = dict.fromkeys(name for name, _, _ in found if name != SAMPLED)
    width = max(map(len, names))
    rows = [["forward / gradient", *OVER_PLAIN, *COUNTS, "sampled networks"]]
    for name in names:
        for part in PARTS:
            pairs = [(found[name, part, kind], found[PLAIN, part, kind]) for kind in KINDS]
            cells = [
                " / ".join(_cell(own, plain, figure) for own, plain in pairs)
                for figure in (*OVER_PLAIN.values(), *COUNTS.values())
            ]
            one = found.get((SAMPLED, part, "forward"), {})
            cells.append(_ratio(pairs[0][0], one, "seconds") if one else "")
            rows.append([f"{name:{width}s}  {part}", *cells])
    reasons = [
        "{structure} {part} {kind} {status}: {reason}".format_map(record)
        for record in records
        if record["status"] != "ok"
    ]
    return "\n".join([aligned(rows), *reasons])


def _cell(own: Record, plain: Record, figure: str) -> str:
    if figure not in own:
        return "-"
    if figure in COUNTS.values():
        return str(own[figure])
    if own is not plain:
        return _ratio(own, plain, figure)
    return duration(own[figure]) if "seconds" in figure else f"{own[figure] / 2**20:.3g} MiB"


def _ratio(own: Record, other: Record, figure: str) -> str:
    if figure not in own or figure not in other:
        return "-"
    ratio = own[figure] / other[figure]
    return f"{ratio:.3g}" if ratio < 999.5 else f"{ratio:,.0f}"
