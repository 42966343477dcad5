"""What a model's layers follow, as a table: path, kernel, recipe, backend, parameters."""

import dataclasses
import math
from collections.abc import Iterable

from flax import nnx

from fp4jax.dot import DotGeneral
from fp4jax.nn.layers import Found, find_layers
from fp4jax.nn.runs import BlockwiseDotGeneral, equal_runs
from fp4jax.recipe import Recipe


@dataclasses.dataclass(frozen=True)
class LayerReport:
    """One layer, or another module with parameters.

    Attributes:
        path: dotted path, "" for the model itself; a shared layer's first path, and how many more there are.
        kind: its class.
        kernel: shape of one layer's kernel; () if it has none.
        stack: sizes of the leading axes by which it is stacked.
        recipe: what its product follows: a recipe, None for high precision; one for each block if they differ.
        backend: name of the backend, None if it is chosen call by call.
        parameters: how many values it holds, biases included.
        covered: how many of them a recipe quantizes: the kernel, or the part of it that belongs to such blocks.
    """

    path: str
    kind: str
    kernel: tuple[int, ...]
    stack: tuple[int, ...]
    recipe: Recipe | tuple[Recipe | None, ...] | None
    backend: str | None
    parameters: int
    covered: int

    def cells(self) -> tuple[str, ...]:
        """The row of the table."""
        kernel = " × ".join(map(str, self.kernel))
        if self.stack:
            kernel = " × ".join([*map(str, self.stack), f"({kernel})"])
        if isinstance(self.recipe, tuple):
            recipe = ", ".join(f"{_span(a, b)} {_name(recipe)}" for a, b, recipe in equal_runs(self.recipe))
        else:
            recipe = _name(self.recipe)
        backend = "–" if self.recipe is None else self.backend or "auto"
        return self.path or "(model)", self.kind, kernel or "–", recipe, backend, f"{self.parameters:,}"


@dataclasses.dataclass(frozen=True)
class ModelReport:
    """All layers of a model, in its order. Prints as a table.

    Attributes:
        layers: one entry for each module with parameters.
        parameters: parameters of the model, each counted once.
        covered: those that a recipe quantizes.
    """

    layers: tuple[LayerReport, ...]
    parameters: int
    covered: int

    @property
    def share(self) -> float:
        """Share of the parameters that a recipe quantizes."""
        return self.covered / self.parameters if self.parameters else 0.0

    def __str__(self) -> str:
        rows = [("path", "layer", "kernel", "recipe", "backend", "parameters"), *(row.cells() for row in self.layers)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join([*(cell.ljust(w) for cell, w in zip(row[:-1], widths, strict=False)), row[-1].rjust(widths[-1])])
            for row in rows
        ]
        lines.insert(1, "  ".join("-" * width for width in widths))
        lines.append(f"{self.share:.1%} of {self.parameters:,} parameters are quantized")
        return "\n".join(lines)


def describe_model(model: nnx.Module) -> ModelReport:
    """Which recipe each layer of `model` follows: every module with parameters, those in high precision included.

    It reads the model as it is, however its recipes came there. For what a function multiplies with them, attention
    and tied heads included, see `fp4jax.explain`.

    Example:
        >>> layers = [nnx.Conv(1, 8, (3, 3), rngs=nnx.Rngs(0)), nnx.Linear(8, 10, rngs=nnx.Rngs(0))]
        >>> print(describe_model(fp4jax.nn.quantize_model(nnx.Sequential(*layers), [(".*", fp4jax.recipes.fp4())])))
        path      layer       kernel         recipe  backend  parameters
        --------  ----------  -------------  ------  -------  ----------
        layers.0  nnx.Conv    3 × 3 × 1 × 8  –       –                80
        layers.1  nnx.Linear  8 × 10         fp4     auto             90
        47.1% of 170 parameters are quantized
    """
    found = find_layers(model)
    variables = {id(v): v for f in found for v in f.variables}
    rows = tuple(map(_row, found))
    # A kernel that two layers share is stored once.
    kernels = {id(f.kernel): row.covered for f, row in zip(found, rows, strict=True) if row.covered}
    return ModelReport(rows, _size(variables.values()), sum(kernels.values()))


def _row(found: Found) -> LayerReport:
    product = found.product
    recipe: Recipe | tuple[Recipe | None, ...] | None = None
    backend = None
    if isinstance(product, BlockwiseDotGeneral):
        recipe, backend = product.recipes, product.backend
    elif product is not None:
        dot = product if isinstance(product, DotGeneral) else getattr(product, "dot", None)
        recipe, backend = (dot.recipe, dot.backend) if isinstance(dot, DotGeneral) else (None, None)
    held = found.variables
    mine = any(found.kernel is v for v in held)
    kernel = found.kernel.shape if mine else ()
    blocks = recipe if isinstance(recipe, tuple) else (recipe,)
    share = sum(r is not None and r.quantizes for r in blocks) / len(blocks)
    more = f" (and {len(found.paths) - 1} more)" if len(found.paths) > 1 else ""
    return LayerReport(
        found.path + more,
        found.name,
        tuple(kernel[len(found.stack) :]),
        tuple(found.stack),
        recipe,
        backend,
        _size(held),
        round(share * math.prod(kernel)) if mine else 0,
    )


def _size(variables: Iterable[nnx.Variable]) -> int:
    return sum(math.prod(v.shape) for v in variables)


def _name(recipe: Recipe | None) -> str:
    return "–" if recipe is None else recipe.name


def _span(start: int, stop: int) -> str:
    return f"{start}:" if stop == start + 1 else f"{start}–{stop - 1}:"
