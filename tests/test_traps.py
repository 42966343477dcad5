"""What broke others (shared list of traps): each numeric one is a test of its kind, eager and jit, in every dtype.

The number of the trap stands in each docstring. Traps of optimizers, kernels, collectives, checkpoints and telemetry
are tested where those live. Functions are compiled once a spec or recipe and shared by the tests, which therefore use
few shapes.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import fp4jax
from fp4jax.formats import pack_nibbles, unpack_nibbles
from fp4jax.recipes import RECIPES

F32 = np.float32
DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]
MATMUL = (((1,), (0,)), ((), ()))
E2M1_VECTOR = fp4jax.QuantSpec(fp4jax.E2M1)
STOCHASTIC_VECTOR = fp4jax.QuantSpec(fp4jax.E2M1, rounding=fp4jax.STOCHASTIC)
FORMATS = [fp4jax.E2M1, fp4jax.E1M2, fp4jax.E3M0, fp4jax.E4M3, fp4jax.E5M2]
RULES = (fp4jax.AbsMax(), *(fp4jax.PowerOfTwo(mode) for mode in ("floor", "ceil", "even", "rceil")), fp4jax.TwoLevel())

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
rules = pytest.mark.parametrize("rule", RULES, ids=str)
formats = pytest.mark.parametrize("fmt", FORMATS, ids=str)
every_recipe = pytest.mark.parametrize("name", RECIPES)


def there_and_back(x, spec, axis=-1, key=None):
    """Quantize, then dequantize."""
    return fp4jax.quantize(x, spec, axis=axis, key=key).dequantize(jnp.float32)


def same(eager, jitted):
    """Both, after checking that they are the same to the bit."""
    for a, b in zip(jax.tree.leaves(eager), jax.tree.leaves(jitted), strict=True):
        assert a.dtype == b.dtype
        a, b = (np.asarray(t).astype(F32).view(np.uint32) for t in (a, b))
        np.testing.assert_array_equal(a, b, "jit differs from eager")
    return jitted


@functools.cache
def quantizer(spec):
    f = functools.partial(fp4jax.quantize, spec=spec, axis=-1)
    return f, jax.jit(f)


def quantized(x, spec):
    """(values, scale as stored, dequantized) in NumPy; eager and jit must agree to the bit."""
    q = same(*(f(x) for f in quantizer(spec)))
    return np.asarray(q.values).astype(F32), np.asarray(q.scale), np.asarray(q.dequantize(jnp.float32))


def dot(recipe, dims=MATMUL):
    return lambda lhs, rhs: fp4jax.dot_general(lhs, rhs, dims, recipe=recipe)


def with_gradients(f, lhs, rhs, dy):
    y, vjp = jax.vjp(f, lhs, rhs)
    return (y, *vjp(dy.astype(y.dtype)))


@functools.cache
def product(name):
    """Compiled (y, dx, dw) of a recipe at the defaults of its knobs."""
    return jax.jit(functools.partial(with_gradients, dot(RECIPES[name]())))


def normal(seed, *shape, dtype=F32, scale=1.0):
    return jnp.asarray(scale * np.random.default_rng(seed).normal(size=shape), dtype)


def mesh_of_eight():
    return jax.make_mesh((8,), ("d",))


def on_devices(x, mesh, *spec):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


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


def uniform_recipe(spec):
    """``spec`` on every operand of every product."""
    gemm = fp4jax.Gemm(spec, spec)
    return fp4jax.Recipe("uniform", fprop=gemm, dgrad=gemm, wgrad=gemm)


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


# --- stochastic rounding ----------------------------------------------------------------------------------------------


@formats
def test_stochastic_rounding_draws_both_neighbors_and_is_unbiased(fmt):
    """Traps 22 and 23: never zeros, never deterministic; the mean is the value."""
    spec = fp4jax.QuantSpec(fmt, rounding=fp4jax.STOCHASTIC)
    f = jax.jit(lambda x, key: fp4jax.quantize(x, spec, axis=-1, key=key).values.astype(jnp.float32))
    left, right = oracle.format_of(fmt).magnitudes[[2, 3]]
    for sign, share in itertools.product((1, -1), (0.3, 0.6)):
        target = sign * (left + share * (right - left))
        x = jnp.full((1, 4097), target, jnp.float32).at[0, 0].set(fmt.max)
        drawn = np.asarray(f(x, jax.random.key(7)))[0, 1:]
        assert set(np.abs(drawn).tolist()) == {left, right}
        assert abs(drawn.mean() - target) < 0.04 * (right - left)


def test_stochastic_rounding_of_0_3():
    """Trap 22, to the letter: x = .3 under scale 1, 4096 draws from {0, .5} with mean .3 ± .02; eager as jit."""
    x = jnp.full((4097,), 0.3, jnp.float32).at[0].set(6)
    f = functools.partial(there_and_back, spec=STOCHASTIC_VECTOR, key=jax.random.key(0))
    drawn = np.asarray(same(f(x), jax.jit(f)(x)))[1:]
    assert set(drawn.tolist()) == {0, 0.5}
    assert abs(drawn.mean() - 0.3) < 0.02


def test_stochastic_rounding_without_a_key_is_an_error():
    """Trap 23: asking for noise never gives nearest."""
    x, w = jnp.ones((2, 4), jnp.float32), jnp.ones((4, 2), jnp.float32)
    for call in (
        lambda: fp4jax.quantize(x, STOCHASTIC_VECTOR, axis=-1),
        lambda: fp4jax.fake_quant(x, STOCHASTIC_VECTOR, axis=-1),
        lambda: dot(uniform_recipe(STOCHASTIC_VECTOR))(x, w),
        lambda: fp4jax.DotGeneral(uniform_recipe(STOCHASTIC_VECTOR))(x, w, MATMUL),
    ):
        with pytest.raises(ValueError, match="key"):
            call()


def test_layers_and_rows_draw_differently():
    """Traps 25 and 28: split keys in a scan, and one key under vmap, give distinct noise."""
    x = jnp.full((3, 256), 0.3, jnp.float32).at[:, 0].set(6)
    keys = jax.random.split(jax.random.key(0), 3)
    f = functools.partial(there_and_back, spec=STOCHASTIC_VECTOR)
    scanned = jax.jit(lambda x, keys: jax.lax.scan(lambda c, xk: (c, f(xk[0], key=xk[1])), None, (x, keys))[1])(x, keys)
    own_keys = jax.jit(jax.vmap(lambda row, key: f(row, key=key)))(x, keys)
    one_key = jax.vmap(lambda row: f(row, key=keys[0]))
    for result in (scanned, own_keys, same(one_key(x), jax.jit(one_key)(x))):
        assert len({np.asarray(row).tobytes() for row in result}) == 3
    np.testing.assert_array_equal(scanned, own_keys)


def test_noise_is_the_same_on_any_mesh():
    """Trap 25: noise depends on the key and the position, never on the device."""
    x = jnp.full((16, 64), 0.3, jnp.float32).at[:, 0].set(6)
    f = jax.jit(lambda x, key: there_and_back(x, STOCHASTIC_VECTOR, key=key))
    want = np.asarray(f(x, jax.random.key(3)))
    mesh = mesh_of_eight()
    with jax.set_mesh(mesh):
        for spec in (("d", None), (None, "d")):
            np.testing.assert_array_equal(np.asarray(f(on_devices(x, mesh, *spec), jax.random.key(3))), want)


# --- transformations --------------------------------------------------------------------------------------------------


def test_a_traced_key_passes_through_every_transformation():
    """Trap 29: nothing leaks a tracer, and remat draws the same noise again."""
    recipe = fp4jax.Recipe("noisy", fprop=fp4jax.Gemm(STOCHASTIC_VECTOR, STOCHASTIC_VECTOR))
    x, w, keys = normal(0, 4, 8), normal(1, 8, 6), jax.random.split(jax.random.key(0), 2)

    def loss(x, w, key):
        y = fp4jax.dot_general(x, w, MATMUL, recipe=recipe, key=key)
        z = fp4jax.fake_quant(w, STOCHASTIC_VECTOR, axis=0, estimator=fp4jax.DGE(), key=key)
        return (y**2).sum() + (z**2).sum()

    grad = jax.jit(jax.grad(loss, (0, 1)))
    want = [np.stack(pair) for pair in zip(grad(x, w, keys[0]), grad(x, w, keys[1]))]
    runs = {
        "grad(jit)": [jnp.stack(p) for p in zip(*(jax.grad(jax.jit(loss), (0, 1))(x, w, k) for k in keys))],
        "remat": jax.jit(lambda ks: jax.lax.map(lambda k: jax.grad(jax.checkpoint(loss), (0, 1))(x, w, k), ks))(keys),
        "scan": jax.jit(lambda ks: jax.lax.scan(lambda c, k: (c, jax.grad(loss, (0, 1))(x, w, k)), None, ks)[1])(keys),
        "vmap": jax.jit(jax.vmap(jax.grad(loss, (0, 1)), (None, None, 0)))(x, w, keys),
    }
    for name, got in runs.items():
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5, err_msg=name)


def test_a_traced_outlier_clamp_passes_through_every_transformation():
    """Trap 29: the gradient of clamp plus residual is the identity through all of them."""
    occ = fp4jax.OCC(alpha=0.9)
    x = normal(0, 8, 32)

    def loss(x):
        clamped, residual = fp4jax.clamp_outliers(x, occ, axis=-1)
        return (3 * clamped + 3 * residual).sum()

    runs = (
        jax.grad(jax.jit(loss)),
        jax.jit(jax.grad(loss)),
        jax.jit(jax.grad(jax.checkpoint(loss))),
        jax.jit(jax.vmap(jax.grad(loss))),
        lambda x: jax.lax.map(jax.grad(loss), x),
    )
    for grad in runs:
        np.testing.assert_array_equal(np.asarray(grad(x)), 3)


@pytest.mark.parametrize("name", ["bf16", "fp4_vector", "fp4_direct"])
def test_weight_gradients_under_shard_map_are_summed(name):
    """Trap 31: X = arange(32) over 8 devices, W = 1: dW[0] = 0 + 4 + … + 28 = 112, up to quantization of X."""
    mesh = mesh_of_eight()
    x, w = jnp.arange(32, dtype=jnp.float32).reshape(8, 4), jnp.ones((4, 4), jnp.float32)
    mapped = jax.shard_map(dot(RECIPES[name]()), mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"))
    dw = jax.jit(jax.grad(lambda w, x: mapped(x, w).sum()))(on_devices(w, mesh), on_devices(x, mesh, "d", None))
    want = jax.jit(jax.grad(lambda w, x: dot(RECIPES[name]())(x, w).sum()))(w, x)
    if name == "bf16":
        assert np.asarray(dw)[0].tolist() == [112] * 4
    np.testing.assert_allclose(dw, want, rtol=1e-5)
    assert dw.sharding.is_fully_replicated


@dtypes
def test_fake_quant_gradients_have_the_dtype_of_their_input(dtype):
    """Trap 32."""
    f = jax.grad(lambda x: fp4jax.fake_quant(x, E2M1_VECTOR, axis=-1).astype(jnp.float32).sum())
    x = normal(0, 8, 64, dtype=dtype)
    assert same(f(x), jax.jit(f)(x)).dtype == dtype


@dtypes
def test_dge_is_exactly_its_cap_at_midpoints_and_a_fifth_on_the_grid(dtype):
    """Trap 34: p^(1/k − 1) is inf at p = 0 before the cap; no NaN, no rounding of the 3."""
    grid = fp4jax.E2M1.grid
    u = jnp.asarray(np.concatenate([(grid[1:] + grid[:-1]) / 2, grid]), dtype)
    factor = functools.partial(fp4jax.DGE().factor, format=fp4jax.E2M1)
    f = same(factor(u), jax.jit(factor)(u))
    assert f.dtype == dtype
    assert np.asarray(f).tolist() == np.array([3] * 14 + [0.2] * 15).astype(dtype).tolist()
    x = jnp.asarray([0.25, 0.75, 5, 0, 6], dtype)
    fake = functools.partial(fp4jax.fake_quant, spec=E2M1_VECTOR, axis=-1, estimator=fp4jax.DGE())
    slope = jax.jit(jax.grad(lambda x: fake(x).astype(jnp.float32).sum()))(x)
    assert np.asarray(slope).tolist() == np.array([3, 3, 3, 0.2, 0.2]).astype(dtype).tolist()


@dtypes
def test_vmap_is_a_stack_of_calls(dtype):
    """Trap 35: a per-tensor scale becomes one an example, as a loop would have it."""
    x = normal(0, 5, 8, 64, dtype=dtype) * jnp.asarray(10.0 ** np.arange(-2, 3)[:, None, None], dtype)
    for granularity in (fp4jax.PerTensor(), fp4jax.PerVector()):
        spec = fp4jax.QuantSpec(fp4jax.E2M1, granularity)
        many = jax.jit(jax.vmap(functools.partial(there_and_back, spec=spec)))(x)
        np.testing.assert_array_equal(np.asarray(many), np.stack([quantized(row, spec)[2] for row in x]))


def test_debug_nans_finds_nothing_in_a_donated_step():
    """Trap 36: zero rows, donated buffers and debug_nans together; no NaN arises on the way to a finite result."""
    recipe = RECIPES["fp4"]()
    x, w = normal(0, 16, 32).at[0].set(0), normal(1, 32, 8).at[:, 0].set(0)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(w, x):
        return w - 0.1 * jax.grad(lambda w: (dot(recipe)(x, w) ** 2).sum())(w)

    with jax.debug_nans(True):
        for _ in range(2):
            w = step(w, x)
    assert np.isfinite(np.asarray(w)).all()


def test_vmap_over_a_sharded_product_equals_a_loop():
    """Trap 37: vmap(shard_map(pmax)) of a per-tensor scale."""
    mesh = mesh_of_eight()
    x, w = normal(0, 3, 16, 32), normal(1, 32, 8)
    direct = dot(RECIPES["fp4_direct"]())
    mapped = jax.shard_map(direct, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"))
    many = jax.jit(jax.vmap(mapped, (0, None)))(on_devices(x, mesh, None, "d", None), on_devices(w, mesh))
    one, whole = jax.jit(mapped), jax.jit(direct)
    loop = [one(on_devices(row, mesh, "d", None), on_devices(w, mesh)) for row in x]
    np.testing.assert_array_equal(np.asarray(many), np.stack(loop))
    np.testing.assert_array_equal(np.asarray(many), np.stack([whole(row, w) for row in x]))


# --- shapes -----------------------------------------------------------------------------------------------------------


@every_recipe
def test_empty_operands_have_empty_products_and_zero_gradients(name):
    """Trap 38."""
    w = normal(0, 64, 8)
    y, dx, dw = product(name)(jnp.zeros((0, 64), jnp.float32), w, jnp.zeros((0, 8), jnp.float32))
    assert (y.shape, dx.shape, dw.shape) == ((0, 8), (0, 64), (64, 8))
    assert not np.asarray(dw).any()
    y, dx, dw = product(name)(jnp.zeros((3, 0), jnp.float32), w[:0], jnp.ones((3, 8), jnp.float32))
    assert (y.shape, dx.shape, dw.shape) == ((3, 8), (3, 0), (0, 8))
    assert not np.asarray(y).any()


def test_empty_arrays_quantize():
    """Trap 38: a maximum over nothing is no error."""
    granularities = (fp4jax.PerTensor(), fp4jax.PerVector(), fp4jax.PerBlock(3))
    for granularity, rule, shape in itertools.product(granularities, RULES, ((0,), (0, 4), (4, 0))):
        spec = fp4jax.QuantSpec(fp4jax.E2M1, granularity, rule)
        q = jax.jit(lambda x: fp4jax.quantize(x, spec, axis=-1))(jnp.zeros(shape, jnp.float32))  # noqa: B023
        assert q.shape == q.dequantize(jnp.float32).shape == shape
    for shape in ((0,), (4, 0)):
        clamped, residual = fp4jax.clamp_outliers(jnp.zeros(shape, jnp.float32), fp4jax.OCC(), axis=-1)
        assert clamped.shape == residual.shape == shape


@pytest.mark.parametrize("name", ["fp4_vector", "fp4_release", "fp4_research"])
def test_no_stride_is_hidden_by_equal_sizes(name):
    """Trap 42: m ≠ n ≠ k, batch 2: each slice of the batch equals its own product."""
    recipe = RECIPES[name]()
    assert recipe.outliers is None or recipe.outliers.scope == "vector"
    x, w = normal(0, 2, 5, 7, scale=0.1).at[1].multiply(30), normal(1, 2, 7, 3)
    batched = jax.jit(dot(recipe, (((2,), (1,)), ((0,), (0,)))))(x, w)
    one = jax.jit(dot(recipe))
    for i in range(2):
        np.testing.assert_allclose(batched[i], one(x[i], w[i]), rtol=1e-6, atol=1e-6)


# --- dtypes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lhs", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("rhs", DTYPES, ids=lambda d: np.dtype(d).name)
def test_every_public_function_takes_every_dtype(lhs, rhs):
    """Trap 47: float4 storage never meets a product it cannot enter."""
    x, w = normal(0, 8, 64, dtype=lhs), normal(1, 64, 6, dtype=rhs)
    q = quantizer(E2M1_VECTOR)[1](x)
    assert q.values.dtype == jnp.float4_e2m1fn
    assert q.dequantize(rhs).dtype == rhs
    assert fp4jax.fake_quant(x, E2M1_VECTOR, axis=-1).dtype == lhs
    assert {t.dtype for t in fp4jax.clamp_outliers(x, fp4jax.OCC(), axis=-1)} == {np.dtype(lhs)}
    for name in ("bf16", "fp4"):
        y = jax.eval_shape(dot(RECIPES[name]()), x, w)
        assert y.dtype == (RECIPES[name]().output_dtype or lhs)


def test_other_dtypes_are_refused_by_name():
    """Trap 47: an integer or float8 array is an error, not a silent cast."""
    for x in (jnp.arange(4), jnp.ones(4, jnp.float8_e4m3fn)):
        with pytest.raises(TypeError, match=str(x.dtype)):
            fp4jax.quantize(x, E2M1_VECTOR, axis=-1)


def test_x64_changes_no_bit():
    """Trap 54: tables, noise and scales are pinned to float32."""
    x, w, dy = (np.asarray(normal(i, *shape)) for i, shape in enumerate(((8, 32), (32, 6), (8, 6))))

    def everything(x, w, dy):
        key = jax.random.key(0)
        out = list(with_gradients(dot(RECIPES["fp4"]()), x, w, dy))
        for spec in (STOCHASTIC_VECTOR, *(fp4jax.QuantSpec(fp4jax.E2M1, fp4jax.PerBlock(8), rule) for rule in RULES)):
            q = fp4jax.quantize(x, spec, axis=-1, key=key)
            out += [q.values, q.scale, q.dequantize(jnp.float32)]
        out += [fp4jax.fake_quant(x, E2M1_VECTOR, axis=-1), fp4jax.DGE().factor(x, fp4jax.E2M1)]
        out += fp4jax.clamp_outliers(x, fp4jax.OCC(alpha=0.9), axis=-1)
        return out

    narrow = jax.jit(everything)(x, w, dy)
    with jax.enable_x64(True):
        same(jax.jit(everything)(x, w, dy), narrow)


def test_a_small_gradient_does_not_underflow_on_its_way_to_the_master_weight():
    """Trap 60: 2e-4 and far less arrive in float32."""
    x, w = normal(0, 32, 16, dtype=jnp.bfloat16), normal(1, 16, 4)
    for scale in (2e-4, 1e-12):
        dy = jnp.full((32, 4), scale, jnp.bfloat16)
        _, _, dw = product("fp4_vector")(x, w, dy)
        want = np.asarray(x, F32).T @ np.asarray(dy, F32)
        assert dw.dtype == jnp.float32
        assert np.linalg.norm(np.asarray(dw) - want) < 0.2 * np.linalg.norm(want)
