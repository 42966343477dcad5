"""Where the arrays of a run live: on one device, or over a mesh of many and several processes."""

import contextlib
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from fp4jax.parallel import BATCH_AXES, batch_sharding, make_mesh, parameter_sharding
from fp4jax.train.config import DistributedOptions
from fp4jax.train.errors import ConfigError

type ParameterAxes = Mapping[str, Any]
"""A tree like the parameters; each leaf is a tuple of logical axis names, one for each axis."""


class Placement(Protocol):
    """Where arrays live. Everything about a run's arrays happens inside `active()`."""

    process_index: int
    """Which part of every batch this process reads, of `process_count`."""
    process_count: int

    def active(self) -> contextlib.AbstractContextManager[Any]:
        """The context in which to create, compile and run."""
        ...

    def parameters(self, create: Callable[..., Any], axes: ParameterAxes, abstract: Any) -> Callable[..., Any]:
        """`create(seed) -> (params, noise)`, its results where they belong."""
        ...

    def state(self, abstract: Any) -> Any:
        """A tree of `jax.ShapeDtypeStruct` with shardings: where a state of these shapes, traced inside, will lie."""
        ...

    def batch(self, host: Any, *, seeds: int = 1) -> Any:
        """The rows that this process has read, as global arrays."""
        ...


class SingleDevice:
    """All on the first device."""

    process_index, process_count = 0, 1

    def __init__(self) -> None:
        self.sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def active(self) -> contextlib.AbstractContextManager[Any]:
        """Nothing to set."""
        return contextlib.nullcontext()

    def parameters(self, create: Callable[..., Any], axes: ParameterAxes, abstract: Any) -> Callable[..., Any]:
        """`create` itself."""
        del axes, abstract
        return create

    def state(self, abstract: Any) -> Any:
        """Every leaf on the device."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.sharding), abstract)

    def batch(self, host: Any, *, seeds: int = 1) -> Any:
        """The rows, on the device."""
        del seeds
        return jax.device_put(host, self.sharding)


class OnMesh:
    """Over a mesh: batches split over "data" and "fsdp", parameters and optimizer state over "fsdp" and "tensor".

    Args:
        shape: what `fp4jax.parallel.parse_mesh` takes.

    Raises:
        ConfigError: the mesh does not have as many devices as there are, or its processes do not hold equal and whole
            parts of the batch.
    """

    def __init__(self, shape: str):
        try:
            self.mesh = make_mesh(shape)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self.batch_shards = math.prod(self.mesh.shape[name] for name in BATCH_AXES)
        self.process_index, self.process_count = self._part()

    def active(self) -> contextlib.AbstractContextManager[Any]:
        """The mesh as JAX's current one."""
        return jax.set_mesh(self.mesh)

    def parameters(self, create: Callable[..., Any], axes: ParameterAxes, abstract: Any) -> Callable[..., Any]:
        """`create`, compiled so that each device makes only its part: no device ever holds the whole model."""
        params, noise = abstract

        def sharding(path: Any, names: tuple[str | None, ...], leaf: Any) -> NamedSharding:
            try:
                return parameter_sharding(self.mesh, names, leaf.shape)
            except ValueError as error:
                raise ConfigError(f"parameter {jax.tree_util.keystr(path)}: {error}") from error

        is_names = lambda x: isinstance(x, tuple)  # noqa: E731
        shardings = jax.tree_util.tree_map_with_path(sharding, axes, params, is_leaf=is_names)
        whole = NamedSharding(self.mesh, PartitionSpec())
        return jax.sharding.auto_axes(create, out_sharding=(shardings, jax.tree.map(lambda _: whole, noise)))

    def state(self, abstract: Any) -> Any:
        """As their types say: one that says nothing is whole on every device."""

        def place(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            spec = PartitionSpec() if x.sharding is None else x.sharding.spec
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(self.mesh, spec))

        return jax.tree.map(place, abstract)

    def batch(self, host: Any, *, seeds: int = 1) -> Any:
        """The rows of all processes together."""
        if seeds > 1:
            raise ConfigError(f"{seeds} seeds side by side need one device: leave out --mesh, or give one seed")
        sharding = batch_sharding(self.mesh)

        def put(x: np.ndarray) -> jax.Array:
            shape = (x.shape[0] * self.process_count, *x.shape[1:])
            return jax.make_array_from_process_local_data(sharding, x, shape)

        return jax.tree.map(put, host)

    def _part(self) -> tuple[int, int]:
        """Which of how many equal parts of a batch the devices of this process hold.

        Processes that hold the same rows, since "tensor" spans them, have the same part and read the same text.
        """
        indices = batch_sharding(self.mesh).addressable_devices_indices_map((self.batch_shards,)).values()
        rows = sorted({row for index in indices if index for row in range(self.batch_shards)[index[0]]})
        size = len(rows)
        if rows != list(range(rows[0], rows[0] + size)) or rows[0] % size or self.batch_shards % size:
            raise ConfigError(
                f"process {jax.process_index()} would hold parts {rows} of {self.batch_shards} of a batch, "
                f"and it must be one even part: choose sizes of data and fsdp that the processes divide"
            )
        return rows[0] // size, self.batch_shards // size


def make_placement(options: DistributedOptions) -> Placement:
    """One device, or the mesh that the options ask for.

    Raises:
        ConfigError: several processes without a mesh, or a mesh that the devices do not make.
    """
    if options.mesh is not None:
        return OnMesh(options.mesh)
    if jax.process_count() > 1:
        raise ConfigError(f"{jax.process_count()} processes need a mesh, such as --mesh data={jax.device_count()}")
    return SingleDevice()
