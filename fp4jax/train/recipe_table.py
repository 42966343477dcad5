"""`fp4jax recipes`: every recipe's quantizers, and its knobs."""

import re
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from fp4jax.quantize import QuantSpec
from fp4jax.recipe import REUSE, Recipe
from fp4jax.recipes import RECIPES
from fp4jax.rounding import NEAREST_EVEN
from fp4jax.scaling import AbsMax
from fp4jax.train.naming import describe_knobs


def recipes_table() -> RenderableType:
    """Two tables that fit 100 columns: what each recipe quantizes to, and what it is and takes."""
    quantizers = Table(show_lines=True, title="What the products quantize", title_justify="left")
    quantizers.caption = (
        "Unless said otherwise, X and W are quantized once and reused in the backward products, scales are exact "
        "maxima, ties go to even, and gradients pass straight through. PerVector: a scale for each token of X, each "
        "output channel of W."
    )
    quantizers.caption_justify = "left"
    quantizers.add_column("recipe", style="bold", no_wrap=True)
    for header in ("activation X", "weight W", "gradient dY"):
        quantizers.add_column(header, ratio=1)
    knobs = Table(show_lines=True, title="Knobs, as in --recipe fp4:alpha=0.999,k=3", title_justify="left")
    knobs.add_column("recipe", style="bold", no_wrap=True)
    knobs.add_column("what it is")
    knobs.add_column("knobs and their defaults")
    for name, function in RECIPES.items():
        quantizers.add_row(name, *quantizer_cells(function()))
        what = (function.__doc__ or "").partition("\n")[0].replace("``", "")
        knobs.add_row(name, what, describe_knobs(name).replace(",", "\n") or "none")
    return Group(quantizers, "", knobs)


def quantizer_cells(recipe: Recipe) -> tuple[str, str, str]:
    r"""What a recipe does to activations, weights and gradients, a line a fact.

    Example:
        >>> quantizer_cells(fp4jax.recipes.fp4())[1]
        'E2M1 PerVector\ngradient: DGE(k=5.0, clip=3.0)'
    """
    outliers = recipe.outliers
    activation = [_operand(recipe.fprop.lhs), *_again("wgrad", recipe.fprop.lhs, recipe.wgrad.lhs)]
    if outliers is not None:
        carried = f" in {outliers.residual_format or 'float32'}" if outliers.compensation == "residual" else ""
        compensation = "dropped" if outliers.compensation == "none" else f"{outliers.compensation}{carried}"
        activation.append(f"OCC: α={outliers.alpha:g} by {outliers.scope}, ΔX {compensation}")
        if outliers.quantile != "exact":
            activation.append(f"quantile: {outliers.quantile}")
    weight = [_operand(recipe.fprop.rhs), *_again("dgrad", recipe.fprop.rhs, recipe.dgrad.rhs)]
    for lines, estimator in ((activation, recipe.activation_estimator), (weight, recipe.weight_estimator)):
        if not estimator.is_identity:
            lines.append(f"gradient: {estimator!r}")
    if recipe.dgrad.lhs == recipe.wgrad.rhs:
        gradient = [_operand(recipe.dgrad.lhs)]
    else:
        gradient = [f"dgrad: {_operand(recipe.dgrad.lhs)}", f"wgrad: {_operand(recipe.wgrad.rhs)}"]
    return "\n".join(activation), "\n".join(weight), "\n".join(gradient)


def _operand(spec: Any) -> str:
    if not isinstance(spec, QuantSpec):
        return "high precision"
    parts = [repr(spec.format), _bare(spec.granularity)]
    if spec.scale != AbsMax():
        parts.append(_bare(spec.scale))
    if spec.rounding != NEAREST_EVEN:
        parts.append(repr(spec.rounding))
    return " ".join(parts)


def _again(product: str, forward: Any, backward: Any) -> list[str]:
    """A line on the operand in its backward product, where that is not plain reuse."""
    return [] if backward is REUSE or backward == forward else [f"{product}: {_operand(backward)}"]


def _bare(part: Any) -> str:
    """`PerTensor(axis_name=None)` as PerTensor, `PerBlock(size=32)` as it is."""
    return re.sub(r"\(\)$", "", re.sub(r"(, )?axis_name=None", "", repr(part)))
