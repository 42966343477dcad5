"""What a program multiplies: every product of a traced function with its recipe, formats and backend."""

import dataclasses
import math
from collections.abc import Callable, Iterator

import jax
from jax.extend import core

from fp4jax.dot.call import MARK, MARKS
from fp4jax.quantize import QuantSpec
from fp4jax.recipe import Recipe, Reuse

_REMATTED = "rematted_computation"


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

    @property
    def flops(self) -> int:
        """2 · b · m · n · k for each time it runs."""
        return 2 * self.b * self.m * self.n * self.k * self.count


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The products of a program, in program order. Prints as a table."""

    products: tuple[Product, ...]

    @property
    def quantized(self) -> tuple[Product, ...]:
        """Those that a recipe governs."""
        return tuple(p for p in self.products if p.kind != "plain")

    def __str__(self) -> str:
        header = ("product", "recipe", "backend", "lhs", "rhs", "b × m × n × k", "runs", "GFLOP")
        rows: list[tuple[str, ...]] = [header]
        for p in self.products:
            size = f"{p.b} × {p.m} × {p.n} × {p.k}"
            rows.append((p.kind, p.recipe, p.backend, p.lhs, p.rhs, size, str(p.count), f"{p.flops / 1e9:.3g}"))
        widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        total = sum(p.flops for p in self.products)
        share = sum(p.flops for p in self.quantized) / total if total else 0.0
        lines.insert(1, "  ".join("-" * w for w in widths))
        lines.append(f"{len(self.products)} products, {total / 1e9:.3g} GFLOP, {share:.1%} of it under a recipe")
        return "\n".join(lines)


def explain(fn: Callable, *args, **kwargs) -> Explanation:
    """Traces ``fn(*args, **kwargs)`` and lists its matrix products; runs nothing.

    Products are found through jit, scan, remat, shard_map and grad. What remat computes a second time is left out; the
    trip count of a ``while_loop`` is not known, so its body counts once; every branch of a ``cond`` counts.

    Args:
        fn: any function of arrays; jitted or not. Differentiate it to see backward products.
        args, kwargs: arrays, or ``jax.ShapeDtypeStruct`` for them.

    Returns:
        An ``Explanation``; ``print`` it.

    Example:
        >>> import fp4jax, jax, jax.numpy as jnp
        >>> dot = fp4jax.DotGeneral(fp4jax.recipes.fp4_vector())
        >>> loss = lambda x, w: dot(x, w, (((1,), (0,)), ((), ()))).sum()
        >>> result = fp4jax.explain(jax.grad(loss, (0, 1)), jnp.ones((4, 8)), jnp.ones((8, 2)))
        >>> [(p.kind, p.lhs, p.rhs) for p in result.products]
        [('fprop', 'E2M1', 'E2M1'), ('dgrad', 'E5M2', 'E2M1'), ('wgrad', 'E2M1', 'E5M2')]
    """
    return Explanation(tuple(_walk(jax.make_jaxpr(fn)(*args, **kwargs).jaxpr, 1)))


def _walk(jaxpr: core.Jaxpr, count: int) -> Iterator[Product]:
    for eqn in jaxpr.eqns:
        if _REMATTED in str(eqn.source_info.name_stack):
            continue
        name = eqn.params.get("name", "")
        if isinstance(name, str) and name.startswith(MARK) and name in MARKS:
            call, kind = MARKS[name]
            for dot in eqn.params["jaxpr"].jaxpr.eqns:  # partial evaluation can leave the jit behind, empty
                if dot.primitive.name == "dot_general":
                    yield _product(dot, count, kind, call.recipe.name, call.backend, *_formats(call.recipe, kind, dot))
        elif eqn.primitive.name == "dot_general":
            dtypes = (_dtype(v) for v in eqn.invars)
            yield _product(eqn, count, "plain", "-", "-", *dtypes)
        else:
            trips = eqn.params["length"] if eqn.primitive.name == "scan" else 1
            for inner in _subjaxprs(eqn):
                yield from _walk(inner, count * trips)


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


def _product(eqn: core.JaxprEqn, count: int, kind: str, recipe: str, backend: str, lhs: str, rhs: str) -> Product:
    (contract, _), (batch, _) = eqn.params["dimension_numbers"]
    shapes = [_shape(v) for v in eqn.invars]
    b = math.prod(shapes[0][a] for a in batch)
    k = math.prod(shapes[0][a] for a in contract)
    m, n = (math.prod(s) // max(1, b * k) for s in shapes)
    return Product(kind, recipe, backend, lhs, rhs, b, m, n, k, count)
