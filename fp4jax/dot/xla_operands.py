"""What the products of the "xla" backend take: operands quantized by the reference's own arithmetic."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

from fp4jax.blocks import explicit_sharding
from fp4jax.exact import as_float32, magnitude, multiply
from fp4jax.formats import E4M3, FloatFormat
from fp4jax.outliers import OCC, clip, ranks, thresholds
from fp4jax.quantize import QuantSpec, find_scales, grid_values, tensor_axes
from fp4jax.recipe import Recipe, Reuse
from fp4jax.rounding import NEAREST_EVEN
from fp4jax.scaling import Scales, manual_axes
from fp4jax.typing import Array, Key

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


def subkey(key: Key | None, spec: QuantSpec, place: int) -> Key | None:
    """The key of the quantizer at ``place``, such as ``FPROP_LHS``; None for one that draws no noise."""
    return jax.random.fold_in(key, place) if key is not None and spec.needs_key else None


def _on_one_gpu() -> bool:
    """Whether the kernel would find all of an array where it runs, on a GPU that has its instructions: from sm_90."""
    if jax.default_backend() != "gpu" or jax.device_count() > 1:
        return False
    major = jax.devices()[0].compute_capability.split(".")[0]  # of a GPU of AMD a name, as "gfx942"
    return major.isdigit() and int(major) >= 9


def _thresholds(x: Array, occ: OCC, axis: tuple[int, ...]) -> tuple[Array, Array]:
    """``fp4jax.outliers.thresholds``; exact ones of a 16-bit tensor on a GPU by a kernel, which reads it less often."""
    whole = occ.scope == "tensor" and occ.quantile == "exact" and occ.axis_name is None and not manual_axes(x)
    if not (whole and x.size and x.dtype.itemsize == 2 and explicit_sharding(x) is None and _on_one_gpu()):
        return thresholds(x, occ, axis)

    @jax.named_scope("quantile")
    def by_kernel(x: Array) -> tuple[Array, ...]:
        from fp4jax import kernels

        found = kernels.order_statistics(x, ranks(occ.alpha, x.size))
        return tuple(as_float32(v).reshape((1,) * x.ndim) for v in found)

    @jax.custom_batching.custom_vmap
    def counted(x: Array) -> tuple[Array, ...]:
        from fp4jax.kernels.device import interpreting  # Pallas takes a second to import

        # What is compiled for the CPU of that machine cannot have the kernel.
        platform = "cpu" if interpreting() else "cuda"
        return lax.platform_dependent(x, **{platform: by_kernel}, default=lambda x: thresholds(x, occ, axis))

    @counted.def_vmap
    def _(size: int, mapped: list[bool], x: Array) -> tuple[tuple[Array, ...], tuple[bool, bool]]:
        del size, mapped
        return jax.vmap(lambda x: thresholds(x, occ, axis))(x), (True, True)

    lo, hi = counted(x)
    return lo, hi


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
    lo, hi = _thresholds(x, occ, axis if clamp_axis is None else clamp_axis)
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


def widened(kept: Array, format: FloatFormat | None) -> Array:
    """Undoes ``_keep``: bfloat16, or the dtype that a wider format is kept in."""
    if kept.dtype == jnp.uint8:
        return lax.bitcast_convert_type(kept, _storage(format)).astype(jnp.bfloat16)
    return kept


def activation_format(recipe: Recipe) -> FloatFormat | None:
    """The format that holds the values of a quantized activation, outlier entries included; None is float32."""
    if recipe.outliers is not None and recipe.outliers.compensation == "residual":
        return recipe.outliers.residual_format
    return None if recipe.activation_spec is None else recipe.activation_spec.format


def operand_of(
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


def quantized_operand(x: Array, spec: QuantSpec, axis: tuple[int, ...], key: Key | None) -> Operand:
    scales = find_scales(x, spec, axis)
    return operand_of(grid_values(x, scales, spec, axis, key), scales, spec, axis, spec.format)


def reshard(x: Array, entries: list[Any], like: NamedSharding) -> Array:
    """``x`` split over these axes of the mesh of ``like``; itself if it is, so that a scan need not keep it twice."""
    own, whole = explicit_sharding(x), NamedSharding(like.mesh, PartitionSpec(*entries))
    if own is not None and tuple(own.spec) == tuple(whole.spec):
        return x
    if x.dtype.itemsize > 2:
        return jax.sharding.reshard(x, whole)
    # As bits, since XLA's CPU code widens collectives of bfloat16 and FP8.
    bits = jax.sharding.reshard(lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}"), whole)
    return lax.bitcast_convert_type(bits, x.dtype)


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
    operand = operand_of(values, scales, spec, axis, activation_format(recipe))
    kept = kept_scale = None
    if isinstance(recipe.wgrad.lhs, Reuse):
        kept = _keep(values, activation_format(recipe), LHS_NAME)
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
    operand = operand_of(values, scales, spec, axis, spec.format)
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
        return reshard(x, [None if size == 1 else entry for size, entry in zip(x.shape, spec, strict=True)], sharding)

    return jax.tree.map(split, quantized)
