"""Flattened products on Explicit meshes: who holds which part, what is summed, and what little is gathered.

A product of the "hopper" backend is lhs[m, k] · rhs[n, k]. Each of its axes stands for several axes of an array, and is
split over the mesh axes that split those. Kernels run inside ``jax.shard_map``, on what a device holds.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from fp4jax.dot.call import Call, names_of
from fp4jax.typing import Array

type Names = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Which mesh axes split each axis of an array, those of one device included: they are part of its type.

    Attributes:
        mesh: an Explicit mesh, or None for arrays that are nowhere split.
        entries: mesh axes of each array axis.
    """

    mesh: Any
    entries: tuple[Names, ...]

    @classmethod
    def of(cls, sharding: NamedSharding | None, ndim: int) -> "Layout":
        """The layout of an array of this sharding; None is whole on every device."""
        if sharding is None:
            return cls(None, ((),) * ndim)
        entries = [*sharding.spec, *(None,) * (ndim - len(sharding.spec))]
        return cls(sharding.mesh, tuple(tuple(names_of(e)) for e in entries))

    @property
    def spec(self) -> PartitionSpec:
        """As a ``PartitionSpec``."""
        return spec(*self.entries)

    def names(self, *axes: int) -> Names:
        """The mesh axes that split any of these array axes, in order."""
        return tuple(n for a in axes for n in self.entries[a])


def spec(*groups: Names) -> PartitionSpec:
    """A ``PartitionSpec`` of groups of names, empty for an axis that is whole."""
    return PartitionSpec(*(g or None for g in groups))


@dataclasses.dataclass(frozen=True)
class Split:
    """Which mesh axes split the three axes of a layer's products.

    Attributes:
        mesh: the mesh, or None.
        m, n: mesh axes that split the tokens and the output channels.
        lhs_k, rhs_k: those that split the contraction in the activation and in the weight. Either the same
            (row-parallel: sums run over devices), or none for the activation (fully sharded weights: the weight's FP8
            values are gathered).
        lhs, rhs, out: entries of the operands and of the result, one an axis.
    """

    mesh: Any
    m: Names
    n: Names
    lhs_k: Names
    rhs_k: Names
    lhs: tuple[Names, ...]
    rhs: tuple[Names, ...]
    out: tuple[Names, ...]

    @classmethod
    def of(cls, call: Call) -> "Split":
        """How the operands of ``call`` are split; one with batch axes has no mesh."""
        geometry = call.geometry
        lhs = Layout.of(call.lhs_sharding, geometry.lhs_ndim)
        rhs = Layout.of(call.rhs_sharding, geometry.rhs_ndim)
        return cls(
            mesh=lhs.mesh if lhs.mesh is not None else rhs.mesh,
            m=lhs.names(*geometry.lhs_free),
            n=rhs.names(*geometry.rhs_free),
            lhs_k=lhs.names(*geometry.lhs_contract),
            rhs_k=rhs.names(*geometry.rhs_contract),
            lhs=lhs.entries,
            rhs=rhs.entries,
            out=tuple(lhs.entries[a] for a in geometry.lhs_free) + tuple(rhs.entries[a] for a in geometry.rhs_free),
        )


def unsupported(call: Call) -> list[str]:
    """Why the kernels cannot run ``call`` on its mesh, a reason each; empty if they can."""
    if jax.sharding.get_abstract_mesh().manual_axes:
        return ["inside a shard_map"]
    meshes = {s.mesh for s in (call.lhs_sharding, call.rhs_sharding) if s is not None}
    if len(meshes) > 1:
        return [f"operands on different meshes: {meshes}"]
    if any(t != AxisType.Explicit for mesh in meshes for t in mesh.axis_types):
        return ["a mesh with axes that are not Explicit"]
    split, geometry, reasons = Split.of(call), call.geometry, []
    for side, entries, contract in (
        ("lhs", split.lhs, geometry.lhs_contract),
        ("rhs", split.rhs, geometry.rhs_contract),
    ):
        if any(entries[a] for a in contract[1:]):
            reasons.append(f"{side} is split along a contracted axis that is not the first")
    if split.lhs_k not in ((), split.rhs_k):
        reasons.append(f"the contraction is split over {split.lhs_k} in lhs and {split.rhs_k} in rhs")
    elif not split.lhs_k and not set(split.rhs_k) <= set(split.m):
        reasons.append(f"rhs is split along the contraction over {split.rhs_k}, which do not split the rows of lhs")
    if shared := set(split.m) & set(split.n):
        reasons.append(f"{sorted(shared)} split both the rows of lhs and the columns of rhs")
    return reasons


def run(mesh: Any, f: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """``f`` on what each device holds; without a mesh ``f`` itself."""
    if mesh is None:
        return f
    return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def unflatten(x: Array, mesh: Any, entries: tuple[Names, ...], rows: int, shape: tuple[int, ...]) -> Array:
    """[m, n] as an array of ``shape``, split like ``entries``; its first ``rows`` axes are m."""

    def local(x):
        sizes = [s // _devices(mesh, e) for s, e in zip(shape, entries, strict=True)]
        return x.reshape(sizes)

    if mesh is None:
        return x.reshape(shape)
    groups = [tuple(n for e in part for n in e) for part in (entries[:rows], entries[rows:])]
    return run(mesh, local, spec(*groups), spec(*entries))(x)


def _devices(mesh: Any, names: Names) -> int:
    return math.prod(mesh.shape[n] for n in names)


@dataclasses.dataclass(frozen=True)
class Parts:
    """How one product lhs[m, k] · rhs[n, k] -> out[m, n] is split: mesh axes of each axis of each."""

    mesh: Any
    lhs: tuple[Names, ...]
    rhs: tuple[Names, ...]
    out: tuple[Names, ...]

    def multiply(self, product: Callable, lhs: Array, rhs: Array, lhs_scale: Array, rhs_scale: Array, dtype) -> Array:
        """``product(lhs, rhs, lhs_scale, rhs_scale, dtype)``, summed over devices before it is scaled.

        What rhs has split and neither lhs nor the result has is gathered, a byte a value.
        """
        if self.mesh is None:
            return product(lhs, rhs, lhs_scale, rhs_scale, dtype)
        summed = self.lhs[1]

        def local(lhs, rhs, lhs_scale, rhs_scale):
            rhs = _gather(rhs, 1, tuple(n for n in self.rhs[1] if n not in summed))
            rhs = _gather(rhs, 0, tuple(n for n in self.rhs[0] if n not in self.out[1]))
            if not summed:
                return product(lhs, rhs, lhs_scale, rhs_scale, dtype)
            one = jnp.float32(1)
            sums = product(lhs, rhs, one, one, jnp.dtype(jnp.float32))
            scattered = tuple(n for n in self.out[0] if n not in self.lhs[0])
            if scattered:
                sums = lax.psum_scatter(sums, scattered, scatter_dimension=0, tiled=True)
            if rest := tuple(n for n in summed if n not in scattered):
                sums = lax.psum(sums, rest)
            return (sums * _column(lhs_scale) * rhs_scale).astype(dtype)

        scale_specs = (spec(self.lhs[0]) if lhs_scale.ndim else spec(), spec(self.rhs[0]) if rhs_scale.ndim else spec())
        in_specs = (spec(*self.lhs), spec(*self.rhs), *scale_specs)
        return run(self.mesh, local, in_specs, spec(*self.out))(lhs, rhs, lhs_scale, rhs_scale)


def _column(scale: Array) -> Array:
    return scale[:, None] if scale.ndim else scale


def _gather(values: Array, axis: int, names: Names) -> Array:
    """All parts of FP8 values; as bytes, since XLA's CPU code widens collectives of FP8."""
    if not names:
        return values
    held = lax.bitcast_convert_type(values, jnp.uint8)
    return lax.bitcast_convert_type(lax.all_gather(held, names, axis=axis, tiled=True), values.dtype)
