"""Reads the text of a program, StableHLO or compiled HLO, for the products that ``explain`` found."""

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax

# As both texts spell them, but for the case of FP8's letters.
_NAMES = {
    "float32": "f32",
    "bfloat16": "bf16",
    "float16": "f16",
    "float8_e4m3fn": "f8e4m3fn",
    "float8_e5m2": "f8e5m2",
}


class Marked(Protocol):
    """What is needed of a product: see ``fp4jax.dot.explain.Product``."""

    backend: str
    mark: str
    held: tuple[str, str]
    out: str


class Operation(NamedTuple):
    """An operation of a program.

    Attributes:
        name: of the operation; for a custom call, that of its target.
        operands, result: element types, such as ``"bf16"``.
        shape: of the result, such as ``"4x16"``.
    """

    name: str
    operands: tuple[str, ...]
    result: str
    shape: str


def faults(products: Sequence[Any], traced: Any, platform: str | None) -> list[str]:
    """What of the lowered program, on a GPU also of the compiled one, is not as the backends run it: a line each.

    A product whose result nobody uses is in neither, and is no fault.
    """
    lowered = traced.lower() if platform is None else traced.lower(lowering_platforms=(platform,))
    asked = by_mark(stable(lowered.as_text()))
    texts = [asked]
    if platform is None and jax.default_backend() == "gpu":
        texts.append(by_mark(compiled(lowered.compile().as_text())))
    lines = []
    for product in products:
        # XLA merges products of one operand, under the name of one; a kernel keeps its own.
        seen = [text for text in texts if product.mark in text or (product.mark in asked and _is_by_kernel(product))]
        why = [fault(product, text.get(product.mark, [])) for text in seen]
        lines += [f"{product}: {line}" for line in why if line is not None][:1]
    return lines


def by_mark(found: Iterator[tuple[str, Operation]]) -> dict[str, list[Operation]]:
    """Operations of each marked jit."""
    operations: dict[str, list[Operation]] = {}
    for mark, operation in found:
        operations.setdefault(mark, []).append(operation)
    return operations


def fault(product: Marked, operations: list[Operation]) -> str | None:
    """What is not as the backend runs it; None if nothing."""
    kernel = _is_by_kernel(product)
    is_it = _is_kernel if kernel else _multiplies
    others = [o for o in operations if not is_it(o.name) and (_multiplies(o.name) or _is_kernel(o.name))]
    if others:
        return f"it is a {others[0].name} of {' · '.join(others[0].operands[:2])}"
    products = [o for o in operations if is_it(o.name)]
    if not products:
        return "the program has no kernel for it (interpreted kernels are none)" if kernel else "the program lacks it"
    held, out = sorted(_NAMES[dtype] for dtype in product.held), _NAMES[product.out]
    for operation in products:
        if sorted(operation.operands[:2]) != held:  # a compiler may swap them
            return f"it multiplies {' · '.join(operation.operands[:2])}, not {' · '.join(held)}"
        if kernel and operation.result != out:
            return f"its kernel writes {operation.result}, not {out}"
    wide = [o for o in operations if kernel and out != "f32" and o.result == "f32" and o.shape == products[0].shape]
    if wide:
        return f"{wide[0].name} makes a float32 [{wide[0].shape}] on the way to a result in {product.out}"
    return None


def _is_by_kernel(product: Marked) -> bool:
    return product.backend == "hopper"


def _is_kernel(name: str) -> bool:
    return "mosaic_gpu" in name


def _multiplies(name: str) -> bool:
    return name in ("dot_general", "dot") or "gemm" in name or "cublas" in name or "matmul" in name


# --- StableHLO ---------------------------------------------------------------------------------------------------

_FUNCTION = re.compile(r"func\.func (?:public |private )?@(\w+)\(.*?(?=\n  func\.func|\n}\s*$)", re.S)
_OPERATION = re.compile(r"stablehlo\.(\w+)\"?(?: @([\w.$]+))?")
_TENSOR = re.compile(r"tensor<((?:\d+x)*)(\w+)")


def stable(text: str) -> Iterator[tuple[str, Operation]]:
    """(mark, operation) of the functions that marked jits have become, and of what they call."""
    bodies = {m.group(1): m.group(0) for m in _FUNCTION.finditer(text)}
    for name in bodies:
        mark = re.sub(r"(_[0-9a-f]{8})_\d+$", r"\1", name)  # a number that tells functions of one name apart
        for line in "\n".join(_reached(name, bodies)).splitlines():
            operation, (_, _, signature) = _OPERATION.search(line), line.rpartition(" : ")
            operands, _, result = signature.rpartition(" -> ")
            found = _TENSOR.search(result)
            if operation is not None and found is not None:
                dtypes = tuple(t.group(2).lower() for t in _TENSOR.finditer(operands))
                target = operation.group(2) or operation.group(1)
                yield mark, Operation(target, dtypes, found.group(2).lower(), _shape(found.group(1).rstrip("x")))


def _reached(name: str, bodies: dict[str, str]) -> list[str]:
    """The body of a function and of those that it calls."""
    seen, left = {}, [name]
    while left:
        current = left.pop()
        if current not in seen and current in bodies:
            seen[current] = bodies[current]
            left += re.findall(r"call @(\w+)\(", bodies[current])
    return list(seen.values())


# --- compiled HLO ------------------------------------------------------------------------------------------------

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (\(?\w+\[[^ ]*) ([\w-]+)\((.*)$", re.M)
_TYPE = re.compile(r"(\w+)\[([\d,]*)\]")
_MARK = re.compile(r"jit\((fp4jax_\w+)\)")


def compiled(text: str) -> Iterator[tuple[str, Operation]]:
    """(mark, instruction) of every instruction whose ``op_name`` passes through a marked jit."""
    instructions = list(_INSTRUCTION.finditer(text))
    types = {i.group(1): _TYPE.search(i.group(2)) for i in instructions}
    for instruction in instructions:
        _, result, name, rest = instruction.groups()
        marks = _MARK.findall(rest)
        found = _TYPE.search(result)
        if not marks or found is None:
            continue
        arguments = rest.split("), ", 1)[0]
        known = (types.get(argument) for argument in re.findall(r"%([\w.-]+)", arguments))
        operands = tuple(t.group(1) for t in known if t is not None)
        if name == "custom-call" and (target := re.search(r'custom_call_target="([^"]+)"', rest)):
            name = target.group(1)
        yield marks[-1], Operation(name, operands, found.group(1), _shape(found.group(2).replace(",", "x")))


def _shape(text: str) -> str:
    """Without axes of one: kernels have a batch axis."""
    return re.sub(r"^(1x)+", "", text)
