"""The "hopper" backend: products on the FP8 tensor cores of sm_90, with fused quantizers (``fp4jax.kernels``).

Grid values of at most 8 bits are held in FP8. Each operand is quantized once and written the way its products read it:
FP8 tensor cores want both operands along the contraction, so the activation [m, k] and the weight [k, n] are also
written transposed, and those copies are what backward keeps, a byte a value.
"""

import dataclasses
import functools
import math
import sys
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from fp4jax import outliers
from fp4jax.dot.call import Call
from fp4jax.dot.xla import LHS_NAME, RHS_NAME
from fp4jax.estimators import gradient_factor
from fp4jax.exact import as_float32
from fp4jax.formats import E4M3
from fp4jax.outliers import OCC
from fp4jax.quantize import QuantSpec
from fp4jax.recipe import Recipe, Reuse
from fp4jax.scaling import PerTensor, manual_axes
from fp4jax.typing import Array, Key

if TYPE_CHECKING:
    from fp4jax import kernels

# Pallas takes a second to import, so functions import the kernels when they are called.


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["lhs_transposed", "lhs_scale", "rhs_values", "rhs_scale", "rhs"],
    meta_fields=["contracted", "rhs_free"],
)
@dataclasses.dataclass(frozen=True)
class Residuals:
    """What backward needs: values in FP8, a byte each.

    Attributes:
        lhs_transposed: [k, m], under lhs_scale [m] or [].
        rhs_values: [k, n], under rhs_scale [n] or [].
        rhs: the weight, where its estimator needs it, else None.
        contracted, rhs_free: sizes of the axes that k and n stand for.
    """

    lhs_transposed: Array
    lhs_scale: Array
    rhs_values: Array
    rhs_scale: Array
    rhs: Array | None
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
    if call.lhs_sharding or call.rhs_sharding or call.out_sharding or not _one_device():
        reasons.append("its kernels run on one device")
    if geometry.lhs_batch:
        reasons.append("batch axes")
    if geometry.lhs_contract != tuple(range(len(geometry.lhs_free), geometry.lhs_ndim)):
        reasons.append("lhs is not contracted along its last axes")
    if geometry.rhs_contract != tuple(range(len(geometry.lhs_contract))):
        reasons.append("rhs is not contracted along its first axes, in the order of lhs")
    operands = {"fprop.lhs": recipe.fprop.lhs, "fprop.rhs": recipe.fprop.rhs, "dgrad.lhs": recipe.dgrad.lhs,
                "wgrad.rhs": recipe.wgrad.rhs}  # fmt: skip
    for name, spec in operands.items():
        if not isinstance(spec, QuantSpec):
            reasons.append(f"{name}={spec!r}")
        else:
            reasons += [f"{name}: {why}" for why in kernels.quantizer.unsupported(spec)]
            if name in ("dgrad.lhs", "wgrad.rhs") and not isinstance(spec.granularity, PerTensor):
                reasons.append(f"{name}: granularity {spec.granularity!r}")
    if recipe.dgrad.lhs != recipe.wgrad.rhs:
        reasons.append("dgrad and wgrad quantize the gradient differently")
    if not isinstance(recipe.dgrad.rhs, Reuse) or not isinstance(recipe.wgrad.lhs, Reuse):
        reasons.append("a backward product that does not reuse the operand of fprop")
    if not recipe.activation_estimator.is_identity:
        reasons.append(f"activation_estimator={recipe.activation_estimator!r}")
    return reasons + _unsupported_outliers(recipe.outliers, recipe.fprop.lhs)


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


# --- quantizing --------------------------------------------------------------------------------------------------


def _thresholds(x: Array, occ: OCC) -> tuple[Array, Array]:
    """lo and hi as the xla backend has them, float32 scalars."""
    from fp4jax import kernels

    n = math.prod(x.shape)
    if occ.quantile == "exact" and n and x.dtype in kernels.quantile.DTYPES and not manual_axes(x):
        ranks = int((1 - occ.alpha) * n), min(int(occ.alpha * n), n - 1)
        lo, hi = (as_float32(v) for v in kernels.order_statistics(x, ranks))
        return lo, hi
    lo, hi = outliers.thresholds(x, occ, (-1,))
    return lo.reshape(()), hi.reshape(())


def quantize_lhs(lhs: Array, recipe: Recipe, axis: tuple[int, ...], key: Key | None) -> "kernels.Quantized":
    """The activation as values [m, k], the same transposed, and scales [m] or []."""
    from fp4jax import kernels

    del key  # no quantizer of this backend draws noise
    spec, occ = recipe.activation_spec, recipe.outliers
    assert spec is not None  # as unsupported checks
    count = len(axis)
    x = lhs.reshape(math.prod(lhs.shape[: lhs.ndim - count]), math.prod(lhs.shape[lhs.ndim - count :]))
    if isinstance(spec.granularity, PerTensor):
        (q,) = kernels.quantize_tiles(x, spec, (kernels.Wanted(None, transposed=True),))
    else:
        thresholds = None if occ is None else _thresholds(x, occ)
        q = kernels.quantize_rows(x, spec, thresholds=thresholds, occ=occ, transpose=True)
    return q._replace(transposed=checkpoint_name(q.transposed, LHS_NAME), scale=checkpoint_name(q.scale, LHS_NAME))


def quantize_rhs(rhs: Array, recipe: Recipe, axis: tuple[int, ...], key: Key | None) -> "kernels.Quantized":
    """The weight as values [k, n], the same transposed, and scales [n] or []."""
    from fp4jax import kernels

    del key
    spec, count = recipe.weight_spec, len(axis)
    assert spec is not None
    w = rhs.reshape(math.prod(rhs.shape[:count]), math.prod(rhs.shape[count:]))
    by = None if isinstance(spec.granularity, PerTensor) else 1
    (q,) = kernels.quantize_tiles(w, spec, (kernels.Wanted(by, transposed=True),))
    return q._replace(values=checkpoint_name(q.values, RHS_NAME), scale=checkpoint_name(q.scale, RHS_NAME))


def _gradients(residuals: Residuals, g: Array, call: Call) -> "tuple[kernels.Quantized, kernels.Quantized]":
    """Q(dY · sw) [m, n] and Q(dY · sx) transposed [n, m], from one reading of dY after that for the maxima.

    dgrad and wgrad both ask; the compiler runs the equal kernels once.
    """
    from fp4jax import kernels

    m, n = residuals.lhs_transposed.shape[1], residuals.rhs_values.shape[1]
    folds = jnp.broadcast_to(residuals.rhs_scale, (n,)), jnp.broadcast_to(residuals.lhs_scale, (m,))
    wanted = (
        kernels.Wanted(None, folds[0], 1),
        kernels.Wanted(None, folds[1], 0, plain=False, transposed=True),
    )
    spec = call.recipe.dgrad.lhs
    assert isinstance(spec, QuantSpec)  # as unsupported checks
    first, second = kernels.quantize_tiles(g.reshape(m, n), spec, wanted)
    return first, second


# --- products ----------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def _marked(name: str, out_dtype: np.dtype, interpreting: bool):
    """``scaled_matmul`` as an inner jit of the given name, one for each way to run it."""
    del interpreting
    from fp4jax import kernels

    def product(lhs, rhs, lhs_scale, rhs_scale):
        return kernels.scaled_matmul(lhs, rhs, lhs_scale, rhs_scale, out_dtype=out_dtype)

    product.__name__ = product.__qualname__ = name
    return jax.jit(product)


def _multiply(call: Call, product: str, lhs: Any, rhs: Any, lhs_scale: Array, rhs_scale: Array, dtype) -> Array:
    from fp4jax import kernels

    held = dtype if dtype in kernels.gemm.OUT_DTYPES else np.dtype(np.float32)
    name = call.mark(product, (lhs.shape[0], rhs.shape[0], lhs.shape[1]))
    return _marked(name, held, kernels.interpreting())(lhs, rhs, lhs_scale, rhs_scale).astype(dtype)


def fprop(
    lhs: Array, rhs: Array, x: "kernels.Quantized", w: "kernels.Quantized", key: Key | None, call: Call
) -> tuple[Array, Residuals]:
    """Y, and what backward needs."""
    del key
    count = len(call.geometry.lhs_contract)
    free, contracted, rhs_free = lhs.shape[: lhs.ndim - count], rhs.shape[:count], rhs.shape[count:]
    out = _multiply(call, "fprop", x.values, w.transposed, x.scale, w.scale, call.out_dtype)
    assert x.transposed is not None
    assert w.values is not None
    residuals = Residuals(
        lhs_transposed=x.transposed,
        lhs_scale=x.scale,
        rhs_values=w.values,
        rhs_scale=w.scale,
        rhs=None if call.recipe.weight_estimator.is_identity else rhs,
        contracted=contracted,
        rhs_free=rhs_free,
    )
    return out.reshape(*free, *rhs_free), residuals


def dgrad(residuals: Residuals, g: Array, call: Call) -> Array:
    """dLhs = Q(dY · sw) · Wq · s1, in the dtype of lhs."""
    q, _ = _gradients(residuals, g, call)
    one = jnp.float32(1)
    out = _multiply(call, "dgrad", q.values, residuals.rhs_values, q.scale, one, call.lhs_dtype)
    return out.reshape(*g.shape[: g.ndim - len(residuals.rhs_free)], *residuals.contracted)


def wgrad(residuals: Residuals, g: Array, call: Call) -> Array:
    """dRhs = Xqᵀ · Q(dY · sx) · s2 ⊙ f'(W · r): float32 until the cast to the dtype of rhs."""
    _, q = _gradients(residuals, g, call)
    one = jnp.float32(1)
    out = _multiply(call, "wgrad", residuals.lhs_transposed, q.transposed, one, q.scale, np.dtype(np.float32))
    out = out.reshape(*residuals.contracted, *residuals.rhs_free)
    if residuals.rhs is not None:
        spec, axis = call.recipe.weight_spec, call.rhs_axis
        assert spec is not None
        out = out * gradient_factor(residuals.rhs, spec, axis, call.recipe.weight_estimator)
    return out.astype(call.rhs_dtype)
