"""Parse a compiled program's text, with the number of rounds of its loops.

XLA's own cost analysis counts the body of a loop once. Here the text of the compiled module is read:
computations, the loops that call them with their numbers of rounds, and in them matrix products, arrays
that are read and written, and collectives.
"""

import math
import re
from typing import NamedTuple

BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s64": 8, "u64": 8}
BYTES |= {"f64": 8, "c64": 8, "s32": 4, "u32": 4, "f32": 4}
COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
ARRAY = re.compile(r"([a-z]+\d+|pred)\[([\d,]*)\](\{[^}]*\})?")
CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|async_computation)=%?([\w.\-]+)|branch_computations=\{([^}]*)\}"
)
NAME = re.compile(r"%([\w.\-]+)")


class Array(NamedTuple):
    """The type of one array in a program."""

    dims: tuple[int, ...]
    bytes: int
    in_hbm: bool  # memory spaces S(1) and above are on the chip


class Instruction(NamedTuple):
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


Lines = dict[str, Instruction]


class Module(NamedTuple):
    """A program: its computations by name, and which one is the entry."""

    computations: dict[str, Lines]
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
        return {name: times for name, times in counts.items() if name in self.computations}

    def rounds(self, loop: Instruction) -> int:
        """How often a loop runs: as XLA notes it, or the largest number that its condition names."""
        known = re.search(r'known_trip_count":\{"n":"(\d+)"', loop.text)
        if known:
            return int(known.group(1))
        lines = self.computations.get(loop.attribute("condition").lstrip("%"), {})
        constants = [line.text for line in lines.values() if line.opcode == "constant"]
        numbers = re.findall(r"constant\((\d+)\)", " ".join(constants))
        return max(map(int, numbers), default=1)

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
    computations: dict[str, Lines] = {}
    entry, current = None, None
    for row in text.splitlines():
        head, found = COMPUTATION.match(row), INSTRUCTION.match(row)
        if current is None and head:
            current = computations.setdefault(head.group(2), {})
            entry = head.group(2) if head.group(1) else entry
        elif row.startswith("}"):
            current = None
        elif current is not None and found:
            current[found.group(1)] = _instruction(row.strip(), *found.groups())
    if entry is None:
        raise ValueError("`parse` needs the text of a compiled module. Found no ENTRY in it.")
    return Module(computations, entry)


def _instruction(text: str, name: str, types: str, opcode: str, rest: str) -> Instruction:
    inside, *attributes = re.split(r"\), (?=[a-z_]+=)", rest, maxsplit=1)
    called = [
        other.strip().lstrip("%")
        for one, several in CALLED.findall(" ".join(attributes))
        for other in ([one] if one else several.split(","))
    ]
    return Instruction(
        name, opcode, arrays(types), tuple(NAME.findall(inside)), tuple(called), text
    )


def arrays(text: str) -> tuple[Array, ...]:
    """The arrays of a type, of a tuple too."""
    found = []
    for dtype, sizes, layout in ARRAY.findall(text):
        dims = tuple(int(n) for n in sizes.split(",") if n)
        size = math.prod(dims) * BYTES.get(dtype, 4)
        found.append(Array(dims, size, re.search(r"S\([1-9]", layout) is None))
    return tuple(found)
