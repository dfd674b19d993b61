"""Compare analytic moments with the sampled truth: of networks trained here, or of case files.

Prints, for each case and structure: the mean's error in true sd (root mean square), the mean ratio of
sd to true sd, the mean of |ratio - 1|, the correlation of the two sds over all elements, the same for
the logits where the case has a head, and the time as a multiple of the deterministic forward's. Without
--cases five small vision Transformers are trained by sampled variational inference, and what users have
without moments is beside the structures: the linearised network, and 10 to 300 sampled networks.
"""

import argparse
from typing import Any

import jax

import moment_jax as mj
from experiments.accuracy import cases, trained
from experiments.accuracy.cases import Case
from experiments.agreement import Agreement
from experiments.command_line import Parser
from experiments.outputs import write_json
from experiments.programs import interleaved

SAMPLED = (10, 30, 100, 300)  # networks; the truth is of other draws
SLOW = 10.0  # seconds for the timed runs of one forward, unless three take longer
HEADER = ["case", "structure", "mean error", "sd ratio", "|ratio-1|", "sd corr.", "time"]

Record = dict[str, Any]


def add_arguments(parser: Parser) -> None:
    """The options of the comparison."""
    what = "folder of .npz case files; a weight's sd of 0 is a certain weight (default: train five)"
    parser.place("--cases", None, what)
    parser.choice("--structure", mj.STRUCTURES, None, "structures")
    parser.whole("--samples", 20_000, "networks drawn for the truth of those trained here", least=2)
    parser.seed("random seed of their training and of the truth's draws")
    parser.json()
    parser.whole("--repeats", 10, "timed runs of each forward, interleaved; their medians count")
    limit = "skip Full where one of its arrays is larger than this, in GiB; it holds several"
    parser.gib("--full-limit", 0.5, limit)


def run(args: argparse.Namespace) -> None:
    """Read and check all files, or train, before anything is measured; then go through the cases."""
    own = args.cases is None
    every = trained.cases(args.samples, args.seed) if own else cases.read_folder(args.cases)
    records: list[Record] = []
    width = max(len(case.name) for case in every) + len(" logits")
    _print(HEADER, width)
    for case in every:
        found = _measure(case, args)
        records += found
        for record in found:
            _print(_cells(record), width)
    write_json(args.json, records)


def _measure(case: Case, args: argparse.Namespace) -> list[Record]:
    """The records of one case, in the order of --structure."""
    records: list[Record] = []
    forwards = {"": cases.plain(case)}

    def add(name: str, output: Any, logits: Any) -> None:
        for at, moments, truth in (("", output, case.truth), (" logits", logits, case.logits)):
            if truth is not None:
                agreement = Agreement.of(moments[0], moments[1], *truth)._asdict()
                records.append({"case": case.name + at, "structure": name, **agreement})

    for name in dict.fromkeys(args.structure):
        size = cases.full_gib(case)
        if mj.STRUCTURES[name] is mj.Full and size > args.full_limit:
            reason = f"one array of {size:.2g} GiB is over --full-limit {args.full_limit:g}"
            records.append({"case": case.name, "structure": name, "skipped": f"skipped: {reason}"})
            continue
        forwards[name] = cases.moments(case, mj.STRUCTURES[name])
        add(name, *forwards[name]())
    if args.cases is None:
        forwards["linearised"] = cases.linearised(case, 1)  # the time of the logits alone
        add("linearised", cases.linearised(case, 0)(), forwards["linearised"]())
        for count in SAMPLED:
            name = f"{count} sampled"
            forwards[name] = cases.sampled(case, count, jax.random.key(args.seed + 2))
            add(name, *forwards[name]())
    times = interleaved(forwards, args.repeats, SLOW)
    for record in records:
        if record["structure"] in times:
            record["time_ratio"] = times[record["structure"]] / times[""]
    return records


def _cells(record: Record) -> list[str]:
    first = [record["case"], record["structure"]]
    if "skipped" in record:
        return [*first, record["skipped"]]
    figures = [record[name] for name in Agreement._fields]
    return [*first, *(f"{figure:.4f}" for figure in figures), f"{record['time_ratio']:.1f}x"]


def _print(cells: list[str], width: int) -> None:
    case, structure, *rest = cells
    figures = rest[0] if len(rest) == 1 else "  ".join(f"{cell:>10s}" for cell in rest)
    print(f"{case:{width}s}  {structure:15s}  {figures}", flush=True)
