"""Parse a compiled program's text, with the number of rounds of its loops.

XLA's own cost analysis counts the body of a loop once. Here the text of the compiled module is read:
computations, the loops that call them with their numbers of rounds, and in them matrix products, arrays
that are read and written, and collectives.
"""

import dataclasses
import math
import re
from collections.abc import Iterator

BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s64": 8, "u64": 8}
BYTES |= {"f64": 8, "c64": 8, "s32": 4, "u32": 4, "f32": 4}
COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
OPCODE = re.compile(r" ([a-z][\w\-]*)\(")
ARRAY = re.compile(r"([a-z]+\d+|pred)\[([\d,]*)\](\{[^}]*\})?")
CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|async_computation)=%?([\w.\-]+)|branch_computations=\{([^}]*)\}"
)


@dataclasses.dataclass(frozen=True)
class Array:
    """The type of one array in a program."""

    dtype: str
    dims: tuple[int, ...]
    layout: str = ""

    @property
    def bytes(self) -> int:
        """Its size."""
        return math.prod(self.dims) * BYTES.get(self.dtype, 4)

    @property
    def in_hbm(self) -> bool:
        """Whether it is in HBM; memory spaces S(1) and above are on the chip."""
        return re.search(r"S\([1-9]", self.layout) is None


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    results: tuple[Array, ...]
    operands: tuple[str, ...]
    called: tuple[str, ...]
    text: str

    def attribute(self, name: str) -> str:
        """The text after `name=`, up to the next attribute; empty if there is none."""
        found = re.search(rf"[ ,]{name}=(.*?)(?:, [a-z_]+=|$)", self.text)
        return found.group(1) if found else ""

    @property
    def bytes(self) -> int:
        """Size of all results."""
        return sum(array.bytes for array in self.results)


@dataclasses.dataclass(frozen=True)
class Module:
    """A program: its computations by name, and which one is the entry."""

    computations: dict[str, dict[str, Instruction]]
    entry: str

    def counts(self) -> dict[str, int]:
        """How often each computation runs."""
        counts: dict[str, int] = {}

        def visit(name: str, times: int) -> None:
            counts[name] = counts.get(name, 0) + times
            for line in self.computations.get(name, {}).values():
                rounds = self.rounds(line) if line.opcode == "while" else 1
                for other in line.called:
                    visit(other, times * rounds)

        visit(self.entry, 1)
        return counts

    def rounds(self, loop: Instruction) -> int:
        """How often a loop runs: as XLA notes it, or the largest number that its condition names."""
        known = re.search(r'known_trip_count":\{"n":"(\d+)"', loop.text)
        if known:
            return int(known.group(1))
        condition = re.search(r"condition=%?([\w.\-]+)", loop.text)
        lines = self.computations.get(condition.group(1), {}) if condition else {}
        numbers = [
            int(found.group(1))
            for line in lines.values()
            if line.opcode == "constant"
            and (found := re.search(r"constant\((\d+)\)", line.text)) is not None
        ]
        return max(numbers, default=1)

    def lines(self) -> Iterator[tuple[Instruction, dict[str, Instruction], int]]:
        """Every instruction that runs, with its computation and how often it runs."""
        for name, times in self.counts().items():
            lines = self.computations.get(name, {})
            for line in lines.values():
                yield line, lines, times

    def fused(self) -> set[str]:
        """Computations whose instructions keep what they compute on the chip."""
        return {
            name
            for lines in self.computations.values()
            for line in lines.values()
            if line.opcode not in ("while", "conditional", "call")
            for name in line.called
        }


def parse(text: str) -> Module:
    """A module from its text, `compiled.as_text()`."""
    computations: dict[str, dict[str, Instruction]] = {}
    entry, current = None, None
    for row in text.splitlines():
        if current is None:
            found = COMPUTATION.match(row)
            if found:
                current = found.group(1)
                computations[current] = {}
                entry = current if row.startswith("ENTRY") else entry
        elif row.startswith("}"):
            current = None
        else:
            line = _instruction(row)
            if line is not None:
                computations[current][line.name] = line
    if entry is None:
        raise ValueError("`parse` needs the text of a compiled module. Found no ENTRY in it.")
    return Module(computations, entry)


def _instruction(row: str) -> Instruction | None:
    found = INSTRUCTION.match(row)
    if found is None:
        return None
    name, rest = found.groups()
    code = OPCODE.search(" " + rest)
    if code is None:
        return None
    before, after = rest[: max(code.start() - 1, 0)], rest[code.end() - 1 :]
    inside = _until_closed(after)
    called = [
        other.strip().lstrip("%")
        for one, several in CALLED.findall(after[len(inside) :])
        for other in ([one] if one else several.split(","))
    ]
    operands = tuple(re.findall(r"%([\w.\-]+)", inside))
    results = tuple(arrays(before))
    return Instruction(name, code.group(1), results, operands, tuple(called), row.strip())


def _until_closed(text: str) -> str:
    """The text up to the closing bracket."""
    depth = 1
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return text[:i]
    return text


def arrays(text: str) -> list[Array]:
    """The arrays of a type, of a tuple too."""
    return [
        Array(dtype, tuple(int(n) for n in dims.split(",") if n), layout)
        for dtype, dims, layout in ARRAY.findall(text)
    ]
