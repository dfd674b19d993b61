"""Cost of a moment pass on this machine over the plain network's: time, memory, compilation, program.

One pre-norm encoder block with Gaussian beliefs about all weights, each of its layers, or a network of
such blocks, in every structure: a forward, and the gradient by parameters and inputs. Inputs have a
covariance of the structure, as in the midst of a stack (those of the network are certain), and all of
the output's covariance is wanted. Times are medians of runs that take turns with the plain network's.
The table says too how many sampled networks (drawing the weights included) cost one moment pass. What
needs more than the memory of an accelerator, or 4 GiB without one, is not run.
"""

import argparse
import os
import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

import moment_jax as mj
from experiments.command_line import Parser, PartError
from experiments.outputs import aligned, duration, write_json
from experiments.programs import GIB, check_memory, compile_program, failure, interleaved, warm_up

Record = dict[str, Any]

PLAIN, SAMPLED = "plain", "sampled"
NETWORK = "network"  # the part of several blocks in a list
NETWORKS = 32  # that one call of SAMPLED draws
QUEUED = 20  # calls that an accelerator is given before the host waits
SLOW = 4.0  # seconds for the timed runs of one function, unless three take longer
CPU_GIB = 4.0  # memory limit without an accelerator
OVER_PLAIN = {"time": "seconds", "memory": "bytes", "compilation": "compile_seconds"}
COUNTS = "operations", "products", "faults"
KINDS = "forward", "gradient"


class Shape(NamedTuple):
    """Tokens and features of each of `batch` sequences; feed-forward layers have 4 D hidden units."""

    tokens: int
    features: int
    heads: int
    batch: int
    blocks: int = 6  # of `NETWORK`

    def __str__(self) -> str:
        return f"T {self.tokens}, D {self.features}, {self.heads} heads, batch {self.batch}"


def dense(shape: Shape, rngs: nnx.Rngs) -> nnx.Module:
    """A dense layer."""
    return nnx.Linear(shape.features, shape.features, rngs=rngs)


Part = Callable[[Shape, nnx.Rngs], nnx.Module]
PARTS: dict[str, Part] = {  # plain networks (batch, T, D) -> (batch, T, D)
    "block": lambda shape, rngs: mj.nn.EncoderBlock(
        shape.features, shape.heads, norm_first=True, activation="gelu", rngs=rngs
    ),
    "attention": lambda shape, rngs: nnx.MultiHeadAttention(
        shape.heads, shape.features, decode=False, rngs=rngs
    ),
    "feed-forward": lambda shape, rngs: mj.nn.MLP(
        [shape.features, 4 * shape.features, shape.features], activation="gelu", rngs=rngs
    ),
    "layer norm": lambda shape, rngs: nnx.LayerNorm(
        shape.features, use_fast_variance=False, rngs=rngs
    ),
    "dense": dense,
    NETWORK: lambda shape, rngs: mj.nn.Encoder(
        shape.blocks, shape.features, shape.heads, norm_first=True, activation="gelu", rngs=rngs
    ),
}
DEFAULT = Shape(64, 128, 4, 4)


def add_arguments(parser: Parser) -> None:
    """Which structures and shapes, how often they are timed, and where the figures go."""
    parser.choice("--structure", mj.STRUCTURES, None, "structures")
    parser.choice("--part", PARTS, [part for part in PARTS if part != NETWORK], "parts")
    parser.add_argument(
        "--shape", type=_shape, nargs="+", action="extend", metavar="T,D,HEADS,BATCH[,BLOCKS]",
        help="tokens, features, heads, sequences, and blocks of the network (default: "
        f"{','.join(map(str, DEFAULT))}; ViT-B at batch 16 is 196,768,12,16,12)",
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
            "needs T,D,HEADS,BATCH[,BLOCKS], whole numbers above 0, and heads that divide D; got "
            f"{text!r}"
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
            for part in args.part
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
        arguments = partial(arguments_of, name, part, shape)
        function = forward_of(name, PARTS[part], shape)
        function = gradient_of(function) if kind == "gradient" else function
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
        records[name]["seconds"] = seconds / calls / (NETWORKS if name == SAMPLED else 1)
        records[name]["faults"] = _faults(runs[name]) // calls
    print(f"{part}, {kind}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    return list(records.values())


def _faults(function: Callable[[], None]) -> int:
    """Minor page faults of one call: what it allocates anew, 4 KiB each; glibc keeps up to 32 MiB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    function()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def _queued(function: Any, arguments: tuple[Any, ...], calls: int) -> None:
    for _ in range(calls):
        result = function(*arguments)
    jax.block_until_ready(result)


def model_of(name: str, part: Part, shape: Shape) -> Any:
    """The plain network, or `mj.Bayesian` of it, in the structure of this name."""
    network = part(shape, nnx.Rngs(0))
    if name == PLAIN:
        return network
    structure = mj.STRUCTURES.get(name, mj.Separable)
    return mj.Bayesian(network, structure=structure, verify=False)  # in programs of its own


def forward_of(name: str, part: Part, shape: Shape) -> Callable[..., Any]:
    """Outputs, or mean and covariance, of a batch: a function of what `arguments_of` gives.

    `name` is a structure's, `PLAIN`, or `SAMPLED`: `NETWORKS` plain networks drawn from the beliefs.
    """
    graph, _ = nnx.split(nnx.eval_shape(lambda: model_of(name, part, shape)))

    def forward(params: Any, *inputs: Any) -> Any:
        model = nnx.merge(graph, params)
        if name != SAMPLED:
            return model(inputs if len(inputs) > 1 else inputs[0])
        keys = jax.random.split(jax.random.key(0), NETWORKS)
        return jax.lax.map(lambda key: model.sample(key)(*inputs), keys, batch_size=8)

    return forward


def arguments_of(name: str, part: str, shape: Shape) -> tuple[Any, ...]:
    """Parameters (`Factorized`) and inputs (batch, T, D); for a structure their covariance too.

    That is what a dense layer leaves. The network's inputs are certain.
    """
    params = nnx.state(model_of(name, PARTS[part], shape))
    x = jax.random.normal(jax.random.key(1), (shape.batch, shape.tokens, shape.features))
    if name in (PLAIN, SAMPLED) or part == NETWORK:
        return params, x
    return params, x, nnx.jit(model_of(name, dense, shape))(x).cov


def gradient_of(forward: Callable[..., Any]) -> Callable[..., Any]:
    """By parameters and inputs, as in a stack, of the mean squares of all that `forward` gives."""

    def loss(arguments: tuple[Any, ...]) -> Array:
        squares = [jnp.mean(y**2) for y in jax.tree.leaves(forward(*arguments))]
        return jnp.stack(squares).sum()

    return lambda *arguments: jax.grad(loss)(arguments)


def table(records: list[Record]) -> str:
    """Forward / gradient of the plain network, and over it; the reasons of what is missing below."""
    found = {(r["structure"], r["part"], r["kind"]): r for r in records}
    names = dict.fromkeys(name for name, _, _ in found if name != SAMPLED)
    width = max(map(len, names))
    rows = [["forward / gradient", *OVER_PLAIN, *COUNTS, "sampled networks"]]
    for name in names:
        for part in dict.fromkeys(r["part"] for r in records):
            pairs = [(found[name, part, kind], found[PLAIN, part, kind]) for kind in KINDS]
            cells = [
                " / ".join(_cell(own, plain, figure) for own, plain in pairs)
                for figure in (*OVER_PLAIN.values(), *COUNTS)
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
    if figure in COUNTS:
        return str(own[figure])
    if own is not plain:
        return _ratio(own, plain, figure)
    return duration(own[figure]) if "seconds" in figure else f"{own[figure] / 2**20:.3g} MiB"


def _ratio(own: Record, other: Record, figure: str) -> str:
    if figure not in own or figure not in other:
        return "-"
    ratio = own[figure] / other[figure]
    return f"{ratio:.3g}" if ratio < 999.5 else f"{ratio:,.0f}"
