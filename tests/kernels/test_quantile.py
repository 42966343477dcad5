"""The exact quantile, interpreted on the CPU, against sorting."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4jax import kernels
from fp4jax.kernels import order_statistics, quantile
from fp4jax.kernels.device import triton_call
from fp4jax.kernels.quantile_device import BINS, CHUNK, CHUNKS, HIGHEST, count_kernel


def check(x, alpha) -> None:
    n = x.size
    ranks = int((1 - alpha) * n), min(int(alpha * n), n - 1)
    with kernels.interpret():
        got = jax.jit(lambda x: order_statistics(x, ranks))(x)
    ordered = np.sort(np.asarray(x).ravel())
    assert [v.dtype for v in got] == [x.dtype] * 2
    assert [float(v) for v in got] == [float(ordered[r]) for r in ranks]


def test_one_value():
    check(jnp.full((1, 1), -2.5, jnp.float16), 0.99)


def test_a_sample_that_misleads_costs_time_but_no_correctness(monkeypatch):
    monkeypatch.setattr(quantile, "SAMPLES", 64)
    x = np.sort(np.random.default_rng(1).standard_normal(20011))
    stride = -(-x.size // 64) | 1
    x[::stride] = 100  # all that the sample sees
    check(jnp.asarray(x, jnp.float32).astype(jnp.bfloat16), 0.9)


def test_errors():
    with pytest.raises(TypeError, match="x has dtype int32; the exact quantile takes bfloat16, float16 or float32"):
        order_statistics(jnp.zeros(8, jnp.int32), (0, 7))
    with pytest.raises(ValueError, match=r"ranks=\(0, 8\) must be two positions in the 8 values of x"):
        order_statistics(jnp.zeros(8, jnp.bfloat16), (0, 8))


def test_float32_is_counted_by_the_reference():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((40, 7)), jnp.float32)
    ordered = np.sort(np.asarray(x).reshape(-1))
    low, high = order_statistics(x, (2, 277))
    assert (low, high) == (ordered[2], ordered[277])
    assert low.dtype == jnp.float32


@pytest.mark.parametrize("filled", [None, *range(BINS)])
def test_a_program_counts_all_of_its_values(filled):
    """Also where all of them fall in one bin, which takes every counter to its limit."""
    low, high = np.int32([-300, 1000]), np.int32([-200, 1005])  # six bins of 32 keys, and of 1
    shift, origin = np.int32([5, 0]), low - np.int32([32, 1])
    keys = np.random.default_rng(2).integers(-600, 1400, (2, CHUNKS * CHUNK))
    if filled is not None:
        keys = np.stack([np.full(CHUNKS * CHUNK, o + (filled << s)) for o, s in zip(origin, shift, strict=True)])
    for i in range(2):
        bits = np.where(keys[i] < 0, keys[i] ^ HIGHEST, keys[i]).astype(np.int16)
        x = jax.lax.bitcast_convert_type(jnp.asarray(bits), jnp.float16)
        with kernels.interpret():
            counts = triton_call(
                functools.partial(count_kernel, chunks=CHUNKS, always=True),
                jax.ShapeDtypeStruct((1, 2, BINS), jnp.int32), x, jnp.asarray(low), jnp.asarray(high),
                name="count", grid=(1,),
            )  # fmt: skip
        for bracket in range(2):
            place = np.clip((keys[i] - origin[bracket]) >> shift[bracket], 0, BINS - 1)
            np.testing.assert_array_equal(counts[0, bracket], np.bincount(place, minlength=BINS))


@pytest.mark.parametrize(
    ("alpha", "dtype", "readings"),
    [(0.99, jnp.bfloat16, 2), (0.999, jnp.bfloat16, 3), (0.99, jnp.float16, 3), (0.999, jnp.float16, 4)],
    ids=str,
)
def test_more_readings_where_a_bracket_spans_more_keys(alpha, dtype, readings):
    n = 16384 * 4096
    ranks = int((1 - alpha) * n), int(alpha * n)
    assert quantile._readings(ranks, n, jnp.finfo(dtype).nmant) == readings
    assert quantile._readings((0, 9), 10, jnp.finfo(dtype).nmant) == 2


def test_more_readings_where_the_sample_is_a_third():
    n = quantile.SAMPLES + 1  # every third value
    assert quantile._readings((int(0.01 * n), int(0.99 * n)), n, 7) == 3
