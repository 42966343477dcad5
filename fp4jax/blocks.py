"""Cutting an axis into blocks and spreading a value a block back over it, on Explicit meshes too."""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from fp4jax.typing import Array


def explicit_sharding(x: Array) -> NamedSharding | None:
    """Sharding of ``x`` where its type carries one (an Explicit mesh), else None."""
    sharding = jax.typeof(x).sharding
    return sharding if any(t == AxisType.Explicit for t in sharding.mesh.axis_types) else None


def _reshape(x: Array, shape: tuple[int, ...], entries: list | None) -> Array:
    sharding = explicit_sharding(x)
    if sharding is None or entries is None:
        return x.reshape(shape)
    return lax.reshape(x, shape, out_sharding=NamedSharding(sharding.mesh, PartitionSpec(*entries)))


def _reshard(x: Array, entries: list) -> Array:
    # The mesh is that of the type: none need be set around the call.
    return jax.sharding.reshard(x, NamedSharding(jax.typeof(x).sharding.mesh, PartitionSpec(*entries)))


def _entries(x: Array) -> list | None:
    """Which mesh axes split each axis of ``x``; None off an Explicit mesh."""
    sharding = explicit_sharding(x)
    return None if sharding is None else list(sharding.spec) + [None] * (x.ndim - len(sharding.spec))


def _shards(x: Array, entry) -> int:
    mesh = jax.typeof(x).sharding.mesh
    names = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
    return math.prod(mesh.shape[n] for n in names)


def split(x: Array, axis: int, size: int) -> Array:
    """Splits a negative axis [k] into [blocks, size], zero-padding the end; size stands at ``axis``, blocks before it.

    An axis whose shards do not hold whole blocks is gathered first.
    """
    k, entries = x.shape[axis], _entries(x)
    count = -(-k // size)
    position = x.ndim + axis
    if entries is not None:
        if k % (size * _shards(x, entries[position])):
            entries[position] = None
            x = _reshard(x, entries)
        entries.insert(position + 1, None)
    if count * size != k:
        x = jnp.pad(x, [(0, count * size - k if i == position else 0) for i in range(x.ndim)])
    return _reshape(x, (*x.shape[:position], count, size, *x.shape[position + 1 :]), entries)


def spread(blocks: Array, axis: int, size: int, length: int) -> Array:
    """Repeats each value along a negative axis ``size`` times and cuts the axis to ``length``."""
    entries = _entries(blocks)
    position = blocks.ndim + axis
    count = blocks.shape[axis]
    repeated = lax.expand_dims(blocks, (position + 1,))
    repeated = jnp.broadcast_to(repeated, (*blocks.shape[: position + 1], size, *blocks.shape[position + 1 :]))
    merged = _reshape(repeated, (*blocks.shape[:position], count * size, *blocks.shape[position + 1 :]), entries)
    return merged if count * size == length else lax.slice_in_dim(merged, 0, length, axis=position)


def flatten(x: Array, axes: int) -> Array:
    """Merges the last ``axes`` axes into one; split by what splits the first of them, if nothing splits the others."""
    if axes == 1:
        return x
    entries, lead = _entries(x), x.ndim - axes
    if entries is not None:
        if any(e is not None for e in entries[lead + 1 :]):
            entries[lead:] = [None] * axes
            x = _reshard(x, entries)
        entries = entries[: lead + 1]
    return _reshape(x, (*x.shape[:lead], math.prod(x.shape[lead:])), entries)


def unflatten(x: Array, sizes: tuple[int, ...]) -> Array:
    """Undoes ``flatten``: the last axis becomes axes of the given sizes."""
    if len(sizes) == 1:
        return x
    entries = _entries(x)
    if entries is not None:
        if sizes[0] % _shards(x, entries[-1]):
            entries[-1] = None
            x = _reshard(x, entries)
        entries += [None] * (len(sizes) - 1)
    return _reshape(x, (*x.shape[:-1], *sizes), entries)
