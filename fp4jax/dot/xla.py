"""The "xla" backend: the meaning of a recipe. Runs everywhere; every other backend is compared with it.

Values of the grid are computed by arithmetic and multiplied in bfloat16, which holds them exactly, with float32 sums;
scales are applied to the sums, lhs first. What backward needs of a quantized operand is kept at
a byte a value.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp4jax.blocks import explicit_sharding
from fp4jax.dot import xla_operands as operands
from fp4jax.dot.call import Call, marked_dot, names_of, permuted
from fp4jax.dot.geometry import merge_free, restore, scale_to_result
from fp4jax.dot.xla_operands import (
    DGRAD_LHS,
    DGRAD_RHS,
    WGRAD_LHS,
    WGRAD_RHS,
    Operand,
    Quantized,
    activation_format,
    operand_of,
    quantize_activation,
    quantized_operand,
    reshard,
    subkey,
    widened,
)
from fp4jax.estimators import gradient_factor
from fp4jax.exact import as_float32, multiply
from fp4jax.quantize import QuantSpec, scaled_input
from fp4jax.recipe import Operand as RecipeOperand
from fp4jax.rounding import NEAREST_EVEN
from fp4jax.typing import Array, DimensionNumbers, Key

quantize_lhs, quantize_rhs = operands.quantize_lhs, operands.quantize_rhs
stored_rhs, reshard_rhs = operands.stored_rhs, operands.reshard_rhs


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Residuals:
    """What backward needs. Only the fields that the recipe asks for are set."""

    lhs: Any = None  # the activation
    rhs: Any = None  # the weight
    lhs_values: Any = None
    lhs_scale: Any = None
    rhs_values: Any = None
    rhs_scale: Any = None
    delta: Any = None  # ΔX of sparse compensation
    rhs_reciprocal: Any = None
    key: Any = None

    def tree_flatten(self):
        return [getattr(self, f.name) for f in dataclasses.fields(self)], None

    @classmethod
    def tree_unflatten(cls, _, leaves):
        return cls(*leaves)


def unsupported(call: Call) -> list[str]:
    """Reasons why this backend cannot run ``call``: there are none."""
    del call
    return []


def _high(x: Array, call: Call) -> Operand:
    """An operand left in high precision: the dtype of the activation."""
    return Operand(x.astype(call.lhs_dtype), None)


# --- products ----------------------------------------------------------------------------------------------------


def _multiply(lhs: Operand, rhs: Operand, dnums: DimensionNumbers, call: Call, product: str, out_sharding) -> Array:
    """(Σ lhs rhs) · scale(lhs) · scale(rhs), float32."""
    dtype = jnp.bfloat16 if lhs.values.dtype == rhs.values.dtype == jnp.bfloat16 else jnp.float32
    precision = None
    if dtype == jnp.float32:
        # The default would be TF32 on a GPU, and round values that have been quantized.
        precision = lax.Precision.HIGHEST if call.precision is None else call.precision
    contracted = len(dnums[0][0])
    frees = [v.ndim - contracted - len(dnums[1][0]) for v in (lhs.values, rhs.values)]
    left = lhs.values.astype(dtype)
    right = _gathered(rhs.values.astype(dtype), left, dnums)
    if frees[1] > 1 and jax.default_backend() == "cpu" and explicit_sharding(right) is None:
        # XLA's CPU code has no bfloat16 product with float32 sums for several free axes on the right.
        right, flat_dnums, sizes = merge_free(right, dnums)
        out = marked_dot(call.mark(product), flat_dnums, precision, None)(left, right)
        out = out.reshape(*out.shape[:-1], *sizes)
    else:
        out = marked_dot(call.mark(product), dnums, precision, out_sharding)(left, right)
    for side, operand in enumerate((lhs, rhs)):
        if operand.scale is not None:
            out = out * scale_to_result(operand.scale, contracted, dnums, side, frees[1 - side])
    return out


def _gathered(rhs: Array, lhs: Array, dnums: DimensionNumbers) -> Array:
    """``rhs`` whole along axes over which ``lhs`` does not follow it: a fully sharded weight, after it is quantized.

    Those are contracted axes that ``lhs`` has whole, and free axes split like free axes of ``lhs``.
    """
    mine, theirs = explicit_sharding(rhs), explicit_sharding(lhs)
    if mine is None or theirs is None:
        return rhs
    entries, other = ([*s.spec, *(None,) * (x.ndim - len(s.spec))] for x, s in ((rhs, mine), (lhs, theirs)))
    (lhs_contract, contract), (_, batch) = dnums
    for axis, partner in zip(contract, lhs_contract, strict=True):
        if other[partner] is None:
            entries[axis] = None
    taken = {name for axis, entry in enumerate(other) if axis not in lhs_contract for name in names_of(entry)}
    for axis, entry in enumerate(entries):
        if axis not in (*contract, *batch) and taken & set(names_of(entry)):
            entries[axis] = None
    return reshard(rhs, entries, mine)


def _negative(axes: tuple[int, ...], ndim: int) -> tuple[int, ...]:
    return tuple(a - ndim for a in axes)


def fprop(
    lhs: Array, rhs: Array, x: Quantized | None, w: Quantized | None, key: Key | None, call: Call
) -> tuple[Array, Residuals]:
    """Y, and what backward needs."""
    recipe, geometry = call.recipe, call.geometry
    kept: dict[str, Array | None] = {"key": key}
    if x is not None:
        kept["lhs_values"], kept["lhs_scale"] = x.kept, x.kept_scale
    if x is None or x.kept is None or not recipe.activation_estimator.is_identity:
        kept["lhs"] = lhs
    if w is not None:
        kept["rhs_values"], kept["rhs_scale"], kept["rhs_reciprocal"] = w.kept, w.kept_scale, w.reciprocal
    if w is None or w.kept is None or not recipe.weight_estimator.is_identity:
        kept["rhs"] = rhs
    lhs_operand = _high(lhs, call) if x is None else x.operand
    rhs_operand = _high(rhs, call) if w is None else w.operand
    if w is not None and w.operand.values is None:
        assert recipe.weight_spec is not None  # it was quantized
        assert w.kept is not None  # and stored as what is kept
        rhs_operand = w.operand._replace(values=widened(w.kept, recipe.weight_spec.format))
    out = _multiply(lhs_operand, rhs_operand, geometry.fprop, call, "fprop", call.out_sharding)
    if x is not None and x.delta is not None:
        sparse = _high(x.delta, call)
        if recipe.wgrad.lhs is not None:  # an activation in high precision still holds its outliers
            kept["delta"] = sparse.values
        out = out + _multiply(sparse, rhs_operand, geometry.fprop, call, "occ", call.out_sharding)
    return out.astype(call.out_dtype), Residuals(**kept)


def _folded(g: Array, scale: Array | None, side: int, call: Call) -> Array:
    """dY times the scale of the operand that the backward product reuses, float32."""
    if scale is None:
        return g
    geometry = call.geometry
    contracted = len(geometry.lhs_contract)
    other = len(geometry.lhs_free) if side else len(geometry.rhs_free)
    return multiply(g, scale_to_result(scale, contracted, geometry.fprop, side, other))


@jax.named_scope("quantize")
def _gradient(g: Array, spec: RecipeOperand, axis: tuple[int, ...], place: int, key: Key | None, call: Call) -> Operand:
    if not isinstance(spec, QuantSpec):
        # Not float16: a scale folded in can take a gradient out of its range.
        return Operand(g.astype(jnp.bfloat16) if call.lhs_dtype == jnp.bfloat16 else g, None)
    return quantized_operand(g, spec, _negative(axis, g.ndim), subkey(key, spec, place))


def dgrad(residuals: Residuals, g: Array, call: Call) -> Array:
    """dLhs = Q(dY · sw) · Wq · s1, in the dtype of lhs."""
    recipe, geometry = call.recipe, call.geometry
    scale, spec = None, recipe.dgrad.rhs
    if residuals.rhs_values is not None:
        scale = residuals.rhs_scale
        assert recipe.weight_spec is not None  # it was kept
        weight = Operand(widened(residuals.rhs_values, recipe.weight_spec.format), None)
    elif isinstance(spec, QuantSpec):
        axis = _negative(geometry.rhs_free, geometry.rhs_ndim)
        weight = quantized_operand(as_float32(residuals.rhs), spec, axis, subkey(residuals.key, spec, DGRAD_RHS))
    else:
        weight = _high(residuals.rhs, call)
    folded = _folded(as_float32(g), scale, 1, call)
    gradient = _gradient(folded, recipe.dgrad.lhs, geometry.out_rhs, DGRAD_LHS, residuals.key, call)
    out_sharding = permuted(call.lhs_sharding, geometry.dgrad_axes)
    out = restore(_multiply(gradient, weight, geometry.dgrad, call, "dgrad", out_sharding), geometry.dgrad_axes)
    if not recipe.activation_estimator.is_identity:
        out = out * _activation_factor(residuals.lhs, call)
    return out.astype(call.lhs_dtype)


def _activation_factor(lhs: Array, call: Call) -> Array:
    """f'(u) of the activation's quantizer; 1 for entries that the clamp moved."""
    recipe, spec = call.recipe, call.recipe.activation_spec
    assert spec is not None  # a recipe with an activation estimator has one
    axis = _negative(call.geometry.lhs_contract, lhs.ndim)
    value = as_float32(lhs)
    _, scales, delta = quantize_activation(
        lhs, dataclasses.replace(spec, rounding=NEAREST_EVEN), axis, recipe.outliers, None
    )
    factor = recipe.activation_estimator.factor(scaled_input(value, scales, spec, axis), spec.format)
    return factor if delta is None else jnp.where(delta != 0, jnp.float32(1), factor)


def wgrad(residuals: Residuals, g: Array, call: Call) -> Array:
    """dRhs = Xqᵀ · Q(dY · sx) · s2 ⊙ f'(W · r): float32 until the cast to the dtype of rhs."""
    recipe, geometry = call.recipe, call.geometry
    g = as_float32(g)
    scale, spec = None, recipe.wgrad.lhs
    if residuals.lhs_values is not None:
        scale = residuals.lhs_scale
        activation = Operand(widened(residuals.lhs_values, activation_format(recipe)), None)
    elif isinstance(spec, QuantSpec):
        axis = _negative(geometry.lhs_free, geometry.lhs_ndim)
        key = subkey(residuals.key, spec, WGRAD_LHS)
        clamp_axis = _negative(geometry.lhs_contract, geometry.lhs_ndim)
        values, scales, _ = quantize_activation(residuals.lhs, spec, axis, recipe.outliers, key, clamp_axis)
        activation = operand_of(values, scales, spec, axis, activation_format(recipe))
    else:
        activation = _high(residuals.lhs, call)
    gradient = _gradient(_folded(g, scale, 0, call), recipe.wgrad.rhs, geometry.out_lhs, WGRAD_RHS, residuals.key, call)
    out_sharding = permuted(call.rhs_sharding, geometry.wgrad_axes)
    out = _multiply(activation, gradient, geometry.wgrad, call, "wgrad", out_sharding)
    if residuals.delta is not None:
        sparse, plain = Operand(residuals.delta, None), _high(g, call)
        out = out + _multiply(sparse, plain, geometry.wgrad, call, "occ", out_sharding)
    out = restore(out, geometry.wgrad_axes)
    if not recipe.weight_estimator.is_identity:
        assert recipe.weight_spec is not None  # a recipe with a weight estimator has one
        spec = recipe.weight_spec
        if residuals.rhs_reciprocal is None:
            axis = _negative(geometry.rhs_contract, geometry.rhs_ndim)
            factor = gradient_factor(residuals.rhs, spec, axis, recipe.weight_estimator)
        else:
            u = multiply(as_float32(residuals.rhs), residuals.rhs_reciprocal)
            factor = recipe.weight_estimator.factor(u, spec.format)
        out = out * factor
    return out.astype(call.rhs_dtype)
