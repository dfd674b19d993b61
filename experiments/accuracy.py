"""Compare analytic moments with the sampled truth in a folder of `.npz` case files.

Prints, for each case and structure: the mean's error in true sd (root mean square), the mean ratio of
sd to true sd, the mean of |ratio - 1|, the correlation of the two sds over all elements, the same for
the logits where the file has a head, and the time as a multiple of the deterministic forward's.
"""

import argparse
from typing import Any

import moment_jax as mj
from experiments import propagation
from experiments.cases import Case, Truth, read_folder
from experiments.command_line import Parser
from experiments.outputs import write_json
from experiments.programs import interleaved

STRUCTURES = mj.STRUCTURES
HEADER = ["case", "structure", "mean error", "sd ratio", "|ratio-1|", "sd corr.", "time"]


def add_arguments(parser: Parser) -> None:
    """The options of the comparison."""
    what = "folder of .npz case files; a weight's standard deviation of 0 is a certain weight"
    parser.source("--cases", what)
    parser.choice("--structure", STRUCTURES, list(mj.STRUCTURES), "structures")
    parser.json()
    parser.whole("--repeats", 10, "timed runs of each forward, interleaved; their medians count")
    limit = (
        "skip Full where one of its arrays is larger than this, in GiB; it holds several of them"
    )
    parser.real("--full-limit", 0.5, limit, unit="GIB")


def run(args: argparse.Namespace) -> None:
    """Read and check all files before anything is computed, then go through them."""
    cases = read_folder(args.cases)
    records: list[dict[str, Any]] = []
    width = max(len(case.name) for case in cases) + len(" logits")
    print(_line(HEADER, width), flush=True)
    for case in cases:
        for record in _measure(case, args):
            records.append(record)
            print(_line(_cells(record), width), flush=True)
    write_json(args.json, records)


def _measure(case: Case, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The records of one case, in the order of --structure."""
    records: list[dict[str, Any]] = []
    forwards = {"": propagation.deterministic(case)}
    for name in dict.fromkeys(args.structure):
        hidden = [block.feed_forward.hidden for block in case.blocks] + case.layers
        widest = max(layer.kernel.shape[1] for layer in hidden)
        size = propagation.full_gib(case.inputs.shape[1], widest, case.num_heads)
        if STRUCTURES[name] is mj.Full and size > args.full_limit:
            reason = f"one array of {size:.2g} GiB is over --full-limit {args.full_limit:g}"
            records.append({"case": case.name, "structure": name, "skipped": f"skipped: {reason}"})
            continue
        forwards[name] = propagation.moments(case, STRUCTURES[name])
        output, logits = forwards[name]()
        records.append(_record(case.name, name, output, case.truth))
        if case.logits is not None:
            records.append(_record(f"{case.name} logits", name, logits, case.logits))
    times = interleaved(forwards, args.repeats)
    for record in records:
        if record["structure"] in times:
            record["time_ratio"] = times[record["structure"]] / times[""]
    return records


def _record(case: str, structure: str, moments: tuple[Any, Any], truth: Truth) -> dict[str, Any]:
    agreement = mj.reference.Agreement.of(*moments, *truth)
    return {"case": case, "structure": structure, **agreement._asdict()}


def _cells(record: dict[str, Any]) -> list[str]:
    first = [record["case"], record["structure"]]
    if "skipped" in record:
        return [*first, record["skipped"]]
    figures = [record[name] for name in mj.reference.Agreement._fields]
    return [*first, *(f"{figure:.4f}" for figure in figures), f"{record['time_ratio']:.1f}x"]


def _line(cells: list[str], width: int) -> str:
    case, structure, *rest = cells
    figures = rest[0] if len(rest) == 1 else "  ".join(f"{cell:>10s}" for cell in rest)
    return f"{case:{width}s}  {structure:15s}  {figures}"
