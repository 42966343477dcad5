"""Reads HLO text for instructions of some kinds, and for how often each runs.

A `lax.scan` is a loop in HLO that counts from a constant to a constant; its body stands in the text once.
"""

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Instruction:
    """`%name = type opcode(operands), attributes`, each as text; of the metadata only the operation's name in JAX."""

    name: str
    type: str
    opcode: str
    operands: str
    attributes: str
    op_name: str

    def called(self, key: str) -> list[str]:
        """Names of the computations in the attribute `key`."""
        found = re.search(rf"\b{key}=(?:\{{([^}}]*)\}}|(%[\w.\-]+))", self.attributes)
        return re.findall(r"%([\w.\-]+)", found[1] or found[2]) if found else []


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions by name, and the name of the last."""

    instructions: Mapping[str, Instruction]
    root: str

    def origin(self, operand: str) -> tuple[str, Any]:
        """Where a scalar comes from: ("constant", n), ("parameter", i), ("add", instruction), or ("", None)."""
        name, _, index = operand.strip().lstrip("%").partition("#")
        instruction = self.instructions[name]
        if instruction.opcode == "get-tuple-element":
            index = re.search(r"index=(\d+)", instruction.attributes)[1]  # pyright: ignore[reportOptionalSubscript]
            return self.origin(f"{instruction.operands}#{index}")
        if index:
            if instruction.opcode == "parameter":
                return "parameter", int(index)
            if instruction.opcode == "tuple":
                return self.origin(_operands(instruction)[int(index)])
            if instruction.opcode == "opt-barrier":
                return self.origin(f"{instruction.operands}#{index}")
            return "", None
        if instruction.opcode in ("copy", "opt-barrier"):
            return self.origin(instruction.operands)
        if instruction.opcode == "constant" and re.fullmatch(r"-?\d+", instruction.operands):
            return "constant", int(instruction.operands)
        return ("add", instruction) if instruction.opcode == "add" else ("", None)


def _operands(instruction: Instruction) -> list[str]:
    return [part.strip() for part in re.sub(r"/\*.*?\*/", "", instruction.operands).split(",")]


# Attributes that name what an operation runs once. A conditional runs one of its branches; all are counted.
_CALLS = {
    "call": ("to_apply",),
    "fusion": ("calls",),
    "conditional": ("branch_computations", "true_computation", "false_computation"),
}


class Program:
    """Computations by name, and the loops among them.

    Args:
        text: of a module; "" is a program that does nothing.
        opcodes: which instructions are of interest.

    Attributes:
        unknown: names of loops around such instructions whose trip count is not a constant, known after `executed`.
    """

    def __init__(self, text: str, opcodes: Collection[str]):
        self.computations, self.entry = _parse(text)
        self.opcodes = opcodes
        self._interesting: dict[str, bool] = {}
        self.unknown: set[str] = set()

    def executed(self) -> Iterable[tuple[Instruction, int]]:
        """Every instruction of `opcodes` that is reached, and how often it runs."""
        yield from self._walk(self.entry, 1) if self.entry else ()

    def _walk(self, name: str, times: int) -> Iterable[tuple[Instruction, int]]:
        computation = self.computations[name]
        for instruction in computation.instructions.values():
            if instruction.opcode in self.opcodes:
                yield instruction, times
            elif instruction.opcode == "while":
                (body,) = instruction.called("body")
                if not self._has_any(body):
                    continue
                trips = self._trips(instruction, computation)
                if trips is None:
                    self.unknown.add(instruction.name)
                yield from self._walk(body, times * (1 if trips is None else trips))
            else:
                for key in _CALLS.get(instruction.opcode, ()):
                    for inner in instruction.called(key):
                        yield from self._walk(inner, times)

    def _has_any(self, name: str) -> bool:
        if name not in self._interesting:
            self._interesting[name] = any(True for _ in self._walk(name, 1))
        return self._interesting[name]

    def _trips(self, loop: Instruction, caller: Computation) -> int | None:
        """Trip count: as XLA found it, or of `while (i < limit) i += step` from constants; None for another form."""
        if known := _TRIPS.search(loop.attributes):
            return int(known[1])
        condition, body = (self.computations[loop.called(key)[0]] for key in ("condition", "body"))
        test = condition.instructions[condition.root]
        if test.opcode != "compare" or "direction=LT" not in test.attributes:
            return None
        (kind, counter), limit = (condition.origin(operand) for operand in _operands(test))
        if kind != "parameter":
            return None
        following, value = body.origin(f"{body.root}#{counter}")
        if following != "add":
            return None
        terms = dict(body.origin(operand) for operand in _operands(value))
        if limit[0] == "parameter":  # carried along, and the same every time
            if body.origin(f"{body.root}#{limit[1]}") != limit:
                return None
            limit = caller.origin(f"{_operands(loop)[0]}#{limit[1]}")
        start = caller.origin(f"{_operands(loop)[0]}#{counter}")
        if start[0] != "constant" or limit[0] != "constant" or terms.get("parameter") != counter:
            return None
        step = terms.get("constant", 0)
        return max(0, -(-(limit[1] - start[1]) // step)) if step > 0 else None


_HEADER = re.compile(r"^(ENTRY )?%([\w.\-]+) \(.*\{$")
_METADATA = re.compile(r', metadata=\{(?:[^{}"]|"(?:[^"\\]|\\.)*")*\}')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_LEFT = re.compile(r"^  (ROOT )?%([\w.\-]+) = ")


def _parse(text: str) -> tuple[dict[str, Computation], str]:
    computations: dict[str, Computation] = {}
    entry = name = root = ""
    instructions: dict[str, Instruction] = {}
    for line in text.splitlines():
        if header := _HEADER.match(line):
            name, instructions, root = header[2], {}, ""
            entry = name if header[1] else entry
        elif line == "}":
            computations[name] = Computation(instructions, root)
        elif left := _LEFT.match(line):
            type_end = _closing(line, left.end()) if line[left.end()] == "(" else line.index(" ", left.end())
            opening = line.index("(", type_end)
            end = _closing(line, opening)
            op_name = _OP_NAME.search(line, end)
            instruction = Instruction(
                name=left[2],
                type=line[left.end() : type_end],
                opcode=line[type_end:opening].strip(),
                operands=line[opening + 1 : end - 1],
                attributes=_METADATA.sub("", line[end:]),
                op_name=op_name[1] if op_name else "",
            )
            instructions[instruction.name] = instruction
            root = instruction.name if left[1] else root
    return computations, entry


def _closing(line: str, opening: int) -> int:
    """The place after the parenthesis that closes the one at `opening`."""
    depth = 0
    for place in range(opening, len(line)):
        depth += {"(": 1, ")": -1}.get(line[place], 0)
        if depth == 0:
            return place + 1
    raise ValueError(f"unbalanced parentheses in HLO: {line[:80]!r}")
