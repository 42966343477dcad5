"""The state copied to host memory that belongs to nobody else, so that training may go on and donate it."""

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from fp4jax.train.checkpoint.leaves import LeafRecord, encode, fingerprint, named_leaves

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
        data_shape: shape of the whole that the pieces make up.
        pieces: index into the whole, and the values there.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    key_impl: str | None
    data_shape: tuple[int, ...]
    pieces: list[tuple[Any, np.ndarray]]

    def store(self, index: int) -> tuple[LeafRecord, np.ndarray]:
        """The manifest's record and the stored form. Uses up the pieces.

        Args:
            index: position in the tree; it keeps stored names unique and short.
        """
        if len(self.pieces) == 1:
            _, whole = self.pieces.pop()
        else:
            whole = np.empty(self.data_shape, self.pieces[0][1].dtype)
            while self.pieces:
                where, piece = self.pieces.pop()
                whole[where] = piece
        array = encode(whole)
        slug = re.sub(r"[^A-Za-z0-9_-]+", ".", self.name).strip(".")[:100]
        stored = f"{index:04d}.{slug}" if array.size else None
        digest = fingerprint(array, self.dtype, self.shape, self.key_impl)
        return LeafRecord(self.name, stored, self.dtype, self.shape, self.key_impl, digest), array


def snapshot(state: Any) -> list[HostLeaf]:
    """Copies every leaf; the transfers of all leaves are begun before the first is waited for.

    Accelerators copy into pinned memory, much faster than into pageable memory; JAX's pool keeps it for the next
    snapshot. What does not fit into the pool goes to pageable memory, with a warning (figures: docs/checkpoints.md).

    Raises:
        TypeError: a leaf is not a `jax.Array` or NumPy array, or has a dtype no checkpoint holds.
        ValueError: two leaves have one name, or a leaf holds PRNG keys of an unregistered kind.
    """
    begin = _Transfers()
    under_way = []
    for name, leaf in named_leaves(state).items():
        if isinstance(leaf, jax.Array):
            key_impl = _key_impl(name, leaf)
            data = leaf if key_impl is None else jax.random.key_data(leaf)
            under_way.append((name, leaf, key_impl, data.shape, list(begin.shards(data))))
        else:
            under_way.append((name, leaf, None, leaf.shape, [(..., np.array(leaf, order="C"))]))

    return [
        HostLeaf(name, str(leaf.dtype), tuple(leaf.shape), key_impl, shape, [(at, _own(piece)) for at, piece in pieces])
        for name, leaf, key_impl, shape, pieces in under_way
    ]


class _Transfers:
    def __init__(self):
        self.pinned = True

    def shards(self, array: jax.Array) -> Iterator[tuple[Any, jax.Array]]:
        """The distinct shards of `array`, their way to the host begun.

        Each is a new `jax.Array` over the shard's buffer. JAX keeps a host copy in the object that was asked for it:
        asking the caller's arrays would keep that memory as long as they live and, on CPU, bar them from donation.
        """
        for shard in array.addressable_shards:
            if shard.replica_id == 0:
                data = shard.data
                yield (
                    shard.index,
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


def _key_impl(name: str, leaf: jax.Array) -> str | None:
    if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return None
    impl = jax.random.key_impl(leaf)
    if not isinstance(impl, str):
        raise ValueError(
            f"leaf {name} is a PRNG key of the unregistered kind {impl}; use threefry2x32, rbg or unsafe_rbg"
        )
    return impl
