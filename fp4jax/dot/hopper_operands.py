"""What the products of the "hopper" backend take: operands in FP8, quantized by kernels.

On a mesh each device quantizes its part. Where devices share a scale they agree on its maximum between the two readings
of the kernels: four bytes a scale are exchanged, and no values.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding

from fp4jax import outliers
from fp4jax.blocks import explicit_sharding
from fp4jax.dot import split, xla_operands
from fp4jax.exact import as_float32
from fp4jax.outliers import OCC
from fp4jax.quantize import QuantSpec
from fp4jax.recipe import Recipe
from fp4jax.rounding import keys_of_examples
from fp4jax.scaling import PerTensor
from fp4jax.typing import Array, Key

if TYPE_CHECKING:
    from fp4jax import kernels

# What fprop reads, for remat policies that would rather keep it than quantize again where fprop is recomputed. What
# backward reads has the names of the xla backend.
FPROP_LHS_NAME, FPROP_RHS_NAME = "fp4jax_fprop_lhs", "fp4jax_fprop_rhs"

BATCH = "fp4jax_batch"  # the axis along which a batch of matrices is mapped, over which scales of a tensor agree too


class Operand(NamedTuple):
    """A quantized operand, written both ways; under batch axes each array but a scale [] has one axis b in front.

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
def thresholds(
    x: Array, occ: OCC, names: split.Names
) -> tuple[tuple[Array, Array], "kernels.quantile.RowExtremes | None"]:
    """lo and hi of a matrix as the xla backend has them, float32 scalars, over the mesh axes that split x.

    And the extremes of its rows, where counting found them.
    """
    from fp4jax import kernels

    n = math.prod(x.shape) * math.prod(lax.axis_size(name) for name in names)
    extremes = None
    if occ.quantile == "exact" and n:
        ranks = outliers.ranks(occ.alpha, n)
        found, extremes = kernels.quantile.order_statistics_and_extremes(x, ranks, names=names)
        lo, hi = (as_float32(v) for v in found)
    else:
        lo, hi = outliers.thresholds(x, dataclasses.replace(occ, axis_name=names or None), (-1,))
    return (lo.reshape(()), hi.reshape(())), extremes


@jax.custom_batching.custom_vmap
def _own_keys(keys: Key, *arrays: Array) -> Key:
    """Keys [*lead] for matrices made of ``arrays`` [*lead, ...]; under ``vmap`` each draws noise of its own."""
    del arrays
    return keys


@_own_keys.def_vmap
def _own_keys_vmap(axis_size, in_batched, keys, *arrays):
    keys_batched, *batched = in_batched
    found = [keys_of_examples(axis_size, (keys_batched, own), keys, x) for own, x in zip(batched, arrays, strict=True)]
    return _own_keys(found[0][0], *(x for _, x in found)), True


def key_of(key: Key | None, spec: QuantSpec, place: int, *arrays: Array) -> Key | None:
    """The key of the quantizer at ``place``, such as ``FPROP_LHS``, of a matrix made of ``arrays``; None where it draws
    none.
    """
    key = xla_operands.subkey(key, spec, place)
    if key is None:
        return None
    return _own_keys(key if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(key), *arrays)


def matrices(x: Array, batch: int, first: int) -> Array:
    """[m, k], or [b, m, k] where the first axes are those of a batch; axis ``first`` is the first of k."""
    lead = (math.prod(x.shape[:batch]),) if batch else ()
    return x.reshape(*lead, math.prod(x.shape[batch:first]), math.prod(x.shape[first:]))


def _each(f: Callable[..., Any], batch: int, in_axes: Any, out_axes: Any) -> Callable[..., Any]:
    """``f`` on each matrix of a batch."""
    return jax.vmap(f, in_axes, out_axes, axis_name=BATCH) if batch else f


def _axes_of(per_tensor: bool) -> Any:
    """Where the results of a quantizer have the axis of a batch."""
    from fp4jax import kernels

    scale = None if per_tensor else 0
    return kernels.Quantized(*(0, 0, scale, scale))  # pyright: ignore[reportArgumentType]


def _activation(
    x: Array, spec: QuantSpec, occ: OCC | None, rows: split.Names, cols: split.Names, key: Key | None
) -> Any:
    """A device's part of an activation, [m, k] or [b, m, k], that is split over mesh axes ``rows`` and ``cols``."""
    from fp4jax import kernels

    batch, per_tensor = x.ndim - 2, isinstance(spec.granularity, PerTensor)
    names = rows + cols + (BATCH,) * batch
    bounds = extremes = None
    if occ is not None:
        bounds, extremes = thresholds(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), occ, rows + cols)
        extremes = jax.tree.map(lambda vector: vector.reshape(x.shape[:-1]), extremes)

    def quantize(x, extremes):
        if per_tensor:
            return kernels.quantize_tiles(x, spec, (kernels.Wanted(None, transposed=True, key=key, names=names),))[0]
        return kernels.quantize_rows(
            x, spec, thresholds=bounds, occ=occ, transpose=True, key=key, names=cols, extremes=extremes
        )

    return _each(quantize, batch, 0, _axes_of(per_tensor))(x, extremes)


def _weight(w: Array, spec: QuantSpec, rows: split.Names, cols: split.Names, key: Key | None) -> Any:
    """A device's part of a weight, [k, n] or [b, k, n], that is split over mesh axes ``rows`` and ``cols``."""
    from fp4jax import kernels

    batch, per_tensor = w.ndim - 2, isinstance(spec.granularity, PerTensor)
    axis, names = (None, rows + cols + (BATCH,) * batch) if per_tensor else (1, rows)

    def quantize(w):
        return kernels.quantize_tiles(w, spec, (kernels.Wanted(axis, transposed=True, key=key, names=names),))[0]

    return _each(quantize, batch, 0, _axes_of(per_tensor))(w)


def specs_of(rows: split.Names, cols: split.Names, scale: split.Names | None) -> Any:
    """How a quantized matrix is split; ``scale`` is None for one of the whole tensor."""
    from fp4jax import kernels

    specs: list[Any] = [split.spec(rows, cols), split.spec(cols, rows), split.spec(*() if scale is None else (scale,))]
    return kernels.Quantized(*specs)


@jax.named_scope("quantize")
def quantize_lhs(lhs: Array, recipe: Recipe, axis: tuple[int, ...], key: Key | None, batch: int = 0) -> Operand:
    """The activation as values [m, k], the same transposed, and scales [m] or []; its first axes may be a batch."""
    spec = recipe.activation_spec
    assert spec is not None  # as unsupported checks
    layout, free = split.Layout.of(explicit_sharding(lhs), lhs.ndim), lhs.ndim - len(axis)
    rows, cols = layout.names(*range(free)), layout.names(*range(free, lhs.ndim))

    def local(x):
        flat = matrices(x, batch, free)
        q = _activation(flat, spec, recipe.outliers, rows, cols, key_of(key, spec, xla_operands.FPROP_LHS, flat))
        return q._replace(reciprocal=None)

    specs = specs_of(rows, cols, None if isinstance(spec.granularity, PerTensor) else rows)
    q = split.run(layout.mesh, local, layout.spec, specs)(lhs)
    return Operand(
        values=checkpoint_name(q.values, FPROP_LHS_NAME),
        transposed=checkpoint_name(q.transposed, xla_operands.LHS_NAME),
        scale=checkpoint_name(q.scale, xla_operands.LHS_NAME),
        reciprocal=None,
    )


@jax.named_scope("quantize")
def quantize_rhs(rhs: Array, recipe: Recipe, axis: tuple[int, ...], key: Key | None, batch: int = 0) -> Operand:
    """The weight as values [k, n], the same transposed, scales [n] or [], and what its estimator needs; its first axes
    may be a batch.
    """
    spec = recipe.weight_spec
    assert spec is not None
    per_tensor, estimates = isinstance(spec.granularity, PerTensor), not recipe.weight_estimator.is_identity
    layout, free = split.Layout.of(explicit_sharding(rhs), rhs.ndim), batch + len(axis)
    one = [per_tensor or batch <= i < free for i in range(rhs.ndim)]  # axes along which r is the same
    rows, cols = layout.names(*range(batch, free)), layout.names(*range(free, rhs.ndim))

    def local(w):
        flat = matrices(w, batch, free)
        q = _weight(flat, spec, rows, cols, key_of(key, spec, xla_operands.FPROP_RHS, flat))
        if not estimates:
            return q._replace(reciprocal=None), None
        shape = [1 if whole else size for size, whole in zip(w.shape, one, strict=True)]
        return q._replace(reciprocal=None), q.reciprocal.reshape(shape)

    specs = specs_of(rows, cols, None if per_tensor else cols)
    entries = split.spec(*(() if whole else names for names, whole in zip(layout.entries, one, strict=True)))
    q, reciprocal = split.run(layout.mesh, local, layout.spec, (specs, entries if estimates else None))(rhs)
    if reciprocal is not None:
        reciprocal = checkpoint_name(reciprocal, xla_operands.RHS_NAME)
    return Operand(
        values=checkpoint_name(q.values, xla_operands.RHS_NAME),
        transposed=checkpoint_name(q.transposed, FPROP_RHS_NAME),
        scale=checkpoint_name(q.scale, xla_operands.RHS_NAME),
        reciprocal=reciprocal,
    )


def stored_rhs(quantized: Operand) -> Operand:
    """``quantized`` as it is: two bytes a value, since either product reads its own copy."""
    return quantized


def reshard_rhs(quantized: Operand, axis: tuple[int, ...], sharding: NamedSharding) -> Operand:
    """A quantized weight, split like the weight itself where it has this sharding."""
    layout, count = split.Layout.of(sharding, len(sharding.spec)), len(axis)
    rows, cols = layout.names(*range(count)), layout.names(*range(count, len(layout.entries)))

    def put(x: Array, *groups: split.Names) -> Array:
        return xla_operands.reshard(x, [group or None for group in groups], sharding)

    reciprocal = quantized.reciprocal
    if reciprocal is not None:
        shown = zip(reciprocal.shape, layout.entries, strict=True)
        reciprocal = put(reciprocal, *(() if size == 1 else names for size, names in shown))
    return Operand(
        values=put(quantized.values, rows, cols),
        transposed=put(quantized.transposed, cols, rows),
        scale=put(quantized.scale, cols) if quantized.scale.ndim else quantized.scale,
        reciprocal=reciprocal,
    )


@jax.named_scope("quantize")
def gradient(
    g: Array, lhs_scale: Array, rhs_scale: Array, spec: QuantSpec, names: split.Names, keys: list[Key | None]
) -> Any:
    """A device's part of both quantized gradients of dY, [m, n] or [b, m, n]; mesh axes ``names`` split it."""
    from fp4jax import kernels

    batch = g.ndim - 2
    names = names + (BATCH,) * batch

    def quantize(g, lhs_scale, rhs_scale):
        m, n = g.shape
        wanted = (
            kernels.Wanted(None, jnp.broadcast_to(rhs_scale, (n,)), 1, key=keys[0], names=names),
            kernels.Wanted(None, jnp.broadcast_to(lhs_scale, (m,)), 0, False, True, key=keys[1], names=names),
        )
        first, second = kernels.quantize_tiles(g, spec, wanted)
        return first._replace(reciprocal=None), second._replace(reciprocal=None)

    in_axes = 0, *(0 if scale.ndim else None for scale in (lhs_scale, rhs_scale))
    return _each(quantize, batch, in_axes, (_axes_of(per_tensor=True),) * 2)(g, lhs_scale, rhs_scale)
