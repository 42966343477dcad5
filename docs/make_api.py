"""Writes docs/api.md, the API reference, from signatures and docstrings: `python docs/make_api.py`.

Of each public name: its signature as the source has it, the first paragraph of its docstring with the equation that
follows, and a link to its file. Links have no line numbers, so that the page changes only when the API does.
tests/test_api_page.py compares the page with what this script makes.
"""

import ast
import dataclasses
import functools
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "api.md"

# In the order of the path of an array. None: what the package exports; of single modules, what users call or extend.
MODULES: dict[str, tuple[str, ...] | None] = {
    "fp4jax": None,
    "fp4jax.formats": ("FORMATS", "encode", "decode", "pack_nibbles", "unpack_nibbles"),
    "fp4jax.rounding": ("ROUNDINGS", "Rounding"),
    "fp4jax.scaling": ("Granularity", "ScaleRule", "Scales"),
    "fp4jax.outliers": ("thresholds", "order_statistics", "hadamard_rotate"),
    "fp4jax.estimators": ("ESTIMATORS", "Estimator", "gradient_factor"),
    "fp4jax.recipes": None,
    "fp4jax.dot": None,
    "fp4jax.nn": None,
    "fp4jax.linen": None,
    "fp4jax.telemetry": None,
    "fp4jax.models": None,
    "fp4jax.optim": None,
    "fp4jax.parallel": None,
    "fp4jax.kernels": None,
    "fp4jax.costs": (
        "Part", "Layer", "Rates", "VARIANTS", "paper_layer", "llama_layer", "llama_model", "speedup", "paper_speedup",
    ),
    "fp4jax.interop": None,
    "fp4jax.train.data": None,
    "fp4jax.train.step": ("TrainState", "Architecture", "make_init", "make_train_step", "make_validation_step"),
    "fp4jax.train.optimizer": ("OPTIMIZERS", "make_schedule", "make_optimizer", "decay_mask"),
    "fp4jax.train.evaluate": ("Score", "score"),
    "fp4jax.train.checkpoint": None,
}  # fmt: skip

PATH = (
    "fp4jax.formats", "fp4jax.rounding", "fp4jax.scaling", "fp4jax.outliers", "fp4jax.quantize", "fp4jax.estimators",
    "fp4jax.recipe", "fp4jax.dot.api", "fp4jax.dot.explain",
)  # fmt: skip

HEAD = """# API reference

Written by `docs/make_api.py` from the docstrings; edit those. Each entry is the signature, the first paragraph of the
docstring, and the file where the rest of it is: arguments, shapes, units, errors, an example that runs, the source in
paper or specification. In Python, `help(fp4jax.quantize)` shows all of it.

"""


@dataclasses.dataclass(frozen=True)
class Entry:
    """A public name.

    Args:
        name: dotted, as users import it.
        signature: the call that makes or uses it, or for a constant its value.
        text: the first paragraph of its docstring; "" of a constant without one.
        source: the file that defines it, relative to the root.
    """

    name: str
    signature: str
    text: str
    source: str


@functools.cache
def tree_of(module: ModuleType) -> ast.Module:
    return ast.parse(inspect.getsource(module))


def public_names(module: ModuleType) -> list[str]:
    """What a package exports, by `__all__` or by `import x as x`, and `fp4jax` does not; of `fp4jax`, by modules."""
    chosen = MODULES[module.__name__]
    if chosen is not None:
        return list(chosen)
    exported = getattr(module, "__all__", None)
    if exported is None:
        imports = [node for node in tree_of(module).body if isinstance(node, ast.ImportFrom)]
        exported = [alias.name for node in imports for alias in node.names if alias.asname == alias.name]
    root = importlib.import_module("fp4jax")
    names = [name for name in exported if not inspect.ismodule(getattr(module, name))]
    if module is not root:
        return [name for name in names if getattr(root, name, None) is not getattr(module, name)]
    return sorted(names, key=lambda name: (PATH.index(origin(root, name)[0].__name__), origin(root, name)[1]))


def defined(node: ast.stmt) -> list[str]:
    """Names that a statement of a module defines."""
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case ast.Assign(targets=[ast.Tuple(elts=names)]):
            return [name.id for name in names if isinstance(name, ast.Name)]
        case ast.TypeAlias(name=ast.Name(id=name)):
            return [name]
    return []


def origin(module: ModuleType, name: str) -> tuple[ModuleType, int]:
    """The module that defines a name, and the place of the definition in its body; imports are followed."""
    for place, node in enumerate(tree_of(module).body):
        if name in defined(node):
            return module, place
        if isinstance(node, ast.ImportFrom) and name in [alias.asname or alias.name for alias in node.names]:
            (original,) = [alias.name for alias in node.names if (alias.asname or alias.name) == name]
            return origin(importlib.import_module(str(node.module)), original)
    raise LookupError(f"{module.__name__} does not define {name}")


def first_paragraph(text: str) -> str:
    """The first paragraph, and what a colon at its end announces: an equation or a list."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    shown = paragraphs[0].replace("``", "`")
    if len(paragraphs) > 1 and shown.endswith(":"):
        table = paragraphs[1].startswith("==")  # reStructuredText's, which Markdown does not know
        shown += f"\n\n```text\n{paragraphs[1]}\n```" if table else "\n\n" + paragraphs[1].replace("``", "`")
    return shown


def call_of(name: str, arguments: ast.arguments, returns: ast.expr | None = None, *, bound: bool = False) -> str:
    """The signature as the source has it; `bound` leaves out the first argument."""
    positional = arguments.posonlyargs + arguments.args
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    shown = [argument(*pair) for pair in zip(positional, defaults, strict=True)][bound:]
    if arguments.vararg or arguments.kwonlyargs:
        shown.append("*" + ast.unparse(arguments.vararg) if arguments.vararg else "*")
    shown += [argument(*pair) for pair in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    if arguments.kwarg:
        shown.append("**" + ast.unparse(arguments.kwarg))
    return broken(name, shown, f" -> {ast.unparse(returns)}" if returns is not None else "")


def broken(name: str, arguments: Sequence[str], result: str = "") -> str:
    """A call in one line, or with an argument a line."""
    line = f"{name}({', '.join(arguments)}){result}"
    if len(line) <= 110:
        return line
    return f"{name}(\n" + "".join(f"    {argument},\n" for argument in arguments) + f"){result}"


def argument(arg: ast.arg | ast.AnnAssign, default: ast.expr | None) -> str:
    name = arg.arg if isinstance(arg, ast.arg) else ast.unparse(arg.target)
    if arg.annotation is None:
        return name if default is None else f"{name}={ast.unparse(default)}"
    return f"{name}: {ast.unparse(arg.annotation)}" + ("" if default is None else f" = {ast.unparse(default)}")


def class_call(name: str, found: type) -> str:
    """How an object of a class is made: by its `__init__`, or from the fields of a dataclass or named tuple."""
    ours = [base for base in found.__mro__ if base.__module__.startswith("fp4jax.")]
    nodes = {base: class_node(base) for base in ours}
    for node in nodes.values():
        for statement in node.body:
            if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
                return call_of(name, statement.args, bound=True)
    if dataclasses.is_dataclass(found):
        fields = [field.name for field in dataclasses.fields(found) if field.init]
    elif issubclass(found, tuple):
        fields = list(getattr(found, "_fields", ()))
    else:
        return name
    shown = {}
    for node in reversed(nodes.values()):
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                shown[statement.target.id] = parameter(statement)
    return broken(name, [shown[field] for field in fields if field in shown])


def class_node(found: type) -> ast.ClassDef:
    module, place = origin(importlib.import_module(found.__module__), found.__name__)
    node = tree_of(module).body[place]
    assert isinstance(node, ast.ClassDef)
    return node


def parameter(field: ast.AnnAssign) -> str:
    """A field as an argument. One made by `field` shows its default or its factory."""
    value = field.value
    if isinstance(value, ast.Call) and ast.unparse(value.func).endswith("field"):
        made = [word.value for word in value.keywords if word.arg in ("default", "default_factory")]
        value = made[0] if made else None
    return argument(field, value)


def describe(module: ModuleType, name: str) -> Entry:
    """The entry of one public name."""
    found: Any = getattr(module, name)
    home, place = origin(module, name)
    node = tree_of(home).body[place]
    match node:
        case ast.FunctionDef():
            signature, text = call_of(name, node.args, node.returns), ast.get_docstring(node) or ""
        case ast.ClassDef():
            signature, text = class_call(name, found), ast.get_docstring(node) or ""
        case ast.TypeAlias():
            signature, text = f"type {name} = {ast.unparse(node.value)}", string_after(home, place)
        case _:
            signature = constant(name, found, node)
            text = string_after(home, place) or (type_text(found) if signature == name else "")
    source = Path(str(home.__file__)).relative_to(ROOT).as_posix()
    return Entry(f"{module.__name__}.{name}", signature, first_paragraph(text), source)


def type_text(value: Any) -> str:
    """Of an object of fp4jax that has no words of its own, those of its type."""
    return (type(value).__doc__ or "") if type(value).__module__.startswith("fp4jax.") else ""


def string_after(module: ModuleType, place: int) -> str:
    """The string that documents an assignment: the statement after it."""
    match tree_of(module).body[place + 1 : place + 2]:
        case [ast.Expr(value=ast.Constant(value=str(text)))]:
            return text
    return ""


def constant(name: str, value: Any, node: ast.stmt) -> str:
    """A registry with its keys, or a name with the expression it is given, if that is short."""
    if isinstance(value, Mapping):
        return f"{name}: " + ", ".join(str(key) for key in value)
    match node:
        case ast.Assign(targets=[ast.Name()], value=given) | ast.AnnAssign(value=ast.expr() as given):
            shown = f"{name} = {ast.unparse(given)}"
            return shown if len(shown) <= 150 else name
    return name


def entries(module: ModuleType) -> Iterator[Entry]:
    for name in public_names(module):
        yield describe(module, name)


def render() -> str:
    """The whole page."""
    modules = [importlib.import_module(name) for name in MODULES]
    listed = [f"- [`{module.__name__}`](#{anchor(module.__name__)}): {summary(module)}" for module in modules]
    sections = [section(module) for module in modules]
    return HEAD + "\n".join(listed) + "\n\n" + "\n".join(sections)


def summary(module: ModuleType) -> str:
    return " ".join(first_paragraph(module.__doc__ or "").split()).replace("fp4jax: ", "")


def anchor(heading: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def section(module: ModuleType) -> str:
    parts = [f"## {module.__name__}\n"]
    for entry in entries(module):
        parts.append(f"### {entry.name}\n\n```text\n{entry.signature}\n```\n")
        if entry.text:
            parts.append(f"{entry.text}\n")
        parts.append(f"[{entry.source}](../{entry.source})\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
