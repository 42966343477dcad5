"""Leaves of a pytree: named, encoded for storage, fingerprinted, compared with a target, and put back.

Orbax 0.12.8 refuses uint4, uint2 and empty arrays, and E8M0 read back as float32 is garbage (1 becomes 1.8e19). So a
leaf is stored as itself only if its dtype is NumPy's or bfloat16. Any other dtype is stored as the unsigned integers of
the same width (float8, float4 and int4 take one byte a value), a typed PRNG key as its uint32 words, and an empty array
not at all; the manifest remembers the true dtype and shape.
"""

import functools
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, Sharding, SingleDeviceSharding

from fp4jax.train.checkpoint.pieces import Box, Piece, box_of, whole

_INTEGERS = {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
_FLOATS = {"float16", "float32", "float64", "bfloat16", "complex64", "complex128"}
_STORED_AS_ITSELF = {"bool"} | _INTEGERS | _FLOATS


@dataclass(frozen=True)
class LeafRecord:
    """What the manifest says of one leaf.

    Attributes:
        name: its path in the tree, as `jax.tree_util.keystr` writes it: `['params']['w']`.
        dtype: name of the dtype in the tree (`float8_e8m0fnu`, `key<fry>`), not of the stored integers.
        shape: its shape in the tree.
        key_impl: the PRNG implementation of a typed key, else None.
        pieces: where its values are; they are disjoint and make up the whole. None for an empty array.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    key_impl: str | None
    pieces: tuple[Piece, ...]

    @property
    def data_shape(self) -> tuple[int, ...]:
        """The shape of what is stored: for a typed key with a last axis for its uint32 words."""
        return self.shape if self.key_impl is None else (*self.shape, *_words(self.key_impl))

    def boxes(self, like: Any) -> dict[Any, Box]:
        """Which part of the data goes where: the box for each of this process's devices under the sharding of `like`.

        The key is None where the whole goes to NumPy or to the default device.

        Raises:
            ValueError: `like` lies on an abstract mesh that no current mesh makes concrete.
        """
        sharding = None if isinstance(like, np.ndarray) else _sharding(self.name, like)
        if sharding is None:
            return {None: whole(self.data_shape)}
        indices = sharding.addressable_devices_indices_map(self.shape)
        return {device: box_of(index or (), self.data_shape) for device, index in indices.items()}


def named_leaves(tree: Any, also: tuple[type, ...] = ()) -> dict[str, Any]:
    """The leaves of a tree by name; each is a `jax.Array`, a NumPy array of a native number type, or one of `also`.

    Raises:
        TypeError: a leaf is something else.
        ValueError: two leaves have one name.
    """
    named = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path)
        if name in named:
            raise ValueError(f"two leaves of the tree are named {name}; a checkpoint needs distinct names")
        if not isinstance(leaf, (jax.Array, np.ndarray, *also)):
            raise TypeError(
                f"leaf {name} is a {type(leaf).__name__} ({leaf!r}); a checkpoint holds arrays: wrap it with "
                f"jnp.asarray, or put it into metadata"
            )
        if isinstance(leaf, np.ndarray) and not (_is_known(leaf.dtype.name) and leaf.dtype.isnative):
            raise TypeError(
                f"leaf {name} has dtype {leaf.dtype.str}, which no checkpoint holds; use a native number type"
            )
        named[name] = leaf
    return named


def wanted_leaves(target: Any) -> dict[str, Any]:
    """The leaves of a restore target by name.

    Raises:
        TypeError: a leaf is not a `jax.Array`, `jax.ShapeDtypeStruct` or NumPy array.
    """
    return named_leaves(target, also=(jax.ShapeDtypeStruct,))


def misfit(records: Mapping[str, LeafRecord], wanted: Mapping[str, Any]) -> str | None:
    """Why the saved leaves do not fit the target, naming up to three leaves; None if they do."""
    problems = [f"leaf {name} is in the target, not in the checkpoint" for name in wanted if name not in records]
    problems += [f"leaf {name} is in the checkpoint, not in the target" for name in records if name not in wanted]
    for name, leaf in wanted.items():
        if name in records:
            saved = _describe(records[name].dtype, records[name].shape)
            asked = _describe(str(leaf.dtype), leaf.shape)
            if saved != asked:
                problems.append(f"leaf {name} is {saved} in the checkpoint, {asked} in the target")
    if not problems:
        return None
    more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
    return "; ".join(problems[:3]) + more


def encode(host: np.ndarray) -> np.ndarray:
    """The stored form of a host array: itself, or a view as unsigned integers of the same width."""
    return host if host.dtype.name in _STORED_AS_ITSELF else host.view(f"u{host.dtype.itemsize}")


def fingerprint(array: np.ndarray, dtype: str, shape: tuple[int, ...], key_impl: str | None) -> str:
    """SHA-256 of dtype, shape and bytes in C order, of a leaf or of a piece: the same whatever it was cut from.

    Args:
        array: the stored form.
        dtype: the dtype in the tree.
        shape: the shape in the tree, so that of keys rather than of their words.
        key_impl: the PRNG implementation of typed keys.
    """
    digest = hashlib.sha256(f"{dtype} {list(shape)} {key_impl}".encode())
    digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return digest.hexdigest()


def stored_name(position: int, name: str) -> str:
    """A short name for files, made unique by the leaf's position in the tree."""
    return f"{position:04d}.{re.sub(r'[^A-Za-z0-9_-]+', '.', name).strip('.')[:100]}"


def place(blocks: Mapping[Box, np.ndarray], record: LeafRecord, like: Any) -> Any:
    """Turns stored blocks back into the leaf and puts it where `like` is, or says it should be.

    Args:
        blocks: the stored form of every box in `record.boxes(like)`.
        record: what the manifest says of the leaf.
        like: the target.

    Raises:
        ValueError: JAX narrowed the dtype.
    """
    boxes = record.boxes(like)
    if isinstance(like, np.ndarray):
        return blocks[boxes[None]].view(numpy_dtype(record.dtype))
    if None in boxes:
        leaf = _put(blocks[boxes[None]], record, None)
    else:
        sharding = _sharding(record.name, like)
        assert sharding is not None
        kind = sharding.memory_kind
        parts = [
            _put(blocks[box], record, SingleDeviceSharding(device, memory_kind=kind)) for device, box in boxes.items()
        ]
        leaf = jax.make_array_from_single_device_arrays(record.shape, sharding, parts, dtype=like.dtype)
    return _weaken(leaf) if getattr(like, "weak_type", False) else leaf  # typed keys have no such attribute


def _put(block: np.ndarray, record: LeafRecord, where: Sharding | None) -> jax.Array:
    # may_alias=False: JAX must own the buffer, or the first donated step would have to copy it.
    if record.key_impl is not None:
        return jax.random.wrap_key_data(jax.device_put(block, where, may_alias=False), impl=record.key_impl)
    host = block.view(numpy_dtype(record.dtype))
    leaf = jax.device_put(host, where, may_alias=False)
    if leaf.dtype != host.dtype:
        raise ValueError(
            f"leaf {record.name} is {record.dtype}, which JAX turned into {leaf.dtype}: set jax_enable_x64, "
            f"or give a NumPy array as its target"
        )
    return leaf


def _weaken(leaf: jax.Array) -> jax.Array:
    """The same array with a weak type, without which it would promote differently."""
    # A Python scalar makes a weak array, and .at[].set keeps it one; the compiled full takes any sharding.
    zero = np.zeros((), leaf.dtype).item()
    where = leaf.sharding if leaf.committed else None
    weak = jax.jit(lambda: jnp.full(leaf.shape, zero), out_shardings=where)()
    return jax.device_put(weak.at[...].set(leaf), where)


@functools.cache
def _words(key_impl: str) -> tuple[int, ...]:
    return jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=key_impl))).shape


def _sharding(name: str, like: Any) -> Sharding | None:
    if isinstance(like, jax.Array) and not like.committed:
        return None
    sharding = like.sharding
    if not (isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh)):
        return sharding
    mesh = jax.sharding.get_mesh()
    if mesh.empty or mesh.abstract_mesh != sharding.mesh:
        raise ValueError(
            f"the target of leaf {name} is laid out on an abstract mesh ({sharding.mesh}): restore under "
            f"jax.set_mesh(mesh), or give ShapeDtypeStructs with concrete shardings"
        )
    return NamedSharding(mesh, sharding.spec)


def _is_known(dtype: str) -> bool:
    return dtype in _STORED_AS_ITSELF or hasattr(ml_dtypes, dtype)


def numpy_dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def _describe(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"
