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
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding

from fp4jax import outliers
from fp4jax.blocks import explicit_sharding
from fp4jax.dot import split, xla
from fp4jax.dot.call import Call
from fp4jax.dot.xla import LHS_NAME, RHS_NAME
from fp4jax.estimators import gradient_factor
from fp4jax.exact import as_float32, multiply
from fp4jax.formats import E4M3
from fp4jax.outliers import OCC
from fp4jax.quantize import QuantSpec, find_scales, grid_values
from fp4jax.recipe import Recipe, Reuse
from fp4jax.scaling import PerTensor, PerVector, Scales
from fp4jax.typing import Array, Key

if TYPE_CHECKING:
    from fp4jax import kernels

# Pallas takes a second to import, so functions import the kernels when they are called.


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["lhs_transposed", "lhs_scale", "rhs_values", "rhs_scale", "rhs", "key"],
    meta_fields=["contracted", "rhs_free"],
)
@dataclasses.dataclass(frozen=True)
class Residuals:
    """What backward needs: values in FP8, a byte each.

    Attributes:
        lhs_transposed: [k, m], under lhs_scale [m] or [].
        rhs_values: [k, n], under rhs_scale [n] or [].
        rhs: the weight, where its estimator needs it, else None.
        key: for stochastic gradients, or None.
        contracted, rhs_free: sizes of the axes that k and n stand for.
    """

    lhs_transposed: Array
    lhs_scale: Array
    rhs_values: Array
    rhs_scale: Array
    rhs: Array | None
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


# --- quantizing --------------------------------------------------------------------------------------------------


def _thresholds(x: Array, occ: OCC, names: split.Names) -> tuple[Array, Array]:
    """lo and hi as the xla backend has them, float32 scalars; over the mesh axes that split x."""
    from fp4jax import kernels

    n = math.prod(x.shape) * math.prod(lax.axis_size(name) for name in names)
    if occ.quantile == "exact" and n:
        ranks = int((1 - occ.alpha) * n), min(int(occ.alpha * n), n - 1)
        lo, hi = (as_float32(v) for v in kernels.order_statistics(x, ranks, names=names))
        return lo, hi
    lo, hi = outliers.thresholds(x, dataclasses.replace(occ, axis_name=names or None), (-1,))
    return lo.reshape(()), hi.reshape(())


@jax.custom_batching.custom_vmap
def _own_keys(keys: Key, like: Array) -> Key:
    """Keys [*lead] for matrices ``like`` [*lead, m, n]; under ``vmap`` each matrix draws noise of its own."""
    del like
    return keys


@_own_keys.def_vmap
def _own_keys_vmap(axis_size, in_batched, keys, like):
    # As fp4jax.rounding.noise has it, so that the noise is the same.
    keys_batched, like_batched = in_batched
    if not keys_batched:
        index = jnp.arange(axis_size, dtype=jnp.uint32).reshape(-1, *[1] * keys.ndim)
        fold = jax.random.fold_in
        for _ in range(keys.ndim + 1):
            fold = jax.vmap(fold)
        keys = fold(jnp.broadcast_to(keys, (axis_size, *keys.shape)), jnp.broadcast_to(index, (axis_size, *keys.shape)))
    if not like_batched:
        like = jnp.broadcast_to(like, (axis_size, *like.shape))
    return _own_keys(keys, like), True


def _key(key: Key | None, spec: QuantSpec, place: int, x: Array) -> Key | None:
    key = xla.subkey(key, spec, place)
    return None if key is None else _own_keys(key, x)


def _named(spec: QuantSpec, names: split.Names) -> QuantSpec:
    """``spec`` with maxima over these mesh axes too."""
    kind = PerTensor if isinstance(spec.granularity, PerTensor) else PerVector
    return dataclasses.replace(spec, granularity=kind(axis_name=names))


def _by_reference(values: Array, scales: Scales, spec: QuantSpec) -> "kernels.Quantized":
    """float32 values and scales of the reference, as the kernels write them."""
    from fp4jax import kernels

    held = jnp.where(jnp.isnan(values), jnp.float32(0), values).astype(kernels.quantizer.storage(spec.format))
    shape = () if isinstance(spec.granularity, PerTensor) else (-1,)
    return kernels.Quantized(held, held.T, spec.scale.decode(scales.scale, scales.outer_scale).reshape(shape))


def _activation(
    x: Array, spec: QuantSpec, occ: OCC | None, rows: split.Names, cols: split.Names, key: Key | None
) -> Any:
    """A device's part of an activation [m, k] that is split over mesh axes ``rows`` and ``cols``."""
    from fp4jax import kernels

    if cols or (rows and isinstance(spec.granularity, PerTensor)):  # its scales are shared: the reference's sums do it
        spec = _named(spec, rows + cols if isinstance(spec.granularity, PerTensor) else cols)
        occ = None if occ is None else dataclasses.replace(occ, axis_name=rows + cols)
        values, scales, _ = xla.quantize_activation(x, spec, (-1,), occ, None)
        return _by_reference(values, scales, spec)
    if isinstance(spec.granularity, PerTensor):
        return kernels.quantize_tiles(x, spec, (kernels.Wanted(None, transposed=True, key=key),))[0]
    thresholds = None if occ is None else _thresholds(x, occ, rows)
    return kernels.quantize_rows(x, spec, thresholds=thresholds, occ=occ, transpose=True, key=key)


def _weight(w: Array, spec: QuantSpec, rows: split.Names, cols: split.Names, key: Key | None) -> Any:
    """A device's part of a weight [k, n] that is split over mesh axes ``rows`` and ``cols``."""
    from fp4jax import kernels

    per_tensor = isinstance(spec.granularity, PerTensor)
    if rows or (cols and per_tensor):
        spec = _named(spec, rows + cols if per_tensor else rows)
        value = as_float32(w)
        scales = find_scales(value, spec, (-2,))
        return _by_reference(grid_values(value, scales, spec, (-2,), None), scales, spec)
    wanted = kernels.Wanted(None if per_tensor else 1, transposed=True, key=key)
    return kernels.quantize_tiles(w, spec, (wanted,))[0]


def _quantized_specs(rows: split.Names, cols: split.Names, scale: split.Names | None) -> Any:
    from fp4jax import kernels

    specs: list[Any] = [split.spec(rows, cols), split.spec(cols, rows), split.spec(*() if scale is None else (scale,))]
    return kernels.Quantized(*specs)


def quantize_lhs(lhs: Array, recipe: Recipe, axis: tuple[int, ...], key: Key | None) -> "kernels.Quantized":
    """The activation as values [m, k], the same transposed, and scales [m] or []."""
    spec = recipe.activation_spec
    assert spec is not None  # as unsupported checks
    layout, free = split.Layout.of(explicit_sharding(lhs), lhs.ndim), lhs.ndim - len(axis)
    rows, cols = layout.names(*range(free)), layout.names(*range(free, lhs.ndim))

    def local(x):
        flat = x.reshape(math.prod(x.shape[:free]), math.prod(x.shape[free:]))
        return _activation(flat, spec, recipe.outliers, rows, cols, _key(key, spec, xla.FPROP_LHS, flat))

    specs = _quantized_specs(rows, cols, None if isinstance(spec.granularity, PerTensor) else rows)
    q = split.run(layout.mesh, local, layout.spec, specs)(lhs)
    return q._replace(transposed=checkpoint_name(q.transposed, LHS_NAME), scale=checkpoint_name(q.scale, LHS_NAME))


def quantize_rhs(rhs: Array, recipe: Recipe, axis: tuple[int, ...], key: Key | None) -> "kernels.Quantized":
    """The weight as values [k, n], the same transposed, and scales [n] or []."""
    spec = recipe.weight_spec
    assert spec is not None
    layout, count = split.Layout.of(explicit_sharding(rhs), rhs.ndim), len(axis)
    rows, cols = layout.names(*range(count)), layout.names(*range(count, rhs.ndim))

    def local(w):
        flat = w.reshape(math.prod(w.shape[:count]), math.prod(w.shape[count:]))
        return _weight(flat, spec, rows, cols, _key(key, spec, xla.FPROP_RHS, flat))

    specs = _quantized_specs(rows, cols, None if isinstance(spec.granularity, PerTensor) else cols)
    q = split.run(layout.mesh, local, layout.spec, specs)(rhs)
    return q._replace(values=checkpoint_name(q.values, RHS_NAME), scale=checkpoint_name(q.scale, RHS_NAME))


def _gradients(residuals: Residuals, g: Array, call: Call) -> "tuple[kernels.Quantized, kernels.Quantized]":
    """Q(dY · sw) [m, n] and Q(dY · sx) transposed [n, m], from one reading of dY after that for the maxima.

    dgrad and wgrad both ask; the compiler runs the equal kernels once.
    """
    spec, parts = call.recipe.dgrad.lhs, split.Split.of(call)
    assert isinstance(spec, QuantSpec)  # as unsupported checks
    free = len(call.geometry.lhs_free)
    if parts.mesh is not None:
        g = jax.sharding.reshard(g, NamedSharding(parts.mesh, split.spec(*parts.out)))

    def local(g, lhs_scale, rhs_scale):
        g = g.reshape(math.prod(g.shape[:free]), math.prod(g.shape[free:]))
        keys = [_key(residuals.key, spec, place, g) for place in (xla.DGRAD_LHS, xla.WGRAD_RHS)]
        return _gradient(g, lhs_scale, rhs_scale, spec, parts.m + parts.n, keys)

    scale_specs = [
        split.spec(names) if scale.ndim else split.spec()
        for scale, names in ((residuals.lhs_scale, parts.m), (residuals.rhs_scale, parts.n))
    ]
    plain, transposed = _quantized_specs(parts.m, parts.n, None), _quantized_specs(parts.m, parts.n, None)
    specs = plain._replace(transposed=None), transposed._replace(values=None)
    f = split.run(parts.mesh, local, (split.spec(*parts.out), *scale_specs), specs)
    return f(g, residuals.lhs_scale, residuals.rhs_scale)


def _gradient(
    g: Array, lhs_scale: Array, rhs_scale: Array, spec: QuantSpec, names: split.Names, keys: list[Key | None]
) -> Any:
    """A device's part of both quantized gradients; ``names`` are the mesh axes that split dY."""
    from fp4jax import kernels

    m, n = g.shape
    if names:
        spec, found = _named(spec, names), []
        for fold in (rhs_scale, lhs_scale[:, None] if lhs_scale.ndim else lhs_scale):
            value = multiply(as_float32(g), fold)
            scales = find_scales(value, spec, (-1,))
            found.append(_by_reference(grid_values(value, scales, spec, (-1,), None), scales, spec))
        return found[0]._replace(transposed=None), found[1]._replace(values=None)
    wanted = (
        kernels.Wanted(None, jnp.broadcast_to(rhs_scale, (n,)), 1, key=keys[0]),
        kernels.Wanted(None, jnp.broadcast_to(lhs_scale, (m,)), 0, plain=False, transposed=True, key=keys[1]),
    )
    first, second = kernels.quantize_tiles(g, spec, wanted)
    return first, second


# --- products ----------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def _marked(name: str, parts: split.Parts, dtype: np.dtype, interpreting: bool):
    """A scaled product as an inner jit of the given name, one for each way to run it."""
    del interpreting
    from fp4jax import kernels

    def scaled(lhs, rhs, lhs_scale, rhs_scale, dtype):
        return kernels.scaled_matmul(lhs, rhs, lhs_scale, rhs_scale, out_dtype=dtype)

    def product(lhs, rhs, lhs_scale, rhs_scale):
        return parts.multiply(scaled, lhs, rhs, lhs_scale, rhs_scale, dtype)

    product.__name__ = product.__qualname__ = name
    return jax.jit(product)


def _multiply(
    call: Call, product: str, lhs: Array, rhs: Array, lhs_scale: Array, rhs_scale: Array, dtype, out: Any
) -> Array:
    """(Σk lhs[m, k] rhs[n, k]) · lhs_scale · rhs_scale, split like ``out``."""
    from fp4jax import kernels

    held = dtype if dtype in kernels.gemm.OUT_DTYPES else np.dtype(np.float32)
    name = call.mark(product, (lhs.shape[0], rhs.shape[0], lhs.shape[1]))
    mesh = split.Split.of(call).mesh
    layouts = [split.Layout.of(explicit_sharding(x), 2).entries for x in (lhs, rhs)]
    parts = split.Parts(mesh, layouts[0], layouts[1], out)
    return _marked(name, parts, held, kernels.interpreting())(lhs, rhs, lhs_scale, rhs_scale).astype(dtype)


def fprop(
    lhs: Array, rhs: Array, x: "kernels.Quantized", w: "kernels.Quantized", key: Key | None, call: Call
) -> tuple[Array, Residuals]:
    """Y, and what backward needs."""
    assert x.values is not None
    assert x.transposed is not None
    assert w.values is not None
    assert w.transposed is not None
    count, parts = len(call.geometry.lhs_contract), split.Split.of(call)
    free, contracted, rhs_free = lhs.shape[: lhs.ndim - count], rhs.shape[:count], rhs.shape[count:]
    out = _multiply(call, "fprop", x.values, w.transposed, x.scale, w.scale, call.out_dtype, (parts.m, parts.n))
    out = split.unflatten(out, parts.mesh, parts.out, len(free), (*free, *rhs_free))
    if call.out_sharding is not None and parts.mesh is not None:
        out = jax.sharding.reshard(out, call.out_sharding)
    residuals = Residuals(
        lhs_transposed=x.transposed,
        lhs_scale=x.scale,
        rhs_values=w.values,
        rhs_scale=w.scale,
        rhs=None if call.recipe.weight_estimator.is_identity else rhs,
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
    drhs = _multiply(call, "wgrad", residuals.lhs_transposed, q.transposed, one, q.scale, float32, out)
    shape = (*residuals.contracted, *residuals.rhs_free)
    drhs = split.unflatten(drhs, parts.mesh, parts.rhs, len(residuals.contracted), shape)
    if residuals.rhs is not None:
        assert recipe.weight_spec is not None
        drhs = drhs * gradient_factor(residuals.rhs, recipe.weight_spec, call.rhs_axis, recipe.weight_estimator)
    return drhs.astype(call.rhs_dtype)
