"""The mean of gradients over data-parallel devices with one byte an element on the wire.

Inside a ``jax.shard_map``, for each leaf x of local gradients on N devices and a format whose largest value is M:

    1. agree      amax = max |x| over all devices: one small all-reduce for all leaves
    2. quantize   q = round(x · r), r = M / amax, so that |q| ≤ M on every device
    3. exchange   all-to-all: each device receives its part of every leaf, N times, one byte an element
    4. sum        Σ q in float32, which holds any number of devices, then · (amax / M / N)
    5. share      the means are quantized likewise and all-gathered, one byte an element

Without step 5 it is a reduce-scatter, for optimizer state that is split over the devices (ZeRO). The bytes travel as
uint8: XLA widens FP8 collectives on CPU.

A leaf that holds NaN or infinity on one device becomes NaN on all, so that all skip the step.

Where amax itself is a value of the format times a power of two, r is a power of two: what FP8 holds exactly then passes
unchanged. Elsewhere amax lands on ±M, so that a constant passes to one unit in the last place.
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp4jax.exact import as_float32, magnitude, multiply
from fp4jax.formats import E4M3, E5M2, FloatFormat
from fp4jax.rounding import NEAREST_EVEN, Rounding
from fp4jax.scaling import AbsMax, PowerOfTwo
from fp4jax.typing import Array, AxisName, Key

# Elements of a bucket after which it is sent: small leaves share the latency of one exchange.
_BUCKET = 2**22


class _Scales(NamedTuple):
    """float32 [leaves] each: u = x · reciprocal, and x ≈ (values · unit) · base."""

    reciprocal: Array
    unit: Array
    base: Array


def fp8_mean(
    tree: object,
    axis_name: AxisName,
    *,
    scale_axes: AxisName = (),
    format: FloatFormat = E4M3,
    rounding: Rounding = NEAREST_EVEN,
    key: Key | None = None,
) -> object:
    """Mean over the devices of ``axis_name``, as ``lax.pmean``, with FP8 on the wire.

    Each device sends 2 (N - 1) / N bytes an element, half of a BF16 ring all-reduce. Two roundings to FP8 separate the
    result from the mean: of each summand, and of the mean, each under one scale a leaf.

    Args:
        tree: local gradients: float32, bfloat16 or float16 arrays that vary over ``axis_name``, of any shapes.
        axis_name: mesh axis, or a tuple of them.
        scale_axes: further mesh axes, over which the leaves are split: each leaf still has one scale. In a
            ``shard_map`` with ``check_vma=False`` only, where a leaf may as well be the same on all of them.
        format: ``E4M3`` or ``E5M2``.
        rounding: how to round; ``STOCHASTIC`` draws other noise on each device.
        key: key of the noise, the same on all devices.

    Returns:
        A tree of float32 arrays, the same on all devices.

    Raises:
        ValueError: for a format that is not FP8; for stochastic rounding without a key; for a leaf that does not vary
            over ``axis_name``, because JAX has summed it already.
        TypeError: for another dtype.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jax.sharding import PartitionSpec as P
        >>> from fp4jax.parallel import fp8_mean
        >>> mesh = jax.make_mesh((len(jax.devices()),), ("data",))
        >>> mean = jax.shard_map(lambda g: fp8_mean(g[0], "data"), mesh=mesh, in_specs=P("data"), out_specs=P())
        >>> g = jax.device_put(jnp.full((len(jax.devices()), 3), 100.0), jax.NamedSharding(mesh, P("data")))
        >>> jax.jit(mean)(g).tolist()
        [100.0, 100.0, 100.0]

    References:
        Peng et al., *FP8-LM*, arXiv:2310.18313, §2.1; Wang et al., arXiv:2501.17116, §4.1.
    """
    options = {"scale_axes": scale_axes, "format": format, "rounding": rounding}
    shards = fp8_mean_scatter(tree, axis_name, key=key, **options)
    if key is not None:
        key = jax.random.fold_in(key, 1)
    return gather_shards(shards, axis_name, like=tree, key=key, **options)


def fp8_mean_scatter(
    tree: object,
    axis_name: AxisName,
    *,
    dimension: int | None = None,
    scale_axes: AxisName = (),
    format: FloatFormat = E4M3,
    rounding: Rounding = NEAREST_EVEN,
    key: Key | None = None,
) -> object:
    """Mean over the devices of ``axis_name``, of which each device keeps its part; FP8 on the wire.

    As ``lax.psum_scatter`` divided by N; each device sends (N - 1) / N bytes an element.

    Args:
        tree: local gradients, see ``fp8_mean``.
        axis_name: mesh axis, or a tuple of them.
        dimension: the dimension of every leaf to split, which N must divide: the one that the parameters are sharded
            along. None flattens each leaf and pads it with zeros to N equal parts, see ``local_shards``.
        scale_axes: see ``fp8_mean``.
        format: ``E4M3`` or ``E5M2``.
        rounding: how to round.
        key: key of the noise, the same on all devices.

    Returns:
        A tree of float32 parts: the leaf's shape with ``dimension`` divided by N, or [ceil(size / N)].

    Raises:
        ValueError: as ``fp8_mean``; and if N does not divide ``dimension`` of a leaf.
        TypeError: for another dtype.
    """
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    if not paths:
        return tree
    _check(format, rounding, key)
    devices = lax.axis_size(axis_name)
    _check_varying(paths, axis_name)
    parts = [_split(path, as_float32(x), devices, dimension) for path, x in paths]
    if key is not None:
        key = jax.random.fold_in(key, lax.axis_index(axis_name))

    scales = _agree(parts, _together(axis_name, scale_axes), format)
    codes = _quantize(parts, scales, format, rounding, key)
    share = jnp.where(scales.unit == 1, jnp.float32(1 / devices), jnp.float32(1 / (format.max * devices)))
    means = []
    for exchanged in _in_buckets(codes, devices, lambda wire: lax.all_to_all(wire, axis_name, 0, 0, tiled=True)):
        total = jnp.sum(_decode(exchanged, format), axis=0)
        means.append((total * share[len(means)]) * scales.base[len(means)])
    if dimension is not None:
        means = [_part(m, x.shape, devices, dimension) for m, (_, x) in zip(means, paths, strict=True)]
    return treedef.unflatten(means)


def local_shards(tree: object, axis_name: AxisName) -> object:
    """The part of each leaf that this device keeps: what ``fp8_mean_scatter`` returns the mean of.

    Args:
        tree: arrays of any dtype, the same on all devices.
        axis_name: mesh axis, or a tuple of them.

    Returns:
        A tree of arrays [ceil(size / N)], the last ones padded with zeros.
    """
    devices, index = lax.axis_size(axis_name), lax.axis_index(axis_name)
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(_flat_parts(x, devices), index, keepdims=False), tree)


def gather_shards(
    shards: object,
    axis_name: AxisName,
    *,
    like: object,
    scale_axes: AxisName = (),
    format: FloatFormat | None = None,
    rounding: Rounding = NEAREST_EVEN,
    key: Key | None = None,
) -> object:
    """Puts the parts of ``local_shards`` or ``fp8_mean_scatter`` together on every device.

    Args:
        shards: tree of arrays [ceil(size / N)].
        axis_name: mesh axis, or a tuple of them.
        like: tree of arrays with the shapes to restore.
        scale_axes: see ``fp8_mean``.
        format: ``E4M3`` or ``E5M2``: quantize for the way, one scale a leaf. None sends the parts as they are.
        rounding: how to round.
        key: key of the noise, the same on all devices.

    Returns:
        A tree of arrays with the shapes of ``like``, the same on all devices: float32 if quantized, else of the dtypes
        of ``shards``.

    Raises:
        ValueError: for a format that is not FP8, or stochastic rounding without a key.
    """
    parts, treedef = jax.tree.flatten(shards)
    if not parts:
        return shards
    shapes = [x.shape for x in treedef.flatten_up_to(like)]

    def gather(wire):
        if not wire.size:  # which is the same everywhere, and no collective takes it
            return jnp.zeros((0,), wire.dtype)
        return lax.all_gather(wire, axis_name, axis=wire.ndim - 1, tiled=True, to="invarying")

    if format is None:
        whole = [gather(p) for p in parts]
        return treedef.unflatten([w[: math.prod(s)].reshape(s) for w, s in zip(whole, shapes, strict=True)])
    _check(format, rounding, key)
    if key is not None:
        key = jax.random.fold_in(key, lax.axis_index(axis_name))
    rows = [as_float32(p)[None] for p in parts]
    scales = _agree(rows, _together(axis_name, scale_axes), format)
    codes = _quantize(rows, scales, format, rounding, key)
    devices = lax.axis_size(axis_name)
    results = []
    for whole in _in_buckets(codes, devices, lambda wire: gather(wire[0]).reshape(devices, -1)):
        i, shape = len(results), shapes[len(results)]
        x = (_decode(whole, format) * scales.unit[i]) * scales.base[i]
        results.append(x.reshape(-1)[: math.prod(shape)].reshape(shape))
    return treedef.unflatten(results)


# --- steps -------------------------------------------------------------------------------------------------------


def _together(*axes: AxisName) -> AxisName:
    return tuple(name for axis in axes for name in (axis if isinstance(axis, tuple) else (axis,)))


def _agree(leaves: Sequence[Array], axis_name: AxisName, format: FloatFormat) -> _Scales:
    """One scale a leaf, the same on all devices: NaN if the leaf is not finite on one of them."""
    local = jnp.stack([jnp.max(magnitude(x), initial=0) for x in leaves])
    amax = lax.pmax(local, axis_name)
    # Bits of the mantissa beyond those of the format: without any, a power of two puts amax on the grid.
    beyond = lax.bitcast_convert_type(amax, jnp.int32) & (2 ** (23 - format.mantissa_bits) - 1)
    power, exact = PowerOfTwo("rceil"), AbsMax()
    by_power, by_amax = power(amax, format), exact(amax, format)
    on_grid = (beyond == 0) & jnp.isfinite(amax)
    # AbsMax's own scale is rounded twice before it meets 448; amax · (448 · float32(1 / 448)) is amax.
    base = jnp.where(jnp.isfinite(amax), jnp.maximum(amax, jnp.float32(format.max * 2.0**-125)), jnp.float32(np.nan))
    return _Scales(
        reciprocal=jnp.where(on_grid, by_power.reciprocal, by_amax.reciprocal),
        unit=jnp.where(on_grid, jnp.float32(1), jnp.float32(1 / format.max)),
        base=jnp.where(on_grid, power.decode(by_power.scale, None), base),
    )


def _quantize(
    leaves: Sequence[Array], scales: _Scales, format: FloatFormat, rounding: Rounding, key: Key | None
) -> list[Array]:
    """FP8 codes of each leaf, uint8. NaN travels in the scales: its code is that of 0."""
    codes = []
    for i, x in enumerate(leaves):
        noise = None if key is None else jax.random.fold_in(key, i)
        values = rounding(multiply(x, scales.reciprocal[i]), format, noise)
        values = jnp.where(jnp.isnan(values), jnp.float32(0), values)
        codes.append(lax.bitcast_convert_type(values.astype(format.storage_dtype), jnp.uint8))
    return codes


def _decode(codes: Array, format: FloatFormat) -> Array:
    return lax.bitcast_convert_type(codes, format.storage_dtype).astype(jnp.float32)


def _in_buckets(codes: Sequence[Array], devices: int, collective):
    """Sends [rows, columns] leaves, small ones side by side in one buffer, and yields what arrives of each."""
    bucket, size = [], 0
    for i, leaf in enumerate(codes):
        bucket.append(leaf)
        size += leaf.shape[1] * devices
        if size >= _BUCKET or i == len(codes) - 1:
            wire = jnp.concatenate(bucket, axis=1)
            arrived = collective(wire) if wire.size else jnp.zeros((devices, 0), jnp.uint8)
            ends = list(itertools.accumulate(b.shape[1] for b in bucket))
            yield from jnp.split(arrived, ends[:-1], axis=1)
            bucket, size = [], 0


# --- parts of a leaf ---------------------------------------------------------------------------------------------


def _flat_parts(x: Array, devices: int) -> Array:
    """[devices, ceil(size / devices)], zero-padded."""
    columns = -(-x.size // devices)
    return jnp.pad(x.reshape(-1), (0, devices * columns - x.size)).reshape(devices, columns)


def _split(path: tuple, x: Array, devices: int, dimension: int | None) -> Array:
    """[devices, columns]: row i is the part of device i."""
    if dimension is None:
        return _flat_parts(x, devices)
    if not -x.ndim <= dimension < x.ndim or x.shape[dimension] % devices:
        raise ValueError(
            f"dimension={dimension} of leaf {jax.tree_util.keystr(path)} of shape {x.shape} cannot be split over "
            f"{devices} devices; pass a dimension that they divide, or dimension=None"
        )
    return jnp.moveaxis(x, dimension, 0).reshape(devices, x.size // devices)


def _part(row: Array, shape: tuple[int, ...], devices: int, dimension: int) -> Array:
    """The part of a leaf of ``shape`` from its row [columns] of ``_split``."""
    rest = list(shape)
    front = rest.pop(dimension) // devices
    return jnp.moveaxis(row.reshape(front, *rest), 0, dimension)


def _check(format: FloatFormat, rounding: Rounding, key: Key | None) -> None:
    if format not in (E4M3, E5M2):
        raise ValueError(f"format={format!r} is not an 8-bit floating-point format; use E4M3 or E5M2")
    if rounding.needs_key and key is None:
        raise ValueError(f"rounding={rounding!r} draws noise and key=None; pass key=jax.random.key(...)")


def _check_varying(paths: Sequence[tuple[tuple, Array]], axis_name: AxisName) -> None:
    """Raises where JAX tracks which values vary and a leaf does not."""
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    tracked = bool(jax.typeof(lax.axis_index(names[0])).manual_axis_type.varying)
    for path, x in paths:
        missing = [n for n in names if n not in jax.typeof(x).manual_axis_type.varying]
        if tracked and missing:
            raise ValueError(
                f"leaf {jax.tree_util.keystr(path)} is the same on all devices of {missing}, so if it is a gradient it "
                "was summed there already: differentiate with respect to jax.lax.pcast(params, axis_name, to='varying')"
            )
