"""Statistics as gradients: a tap on the result of a product whose backward pass returns them for a dummy input.

The tap is the identity on Y. Its other input, the probe, is a float32 array of zeros that no result depends on; what
the backward pass returns as the probe's gradient are the statistics of the operands. So they come out of scan, remat,
vmap, shard_map, jit and gradient accumulation as any gradient does: once, stacked like parameters, summed where a
layer runs more than once. Nothing calls back to the host.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp4jax.dot.geometry import Geometry, scale_to_result
from fp4jax.exact import as_float32, multiply
from fp4jax.quantize import QuantSpec
from fp4jax.recipe import Recipe, Reuse
from fp4jax.telemetry.operands import (
    FACTOR_EDGES,
    STATISTICS,
    factor_histogram,
    find_operand_scale,
    operand_statistics,
)
from fp4jax.typing import Array, DimensionNumbers, Key

PLACES = ("fprop.lhs", "fprop.rhs", "dgrad.lhs", "dgrad.rhs", "wgrad.lhs", "wgrad.rhs")
"""The operands, in the order of ``Recipe.specs``: the rows of a probe. Only those that are quantized are measured."""

NOISE = "noise_share"
COLUMNS = ("calls", NOISE, *STATISTICS[1:], *(f"factor_{i}" for i in range(len(FACTOR_EDGES) - 1)))
"""The columns of a probe: how often the operand was measured, then sums over those calls. In place of the SNR, which is
infinite where nothing was lost, stands its reciprocal, Σ (x - x̂)² / Σ x²."""

SHAPE = (len(PLACES), len(COLUMNS))


def measured(recipe: Recipe) -> tuple[str, ...]:
    """The places that ``recipe`` quantizes."""
    return tuple(place for place, spec in recipe.specs.items() if isinstance(spec, QuantSpec))


@dataclasses.dataclass(frozen=True)
class Observed:
    """What is static about an observed product."""

    recipe: Recipe
    geometry: Geometry


def observe(
    y: Array, probe: Array, lhs: Array, rhs: Array, dimension_numbers: DimensionNumbers, recipe: Recipe, key: Key | None
) -> Array:
    """``y``, unchanged; differentiated, the gradient of ``probe`` is the statistics of the operands that made it.

    Args:
        y: result of ``fp4jax.dot_general(lhs, rhs, dimension_numbers, recipe=recipe, key=key)``.
        probe: float32 zeros of ``SHAPE``, rows ``PLACES`` and columns ``COLUMNS``.
        lhs, rhs, dimension_numbers, recipe, key: of that call.

    Example:
        >>> import fp4jax, jax, jax.numpy as jnp
        >>> recipe, numbers = fp4jax.recipes.fp4_vector(), (((1,), (0,)), ((), ()))
        >>> x, w = jnp.array([[1.0, 5.0, 6.0]]), jnp.eye(3)
        >>> def loss(probe):
        ...     y = fp4jax.dot_general(x, w, numbers, recipe=recipe)
        ...     return observe(y, probe, x, w, numbers, recipe, None).sum()
        >>> sums = jax.grad(loss)(jnp.zeros(SHAPE))
        >>> round(float(sums[PLACES.index("fprop.lhs"), COLUMNS.index("noise_share")]), 4)  # 5 became 4: 1/62
        0.0161
    """
    geometry = Geometry.make(lhs.ndim, rhs.ndim, dimension_numbers)
    static = Observed(recipe, geometry)
    lhs, rhs = lax.stop_gradient(lhs), lax.stop_gradient(rhs)
    return _tap(y, _varying_like(probe, y), lhs, rhs, key, static)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _tap(y: Array, probe: Array, lhs: Array, rhs: Array, key: Key | None, static: Observed) -> Array:
    return y


def _tap_fwd(y, probe, lhs, rhs, key, static):
    recipe = static.recipe
    rows = forward_statistics(lhs, rhs, key, static)
    # Of the operands backward needs no more than their scales, unless they are quantized again along another axis.
    kept = {
        "forward": rows,
        "lhs": lhs if isinstance(recipe.wgrad.lhs, QuantSpec) else None,
        "rhs": rhs if isinstance(recipe.dgrad.rhs, QuantSpec) else None,
        "lhs_scale": None,
        "rhs_scale": None,
        "key": key,
    }
    if isinstance(recipe.wgrad.lhs, Reuse) and recipe.activation_spec is not None:
        axis = _negative(static.geometry.lhs_contract, lhs.ndim)
        kept["lhs_scale"] = find_operand_scale(lhs, recipe.activation_spec, axis, recipe.outliers)
    if isinstance(recipe.dgrad.rhs, Reuse) and recipe.weight_spec is not None:
        axis = _negative(static.geometry.rhs_contract, rhs.ndim)
        kept["rhs_scale"] = find_operand_scale(rhs, recipe.weight_spec, axis, None)
    return y, kept


def _tap_bwd(static, kept, g):
    rows = kept["forward"] + backward_statistics(g, kept, static)
    return g, rows, None, None, None


_tap.defvjp(_tap_fwd, _tap_bwd)


def forward_statistics(lhs: Array, rhs: Array, key: Key | None, static: Observed) -> Array:
    """The rows of a probe that fprop fills, the others 0."""
    recipe, geometry, rows = static.recipe, static.geometry, {}
    if recipe.activation_spec is not None:
        axis = _negative(geometry.lhs_contract, lhs.ndim)
        rows["fprop.lhs"] = _row(lhs, "fprop.lhs", axis, static, key, outliers=recipe.outliers)
    if recipe.weight_spec is not None:
        axis = _negative(geometry.rhs_contract, rhs.ndim)
        row = _row(rhs, "fprop.rhs", axis, static, key)
        if not recipe.weight_estimator.is_identity:
            histogram = factor_histogram(rhs, recipe.weight_spec, axis=axis, estimator=recipe.weight_estimator)
            row = jnp.concatenate([row[: -len(histogram)], histogram])
        rows["fprop.rhs"] = row
    return _table(rows)


def backward_statistics(g: Array, kept: dict, static: Observed) -> Array:
    """The rows of a probe that dgrad and wgrad fill, the others 0. The gradient is measured as it is quantized: with
    the scale of a reused operand folded in.
    """
    recipe, geometry, rows = static.recipe, static.geometry, {}
    key, g = kept["key"], as_float32(g)
    if isinstance(recipe.dgrad.lhs, QuantSpec):
        folded = _folded(g, kept["rhs_scale"], 1, geometry)
        rows["dgrad.lhs"] = _row(folded, "dgrad.lhs", _negative(geometry.out_rhs, g.ndim), static, key)
    if isinstance(recipe.wgrad.rhs, QuantSpec):
        folded = _folded(g, kept["lhs_scale"], 0, geometry)
        rows["wgrad.rhs"] = _row(folded, "wgrad.rhs", _negative(geometry.out_lhs, g.ndim), static, key)
    if kept["rhs"] is not None:
        axis = _negative(geometry.rhs_free, geometry.rhs_ndim)
        rows["dgrad.rhs"] = _row(kept["rhs"], "dgrad.rhs", axis, static, key)
    if kept["lhs"] is not None:
        axis = _negative(geometry.lhs_free, geometry.lhs_ndim)
        clamp_axis = _negative(geometry.lhs_contract, geometry.lhs_ndim)
        rows["wgrad.lhs"] = _row(
            kept["lhs"], "wgrad.lhs", axis, static, key, outliers=recipe.outliers, clamp_axis=clamp_axis
        )
    return _table(rows)


def _row(x: Array, place: str, axis: tuple[int, ...], static: Observed, key: Key | None, **options) -> Array:
    spec = static.recipe.specs[place]
    assert isinstance(spec, QuantSpec)
    # dot_general folds the number of the operand into the key, so that this draws what the product drew.
    subkey = jax.random.fold_in(key, PLACES.index(place)) if key is not None and spec.needs_key else None
    stats = operand_statistics(x, spec, axis=axis, key=subkey, **options)
    noise = jnp.power(jnp.float32(10), -stats["snr_db"] / np.float32(10))
    columns = jnp.stack([jnp.float32(1), noise, *(stats[name] for name in STATISTICS[1:])])
    return jnp.concatenate([columns, jnp.zeros(len(FACTOR_EDGES) - 1, jnp.float32)])


def _table(rows: dict[str, Array]) -> Array:
    nothing = jnp.zeros(len(COLUMNS), jnp.float32)
    return jnp.stack([rows.get(place, nothing) for place in PLACES])


def _folded(g: Array, scale: Array | None, side: int, geometry: Geometry) -> Array:
    """dY times the scale of the operand that the backward product reuses, as ``fp4jax.dot`` has it."""
    if scale is None:
        return g
    other = len(geometry.lhs_free) if side else len(geometry.rhs_free)
    return multiply(g, scale_to_result(scale, len(geometry.lhs_contract), geometry.fprop, side, other))


def _negative(axes: tuple[int, ...], ndim: int) -> tuple[int, ...]:
    return tuple(a - ndim for a in axes)


def _varying_like(probe: Array, y: Array) -> Array:
    """Inside shard_map, makes the probe vary over the mesh axes that y varies over: its gradient is then summed."""
    missing = jax.typeof(y).manual_axis_type.varying - jax.typeof(probe).manual_axis_type.varying
    return lax.pcast(probe, tuple(missing), to="varying") if missing else probe
