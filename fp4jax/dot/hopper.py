"""The "hopper" backend: products on the FP8 tensor cores of sm_90, with fused quantizers (``fp4jax.kernels``).

Grid values of at most 8 bits are held in FP8. Each operand is quantized once and written the way its products read it:
FP8 tensor cores want both operands along the contraction, so the activation [m, k] and the weight [k, n] are also
written transposed, and those copies are what backward keeps, a byte a value.
"""

import dataclasses
import functools
import sys
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from fp4jax.blocks import explicit_sharding
from fp4jax.dot import hopper_operands as operands
from fp4jax.dot import split
from fp4jax.dot.call import Call
from fp4jax.dot.xla_operands import DGRAD_LHS, WGRAD_RHS
from fp4jax.exact import as_float32, multiply
from fp4jax.formats import E4M3
from fp4jax.outliers import OCC
from fp4jax.quantize import QuantSpec
from fp4jax.recipe import Reuse
from fp4jax.scaling import PerTensor
from fp4jax.typing import Array, Key

if TYPE_CHECKING:
    from fp4jax import kernels

# Pallas takes a second to import, so functions import the kernels when they are called.

quantize_lhs, quantize_rhs = operands.quantize_lhs, operands.quantize_rhs
stored_rhs, reshard_rhs = operands.stored_rhs, operands.reshard_rhs


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["lhs_transposed", "lhs_scale", "rhs_values", "rhs_scale", "rhs", "rhs_reciprocal", "key"],
    meta_fields=["contracted", "rhs_free"],
)
@dataclasses.dataclass(frozen=True)
class Residuals:
    """What backward needs: values in FP8, a byte each.

    Attributes:
        lhs_transposed: [k, m], under lhs_scale [m] or [].
        rhs_values: [k, n], under rhs_scale [n] or [].
        rhs, rhs_reciprocal: the weight and r of its scales, where its estimator needs them, else None.
        key: for stochastic gradients, or None.
        contracted, rhs_free: sizes of the axes that k and n stand for.
    """

    lhs_transposed: Array
    lhs_scale: Array
    rhs_values: Array
    rhs_scale: Array
    rhs: Array | None
    rhs_reciprocal: Array | None
    key: Key | None
    contracted: tuple[int, ...]
    rhs_free: tuple[int, ...]


def _runs_here() -> bool:
    """Whether the device has Hopper's tensor cores, or kernels are interpreted."""
    if jax.default_backend() != "gpu" and "fp4jax.kernels.device" not in sys.modules:  # so nothing can be interpreting
        return False
    from fp4jax import kernels

    return kernels.is_hopper() or kernels.interpreting()


def _one_device() -> bool:
    """Whether no array can be split over devices: there is one, interpreted or only lowered for."""
    from fp4jax import kernels

    mesh = jax.sharding.get_abstract_mesh()
    lowering = mesh.abstract_device is not None and not mesh.axis_names
    return kernels.interpreting() or lowering or jax.device_count() == 1


def unsupported(call: Call) -> list[str]:
    """Reasons why this backend cannot run ``call``; empty if it can."""
    if not _runs_here():
        return ["the device is no H100 or H200"]
    from fp4jax import kernels

    recipe, geometry, reasons = call.recipe, call.geometry, []
    if call.lhs_sharding is None and call.rhs_sharding is None and not _one_device():
        reasons.append("there are several devices and no Explicit mesh (a kernel would gather its operands)")
    batch = len(geometry.lhs_batch)
    if (geometry.lhs_batch, geometry.rhs_batch) != (tuple(range(batch)),) * 2:
        reasons.append("batch axes that are not the first axes of both operands, in the same order")
    if geometry.lhs_contract != tuple(range(batch + len(geometry.lhs_free), geometry.lhs_ndim)):
        reasons.append("lhs is not contracted along its last axes")
    if geometry.rhs_contract != tuple(range(batch, batch + len(geometry.lhs_contract))):
        reasons.append("rhs is not contracted along its first axes (but for batch axes), in the order of lhs")
    if batch and recipe.needs_key:
        reasons.append("stochastic rounding under batch axes (under a vmap it runs)")
    if batch and (call.lhs_sharding is not None or call.rhs_sharding is not None):
        reasons.append("batch axes on a mesh")
    for name in ("fprop.lhs", "fprop.rhs", "dgrad.lhs", "wgrad.rhs"):
        spec = recipe.specs[name]
        if not isinstance(spec, QuantSpec):
            reasons.append(f"{name}={spec!r}")
        else:
            reasons += [f"{name}: {why}" for why in kernels.quantizer.unsupported(spec, keyed=True)]
            if spec.granularity.axis_name is not None:
                reasons.append(f"{name}: granularity {spec.granularity!r}")
            if name in ("dgrad.lhs", "wgrad.rhs") and not isinstance(spec.granularity, PerTensor):
                reasons.append(f"{name}: granularity {spec.granularity!r}")
    if recipe.dgrad.lhs != recipe.wgrad.rhs:
        reasons.append("dgrad and wgrad quantize the gradient differently")
    if not isinstance(recipe.dgrad.rhs, Reuse) or not isinstance(recipe.wgrad.lhs, Reuse):
        reasons.append("a backward product that does not reuse the operand of fprop")
    if not recipe.activation_estimator.is_identity:
        reasons.append(f"activation_estimator={recipe.activation_estimator!r}")
    if call.lhs_sharding is not None or call.rhs_sharding is not None:  # these two depend on who holds what
        if recipe.needs_key:
            reasons.append("stochastic rounding on a mesh")
        if recipe.outliers is not None and recipe.outliers.quantile == "sampled":
            reasons.append("a sampled quantile on a mesh")
    reasons += _unsupported_outliers(recipe.outliers, recipe.fprop.lhs)
    return reasons or split.unsupported(call)  # which takes axes in order for granted


def _unsupported_outliers(occ: OCC | None, spec) -> list[str]:
    if occ is None:
        return []
    reasons = []
    if occ.scope != "tensor" or occ.compensation == "sparse" or occ.axis_name is not None:
        reasons.append(f"outliers={occ}")
    if occ.compensation == "residual" and occ.residual_format != E4M3:
        reasons.append(f"residual_format={occ.residual_format!r}")
    if isinstance(spec, QuantSpec) and isinstance(spec.granularity, PerTensor):
        reasons.append("outliers under one scale a tensor")
    return reasons


# --- products ----------------------------------------------------------------------------------------------------


def _gradients(residuals: Residuals, g: Array, call: Call) -> "tuple[kernels.Quantized, kernels.Quantized]":
    """Q(dY · sw) [m, n] and Q(dY · sx) transposed [n, m], from one reading of dY after that for the maxima.

    Under batch axes they have an axis b in front, as all operands do. dgrad and wgrad both ask; the compiler runs the
    equal kernels once.
    """
    spec, parts = call.recipe.dgrad.lhs, split.Split.of(call)
    assert isinstance(spec, QuantSpec)  # as unsupported checks
    batch = len(call.geometry.lhs_batch)
    free = batch + len(call.geometry.lhs_free)
    if parts.mesh is not None:
        g = jax.sharding.reshard(g, NamedSharding(parts.mesh, split.spec(*parts.out)))

    def local(g, lhs_scale, rhs_scale):
        g = operands.matrices(g, batch, free)
        keys = [
            operands.key_of(residuals.key, spec, place, g, folded)
            for place, folded in ((DGRAD_LHS, rhs_scale), (WGRAD_RHS, lhs_scale))
        ]
        return operands.gradient(g, lhs_scale, rhs_scale, spec, parts.m + parts.n, keys)

    scale_specs = [
        split.spec(names) if scale.ndim else split.spec()
        for scale, names in ((residuals.lhs_scale, parts.m), (residuals.rhs_scale, parts.n))
    ]
    plain, transposed = operands.specs_of(parts.m, parts.n, None), operands.specs_of(parts.m, parts.n, None)
    specs = plain._replace(transposed=None), transposed._replace(values=None)
    f = split.run(parts.mesh, local, (split.spec(*parts.out), *scale_specs), specs)
    return f(g, residuals.lhs_scale, residuals.rhs_scale)


@functools.lru_cache(maxsize=4096)
def _marked(name: str, parts: split.Parts, dtype: np.dtype, interpreting: bool):
    """A scaled product as an inner jit of the given name, one for each way to run it."""
    del interpreting
    from fp4jax import kernels

    def product(lhs, rhs, lhs_scale, rhs_scale, factor):
        def scaled(lhs, rhs, lhs_scale, rhs_scale, dtype):
            return kernels.scaled_matmul(lhs, rhs, lhs_scale, rhs_scale, out_dtype=dtype, factor=factor)

        return parts.multiply(scaled, lhs, rhs, lhs_scale, rhs_scale, dtype)

    product.__name__ = product.__qualname__ = name
    return jax.jit(product)


def _multiply(
    call: Call,
    product: str,
    lhs: Array,
    rhs: Array,
    lhs_scale: Array,
    rhs_scale: Array,
    dtype,
    out: Any,
    factor: "kernels.Factor | None" = None,
) -> Array:
    """(Σk lhs[m, k] rhs[n, k]) · lhs_scale · rhs_scale, split like ``out``; without a mesh also times ``factor``."""
    from fp4jax import kernels

    held = dtype if dtype in kernels.gemm.OUT_DTYPES else np.dtype(np.float32)
    name = call.mark(product, (lhs.shape[-2], rhs.shape[-2], lhs.shape[-1]))
    mesh = split.Split.of(call).mesh
    layouts = [split.Layout.of(explicit_sharding(x), x.ndim).entries for x in (lhs, rhs)]
    parts = split.Parts(mesh, layouts[0], layouts[1], out)
    run = _marked(name, parts, held, kernels.interpreting())
    return run(lhs, rhs, lhs_scale, rhs_scale, factor).astype(dtype)


def fprop(
    lhs: Array, rhs: Array, x: operands.Operand, w: operands.Operand, key: Key | None, call: Call
) -> tuple[Array, Residuals]:
    """Y, and what backward needs."""
    batch, count, parts = len(call.geometry.lhs_batch), len(call.geometry.lhs_contract), split.Split.of(call)
    free, contracted = lhs.shape[: lhs.ndim - count], rhs.shape[batch : batch + count]
    rhs_free = rhs.shape[batch + count :]
    if batch and x.values.ndim == 2:
        raise ValueError("lhs was prepared for products without batch axes, and this one has some; pass the array")
    out = _multiply(call, "fprop", x.values, w.transposed, x.scale, w.scale, call.out_dtype, (parts.m, parts.n))
    # Where a scan keeps the result for backward, XLA would let the product write it there, and run the product once
    # more for all who read it now.
    out = lax.optimization_barrier(out)
    out = split.unflatten(out, parts.mesh, parts.out, len(free), (*free, *rhs_free))
    if call.out_sharding is not None and parts.mesh is not None:
        out = jax.sharding.reshard(out, call.out_sharding)
    residuals = Residuals(
        lhs_transposed=x.transposed,
        lhs_scale=x.scale,
        rhs_values=w.values,
        rhs_scale=w.scale,
        rhs=None if call.recipe.weight_estimator.is_identity else rhs,
        rhs_reciprocal=w.reciprocal,
        key=key,
        contracted=contracted,
        rhs_free=rhs_free,
    )
    return out, residuals


def dgrad(residuals: Residuals, g: Array, call: Call) -> Array:
    """dLhs = Q(dY · sw) · Wq · s1, in the dtype of lhs."""
    q, _ = _gradients(residuals, g, call)
    assert q.values is not None
    parts, one = split.Split.of(call), jnp.float32(1)
    out = (parts.m, parts.lhs_k)
    dlhs = _multiply(call, "dgrad", q.values, residuals.rhs_values, q.scale, one, call.lhs_dtype, out)
    free = g.shape[: g.ndim - len(residuals.rhs_free)]
    return split.unflatten(dlhs, parts.mesh, parts.lhs, len(free), (*free, *residuals.contracted))


def wgrad(residuals: Residuals, g: Array, call: Call) -> Array:
    """dRhs = Xqᵀ · Q(dY · sx) · s2 ⊙ f'(W · r): float32 until the cast to the dtype of rhs."""
    _, q = _gradients(residuals, g, call)
    assert q.transposed is not None
    parts, one, recipe = split.Split.of(call), jnp.float32(1), call.recipe
    out, float32 = (parts.rhs_k, parts.n), np.dtype(np.float32)
    # On a mesh the product is summed over devices first.
    fused = residuals.rhs is not None and parts.mesh is None and recipe.weight_estimator.has_kernel_form
    factor = _factor(residuals, call) if fused else None
    drhs = _multiply(call, "wgrad", residuals.lhs_transposed, q.transposed, one, q.scale, float32, out, factor)
    shape = (*g.shape[: len(call.geometry.lhs_batch)], *residuals.contracted, *residuals.rhs_free)
    drhs = split.unflatten(drhs, parts.mesh, parts.rhs, len(residuals.contracted), shape)
    if residuals.rhs is not None and not fused:
        assert recipe.weight_spec is not None
        assert residuals.rhs_reciprocal is not None
        u = multiply(as_float32(residuals.rhs), residuals.rhs_reciprocal)
        drhs = drhs * recipe.weight_estimator.factor(u, recipe.weight_spec.format)
    return drhs.astype(call.rhs_dtype)


def _factor(residuals: Residuals, call: Call) -> "kernels.Factor":
    """f'(W · r) for the product's kernel, which takes W as [*b, k, n] and r as [*b, n] or a scalar."""
    from fp4jax import kernels

    weight, reciprocal, spec = residuals.rhs, residuals.rhs_reciprocal, call.recipe.weight_spec
    assert spec is not None
    assert weight is not None
    assert reciprocal is not None
    batch = len(call.geometry.rhs_batch)
    weight = operands.matrices(weight, batch, batch + len(residuals.contracted))
    per_tensor = isinstance(spec.granularity, PerTensor)
    reciprocal = reciprocal.reshape(() if per_tensor else (*weight.shape[:-2], weight.shape[-1]))
    return kernels.Factor(weight, reciprocal, call.recipe.weight_estimator, spec.format)
