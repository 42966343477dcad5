"""Which part of a train step a kernel belongs to, told from the HLO that it was compiled from.

An instruction carries the name of the operation in JAX that it came from, with the scopes around it
(`jax.named_scope`): "jit(step)/transpose(jvp(rms_norm))/mul" is backward through RMSNorm. A fusion holds operations of
several parts; it counts for the part that has most of its values.
"""

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping
from typing import NamedTuple

from fp4jax.dot.call import MARK
from fp4jax.train.hlo import Instruction, Program


class Part(NamedTuple):
    """A part of a train step.

    Attributes:
        group: what has a least time of its own (see ``fp4jax.bench.least``).
        detail: what of it, or "".
    """

    group: str
    detail: str = ""


PRODUCTS, QUANTIZERS, QUANTILE = "products of linear layers", "quantizers", "quantile"
ATTENTION, HEAD, LOSS, OPTIMIZER = "attention", "head", "loss", "optimizer"
NORMS, SWIGLU, ROPE, EMBEDDING, DGE = "RMSNorm", "SwiGLU", "rotary embedding", "embedding", "DGE factor"
MOVES, COLLECTIVES, OTHER, IDLE, OVERLAP = "copies", "collectives", "other", "idle", "overlap"

GROUPS = (
    PRODUCTS, QUANTIZERS, QUANTILE, DGE, ATTENTION, NORMS, SWIGLU, ROPE, EMBEDDING, HEAD, LOSS, OPTIMIZER, MOVES,
    COLLECTIVES, OTHER, IDLE, OVERLAP,
)  # fmt: skip
"""Groups in the order in which they are shown. IDLE is the time in which the device runs nothing; OVERLAP is negative,
what ran while something else did, so that all add up to the length of a step."""

SCOPES: Mapping[str, Part] = {
    "rms_norm": Part(NORMS),
    "swiglu": Part(SWIGLU),
    "rope": Part(ROPE),
    "attention": Part(ATTENTION),
    "embed": Part(EMBEDDING),
    "head": Part(HEAD),
    "loss": Part(LOSS),
    "optimizer": Part(OPTIMIZER),
    "gradient_norm": Part(OPTIMIZER),
    "dge_factor": Part(DGE),
    "quantize": Part(QUANTIZERS, "XLA"),
    "quantile": Part(QUANTILE),
}
"""Scopes of fp4jax (`jax.named_scope`), in models, optimizer and backends."""

_MARK = rf"jit\({MARK}(?P<product>fprop|dgrad|wgrad|occ)_"
_SCOPE = re.compile(rf"(?:^|[/(])(?:{_MARK}|(?P<scope>{'|'.join(SCOPES)})(?=[/)]|$))")
_OUR_KERNEL = re.compile(rf"{MARK}(?!fprop_|dgrad_|wgrad_|occ_)\w+")
_COLLECTIVE = re.compile(r"(?:all-reduce|all-gather|reduce-scatter|all-to-all|collective-|ragged-all)")
_MOVING = {
    "copy", "copy-start", "copy-done", "transpose", "reshape", "slice", "dynamic-slice", "dynamic-update-slice",
    "concatenate", "pad", "broadcast", "convert", "gather", "reverse", "iota", "bitcast-convert",
}  # fmt: skip
_SILENT = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "broadcast", "iota"}
CONTROL = {"while", "call", "conditional"}
"""Opcodes that only run others."""


def scope(op_name: str) -> Part | None:
    """The innermost part that a JAX operation stands in, or None."""
    scopes = list(_SCOPE.finditer(op_name))
    if not scopes:
        return None
    found = scopes[-1]
    return Part(PRODUCTS, found["product"]) if found["product"] else SCOPES[found["scope"]]


class Parts:
    """Parts of the kernels of a program.

    Args:
        hlo: text of the optimized module.
    """

    def __init__(self, hlo: str):
        self._computations = Program(hlo, ()).computations
        self._instructions = {
            name: instruction
            for computation in self._computations.values()
            for name, instruction in computation.instructions.items()
        }
        # XLA names a kernel after its instruction, in the letters that a symbol may have.
        self._symbols = {re.sub(r"\W", "_", name): name for name in self._instructions}
        self._known: dict[tuple[str, str], Part] = {}

    def instruction(self, hlo_op: str, kernel: str) -> Instruction | None:
        """The instruction of an event of the profiler: by its name, else by that of the kernel."""
        return self._instructions.get(hlo_op) or self._instructions.get(self._symbols.get(kernel, ""))

    def part(self, hlo_op: str, kernel: str) -> Part:
        """The part that a kernel belongs to.

        Args:
            hlo_op: name of its instruction, "" where the profiler does not tell.
            kernel: its own name.
        """
        if (hlo_op, kernel) not in self._known:
            self._known[hlo_op, kernel] = self._part(hlo_op, kernel)
        return self._known[hlo_op, kernel]

    def wide(self, sizes: Collection[int]) -> list[Instruction]:
        """Float32 results of one of these sizes, in values, that are written to memory around products and quantizers.

        Those of head and loss, for one, are no concern of a recipe.
        """
        fused = {name for i in self._instructions.values() if i.opcode == "fusion" for name in i.called("calls")}
        return [
            instruction
            for name, computation in self._computations.items()
            if name not in fused
            for instruction in computation.instructions.values()
            if instruction.type.startswith("f32[") and _size(instruction.type) in sizes
            if instruction.opcode not in CONTROL | _SILENT
            if self.part(instruction.name, "").group in (PRODUCTS, QUANTIZERS, QUANTILE)
        ]

    def _part(self, hlo_op: str, kernel: str) -> Part:
        instruction = self.instruction(hlo_op, kernel)
        inside = [] if instruction is None else self._inside(instruction)
        calls = [i.op_name for i in inside if i.opcode == "custom-call"]  # XLA fuses slices with what they are for
        if ours := _OUR_KERNEL.search(" ".join([kernel, *calls])):
            return _of_our_kernel(ours[0], calls)
        if instruction is None:
            return _of_foreign_kernel(kernel)
        if _COLLECTIVE.match(instruction.opcode):
            return Part(COLLECTIVES)
        for dot in (i for i in inside if _is_product(i)):
            return _of_product(dot.op_name or instruction.op_name)
        if any(map(_is_attention, inside)):
            return Part(ATTENTION)
        votes = Counter[Part]()
        for one in inside:
            if one.opcode not in _SILENT and (part := scope(one.op_name)):
                # Around a marked product, XLA only prepares operands, or finishes results, of a quantized layer.
                votes[Part(QUANTIZERS, "XLA") if part.group == PRODUCTS else part] += _size(one.type)
        if votes:
            return votes.most_common(1)[0][0]
        if own := scope(instruction.op_name):
            return Part(QUANTIZERS, "XLA") if own.group == PRODUCTS else own
        if all(i.opcode in _MOVING | _SILENT for i in inside):
            sliced = any("dynamic" in i.opcode for i in inside)
            return Part(MOVES, "slices of stacked layers" if sliced else "casts, transposes")
        return Part(OTHER)

    def _inside(self, instruction: Instruction) -> list[Instruction]:
        """The instructions that a fusion holds, in order; of another, itself."""
        if instruction.opcode != "fusion":
            return [instruction]
        return [
            inner
            for name in instruction.called("calls")
            for one in self._computations[name].instructions.values()
            for inner in self._inside(one)
        ]


def _is_product(instruction: Instruction) -> bool:
    target = instruction.attributes if instruction.opcode == "custom-call" else ""
    return instruction.opcode in ("dot", "convolution", "scaled-dot") or "cublas" in target or "__onednn$mat" in target


def _is_attention(instruction: Instruction) -> bool:
    return instruction.opcode == "custom-call" and "fmha" in instruction.attributes


def _of_product(op_name: str) -> Part:
    part = scope(op_name)
    if part is None or part.group not in (PRODUCTS, ATTENTION, HEAD, EMBEDDING):
        return Part(PRODUCTS, f"high precision, {'backward' if 'transpose(' in op_name else 'forward'}")
    return part


def _of_our_kernel(name: str, op_names: list[str]) -> Part:
    if "matmul" in name:
        known = (part for part in map(scope, op_names) if part is not None and part.group == PRODUCTS)
        return next(known, Part(PRODUCTS, "fp4jax"))
    if "quantile" in name:
        return Part(QUANTILE)
    return Part(QUANTIZERS, re.sub(r"__\d+$", "", name.removeprefix(MARK)))  # XLA numbers kernels of one name


def _of_foreign_kernel(name: str) -> Part:
    """By the habits of CUDA's libraries, where the HLO does not know a kernel."""
    lower = name.lower()
    for pattern, part in (
        (r"nccl", Part(COLLECTIVES)),
        (r"sdpa|flash|fmha|cudnn", Part(ATTENTION)),
        (r"nvjet|gemm|cublas|cutlass", Part(PRODUCTS, "high precision")),
        (r"memcpy|memset", Part(MOVES, "casts, transposes")),
    ):
        if re.search(pattern, lower):
            return part
    return Part(OTHER)


def _size(type_: str) -> int:
    """Values of an array type such as "f32[16,128]{1,0}", or of the first of a tuple."""
    found = re.search(r"\[([\d,]*)\]", type_)
    return math.prod(int(d) for d in found[1].split(",") if d) if found else 1
