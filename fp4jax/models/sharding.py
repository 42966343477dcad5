"""How the model follows an Explicit mesh. On one device, or under an Auto mesh, everything here changes nothing.

A batch is split over its rows. A parameter that is split over the same mesh axes (ZeRO-3) is gathered where it is used,
and its gradient is scattered again by the transpose. Over other mesh axes (tensor parallelism) parameters and
activations stay split, and a product whose contraction is split ends in a sum over devices.
"""

import math
from collections.abc import Callable

import jax
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec, reshard

from fp4jax.blocks import explicit_sharding


def entries(x: jax.Array) -> list:
    """Which mesh axes split each axis of x; all None off an Explicit mesh."""
    sharding = explicit_sharding(x)
    spec = () if sharding is None else tuple(sharding.spec)
    return [*spec, *[None] * (x.ndim - len(spec))]


def gathered(parameter: jax.Array, x: jax.Array) -> jax.Array:
    """`parameter`, no longer split over the mesh axes that split the rows of x."""
    if explicit_sharding(x) is None or explicit_sharding(parameter) is None:
        return parameter
    return reshard(parameter, _on_mesh_of(parameter, [_without_rows(entry, x) for entry in entries(parameter)]))


def product_sharding(x: jax.Array, kernel: jax.Array, kernel_axis: int = -1) -> NamedSharding | None:
    """The sharding of x · kernel: rows as in x, the last axis as `kernel_axis` of the kernel."""
    if explicit_sharding(x) is None:
        return None
    return _on_mesh_of(x, [*entries(x)[:-1], _without_rows(entries(kernel)[kernel_axis], x)])


def merge_rows(x: jax.Array) -> jax.Array:
    """[b, ..., d] -> [rows, d], rows split as b is."""
    shape = (math.prod(x.shape[:-1]), x.shape[-1])
    if explicit_sharding(x) is None:
        return x.reshape(shape)
    first, *_, last = entries(x)
    return lax.reshape(x, shape, out_sharding=_on_mesh_of(x, [first, last]))


def split_axes(x: jax.Array, lead: tuple[int, ...], last: tuple[int, ...]) -> jax.Array:
    """[rows, d] -> [*lead, *last]: what splits rows and d now splits the first axis of lead and of last."""
    # lax.reshape takes no -1.
    shape = (*lead, *(-(x.shape[-1] // math.prod(last)) if size == -1 else size for size in last))
    if explicit_sharding(x) is None:
        return x.reshape(shape)
    rows, width = entries(x)
    spec = [rows, *[None] * (len(lead) - 1), width, *[None] * (len(last) - 1)]
    return lax.reshape(x, shape, out_sharding=_on_mesh_of(x, spec))


def lookup(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """table[tokens]: [v, d], [b, t] -> [b, t, d], NaN for a token outside [0, v)."""
    table = gathered(table, tokens)
    out = _on_mesh_of(tokens, [*entries(tokens), None])
    return table.at[tokens].get(mode="fill", wrap_negative_indices=False, out_sharding=out)


def locally(function: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    """function(*arrays) on each device by itself, for what mixes no split axes and returns an array like the first.

    Attention kernels that XLA cannot partition need it.
    """
    sharding = explicit_sharding(arrays[0])
    if sharding is None:
        return function(*arrays)
    mesh = sharding.mesh
    names = {n for n, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit}
    specs = tuple(jax.typeof(x).sharding.spec for x in arrays)
    return jax.shard_map(
        function, mesh=mesh, in_specs=specs, out_specs=sharding.spec, axis_names=names, check_vma=False
    )(*arrays)


def _without_rows(entry, x: jax.Array):
    """A part of a sharding, without the mesh axes that split the rows of x."""
    used = _names(entries(x)[0])
    kept = tuple(name for name in _names(entry) if name not in used)
    return kept if len(kept) > 1 else kept[0] if kept else None


def _names(entry) -> tuple[str, ...]:
    return entry if isinstance(entry, tuple) else () if entry is None else (entry,)


def _on_mesh_of(x: jax.Array, spec: list) -> NamedSharding:
    return NamedSharding(jax.typeof(x).sharding.mesh, PartitionSpec(*spec))
