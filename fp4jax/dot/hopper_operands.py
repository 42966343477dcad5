"""What the products of the "hopper" backend take: operands in FP8, quantized by kernels where one device holds a block.

On a mesh each device quantizes its part. A scale that devices share is found by the reference's own sums (``PerTensor``
and ``PerVector`` with ``axis_name``), which XLA compiles; so is what is quantized under it.
"""

import dataclasses
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from fp4jax import outliers
from fp4jax.blocks import explicit_sharding
from fp4jax.dot import split, xla
from fp4jax.exact import as_float32, multiply
from fp4jax.outliers import OCC
from fp4jax.quantize import QuantSpec, find_scales, grid_values
from fp4jax.recipe import Recipe
from fp4jax.rounding import keys_of_examples
from fp4jax.scaling import PerTensor, PerVector, Scales
from fp4jax.typing import Array, Key

if TYPE_CHECKING:
    from fp4jax import kernels

# What fprop reads, for remat policies that would rather keep it than quantize again where fprop is recomputed. What
# backward reads has the names of the xla backend.
FPROP_LHS_NAME, FPROP_RHS_NAME = "fp4jax_fprop_lhs", "fp4jax_fprop_rhs"


class Operand(NamedTuple):
    """A quantized operand, written both ways.

    Attributes:
        values: FP8, [m, k] of the activation or [k, n] of the weight.
        transposed: FP8, [k, m] or [n, k].
        scale: float32 [m], [n] or [].
        reciprocal: of a weight with an estimator, r of every scale, 1 along the contraction; else None.
    """

    values: Array
    transposed: Array
    scale: Array
    reciprocal: Array | None


@jax.named_scope("quantile")
def thresholds(x: Array, occ: OCC, names: split.Names) -> tuple[Array, Array]:
    """lo and hi as the xla backend has them, float32 scalars; over the mesh axes that split x."""
    from fp4jax import kernels

    n = math.prod(x.shape) * math.prod(lax.axis_size(name) for name in names)
    if occ.quantile == "exact" and n:
        ranks = int((1 - occ.alpha) * n), min(int(occ.alpha * n), n - 1)
        lo, hi = (as_float32(v) for v in kernels.order_statistics(x, ranks, names=names))
    else:
        lo, hi = outliers.thresholds(x, dataclasses.replace(occ, axis_name=names or None), (-1,))
    return lo.reshape(()), hi.reshape(())


@jax.custom_batching.custom_vmap
def _own_keys(keys: Key, like: Array) -> Key:
    """Keys [*lead] for matrices ``like`` [*lead, m, n]; under ``vmap`` each matrix draws noise of its own."""
    del like
    return keys


@_own_keys.def_vmap
def _own_keys_vmap(axis_size, in_batched, keys, like):
    return _own_keys(*keys_of_examples(axis_size, in_batched, keys, like)), True


def key_of(key: Key | None, spec: QuantSpec, place: int, x: Array) -> Key | None:
    """The key of the quantizer of ``x`` at ``place``, such as ``xla.FPROP_LHS``; None for one without noise."""
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
    bounds = None if occ is None else thresholds(x, occ, rows)
    return kernels.quantize_rows(x, spec, thresholds=bounds, occ=occ, transpose=True, key=key)


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


def specs_of(rows: split.Names, cols: split.Names, scale: split.Names | None) -> Any:
    """How a quantized matrix is split; ``scale`` is None for one of the whole tensor."""
    from fp4jax import kernels

    specs: list[Any] = [split.spec(rows, cols), split.spec(cols, rows), split.spec(*() if scale is None else (scale,))]
    return kernels.Quantized(*specs)


@jax.named_scope("quantize")
def quantize_lhs(lhs: Array, recipe: Recipe, axis: tuple[int, ...], key: Key | None) -> Operand:
    """The activation as values [m, k], the same transposed, and scales [m] or []."""
    spec = recipe.activation_spec
    assert spec is not None  # as unsupported checks
    layout, free = split.Layout.of(explicit_sharding(lhs), lhs.ndim), lhs.ndim - len(axis)
    rows, cols = layout.names(*range(free)), layout.names(*range(free, lhs.ndim))

    def local(x):
        flat = x.reshape(math.prod(x.shape[:free]), math.prod(x.shape[free:]))
        return _activation(flat, spec, recipe.outliers, rows, cols, key_of(key, spec, xla.FPROP_LHS, flat))

    specs = specs_of(rows, cols, None if isinstance(spec.granularity, PerTensor) else rows)
    q = split.run(layout.mesh, local, layout.spec, specs)(lhs)
    return Operand(
        values=checkpoint_name(q.values, FPROP_LHS_NAME),
        transposed=checkpoint_name(q.transposed, xla.LHS_NAME),
        scale=checkpoint_name(q.scale, xla.LHS_NAME),
        reciprocal=None,
    )


@jax.named_scope("quantize")
def quantize_rhs(rhs: Array, recipe: Recipe, axis: tuple[int, ...], key: Key | None) -> Operand:
    """The weight as values [k, n], the same transposed, scales [n] or [], and what its estimator needs."""
    spec = recipe.weight_spec
    assert spec is not None
    layout, count = split.Layout.of(explicit_sharding(rhs), rhs.ndim), len(axis)
    rows, cols = layout.names(*range(count)), layout.names(*range(count, rhs.ndim))

    def local(w):
        flat = w.reshape(math.prod(w.shape[:count]), math.prod(w.shape[count:]))
        return _weight(flat, spec, rows, cols, key_of(key, spec, xla.FPROP_RHS, flat))

    specs = specs_of(rows, cols, None if isinstance(spec.granularity, PerTensor) else cols)
    q = split.run(layout.mesh, local, layout.spec, specs)(rhs)
    reciprocal = None
    if not recipe.weight_estimator.is_identity:
        reciprocal = checkpoint_name(find_scales(as_float32(rhs), spec, axis).reciprocal, xla.RHS_NAME)
    return Operand(
        values=checkpoint_name(q.values, xla.RHS_NAME),
        transposed=checkpoint_name(q.transposed, FPROP_RHS_NAME),
        scale=checkpoint_name(q.scale, xla.RHS_NAME),
        reciprocal=reciprocal,
    )


@jax.named_scope("quantize")
def gradient(
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
