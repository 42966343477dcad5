"""What the devices of a mesh send each other in one run of a compiled program, read from its partitioned HLO.

The text is XLA's own, taken right after the SPMD partitioner has put the collectives in. Later it is no longer the
program's: XLA's CPU backend widens bfloat16 and FP8 collectives to float32. What is counted, for every collective:

    bytes     of the whole array that a device takes part in moving: the result of an all-gather, all-reduce, all-to-all
              or collective-permute, the operand of a reduce-scatter
    times     how often it runs: the product of the trip counts of the loops around it
    sent      bytes · times that a device sends in a ring of g devices: (g-1)/g of the bytes, twice that for an
              all-reduce, all of them for a collective-permute

What later passes change is not in it. XLA may merge collectives, move them out of loops, overlap them with products,
or, on GPUs, turn an all-reduce of which each device uses a slice into a reduce-scatter, which sends half as much.
"""

import dataclasses
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fp4jax.train.hlo import Program

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
"""HLO's collectives."""

_DUMP = {
    "xla_dump_hlo_as_text": True,
    "xla_dump_hlo_pass_re": "^spmd-partitioning$",
    # Nothing runs: code that is compiled quickly will do.
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}


@dataclasses.dataclass(frozen=True)
class Transfer:
    """Collectives of one kind over the same mesh axes, in one dtype.

    Args:
        kind: one of `KINDS`.
        axes: names of the mesh axes they run over, joined by "+".
        dtype: as HLO spells it: f32, bf16, u8.
        devices: how many take part in each, g.
        times: how many run in a step.
        bytes: see the module's docstring; of all of them together.
        sent: bytes that a device sends for them.
    """

    kind: str
    axes: str
    dtype: str
    devices: int
    times: int
    bytes: int
    sent: int


@dataclasses.dataclass(frozen=True)
class Traffic:
    """All transfers of a program.

    Args:
        transfers: the one that sends most comes first.
        unknown_loops: loops with collectives in them whose trip count is not a constant of the program. They are
            counted as if they ran once.
    """

    transfers: tuple[Transfer, ...]
    unknown_loops: int = 0

    @property
    def sent(self) -> int:
        """Bytes that a device sends in a step."""
        return sum(transfer.sent for transfer in self.transfers)


def compile_partitioned(lowered: Any) -> tuple[Any, str]:
    """Compile a lowered program for the CPU.

    Args:
        lowered: from `jax.jit(...).lower(...)`.

    Returns:
        The compiled program, and its HLO as text after partitioning: "" for a program of one device.

    Raises:
        RuntimeError: XLA wrote no such text for a program of several devices, as happens to one that comes out of JAX's
            persistent compilation cache.
    """
    with tempfile.TemporaryDirectory() as folder:
        compiled = lowered.compile(compiler_options={**_DUMP, "xla_dump_to": folder})
        texts = [path.read_text() for path in Path(folder).glob("*.after_spmd-partitioning.*.txt")]
    devices = {device for sharding in jax.tree.leaves(compiled.input_shardings) for device in sharding.device_set}
    if len(texts) != 1 and len(devices) > 1:
        raise RuntimeError(
            f"XLA of jax {jax.__version__} wrote {len(texts)} texts of the partitioned program, not 1; is it in a "
            "persistent cache? jax.config.update('jax_enable_compilation_cache', False) before anything is compiled"
        )
    return compiled, "".join(texts)


def read_traffic(text: str, mesh: Mapping[str, int]) -> Traffic:
    """The collectives in HLO text.

    Args:
        text: from `compile_partitioned`.
        mesh: sizes of the mesh axes in their order; partition i is device i of the mesh in row-major order.

    Raises:
        ValueError: HLO that this cannot read.
    """
    program = Program(text, KINDS)
    total: dict[tuple[str, str, str, int], list[int]] = {}
    for instruction, times in program.executed():
        members, axes = _group(instruction.attributes, mesh)
        if members < 2:
            continue
        for dtype, size in _sizes(instruction.type):
            size *= members if instruction.opcode == "reduce-scatter" else 1
            entry = total.setdefault((instruction.opcode, axes, dtype, members), [0, 0])
            entry[0] += times
            entry[1] += times * size
    transfers = [
        Transfer(kind, axes, dtype, members, times, size, round(size * _ring(kind, members)))
        for (kind, axes, dtype, members), (times, size) in total.items()
    ]
    return Traffic(tuple(sorted(transfers, key=lambda t: -t.sent)), unknown_loops=len(program.unknown))


def _ring(kind: str, devices: int) -> float:
    if kind in ("collective-permute", "collective-broadcast"):
        return 1.0
    return (2 if kind == "all-reduce" else 1) * (devices - 1) / devices


def _sizes(type_text: str) -> list[tuple[str, int]]:
    """(dtype, bytes) of each array of a type, such as `bf16[4,64]{1,0}` or a tuple of them."""
    found = []
    for dtype, dims in re.findall(r"([a-z]\w*)\[([\d,]*)\]", type_text):
        bits = 8 if dtype == "pred" else int(re.sub(r"^\D+(\d+).*", r"\1", dtype))
        found.append((dtype, -(-bits * int(np.prod([int(n) for n in dims.split(",") if n], dtype=np.int64)) // 8)))
    return found


# --- who takes part ----------------------------------------------------------------------------------------------


def _group(attributes: str, mesh: Mapping[str, int]) -> tuple[int, str]:
    """How many devices share a collective, and the names of the mesh axes on which they differ."""
    if pairs := re.search(r"source_target_pairs=\{(\{.*?\})\}", attributes):
        moved = [pair for pair in _number_lists(pairs[1]) if pair[0] != pair[1]]
        return (2, _axes(moved, mesh)) if moved else (1, "")
    groups = replica_groups(attributes, int(np.prod(list(mesh.values()))))
    return len(groups[0]), _axes(groups, mesh)


def replica_groups(attributes: str, devices: int) -> Sequence[Sequence[int]]:
    """The devices of each group, from any of HLO's spellings: lists, a transposed count, or names of a mesh.

    Args:
        attributes: of the instruction.
        devices: all of them, which `replica_groups={}` means.

    Raises:
        ValueError: another spelling.

    Example:
        >>> replica_groups("replica_groups=[2,2]<=[2,2]T(1,0)", 4)
        [[0, 2], [1, 3]]
        >>> replica_groups("replica_groups=mesh['data'=2,'fsdp'=2] {'fsdp'}", 4)
        [[0, 1], [2, 3]]
    """
    text = attributes.partition("replica_groups=")[2]
    if text.startswith("{}"):
        return [list(range(devices))]
    if text.startswith("{{"):
        return _number_lists(text.partition("}}")[0] + "}")
    if iota := re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        shape, dims, order = (_numbers(part) for part in iota.groups(""))
        ids = np.arange(np.prod(dims)).reshape(dims)
        return _rows((ids.transpose(order) if order else ids).reshape(shape))
    if named := re.match(r"mesh\[((?:'\w+'=\d+,?)+)\] \{((?:'\w+'(?::\(\d+\)\d+)?,?)*)\}", text):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        parts = re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", named[2])
        return _named_groups(sizes, {name: (int(skip or 1), int(size or sizes[name])) for name, skip, size in parts})
    raise ValueError(f"replica groups of a spelling unknown to this version: {text[:80]!r}")


def _named_groups(sizes: Mapping[str, int], inside: Mapping[str, tuple[int, int]]) -> list[list[int]]:
    """Groups along mesh axes. 'x':(k)n is the part of axis x that has n steps, with k steps of it outside."""
    dims: list[int] = []
    within: list[int] = []
    for name, size in sizes.items():
        skip, part = inside.get(name, (size, 1))
        within += [len(dims) + 1] if name in inside else []
        dims += [skip, part, size // (skip * part)]
    around = [i for i in range(len(dims)) if i not in within]
    group = int(np.prod([dims[i] for i in within], dtype=int))
    return _rows(np.arange(np.prod(dims)).reshape(dims).transpose(around + within).reshape(-1, group))


def _rows(ids: np.ndarray) -> list[list[int]]:
    return [[int(i) for i in row] for row in ids]


def _axes(groups: Sequence[Sequence[int]], mesh: Mapping[str, int]) -> str:
    sizes = list(mesh.values())
    varying = set()
    for group in groups:
        places = np.array(np.unravel_index(np.array(group), sizes))
        varying |= {name for name, row in zip(mesh, places, strict=True) if len(set(row.tolist())) > 1}
    return "+".join(name for name in mesh if name in varying)


def _number_lists(text: str) -> list[list[int]]:
    return [_numbers(group) for group in re.findall(r"\{([\d,]+)\}", text)]


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]
