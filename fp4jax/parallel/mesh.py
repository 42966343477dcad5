"""Meshes of devices, and which mesh axis splits which axis of a parameter.

A mesh has up to three axes. Batches are split over ``data`` and ``fsdp``; parameters and optimizer state over ``fsdp``
(ZeRO-3) and ``tensor`` (Megatron):

    ======  ==================================================================================
    data    whole copies of the model, each with its rows of the batch
    fsdp    the same, but each device keeps only a part of every parameter and gathers it for use
    tensor  heads, the width of the MLP and the vocabulary are split; activations are summed
    ======  ==================================================================================

All are ``AxisType.Explicit``: the sharding of every array is part of its type, and nothing is gathered unasked.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "tensor")
"""Names of the mesh axes, outermost first: those of ``tensor`` are neighbors, on the fastest links."""

BATCH_AXES = ("data", "fsdp")
"""What splits the rows of a batch."""

LOGICAL_AXES: Mapping[str, str | None] = MappingProxyType(
    {
        "layers": None,
        "embed": "fsdp",
        "mlp": "tensor",
        "heads": "tensor",
        "kv": "tensor",
        "vocab": "tensor",
    }
)
"""Mesh axis for each logical axis of a parameter (see ``fp4jax.models``); None leaves it whole."""


def parse_mesh(text: str) -> dict[str, int]:
    """Sizes of the mesh axes, from text.

    Args:
        text: ``"data=2,fsdp=2,tensor=2"``, in any order; axes that are left out have size 1.

    Returns:
        Sizes of ``AXES``, in their order.

    Raises:
        ValueError: the text is not of this form, an axis is unknown or given twice, or a size is not positive.

    Example:
        >>> parse_mesh("tensor=2,data=4")
        {'data': 4, 'fsdp': 1, 'tensor': 2}
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = (word.strip() for word in part.partition("="))
        if not equals or not size.isdecimal() or int(size) < 1:
            raise ValueError(f"mesh={text!r}: {part.strip()!r} is no axis=size; write, say, data=2,fsdp=2,tensor=2")
        if name not in AXES:
            raise ValueError(f"mesh={text!r}: {name!r} is no axis; there are {', '.join(AXES)}")
        if name in sizes:
            raise ValueError(f"mesh={text!r} gives {name!r} twice")
        sizes[name] = int(size)
    return {name: sizes.get(name, 1) for name in AXES}


def make_mesh(shape: str | Mapping[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of ``AXES``, all Explicit.

    Args:
        shape: what ``parse_mesh`` takes or returns.
        devices: ``jax.Device``s, by default all; there must be as many as the sizes multiply to.

    Returns:
        The mesh. Use it with ``jax.set_mesh``.

    Raises:
        ValueError: an unknown axis, or another number of devices.

    Example:
        >>> import jax
        >>> make_mesh({"data": len(jax.devices())}).axis_names
        ('data', 'fsdp', 'tensor')
    """
    if isinstance(shape, str):
        shape = parse_mesh(shape)
    if unknown := [name for name in shape if name not in AXES]:
        raise ValueError(f"mesh={dict(shape)}: {unknown[0]!r} is no axis; there are {', '.join(AXES)}")
    sizes = {name: shape.get(name, 1) for name in AXES}
    devices = jax.devices() if devices is None else devices
    count = sizes["data"] * sizes["fsdp"] * sizes["tensor"]
    if count != len(devices):
        wanted = ",".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(f"mesh={wanted} takes {count} devices, and there are {len(devices)}")
    return jax.make_mesh(tuple(sizes.values()), AXES, (AxisType.Explicit,) * len(AXES), devices=devices)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of arrays whose first axis is the batch."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def parameter_sharding(mesh: Mesh, names: Sequence[str | None], shape: Sequence[int]) -> NamedSharding:
    """The sharding of a parameter by the logical names of its axes.

    Args:
        mesh: from ``make_mesh``.
        names: a key of ``LOGICAL_AXES``, or None, for each axis of the parameter.
        shape: its shape.

    Raises:
        ValueError: an unknown name, or an axis that the mesh axis does not divide.

    Example:
        >>> import jax
        >>> mesh = make_mesh({"fsdp": len(jax.devices())})
        >>> parameter_sharding(mesh, ("embed", "mlp"), (128, 352)).spec
        P('fsdp', 'tensor')
    """
    if unknown := [name for name in names if name is not None and name not in LOGICAL_AXES]:
        raise ValueError(f"axis name {unknown[0]!r} is unknown; there are {', '.join(LOGICAL_AXES)}")
    entries = [None if name is None else LOGICAL_AXES[name] for name in names]
    for name, entry, size in zip(names, entries, shape, strict=True):
        if entry is not None and size % mesh.shape[entry]:
            raise ValueError(
                f"mesh axis {entry}={mesh.shape[entry]} must divide the axis {name!r} of size {size} "
                f"of a parameter of shape {tuple(shape)}"
            )
    return NamedSharding(mesh, PartitionSpec(*entries))
