"""States to save, and how to compare what comes back, for the tests of checkpoints."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

ONE_BYTE = ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e4m3", "float8_e3m4", "int8", "uint8")
FOUR_BITS = ("float4_e2m1fn", "int4", "uint4")
TWO_BYTES = ("bfloat16", "float16", "int16", "uint16")


def _dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def _every_bit_pattern(name: str) -> np.ndarray:
    count, width = (16, np.uint8) if name in FOUR_BITS else (256, np.uint8) if name in ONE_BYTE else (65536, np.uint16)
    return np.arange(count, dtype=width).view(_dtype(name)).reshape(4, -1)


def _bits(leaf) -> np.ndarray:
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    host = np.asarray(leaf)
    return np.frombuffer(host.tobytes(), np.uint8)


def assert_same(left, right) -> None:
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(left), jax.tree.leaves(right)):
        name = jax.tree_util.keystr(path)
        assert a.dtype == b.dtype, name
        assert a.shape == b.shape, name
        assert np.array_equal(_bits(a), _bits(b)), name


def like_of(state):
    """Shapes and dtypes of a state; NumPy leaves stay."""

    def like(leaf):
        if isinstance(leaf, np.ndarray):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=getattr(leaf, "weak_type", False))

    return jax.tree.map(like, state)


def mesh_of(shape: tuple[int, ...], names: tuple[str, ...], kind: AxisType = AxisType.Explicit):
    count = int(np.prod(shape))
    if jax.device_count() < 8:
        pytest.skip("needs eight devices, virtual or not")
    return jax.make_mesh(shape, names, (kind,) * len(shape), devices=jax.devices()[:count])


def every_dtype():
    """A leaf of every dtype with every bit pattern, empty ones, typed keys, weak types."""
    payloads = np.array([0x7F800001, 0xFFC12345, 0x80000000, 0x00000001, 0x7F7FFFFF], np.uint32).view(np.float32)
    return {
        "all": {name: jnp.asarray(_every_bit_pattern(name)) for name in (*ONE_BYTE, *FOUR_BITS, *TWO_BYTES)},
        "float32": jnp.asarray(payloads),
        "int32": jnp.asarray(np.array([-(2**31), 2**31 - 1], np.int32)),
        "uint32": jnp.asarray(np.array(2**32 - 1, np.uint32)),
        "complex64": jnp.asarray(np.array([1 - 2j], np.complex64)),
        "bool": jnp.asarray([True, False, True]),
        "empty": [jnp.zeros((0, 3)), jnp.zeros((2, 0), jnp.float4_e2m1fn), jax.random.split(jax.random.key(1), 0)],
        "keys": (jax.random.key(7), jax.random.split(jax.random.key(3, impl="rbg"), (2, 3))),
        "weak": [jnp.asarray(0.1), jnp.full((2, 3), -0.0), jnp.asarray(7), jnp.full(2, 1j)],
    }


def sharded_state(mesh, names):
    """Leaves of many kinds over a mesh, which may span processes."""

    def put(x, *spec):
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))

    rows, columns = names[0], names[-1]
    codes = np.arange(16, dtype=np.uint8)
    return {
        "rows": put(np.arange(64, dtype=np.float32).reshape(16, 4), rows),
        "columns": put(np.arange(128, dtype=np.uint16).reshape(4, 32).view(ml_dtypes.bfloat16), None, columns),
        "replicated": put(np.arange(5, dtype=np.int32)),
        "codes": put(np.tile(codes, (8, 1)).view(ml_dtypes.float4_e2m1fn), rows),
        "scales": put(codes[:8].view(ml_dtypes.float8_e8m0fnu), rows),
        "packed": put(np.arange(128, dtype=np.uint8).reshape(8, 16), rows),
        "keys": jax.jit(
            lambda: jax.random.split(jax.random.key(0), 8), out_shardings=NamedSharding(mesh, PartitionSpec(rows))
        )(),
    }
