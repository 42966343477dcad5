"""What a program multiplies: every product of a traced function with its recipe, formats and backend."""

import dataclasses
import math
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
from jax.extend import core

from fp4jax.dot import program
from fp4jax.dot.call import MARK, MARKS
from fp4jax.quantize import QuantSpec
from fp4jax.recipe import Recipe, Reuse

_REMATTED = "rematted_computation"
_PRODUCTS = ("dot_general", "pallas_call", "mpmd_map")
# Frames of these say nothing about where a product comes from.
_MACHINERY = ("/jax/", "/flax/", "/fp4jax/dot/", "/fp4jax/nn/", "/fp4jax/linen/")


@dataclasses.dataclass(frozen=True)
class Product:
    """One matrix product of a program.

    Attributes:
        kind: ``"fprop"``, ``"dgrad"``, ``"wgrad"``, ``"occ"`` (sparse compensation), or ``"plain"`` for a product
            without a recipe.
        recipe, backend: names; ``"-"`` for a plain product.
        lhs, rhs: formats, or the dtype of an operand in high precision.
        b, m, n, k: sizes: batch, lhs free, rhs free, contraction.
        count: how often it runs (the trip count of scans around it).
        held: dtypes in which the product takes its operands.
        out: dtype in which it leaves its sums.
        where: file and line that asked for it; for a backward product, where it was differentiated.
        mark: name of the inner jit around it, by which it is found in the text of a program; empty for a plain product.
    """

    kind: str
    recipe: str
    backend: str
    lhs: str
    rhs: str
    b: int
    m: int
    n: int
    k: int
    count: int
    held: tuple[str, str] = ("", "")
    out: str = ""
    where: str = ""
    mark: str = ""

    def __str__(self) -> str:
        size = f"{self.b} × {self.m} × {self.n} × {self.k}"
        return f"{self.kind} of recipe {self.recipe!r} on {self.backend!r}, b × m × n × k = {size}, from {self.where}"

    @property
    def flops(self) -> int:
        """2 · b · m · n · k for each time it runs."""
        return 2 * self.b * self.m * self.n * self.k * self.count


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The products of a program, in program order. Prints as a table.

    Attributes:
        products: the products.
        traced: the traced function, as ``jax.jit(fn).trace`` returns it.
    """

    products: tuple[Product, ...]
    traced: Any = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def quantized(self) -> tuple[Product, ...]:
        """Those that a recipe governs."""
        return tuple(p for p in self.products if p.kind != "plain")

    @property
    def share(self) -> float:
        """Share of the FLOPs that are under a recipe; 0 for a program without products."""
        total = sum(p.flops for p in self.products)
        return sum(p.flops for p in self.quantized) / total if total else 0.0

    def check(
        self, *, recipe: str | None = None, backend: str | None = None, share: float | None = None
    ) -> "Explanation":
        """Returns itself if the products are what was asked for.

        Args:
            recipe: name of the recipe that every quantized product must follow; None for any.
            backend: name of the backend that must run every quantized product; None for any.
            share: least share of the FLOPs, in [0, 1], that must be under a recipe.

        Raises:
            ValueError: if nothing is quantized, or something is not as asked: each such product, and where it comes
                from; for ``share`` the plain products, largest first.

        Example:
            >>> import fp4jax, jax.numpy as jnp
            >>> dot = fp4jax.DotGeneral(fp4jax.recipes.fp4())
            >>> model = lambda x, w: dot(x, w, (((1,), (0,)), ((), ())))
            >>> explanation = fp4jax.explain(model, jnp.ones((4, 8)), jnp.ones((8, 2)))
            >>> explanation.check(recipe="fp4", backend="xla", share=0.9).check_program().share
            1.0
        """
        if not self.quantized:
            raise ValueError(
                f"no product is quantized: the program has {len(self.products)} products, all plain; give its layers a "
                "recipe (dot_general=fp4jax.DotGeneral(recipe))"
            )
        faults = [
            f"{p}: {what} was asked for {name!r}"
            for p in self.quantized
            for what, got, name in (("recipe", p.recipe, recipe), ("backend", p.backend, backend))
            if name not in (None, got)
        ]
        if share is not None and self.share < share:
            plain = sorted((p for p in self.products if p.kind == "plain"), key=lambda p: -p.flops)
            faults.append(f"{self.share:.1%} of the FLOPs are under a recipe, {share:.1%} was asked for; plain are:")
            faults += [
                f"  {p.lhs} · {p.rhs}, b × m × n × k = {p.b} × {p.m} × {p.n} × {p.k}, {p.count} times, from {p.where}"
                for p in plain
            ]
        if faults:
            raise ValueError("\n".join(["products are not as asked:", *faults]))
        return self

    def check_program(self, *, platform: str | None = None) -> "Explanation":
        """Returns itself if the program text holds each quantized product as its backend runs it.

        Read is StableHLO, and on a GPU the compiled HLO too (XLA's CPU code widens what it compiles). For "xla" a
        product is a ``dot_general`` of grid values in bfloat16 (float32 under block scales that bfloat16 cannot
        hold). For "hopper" it is one kernel that takes FP8 operands and writes the dtype that was asked for: no
        bfloat16 product, and no float32 [m, n] on the way to a bfloat16 result.

        Args:
            platform: ``"cuda"`` reads StableHLO lowered for a GPU that need not be there (trace the function under
                ``fp4jax.kernels.lowering_for()``); by default that of the machine.

        Raises:
            ValueError: each product that is missing or run otherwise, where it comes from, and what was found.
        """
        if faults := program.faults(self.quantized, self.traced, platform):
            raise ValueError("\n".join(["the program does not hold what was asked for:", *faults]))
        return self

    def __str__(self) -> str:
        header = ("product", "recipe", "backend", "lhs", "rhs", "b × m × n × k", "runs", "GFLOP")
        rows: list[tuple[str, ...]] = [header]
        for p in self.products:
            size = f"{p.b} × {p.m} × {p.n} × {p.k}"
            rows.append((p.kind, p.recipe, p.backend, p.lhs, p.rhs, size, str(p.count), f"{p.flops / 1e9:.3g}"))
        widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        total = sum(p.flops for p in self.products)
        lines.insert(1, "  ".join("-" * w for w in widths))
        lines.append(f"{len(self.products)} products, {total / 1e9:.3g} GFLOP, {self.share:.1%} of it under a recipe")
        return "\n".join(lines)


def explain(fn: Callable, *args, **kwargs) -> Explanation:
    """Traces ``fn(*args, **kwargs)`` and lists its matrix products; runs nothing.

    Products are found through jit, scan, remat, shard_map and grad. What remat computes a second time is left out; the
    trip count of a ``while_loop`` is not known, so its body counts once; every branch of a ``cond`` counts. Inside a
    ``shard_map`` of the function's own, sizes are those of a device. A gradient that nobody uses is listed, although
    the compiler will drop it.

    Args:
        fn: any function of arrays; jitted (``jax.jit``, ``nnx.jit``) or not. Differentiate it to see backward products.
        args, kwargs: arrays, or ``jax.ShapeDtypeStruct`` for them.

    Returns:
        An ``Explanation``; ``print`` it, or let it ``check`` that every product is what you asked for.

    Example:
        >>> import fp4jax, jax, jax.numpy as jnp
        >>> dot = fp4jax.DotGeneral(fp4jax.recipes.fp4_vector())
        >>> loss = lambda x, w: dot(x, w, (((1,), (0,)), ((), ()))).sum()
        >>> result = fp4jax.explain(jax.grad(loss, (0, 1)), jnp.ones((4, 8)), jnp.ones((8, 2)))
        >>> [(p.kind, p.lhs, p.rhs) for p in result.products]
        [('fprop', 'E2M1', 'E2M1'), ('dgrad', 'E5M2', 'E2M1'), ('wgrad', 'E2M1', 'E5M2')]
    """
    traced: Any = None
    if isinstance(fn, jax.stages.Wrapped):  # it may have static arguments
        traced = fn.trace(*args, **kwargs)
    if not hasattr(traced, "jaxpr"):  # nnx.jit hides its own
        traced = jax.jit(fn).trace(*args, **kwargs)
    return Explanation(tuple(_walk(traced.jaxpr, 1, "an unknown line")), traced)


def _walk(jaxpr: core.Jaxpr | core.ClosedJaxpr, count: int, where: str) -> Iterator[Product]:
    """Products of a jaxpr that runs ``count`` times, and that ``where`` asked for, unless an equation says better."""
    for eqn in jaxpr.eqns:
        if _REMATTED in str(eqn.source_info.name_stack):
            continue
        name, place = eqn.params.get("name", ""), _where(eqn) or where
        if isinstance(name, str) and name.startswith(MARK) and name in MARKS:
            yield from _marked(eqn, name, count, place)
        elif eqn.primitive.name == "dot_general":
            lhs, rhs = (_dtype(v) for v in eqn.invars)
            out = _dtype(eqn.outvars[0])
            yield Product("plain", "-", "-", lhs, rhs, *_sizes(eqn), count, (lhs, rhs), out, place)
        else:
            trips = eqn.params["length"] if eqn.primitive.name == "scan" else 1
            for inner in _subjaxprs(eqn):
                yield from _walk(inner, count * trips, place)


def _marked(eqn: core.JaxprEqn, name: str, count: int, where: str) -> Iterator[Product]:
    """The product under a mark; none where partial evaluation left only a part of the inner jit."""
    (call, kind, sizes), inner = MARKS[name], eqn.params["jaxpr"].eqns
    if sizes is None:
        found = [(dot, _sizes(dot)) for dot in inner if dot.primitive.name == "dot_general"]
    elif _multiplies(inner):
        m, n, _ = sizes
        batch = math.prod(_shape(eqn.outvars[0])) // max(1, m * n)  # batch axes, and those of vmap
        found = [(eqn, (batch, *sizes))]
    else:
        found = []
    for product, size in found:
        lhs, rhs = _formats(call.recipe, kind, product)
        held, out = (_dtype(product.invars[0]), _dtype(product.invars[1])), _dtype(product.outvars[0])
        yield Product(kind, call.recipe.name, call.backend, lhs, rhs, *size, count, held, out, where, name)


def _multiplies(eqns: Iterable[core.JaxprEqn]) -> bool:
    """Whether a product or a kernel is among them, at any depth."""
    return any(
        eqn.primitive.name in _PRODUCTS or any(_multiplies(inner.eqns) for inner in _subjaxprs(eqn)) for eqn in eqns
    )


def _subjaxprs(eqn: core.JaxprEqn) -> Iterator[core.Jaxpr]:
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, core.ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, core.Jaxpr):
                yield item


def _dtype(variable) -> str:
    return str(variable.aval.dtype)


def _shape(variable) -> tuple[int, ...]:
    return variable.aval.shape


def _formats(recipe: Recipe, kind: str, dot: core.JaxprEqn) -> tuple[str, str]:
    if kind == "occ":
        return _dtype(dot.invars[0]), _dtype(dot.invars[1])
    gemm = getattr(recipe, kind)
    shown = []
    for side, variable, source in (
        ("lhs", dot.invars[0], recipe.activation_spec),
        ("rhs", dot.invars[1], recipe.weight_spec),
    ):
        spec = getattr(gemm, side)
        spec = source if isinstance(spec, Reuse) else spec
        shown.append(repr(spec.format) if isinstance(spec, QuantSpec) else _dtype(variable))
    return shown[0], shown[1]


def _sizes(eqn: core.JaxprEqn) -> tuple[int, int, int, int]:
    """b, m, n, k of a ``dot_general``."""
    (contract, _), (batch, _) = eqn.params["dimension_numbers"]
    shapes = [_shape(v) for v in eqn.invars]
    b = math.prod(shapes[0][a] for a in batch)
    k = math.prod(shapes[0][a] for a in contract)
    m, n = (math.prod(s) // max(1, b * k) for s in shapes)
    return b, m, n, k


def _where(eqn: core.JaxprEqn) -> str | None:
    """File and line of the innermost frame that is nobody's machinery; None in what is traced behind its caller."""
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        path = pathlib.PurePath(frame.file_name).as_posix()
        if not any(part in path for part in _MACHINERY):
            return f"{pathlib.PurePath(path).name}:{frame.line_num} ({frame.function_name})"
    return None
