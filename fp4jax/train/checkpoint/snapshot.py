"""The state copied to host memory that belongs to nobody else, so that training may go on and donate it."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from fp4jax.train.checkpoint.leaves import named_leaves
from fp4jax.train.checkpoint.pieces import Box, box_of, slices, whole

_log = logging.getLogger(__name__)

_PINNED = "pinned_host"


@dataclass(frozen=True)
class HostLeaf:
    """A leaf on the host, shard by shard.

    Attributes:
        name: its path in the tree, as `jax.tree_util.keystr` writes it.
        dtype: name of its dtype in the tree.
        shape: its shape in the tree.
        key_impl: the PRNG implementation of a typed key, whose pieces are then its uint32 words; else None.
        data_shape: shape of the whole that the pieces of all processes make up.
        on_its_own: several processes run, and this one holds the leaf on its own devices or in NumPy. So may the
            others, and then all hold the same.
        pieces: the parts that this process owns, by their box in the whole. Over all processes they are disjoint.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    key_impl: str | None
    data_shape: tuple[int, ...]
    on_its_own: bool
    pieces: list[tuple[Box, np.ndarray]]

    def merged(self) -> np.ndarray:
        """The whole, where this process owns all of it. Uses up the pieces."""
        if len(self.pieces) == 1:
            return self.pieces.pop()[1]
        merged = np.empty(self.data_shape, self.pieces[0][1].dtype)
        while self.pieces:
            box, piece = self.pieces.pop()
            merged[slices(box, whole(self.data_shape))] = piece
        return merged


def snapshot(state: Any) -> list[HostLeaf]:
    """Copies every leaf; the transfers of all leaves are begun before the first is waited for.

    Accelerators copy into pinned memory, much faster than into pageable memory; JAX's pool keeps it for the next
    snapshot. What does not fit into the pool goes to pageable memory, with a warning (figures: docs/checkpoints.md).

    Raises:
        TypeError: a leaf is not a `jax.Array` or NumPy array, or has a dtype no checkpoint holds.
        ValueError: two leaves have one name, or a leaf holds PRNG keys of an unregistered kind.
    """
    begin, several = _Transfers(), jax.process_count() > 1
    under_way = []
    for name, leaf in named_leaves(state).items():
        key_impl = _key_impl(name, leaf)
        if isinstance(leaf, jax.Array):
            data = leaf if key_impl is None else jax.random.key_data(leaf)
            pieces, on_its_own = list(begin.shards(data)), several and leaf.is_fully_addressable
        else:
            data, on_its_own = leaf, several
            pieces = [(whole(leaf.shape), np.array(leaf, order="C"))]
        begun = HostLeaf(name, str(leaf.dtype), tuple(leaf.shape), key_impl, tuple(data.shape), on_its_own, [])
        under_way.append((begun, pieces))
    return [replace(begun, pieces=[(box, _own(piece)) for box, piece in pieces]) for begun, pieces in under_way]


class _Transfers:
    def __init__(self):
        self.pinned = True

    def shards(self, array: jax.Array) -> Iterator[tuple[Box, jax.Array]]:
        """The shards of `array` that this process owns, their way to the host begun.

        Of equal shards the one with replica id 0 counts, so that each element has one owner over all processes.

        Each is a new `jax.Array` over the shard's buffer. JAX keeps a host copy in the object that was asked for it:
        asking the caller's arrays would keep that memory as long as they live and, on CPU, bar them from donation.
        """
        for shard in array.addressable_shards:
            if shard.replica_id == 0:
                data = shard.data
                yield (
                    box_of(shard.index, array.shape),
                    self._begin(jax.make_array_from_single_device_arrays(data.shape, data.sharding, [data])),
                )

    def _begin(self, piece: jax.Array) -> jax.Array:
        (device,) = piece.sharding.device_set
        if device.platform == "cpu":
            return piece
        if self.pinned and any(memory.kind == _PINNED for memory in device.addressable_memories()):
            try:
                return jax.device_put(piece, piece.sharding.with_memory_kind(_PINNED))
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                self.pinned = False
                _log.warning(
                    "the state does not fit into JAX's pinned host memory, so copying it there is slow: "
                    "set XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB above the state's size"
                )
        piece.copy_to_host_async()
        return piece


def _own(piece: jax.Array | np.ndarray) -> np.ndarray:
    """The host value of a piece, in memory that no device computes in. Waits for its transfer."""
    if isinstance(piece, np.ndarray):
        return piece
    (device,) = piece.sharding.device_set
    # On CPU this is a view of the device's own buffer, which donation overwrites.
    host = np.asarray(piece)
    return np.array(host, order="C") if device.platform == "cpu" else host


def _key_impl(name: str, leaf: jax.Array | np.ndarray) -> str | None:
    if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return None
    impl = jax.random.key_impl(leaf)
    if not isinstance(impl, str):
        raise ValueError(
            f"leaf {name} is a PRNG key of the unregistered kind {impl}; use threefry2x32, rbg or unsafe_rbg"
        )
    return impl
