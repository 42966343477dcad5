"""Grids, codes and packing."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import fp4jax
from fp4jax.formats import FORMATS, FloatFormat, decode, encode, pack_nibbles, unpack_nibbles

formats = pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)


@pytest.mark.parametrize(
    ("fmt", "positive"),
    [
        (fp4jax.E1M2, [0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5]),
        (fp4jax.E2M1, [0, 0.5, 1, 1.5, 2, 3, 4, 6]),
        (fp4jax.E3M0, [0, 0.25, 0.5, 1, 2, 4, 8, 16]),
    ],
)
def test_four_bit_grids_are_those_of_the_paper(fmt, positive):
    assert fmt.bits == 4
    assert fmt.grid.tolist() == [-v for v in positive[:0:-1]] + [float(v) for v in positive]


@pytest.mark.parametrize("fmt", [fp4jax.E2M1, fp4jax.E4M3, fp4jax.E5M2], ids=str)
def test_grids_with_a_dtype_hold_exactly_its_finite_values(fmt):
    codes = np.arange(2**fmt.bits, dtype=np.uint8).view(fmt.dtype).astype(np.float32)
    np.testing.assert_array_equal(fmt.grid, np.unique(codes[np.isfinite(codes)] + 0.0))


def test_e8m0_holds_every_power_of_two():
    np.testing.assert_array_equal(fp4jax.E8M0.grid, np.ldexp(np.float32(1), np.arange(-127, 128)))


@formats
def test_grid_is_ascending_float32_and_read_only(fmt):
    assert fmt.grid.dtype == np.float32
    assert (np.diff(fmt.grid) > 0).all()
    assert fmt.grid[-1] == fmt.max
    with pytest.raises(ValueError, match="read-only"):
        fmt.grid[0] = 1


@formats
def test_codes_are_those_of_ml_dtypes_and_decode_undoes_encode(fmt):
    codes = np.asarray(encode(jnp.asarray(fmt.grid), fmt))
    np.testing.assert_array_equal(decode(jnp.asarray(codes), fmt), fmt.grid)
    if fmt.dtype is not None:
        np.testing.assert_array_equal(codes, fmt.grid.astype(fmt.dtype).view(np.uint8) & (2**fmt.bits - 1))


def test_a_format_without_a_dtype_is_stored_in_the_narrowest_exact_one():
    assert fp4jax.E1M2.storage_dtype == fp4jax.E3M0.storage_dtype == ml_dtypes.float8_e4m3fn
    assert fp4jax.E5M2.storage_dtype == ml_dtypes.float8_e5m2
    assert FloatFormat("e6m1", 6, 1, 2.0**31).storage_dtype == ml_dtypes.bfloat16
    assert FloatFormat("e4m9", 4, 9, 240.0).storage_dtype == np.float32


def test_formats_compare_by_value_and_hash_without_the_grid():
    twin = FloatFormat("e2m1", 2, 1, 6.0, ml_dtypes.float4_e2m1fn)
    assert twin == fp4jax.E2M1
    assert hash(twin) == hash(fp4jax.E2M1)
    assert repr(twin) == "E2M1"


def test_a_maximum_off_the_grid_is_refused():
    with pytest.raises(ValueError, match=r"max=5.0 is not a value .* largest values are \[3.0, 4.0, 6.0\]"):
        FloatFormat("broken", 2, 1, 5.0)


def test_packing_puts_element_zero_in_the_low_nibble():
    values = jnp.asarray([0.5, 6.0, -0.0, 1.5], jnp.float4_e2m1fn)
    assert [hex(b) for b in pack_nibbles(values).tolist()] == ["0x71", "0x38"]
    assert unpack_nibbles(pack_nibbles(values), 4).tolist() == [1, 7, 8, 3]


@pytest.mark.parametrize("size", [0, 1, 2, 5, 8])
def test_packing_round_trips_any_length(size):
    codes = jnp.asarray(np.random.default_rng(0).integers(0, 16, (3, size)), jnp.uint8)
    packed = pack_nibbles(codes)
    assert packed.shape == (3, (size + 1) // 2)
    np.testing.assert_array_equal(unpack_nibbles(packed, size), codes)


def test_unpacking_a_wrong_size_names_both():
    with pytest.raises(ValueError, match=r"size=5 codes take 3 bytes a row, but packed has shape \(2,\)"):
        unpack_nibbles(jnp.zeros(2, jnp.uint8), 5)
