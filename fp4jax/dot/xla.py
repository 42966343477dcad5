"""The "xla" backend: the meaning of a recipe. Runs everywhere; every other backend is compared with it.

Values of the grid are computed by arithmetic and multiplied in bfloat16, which holds them exactly, with float32 sums;
scales are applied to the sums, lhs first. What backward needs of a quantized operand is kept at
a byte a value.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

from fp4jax.blocks import explicit_sharding
from fp4jax.dot.call import Call, marked_dot, names_of, permuted
from fp4jax.dot.geometry import merge_free, restore, scale_to_result
from fp4jax.estimators import gradient_factor
from fp4jax.exact import as_float32, magnitude, multiply
from fp4jax.formats import E4M3, FloatFormat
from fp4jax.outliers import OCC, clip, thresholds
from fp4jax.quantize import QuantSpec, find_scales, grid_values, scaled_input, tensor_axes
from fp4jax.recipe import Operand as RecipeOperand
from fp4jax.recipe import Recipe, Reuse
from fp4jax.rounding import NEAREST_EVEN
from fp4jax.scaling import Scales
from fp4jax.typing import Array, DimensionNumbers, Key

LHS_NAME, RHS_NAME = "fp4jax_lhs", "fp4jax_rhs"  # names of the quantized residuals, for remat policies

FPROP_LHS, FPROP_RHS, DGRAD_LHS, DGRAD_RHS, WGRAD_LHS, WGRAD_RHS = range(6)  # each quantizer folds in its own


class Operand(NamedTuple):
    """One side of a product: ``values · scale``, the scale (if any) constant along the contraction.

    Attributes:
        values: in the dtype the product runs in.
        scale: float32, 1 along the contraction axes, or None for 1.
    """

    values: Any
    scale: Array | None


class Quantized(NamedTuple):
    """A quantized operand of fprop, and the form of it that backward keeps.

    Attributes:
        operand: what fprop multiplies; its values are None where they are to be had from ``kept``.
        kept, kept_scale: values at a byte each and their scale, for the backward product that reuses them, else None.
        delta: ΔX of sparse compensation, float32, or None.
        reciprocal: r of a weight with an estimator, where its scales leave the sum, else None.
    """

    operand: Operand
    kept: Array | None
    kept_scale: Array | None
    delta: Array | None = None
    reciprocal: Array | None = None


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


# --- quantizing the operands -------------------------------------------------------------------------------------


def subkey(key: Key | None, spec: QuantSpec, place: int) -> Key | None:
    """The key of the quantizer at ``place``, such as ``FPROP_LHS``; None for one that draws no noise."""
    return jax.random.fold_in(key, place) if key is not None and spec.needs_key else None


def quantize_activation(
    x: Array,
    spec: QuantSpec,
    axis: tuple[int, ...],
    occ: OCC | None,
    key: Key | None,
    clamp_axis: tuple[int, ...] | None = None,
) -> tuple[Array, Scales, Array | None]:
    """Grid values (float32) and scales of an activation, and ΔX (float32) where ``occ`` clamps.

    With "residual" compensation an outlier entry holds E4M3(q + ΔX · r) and amax is at least amax(X) · float32(M /
    448), so that none saturates. Whether a block is finite is decided on X, before the clamp. ``clamp_axis`` is fprop's
    contraction, where that is not ``axis``: X is clamped alike in all three products.
    """
    value = as_float32(x)
    if occ is None:
        scales = find_scales(value, spec, axis)
        return grid_values(value, scales, spec, axis, key), scales, None
    lo, hi = thresholds(x, occ, axis if clamp_axis is None else clamp_axis)
    clamped = clip(value, lo, hi)
    delta = value - clamped
    amax = spec.granularity.reduce_max(magnitude(clamped), axis)
    whole = spec.granularity.reduce_max(magnitude(value), axis)
    carrier = occ.residual_format if occ.compensation == "residual" else None
    if carrier is not None:
        amax = jnp.maximum(amax, whole * jnp.float32(spec.format.max / carrier.max))
    amax = jnp.where(jnp.isfinite(whole), amax, np.float32(np.nan))
    scales = spec.scale(amax, spec.format, tensor_axes(value, spec))
    values = grid_values(clamped, scales, spec, axis, key)
    if occ.compensation == "residual":
        moved = multiply(delta, spec.granularity.expand(scales.reciprocal, x.shape, axis))
        if carrier is not None:
            # The bound changes no result. It keeps the compiler from fusing product and sum into one rounding.
            moved = lax.clamp(jnp.float32(-2 * carrier.max), moved, jnp.float32(2 * carrier.max))
            carried = NEAREST_EVEN(values + moved, carrier)
        else:
            carried = values + moved
        values = jnp.where(delta != 0, carried, values)
    return values, scales, delta


def _storage(format: FloatFormat | None) -> np.dtype:
    """Dtype that keeps values of a format for backward: a byte a value, E4M3 wherever it holds them exactly."""
    if format is None:
        return np.dtype(np.float32)
    return E4M3.storage_dtype if np.isin(format.grid, E4M3.grid).all() else format.storage_dtype


def _keep(values: Array, format: FloatFormat | None, name: str) -> Array:
    """Values (float32) as they are kept for backward, under a name that remat policies know.

    Eight-bit floats are kept as uint8: XLA's CPU code widens the whole stack of them at every step of a scan.
    """
    kept = values.astype(_storage(format))
    return checkpoint_name(lax.bitcast_convert_type(kept, jnp.uint8) if kept.dtype.itemsize == 1 else kept, name)


def _kept(kept: Array, format: FloatFormat | None) -> Array:
    """Undoes ``_keep``: bfloat16, or the dtype that a wider format is kept in."""
    if kept.dtype == jnp.uint8:
        return lax.bitcast_convert_type(kept, _storage(format)).astype(jnp.bfloat16)
    return kept


def _activation_format(recipe: Recipe) -> FloatFormat | None:
    """The format that holds the values of a quantized activation, outlier entries included; None is float32."""
    if recipe.outliers is not None and recipe.outliers.compensation == "residual":
        return recipe.outliers.residual_format
    return None if recipe.activation_spec is None else recipe.activation_spec.format


def _operand(
    values: Array, scales: Scales, spec: QuantSpec, axis: tuple[int, ...], format: FloatFormat | None
) -> Operand:
    """An operand of grid values (float32). Scales that vary along the contraction go into the values."""
    exact = ml_dtypes.bfloat16 if format is not None else np.float32
    if spec.granularity.leaves_the_sum:
        return Operand(values.astype(exact), spec.scale.decode(scales.scale, scales.outer_scale))
    outer = scales.outer_scale
    inside = spec.scale.decode(scales.scale, None)
    values = values * spec.granularity.expand(inside, values.shape, axis)
    return Operand(values.astype(exact if spec.scale.exact_in_bfloat16 else np.float32), outer)


def _high(x: Array, call: Call) -> Operand:
    """An operand left in high precision: the dtype of the activation."""
    return Operand(x.astype(call.lhs_dtype), None)


def _quantized(x: Array, spec: QuantSpec, axis: tuple[int, ...], key: Key | None) -> Operand:
    scales = find_scales(x, spec, axis)
    return _operand(grid_values(x, scales, spec, axis, key), scales, spec, axis, spec.format)


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
    return _reshard(rhs, entries, mine)


def _reshard(x: Array, entries: list[Any], like: NamedSharding) -> Array:
    """``x`` split over these axes of the mesh of ``like``; itself if it is, so that a scan need not keep it twice."""
    own, whole = explicit_sharding(x), NamedSharding(like.mesh, PartitionSpec(*entries))
    if own is not None and tuple(own.spec) == tuple(entries):
        return x
    if x.dtype != jnp.bfloat16:
        return jax.sharding.reshard(x, whole)
    # As bits, since XLA's CPU code widens collectives of bfloat16.
    bits = jax.sharding.reshard(lax.bitcast_convert_type(x, jnp.uint16), whole)
    return lax.bitcast_convert_type(bits, jnp.bfloat16)


def _negative(axes: tuple[int, ...], ndim: int) -> tuple[int, ...]:
    return tuple(a - ndim for a in axes)


@jax.named_scope("quantize")
def quantize_lhs(
    lhs: Array, recipe: Recipe, axis: tuple[int, ...], key: Key | None, batch: int = 0
) -> Quantized | None:
    """The activation as fprop and wgrad take it; None where fprop leaves it in high precision."""
    del batch
    spec = recipe.activation_spec
    if spec is None:
        return None
    values, scales, delta = quantize_activation(lhs, spec, axis, recipe.outliers, subkey(key, spec, FPROP_LHS))
    operand = _operand(values, scales, spec, axis, _activation_format(recipe))
    kept = kept_scale = None
    if isinstance(recipe.wgrad.lhs, Reuse):
        kept = _keep(values, _activation_format(recipe), LHS_NAME)
        kept_scale = checkpoint_name(operand.scale, LHS_NAME)
    sparse = recipe.outliers is not None and recipe.outliers.compensation == "sparse"
    return Quantized(operand, kept, kept_scale, delta if sparse else None)


@jax.named_scope("quantize")
def quantize_rhs(
    rhs: Array, recipe: Recipe, axis: tuple[int, ...], key: Key | None, batch: int = 0
) -> Quantized | None:
    """The weight as fprop and dgrad take it; None where fprop leaves it in high precision."""
    del batch
    spec = recipe.weight_spec
    if spec is None:
        return None
    value = as_float32(rhs)
    scales = find_scales(value, spec, axis)
    values = grid_values(value, scales, spec, axis, subkey(key, spec, FPROP_RHS))
    operand = _operand(values, scales, spec, axis, spec.format)
    kept = kept_scale = None
    if isinstance(recipe.dgrad.rhs, Reuse):
        kept = _keep(values, spec.format, RHS_NAME)
        kept_scale = checkpoint_name(operand.scale, RHS_NAME)
    reciprocal = None
    if spec.granularity.leaves_the_sum and not recipe.weight_estimator.is_identity:
        reciprocal = checkpoint_name(scales.reciprocal, RHS_NAME)
    return Quantized(operand, kept, kept_scale, reciprocal=reciprocal)


def stored_rhs(quantized: Quantized | None) -> Quantized | None:
    """``quantized`` in as few bytes as it takes: one a value, if backward keeps it."""
    if quantized is None or quantized.kept is None or quantized.kept.dtype != jnp.uint8:
        return quantized
    return quantized._replace(operand=quantized.operand._replace(values=None))


def reshard_rhs(quantized: Quantized | None, axis: tuple[int, ...], sharding: NamedSharding) -> Quantized | None:
    """``quantized`` split like a weight of this sharding; a scale along the axes that have one each."""
    del axis

    def split(x: Array) -> Array:
        spec = [*sharding.spec, *(None,) * (x.ndim - len(sharding.spec))]
        return _reshard(x, [None if size == 1 else entry for size, entry in zip(x.shape, spec, strict=True)], sharding)

    return jax.tree.map(split, quantized)


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
        rhs_operand = w.operand._replace(values=_kept(w.kept, recipe.weight_spec.format))
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
    return _quantized(g, spec, _negative(axis, g.ndim), subkey(key, spec, place))


def dgrad(residuals: Residuals, g: Array, call: Call) -> Array:
    """dLhs = Q(dY · sw) · Wq · s1, in the dtype of lhs."""
    recipe, geometry = call.recipe, call.geometry
    scale, spec = None, recipe.dgrad.rhs
    if residuals.rhs_values is not None:
        scale = residuals.rhs_scale
        assert recipe.weight_spec is not None  # it was kept
        weight = Operand(_kept(residuals.rhs_values, recipe.weight_spec.format), None)
    elif isinstance(spec, QuantSpec):
        axis = _negative(geometry.rhs_free, geometry.rhs_ndim)
        weight = _quantized(as_float32(residuals.rhs), spec, axis, subkey(residuals.key, spec, DGRAD_RHS))
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
        activation = Operand(_kept(residuals.lhs_values, _activation_format(recipe)), None)
    elif isinstance(spec, QuantSpec):
        axis = _negative(geometry.lhs_free, geometry.lhs_ndim)
        key = subkey(residuals.key, spec, WGRAD_LHS)
        clamp_axis = _negative(geometry.lhs_contract, geometry.lhs_ndim)
        values, scales, _ = quantize_activation(residuals.lhs, spec, axis, recipe.outliers, key, clamp_axis)
        activation = _operand(values, scales, spec, axis, _activation_format(recipe))
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
