"""Leaves of a pytree: named, encoded for storage, fingerprinted, compared with a target, and put back.

Orbax 0.12.8 refuses uint4, uint2 and empty arrays, and E8M0 read back as float32 is garbage (1 becomes 1.8e19). So a
leaf is stored as itself only if its dtype is NumPy's or bfloat16. Any other dtype is stored as the unsigned integers of
the same width (float8, float4 and int4 take one byte a value), a typed PRNG key as its uint32 words, and an empty array
not at all; the manifest remembers the true dtype and shape.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, Sharding

_INTEGERS = {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
_FLOATS = {"float16", "float32", "float64", "bfloat16", "complex64", "complex128"}
_STORED_AS_ITSELF = {"bool"} | _INTEGERS | _FLOATS


@dataclass(frozen=True)
class LeafRecord:
    """What the manifest says of one leaf.

    Attributes:
        name: its path in the tree, as `jax.tree_util.keystr` writes it: `['params']['w']`.
        stored: the name Orbax stores it under, or None for an empty array.
        dtype: name of the dtype in the tree (`float8_e8m0fnu`, `key<fry>`), not of the stored integers.
        shape: its shape in the tree.
        key_impl: the PRNG implementation of a typed key, else None.
        sha256: fingerprint of dtype, shape and bytes (see `fingerprint`).
    """

    name: str
    stored: str | None
    dtype: str
    shape: tuple[int, ...]
    key_impl: str | None
    sha256: str


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
    """SHA-256 of a leaf's dtype, shape and bytes in C order: the same for every sharding of the same values."""
    digest = hashlib.sha256(f"{dtype} {list(shape)} {key_impl}".encode())
    digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return digest.hexdigest()


def empty(record: LeafRecord) -> np.ndarray:
    """The stored form of an empty leaf, which Orbax does not hold."""
    if record.key_impl is not None:
        words = jax.random.key_data(jax.random.key(0, impl=record.key_impl)).shape
        return np.empty(record.shape + words, np.uint32)
    return encode(np.empty(record.shape, _numpy_dtype(record.dtype)))


def place(array: np.ndarray, record: LeafRecord, like: Any) -> Any:
    """Turns the stored form back into the leaf and puts it where `like` is, or says it should be.

    Raises:
        ValueError: `like` lies on an abstract mesh that no current mesh makes concrete, or JAX narrowed the dtype.
    """
    # may_alias=False throughout: JAX must own the buffer, or the first donated step would have to copy it.
    if record.key_impl is not None:
        words = jax.device_put(array, may_alias=False)
        return jax.device_put(jax.random.wrap_key_data(words, impl=record.key_impl), _sharding(record, like))
    host = array.view(_numpy_dtype(record.dtype))
    if isinstance(like, np.ndarray):
        return host
    source = host
    if (
        like.weak_type
    ):  # or it would promote differently; a Python scalar makes a weak array, and .at[].set keeps it one
        source = jnp.full(host.shape, host.dtype.type(0).item()).at[...].set(host)
    leaf = jax.device_put(source, _sharding(record, like), may_alias=False)
    if leaf.dtype != host.dtype:
        raise ValueError(
            f"leaf {record.name} is {record.dtype}, which JAX turned into {leaf.dtype}: set jax_enable_x64, "
            f"or give a NumPy array as its target"
        )
    return leaf


def _sharding(record: LeafRecord, like: Any) -> Sharding | None:
    if isinstance(like, jax.Array) and not like.committed:
        return None
    sharding = like.sharding
    if not (isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh)):
        return sharding
    mesh = jax.sharding.get_mesh()
    if mesh.empty or mesh.abstract_mesh != sharding.mesh:
        raise ValueError(
            f"the target of leaf {record.name} is laid out on an abstract mesh ({sharding.mesh}): restore under "
            f"jax.set_mesh(mesh), or give ShapeDtypeStructs with concrete shardings"
        )
    return NamedSharding(mesh, sharding.spec)


def _is_known(dtype: str) -> bool:
    return dtype in _STORED_AS_ITSELF or hasattr(ml_dtypes, dtype)


def _numpy_dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def _describe(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"
