"""The exact quantile, interpreted on the CPU, against sorting."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assembly import run_assembly
from jax.sharding import PartitionSpec as P

from fp4jax import kernels
from fp4jax.kernels import order_statistics, quantile
from fp4jax.kernels.quantile_device import (
    _PLACE_PAIR,
    Reading,
    _one_hot,
    _packed,
    float_of_key,
    key_of,
    narrowed,
    windows,
)


def wanted(x, alpha) -> tuple[int, int]:
    return int((1 - alpha) * x.size), min(int(alpha * x.size), x.size - 1)


def check(x, alpha) -> None:
    """Equal to sorting, bit for bit: -0 before +0."""
    ranks = wanted(x, alpha)
    with kernels.interpret():
        got = jax.jit(lambda x: order_statistics(x, ranks))(x)
    assert [v.dtype for v in got] == [x.dtype] * 2
    ordered = np.sort(np.asarray(key_of(x.reshape(-1))))
    assert [int(key_of(v)) for v in got] == [int(ordered[r]) for r in ranks]


def values(shape, dtype, seed=1):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_t(2, shape), jnp.float32).astype(dtype)


@pytest.mark.parametrize(
    ("shape", "dtype", "alpha"),
    [
        ((1, 1), jnp.float16, 0.99),
        ((7, 40), jnp.bfloat16, 0.6),
        ((129, 127), jnp.bfloat16, 0.99),
        ((127, 7), jnp.float32, 0.95),
    ],
    ids=str,
)
def test_equals_sorting(shape, dtype, alpha):
    check(values(shape, dtype), alpha)


def test_a_sample_that_misleads_costs_readings_but_no_correctness(monkeypatch):
    monkeypatch.setattr(quantile, "SAMPLES", 64)
    for dtype in (jnp.bfloat16, jnp.float32):
        x = np.sort(np.random.default_rng(1).standard_normal(20011))
        stride = -(-x.size // 64) | 1
        x[::stride] = 100  # all that the sample sees
        check(jnp.asarray(x, jnp.float32).astype(dtype), 0.9)


def test_zeros_of_both_signs_and_nan_have_their_places():
    x = jnp.asarray([0.0, -0.0, 0.0, -0.0, jnp.nan, -jnp.nan, jnp.inf, -jnp.inf], jnp.bfloat16)
    for alpha in (0.8, 0.51):
        check(x, alpha)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_enough_readings_for_the_worst_case(dtype):
    """Counting with exact counts, from brackets that hold nothing, ends within the readings that are launched."""
    bits = 8 * jnp.dtype(dtype).itemsize
    highest = np.uint32(2**bits - 1)
    rng = np.random.default_rng(0)
    keys = np.sort(rng.integers(0, int(highest), 2000, dtype=np.uint32, endpoint=True))
    one_reading = jax.jit(functools.partial(_read, highest=highest))
    for first, second in ((0, 1999), (0, 0), (1999, 1999), (700, 1400)):
        for guess in ((0, 0, 0, 0), (highest,) * 4, (0, 0, highest, highest), (1000, 1000, 1000, 1000)):
            state = jnp.asarray(guess, jnp.uint32)
            for reading in range(quantile.READINGS[bits]):
                state = one_reading(jnp.asarray(keys), state, jnp.asarray([first, second]), reading > 0)
            assert state.tolist() == [keys[first]] * 2 + [keys[second]] * 2


def _read(keys, state, ranks, trusted, *, highest):
    brackets = (state[0], state[1]), (state[2], state[3])
    shift, origin0, end0, origin1, end1 = windows(brackets, highest)
    offset = jnp.clip(keys, origin0, end0) - origin0 + (jnp.clip(keys, origin1, end1) - origin1)
    counts = jnp.zeros(32, jnp.int32).at[(offset >> shift).astype(jnp.int32)].add(1)
    (a, b), (c, d) = narrowed(brackets, counts, (ranks[0], ranks[1]), highest, trusted)
    return jnp.stack([a, b, c, d])


BRACKETS = (
    (100, 104, 65000, 65010), (0, 65535, 0, 65535), (16000, 16003, 49530, 49540), (30000, 60000, 30010, 65535),
    (0, 0, 65535, 65535),
)  # fmt: skip


@pytest.mark.parametrize("brackets", BRACKETS, ids=str)
def test_the_assembly_finds_the_bins_of_the_portable_code(brackets):
    low0, high0, low1, high1 = (jnp.uint32(v) for v in brackets)
    window = windows(((low0, high0), (low1, high1)), np.uint32(0xFFFF))
    bits = np.arange(2**16, dtype=np.uint16)
    x = jax.lax.bitcast_convert_type(jnp.asarray(bits), jnp.bfloat16)
    reading = Reading(bits.size, 64, 1, 16, interpreted=True)
    portable = np.asarray(_one_hot(x, window, None, reading)).view(np.uint32)
    pairs = bits.view(np.uint32)
    operands = {f"${3 + 2 * i}": np.asarray(v).view(np.uint32) for i, v in enumerate(_packed(window))}
    found = run_assembly(_PLACE_PAIR, {"$2": pairs, **operands})
    np.testing.assert_array_equal(np.stack([found["$0"], found["$1"]], axis=1).ravel(), portable)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_keys_order_floats_and_come_back(dtype):
    integer = jnp.uint32 if dtype == jnp.float32 else jnp.uint16
    bits = np.random.default_rng(0).integers(0, 2 ** (8 * jnp.dtype(dtype).itemsize), 4096).astype(integer)
    x = jax.lax.bitcast_convert_type(jnp.asarray(bits), dtype)
    back = jax.lax.bitcast_convert_type(float_of_key(key_of(x), dtype), integer)
    np.testing.assert_array_equal(np.asarray(back), bits)
    finite = np.asarray(x.astype(jnp.float32))
    finite, keys = finite[np.isfinite(finite)], np.asarray(key_of(x))[np.isfinite(finite)]
    np.testing.assert_array_equal(np.diff(finite[np.argsort(keys)]) >= 0, True)


def test_counts_are_summed_over_a_mesh():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:2])
    x = values((64, 40), jnp.bfloat16)
    ranks = wanted(x, 0.99)
    with kernels.interpret(), jax.set_mesh(mesh):
        split = jax.reshard(x, P("data", None))
        found = jax.jit(
            jax.shard_map(
                lambda x: order_statistics(x, ranks, names=("data",)),
                in_specs=P("data", None), out_specs=P(), check_vma=False,
            )
        )(split)  # fmt: skip
    ordered = np.sort(np.asarray(x).astype(np.float32).ravel())
    assert [float(v) for v in found] == [ordered[r] for r in ranks]


def test_errors():
    with pytest.raises(TypeError, match="x has dtype int32; the exact quantile takes bfloat16, float16 or float32"):
        order_statistics(jnp.zeros(8, jnp.int32), (0, 7))
    for ranks in ((0, 8), (3, 2)):
        with pytest.raises(ValueError, match=r"must be two positions, in order, in the 8 values of x"):
            order_statistics(jnp.zeros(8, jnp.bfloat16), ranks)
