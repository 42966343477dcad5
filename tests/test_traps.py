"""What broke others (shared list of traps): scales, zeros, NaN, rounding and packing, eager and jit, in every dtype.

The number of the trap stands in each docstring; noise, transformations, shapes and dtypes are in
``test_traps_programs``. Traps of optimizers, kernels, collectives, checkpoints and telemetry are tested where those
live.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from jax.sharding import PartitionSpec as P
from traps import (
    DTYPES,
    E2M1_VECTOR,
    F32,
    RULES,
    dot,
    dtypes,
    every_recipe,
    formats,
    mesh_of_eight,
    normal,
    on_devices,
    product,
    quantized,
    quantizer,
    rules,
    same,
    uniform_recipe,
    with_gradients,
)

import fp4jax
from fp4jax.formats import pack_nibbles, unpack_nibbles

# --- scales, zeros, NaN -----------------------------------------------------------------------------------------------


@dtypes
@rules
def test_zero_rows_stay_zero_under_a_finite_scale(rule, dtype):
    """Trap 1."""
    spec = fp4jax.QuantSpec(fp4jax.E2M1, scale=rule)
    for x in (normal(0, 8, 64).at[0].set(0).astype(dtype), jnp.zeros((8, 64), dtype)):
        _, scale, back = quantized(x, spec)
        assert scale.astype(F32)[0, 0] == 1
        assert np.isfinite(scale.astype(F32)).all()
        assert not back[0].any()


@every_recipe
def test_zero_rows_have_finite_gradients(name):
    """Trap 1. The conformance suite has a zero row and a zero column too, in every dtype."""
    x, w = normal(0, 8, 32).at[0].set(0), normal(1, 32, 6).at[:, 2].set(0)
    y, dx, dw = product(name)(x, w, jnp.ones((8, 6), jnp.float32))
    assert all(np.isfinite(np.asarray(t)).all() for t in (y, dx, dw))
    assert not np.asarray(y)[0].any()
    assert not np.asarray(y)[:, 2].any()


@rules
def test_subnormal_inputs_give_finite_zeros(rule):
    """Trap 3. A scale alone shows them as they are; beside ordinary values they are zeros."""
    for fmt, (dtype, tiny) in itertools.product((fp4jax.E2M1, fp4jax.E4M3), zip(DTYPES, (1e-39, 1e-39, 6e-8))):
        x = np.zeros((8, 64), F32)
        x[:4, 0], x[:4, 1], x[2:, 2] = tiny, -tiny / 10, 1
        _, scale, back = quantized(jnp.asarray(x, dtype), fp4jax.QuantSpec(fmt, scale=rule))
        assert np.isfinite(scale.astype(F32)).all()
        assert (scale.astype(F32) > 0).all()
        np.testing.assert_allclose(back, x, atol=1e-7)  # NaN would fail


@formats
def test_no_scale_of_a_finite_block_is_special(fmt):
    """Traps 3 and 12: over the whole exponent range neither 0, inf, NaN nor a subnormal number."""
    x = jnp.asarray(np.ldexp(F32(1.3), np.arange(-149, 128))[:, None].astype(F32))
    for rule in RULES:
        spec = fp4jax.QuantSpec(fmt, scale=rule)
        # Under vmap each row is a tensor, else the largest row sets the outer scale of all.
        q = jax.jit(jax.vmap(quantizer(spec)[0]))(x)
        outer = 1 if q.outer_scale is None else np.asarray(q.outer_scale)
        scale = np.asarray(q.scale).astype(F32) * outer
        assert np.isfinite(scale).all(), rule
        assert (scale >= np.finfo(F32).tiny).all(), rule


def test_block_scales_never_store_a_nan_byte():
    """Trap 4: the E4M3 scale of a finite block saturates at 448; bytes 0x7F and 0xFF are NaN."""
    spec = fp4jax.QuantSpec(fp4jax.E2M1, fp4jax.PerBlock(2), fp4jax.TwoLevel())
    rng = np.random.default_rng(0)
    wide = rng.normal(size=(64, 32)) * 10.0 ** rng.uniform(-30, 30, (64, 1))
    for x in (wide, np.full((64, 32), 1e30), np.full((64, 32), np.finfo(F32).max), np.full((64, 32), 1e-45)):
        _, scale, _ = quantized(jnp.asarray(x, jnp.float32), spec)
        assert not np.isin(scale.view(np.uint8), (0x7F, 0xFF, 0x00, 0x80)).any()
        assert scale.astype(F32).max() <= 448


@formats
@pytest.mark.parametrize("ties", [fp4jax.NEAREST_EVEN, fp4jax.TIES_UP, fp4jax.STOCHASTIC], ids=str)
def test_values_past_the_maximum_saturate(ties, fmt):
    """Trap 5: [464, 465, 1000, −1000] in E4M3 → [448, 448, 448, −448], and the like elsewhere; NaN stays NaN."""
    u = jnp.asarray([464 / 448, 465 / 448, 1000 / 448, -1000 / 448, np.inf, -np.inf, np.nan], jnp.float32) * fmt.max
    f = functools.partial(ties, format=fmt, key=jax.random.key(0))
    landed = np.asarray(same(f(u), jax.jit(f)(u)))
    assert landed[:6].tolist() == [fmt.max, fmt.max, fmt.max, -fmt.max, fmt.max, -fmt.max]
    assert np.isnan(landed[6])


def test_a_power_of_two_floor_saturates():
    """Trap 5, through quantize: amax 464 under scale 1 is stored as 448."""
    spec = fp4jax.QuantSpec(fp4jax.E4M3, fp4jax.PerTensor(), fp4jax.PowerOfTwo("floor"))
    values, scale, _ = quantized(jnp.asarray([464, 465, -465, 1], jnp.float32), spec)
    assert values.tolist() == [448, 448, -448, 1]
    assert scale.astype(F32).tolist() == [1]


@rules
def test_nan_and_inf_make_their_block_nan_whatever_its_size(rule):
    """Trap 6, and jnp.max on CPU, which drops NaN from arrays of 4096 elements on (jaxlib 0.11.2, YNN fusion)."""
    for bad, shape, dtype in itertools.product((np.nan, np.inf, -np.inf), ((8, 64), (64, 256)), DTYPES):
        spec = fp4jax.QuantSpec(fp4jax.E2M1, fp4jax.PerBlock(32), rule)
        x = np.random.default_rng(0).normal(size=shape).astype(F32)
        x[1, 1] = bad
        _, scale, back = quantized(jnp.asarray(x, dtype), spec)
        hit = np.zeros(shape, bool)
        hit[1, :32] = True
        assert np.isnan(scale.astype(F32)[1, 0])
        assert np.isnan(back[hit]).all()
        assert np.isfinite(back[~hit]).all()
        assert np.abs(back[~hit] - x[~hit]).max() < 1, "another block must not feel it"


@every_recipe
def test_non_finite_operands_reach_the_product_and_the_gradients(name):
    """Trap 6: finiteness is tested before any clamp, so OCC does not turn inf into a finite number."""
    x, w, dy = normal(0, 64, 128), normal(1, 128, 8), normal(2, 64, 8)
    f = product(name)
    for bad in (np.nan, np.inf, -np.inf):
        y, _, dw = f(x.at[1, 1].set(bad), w, dy)
        assert not np.isfinite(np.asarray(y)[1]).any()
        assert not np.isfinite(np.asarray(dw)[1]).any()
        y, dx, _ = f(x, w.at[3, 2].set(bad), dy)
        assert not np.isfinite(np.asarray(y)[:, 2]).any()
        assert not np.isfinite(np.asarray(dx)[:, 3]).any()
        _, dx, dw = f(x, w, dy.at[5, 1].set(bad))
        assert not np.isfinite(np.asarray(dx)[5]).any()
        assert not np.isfinite(np.asarray(dw)[:, 1]).any()


def test_a_sharded_tensor_has_one_scale():
    """Trap 8: v = 1..8 over 8 devices, per tensor: 8/6 everywhere."""
    spec = fp4jax.QuantSpec(fp4jax.E2M1, fp4jax.PerTensor())
    v = on_devices(jnp.arange(1.0, 9.0, dtype=jnp.float32), mesh_of_eight(), "d")
    values, scale, _ = quantized(v, spec)
    assert scale.tolist() == [F32(8) * F32(1 / 6)]
    assert values.tolist() == oracle.quantize(np.arange(1, 9), spec, -1).values.tolist()


def test_a_users_shard_map_shares_a_tensor_scale_and_explains_what_it_cannot():
    """Trap 8: the maximum runs over the axes that vary; without that knowledge the error asks for axis_name."""
    mesh = mesh_of_eight()
    v = on_devices(jnp.arange(1.0, 9.0, dtype=jnp.float32), mesh, "d")

    def sharded(granularity, **options):
        def local(v):
            q = fp4jax.quantize(v, fp4jax.QuantSpec(fp4jax.E2M1, granularity), axis=-1)
            return q.scale, q.values.astype(jnp.float32)

        return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("d"), out_specs=(P(), P("d")), **options))(v)

    whole = oracle.quantize(np.arange(1, 9), E2M1_VECTOR, -1)
    for granularity, options in ((fp4jax.PerTensor(), {}), (fp4jax.PerTensor(axis_name="d"), {"check_vma": False})):
        scale, values = sharded(granularity, **options)
        assert np.asarray(scale).tolist() == whole.block_scale.tolist()
        assert np.asarray(values).tolist() == whole.values.tolist()
    with pytest.raises(ValueError, match="axis_name"):
        sharded(fp4jax.PerTensor(), check_vma=False)


@dtypes
def test_two_level_scales_hold_any_constant_tensor(dtype):
    """Trap 9: relative error at most 1 %."""
    for fill in (1e-3, 3e3, 1e5, 1e-30):
        if dtype == jnp.float16 and not 1e-4 < fill < 6e4:
            continue
        x = jnp.full((8, 64), fill, dtype)
        _, _, back = quantized(x, fp4jax.QuantSpec(fp4jax.E2M1, fp4jax.PerBlock(16), fp4jax.TwoLevel()))
        np.testing.assert_allclose(back, np.asarray(x, F32), rtol=0.01)


# --- rounding and packing ---------------------------------------------------------------------------------------------


def e8m0_bytes(amax, fmt, mode):
    """(stored byte, value, dequantized) of one-element blocks."""
    spec = fp4jax.QuantSpec(fmt, scale=fp4jax.PowerOfTwo(mode))
    values, scale, back = quantized(jnp.asarray(np.asarray(amax, F32)[:, None]), spec)
    assert scale.dtype == ml_dtypes.float8_e8m0fnu
    return scale.view(np.uint8).ravel().tolist(), values.ravel().tolist(), back.ravel().tolist()


def test_power_of_two_modes_on_the_published_examples():
    """Trap 10."""
    assert e8m0_bytes([7], fp4jax.E2M1, "floor") == ([127], [6], [6])
    assert e8m0_bytes([7], fp4jax.E2M1, "rceil") == ([128], [4], [8])
    assert e8m0_bytes([150], fp4jax.E4M3, "rceil")[0] == [126]
    assert e8m0_bytes([150], fp4jax.E4M3, "ceil")[0] == [127]


@formats
def test_power_of_two_exponents_are_never_off_by_one(fmt):
    """Traps 11 and 12: exact at and around every power of two; byte 127 for amax 0, never 0 or 255."""
    mantissas = np.array([1, np.nextafter(F32(1), F32(2)), 1.25, 1.5, 1.75, 1.999, np.nextafter(F32(2), F32(0))], F32)
    mantissas = np.append(mantissas, [np.nextafter(F32(c), F32(d)) for c in (1.5, 1.75) for d in (0, 2)])
    powers = (*range(-20, 21), -126, -125, -60, 60, 126, 127)
    amax = np.concatenate([*(np.ldexp(mantissas, k) for k in powers), [0, 1e-45, 1e-38, 3e38, 3.4028235e38]])
    amax = amax.astype(F32)
    for mode in ("floor", "ceil", "even", "rceil"):
        stored, _, _ = e8m0_bytes(amax, fmt, mode)
        exponent = oracle.power_of_two_exponent(amax, oracle.format_of(fmt), mode)
        np.testing.assert_array_equal(stored, exponent + 127, mode)
        assert stored[-5] == 127
        assert 1 <= min(stored) <= max(stored) <= 254
        if mode == "rceil":
            inside = amax.astype(np.float64) <= fmt.max * 2.0**126
            assert (amax.astype(np.float64) / np.ldexp(1.0, exponent) <= fmt.max)[inside].all()


@dtypes
def test_e2m1_ties(dtype):
    """Trap 13: to even in NEAREST_EVEN, toward +∞ in TIES_UP; scale 1 because 6 stands in the block."""
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])
    x = jnp.asarray(np.concatenate([ties, -ties, [6]]), dtype)
    expected = {
        fp4jax.NEAREST_EVEN: [0, 1, 1, 2, 2, 4, 4, 0, -1, -1, -2, -2, -4, -4, 6],
        fp4jax.TIES_UP: [0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, 6],
    }
    for rounding, want in expected.items():
        _, _, back = quantized(x, fp4jax.QuantSpec(fp4jax.E2M1, rounding=rounding))
        assert back.tolist() == want


@pytest.mark.parametrize("fmt", [fp4jax.E4M3, fp4jax.E5M2], ids=str)
def test_eight_bit_midpoints_and_their_neighbors_equal_the_table(fmt):
    """Trap 15: no float32 → float8 result is an ulp off; through quantize under scale 1."""
    middle = ((fmt.grid[1:].astype(np.float64) + fmt.grid[:-1]) / 2).astype(F32)
    x = np.concatenate([middle, np.nextafter(middle, F32(-np.inf)), np.nextafter(middle, F32(np.inf))])
    x = np.stack([x, np.full_like(x, fmt.max)], axis=1)
    values, _, _ = quantized(jnp.asarray(x), fp4jax.QuantSpec(fmt))
    np.testing.assert_array_equal(values, oracle.round_to_grid(x, oracle.format_of(fmt), "even").astype(F32))


@pytest.mark.parametrize(("scope", "dtype"), [*(("tensor", dtype) for dtype in DTYPES), ("vector", jnp.bfloat16)])
def test_the_residual_is_the_same_under_jit(scope, dtype):
    """Trap 16: with excess precision x − clip(x) becomes 0 in bfloat16."""
    occ = fp4jax.OCC(alpha=0.9, scope=scope)

    def f(a, b):  # x is itself computed, so a compiler could keep it in float32
        clamped, residual = fp4jax.clamp_outliers(a * b, occ, axis=-1)
        q = fp4jax.quantize(clamped, E2M1_VECTOR, axis=-1)
        return clamped, residual, q.values, q.scale

    a, b = normal(0, 8, 64, dtype=dtype), normal(1, 8, 64, dtype=dtype)
    _, residual, _, _ = same(f(a, b), jax.jit(f)(a, b))
    assert np.asarray(residual, F32).any()


@dtypes
def test_a_carry_out_of_the_mantissa_reaches_the_exponent(dtype):
    """Trap 17."""
    x = jnp.asarray([1.8, 1.9, 3.6, 3.9, 6, -1.9], dtype)
    assert quantized(x, E2M1_VECTOR)[2].tolist() == [2, 2, 4, 4, 6, -2]


@dtypes
def test_blocks_do_not_straddle_rows(dtype):
    """Trap 18: k = 40, blocks of 32; row 0 = 1e-3 does not feel row 1 = 1e3."""
    x = jnp.stack([jnp.full(40, 1e-3, dtype), jnp.full(40, 1e3, dtype)])
    for rule, tolerance in ((fp4jax.AbsMax(), 1e-6), (fp4jax.PowerOfTwo("floor"), 0.25)):
        spec = fp4jax.QuantSpec(fp4jax.E2M1, fp4jax.PerBlock(32), rule)
        _, scale, both = quantized(x, spec)
        assert scale.shape == (2, 2)
        np.testing.assert_allclose(both, np.asarray(x, F32), rtol=tolerance)
        np.testing.assert_array_equal(both[:1], quantized(x.at[1].set(7), spec)[2][:1])


def test_element_zero_is_the_low_nibble():
    """Trap 19."""
    values = jnp.asarray([0.5, 6, -0.0, 1.5], jnp.float4_e2m1fn)
    assert np.asarray(same(pack_nibbles(values), jax.jit(pack_nibbles)(values))).tolist() == [0x71, 0x38]
    assert np.asarray(jax.lax.bitcast_convert_type(values.reshape(2, 2), jnp.uint8)).tolist() == [0x71, 0x38]
    for n in (1, 5, 16):
        packed = pack_nibbles(jnp.arange(n, dtype=jnp.uint8))
        assert packed.shape == (-(-n // 2),)
        assert np.asarray(unpack_nibbles(packed, n)).tolist() == list(range(n))


def test_alpha_one_is_the_identity_and_small_arrays_have_bounds():
    """Trap 20: int(αn) would be n at α = 1."""
    sizes_and_scopes = ((1, "tensor"), (2, "tensor"), (1000, "tensor"), (2, "vector"))
    for alpha, (n, scope) in itertools.product((1.0, 0.999), sizes_and_scopes):
        x = normal(n, n)
        occ = fp4jax.OCC(alpha=alpha, scope=scope)
        clamped, residual = jax.jit(functools.partial(fp4jax.clamp_outliers, occ=occ, axis=-1))(x)
        np.testing.assert_array_equal(clamped, oracle.clamp_outliers(np.asarray(x), occ, -1)[0])
        if alpha == 1.0:
            np.testing.assert_array_equal(clamped, x)
            assert not np.asarray(residual).any()


def test_the_outer_scale_of_each_operand_reaches_the_product():
    """Trap 21: 4 times each operand gives the same codes, block scales and 16 times the product, exactly."""
    recipe = uniform_recipe(fp4jax.QuantSpec(fp4jax.E2M1, fp4jax.PerBlock(16), fp4jax.TwoLevel()))
    x, w, dy = normal(0, 6, 48), normal(1, 48, 10), normal(2, 6, 10)
    f = jax.jit(functools.partial(with_gradients, dot(recipe)))
    once, four_times = f(x, w, dy), f(4 * x, 4 * w, dy)
    for factor, a, b in zip((16, 4, 4), once, four_times):
        np.testing.assert_array_equal(factor * np.asarray(a), np.asarray(b))
        assert np.asarray(a).any()
    assert np.linalg.norm(once[0] - x @ w) < 0.3 * np.linalg.norm(x @ w)
