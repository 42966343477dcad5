"""The fused quantizers, interpreted on the CPU, against the reference: every bit of values, transposes and scales."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assembly import run_assembly
from jax.sharding import PartitionSpec as P

import fp4jax
from fp4jax import kernels
from fp4jax.dot.xla import quantize_activation
from fp4jax.exact import as_float32, multiply
from fp4jax.kernels import QuantizerConfig, Wanted, noise_device, quantize_rows, quantize_tiles
from fp4jax.kernels.quantizer import storage
from fp4jax.kernels.value_device import divide
from fp4jax.outliers import thresholds

SMALL = QuantizerConfig(rows=8, cols=32)
PACKED = QuantizerConfig(rows=8, cols=32, packed=4)
RNG = np.random.default_rng(5)
GRADIENT = fp4jax.QuantSpec(fp4jax.E5M2, fp4jax.PerTensor())


def same(got, want) -> None:
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    unsigned = f"u{got.dtype.itemsize}"
    np.testing.assert_array_equal(got.view(unsigned), want.view(unsigned))


def tensor(shape, dtype, seed=0):
    """Heavy tails, rows of very different size, and the special rows: zero, tie, NaN, infinity, -0."""
    rng = np.random.default_rng(seed)
    spread = 0.0 if dtype == jnp.float16 else 4.0
    x = rng.standard_t(2, shape) * np.exp(spread * rng.standard_normal((shape[0], 1)))
    if shape[0] > 8 and shape[1] > 8:
        x[1] = 0
        x[2] = np.resize([6, 0.25, -0.25, 2.5, -2.5, 0.75, -0.75, 5, -5], shape[1])
        x[3, 4], x[4, 2], x[5, 0] = np.nan, -np.inf, -0.0
    return jnp.asarray(x, jnp.float32).astype(dtype)


def held(q, format):
    return q.values.astype(jnp.float32).astype(storage(format))


@pytest.mark.parametrize(
    ("format", "rounding", "dtype"),
    [
        (fp4jax.E2M1, fp4jax.NEAREST_EVEN, jnp.bfloat16),
        (fp4jax.E2M1, fp4jax.TIES_UP, jnp.float16),
        (fp4jax.E1M2, fp4jax.TIES_UP, jnp.float32),
        (fp4jax.E4M3, fp4jax.NEAREST_EVEN, jnp.float32),
        (fp4jax.E5M2, fp4jax.NEAREST_EVEN, jnp.bfloat16),
    ],
    ids=repr,
)
@pytest.mark.parametrize("config", [SMALL, PACKED], ids=str)
def test_rows(format, rounding, dtype, config):
    x, spec = tensor((40, 96), dtype), fp4jax.QuantSpec(format, rounding=rounding)
    want = fp4jax.quantize(x, spec, axis=-1)
    with kernels.interpret():
        got = quantize_rows(x, spec, transpose=True, config=config)
    same(got.values, held(want, format))
    same(got.transposed, held(want, format).T)
    same(got.scale, want.scale[:, 0])


@pytest.mark.parametrize("shape", [(1, 40), (7, 129), (127, 1)], ids=str)
def test_odd_sizes_outliers_and_folded_scales(shape):
    x, spec = tensor(shape, jnp.bfloat16), fp4jax.QuantSpec(fp4jax.E2M1)
    fold = jnp.asarray(np.random.default_rng(1).uniform(0.1, 3, shape[0]), jnp.float32)
    want = fp4jax.quantize(multiply(as_float32(x), fold[:, None]), spec, axis=-1)
    with kernels.interpret():
        got = quantize_rows(x, spec, fold=fold, config=SMALL)
    same(got.values, held(want, fp4jax.E2M1))
    same(got.scale, want.scale[:, 0])
    assert got.transposed is None


@pytest.mark.parametrize(
    ("compensation", "dtype", "rounding"),
    [
        ("residual", jnp.bfloat16, fp4jax.NEAREST_EVEN),
        ("residual", jnp.float32, fp4jax.TIES_UP),
        ("none", jnp.bfloat16, fp4jax.NEAREST_EVEN),
    ],
    ids=str,
)
def test_outliers_are_clamped_and_carried(compensation, dtype, rounding):
    x = tensor((40, 96), dtype, seed=3)
    x = jnp.where(jnp.isfinite(x), x, 1)
    x = x.at[6].set(jnp.inf)  # a row that is not finite does not spoil the others
    spec, occ = fp4jax.QuantSpec(fp4jax.E2M1, rounding=rounding), fp4jax.OCC(0.9, compensation=compensation)
    bounds = thresholds(x, occ, (-1,))
    values, scales, _ = quantize_activation(x, spec, (-1,), occ, None)
    values = jnp.where(jnp.isnan(values), jnp.float32(0), values)
    with kernels.interpret():
        got = quantize_rows(x, spec, thresholds=bounds, occ=occ, transpose=True, config=PACKED)
    same(got.values, values.astype(jnp.float8_e4m3fn))
    same(got.transposed, got.values.T)
    same(got.scale, scales.scale[:, 0])


@pytest.mark.parametrize("zero", [0.0, -0.0])
@pytest.mark.parametrize("side", [1, -1])
@pytest.mark.parametrize("compensation", ["residual", "none"])
def test_zeros_keep_their_sign_at_a_bound_of_zero(compensation, side, zero):
    """And what is clamped to zero has the sign of its side, whichever zero the bound is."""
    rng = np.random.default_rng(4)
    x = rng.standard_normal((32, 128))
    x = np.where(x > 0, x, rng.choice([0.0, -0.0], x.shape))
    x[rng.random(x.shape) < 0.02] = -1.5
    x = jnp.asarray(side * x, jnp.bfloat16)
    spec, occ = fp4jax.QuantSpec(fp4jax.E2M1), fp4jax.OCC(0.9, compensation=compensation)
    bounds = thresholds(x, occ, (-1,))
    bounds = [jnp.where(bound == 0, jnp.float32(zero), bound) for bound in bounds]
    assert sum(bool((bound == 0).all()) for bound in bounds) == 1
    values, _, _ = quantize_activation(x, spec, (-1,), occ, None)
    with kernels.interpret():
        got = quantize_rows(x, spec, thresholds=tuple(bounds), occ=occ, transpose=True)
    same(got.values, values.astype(got.values.dtype))


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("compensation", ["residual", "none"])
def test_a_threshold_that_is_nan_clamps_nothing(compensation, transpose):
    """As the upper one is where NaN are more than outliers; rows without any are quantized all the same."""
    x = tensor((32, 128), jnp.bfloat16, seed=3)
    spec, occ = fp4jax.QuantSpec(fp4jax.E2M1), fp4jax.OCC(1.0, compensation=compensation)
    bounds = thresholds(x, occ, (-1,))
    assert np.isnan(bounds[1]).all()
    values, scales, _ = quantize_activation(x, spec, (-1,), occ, None)
    values = jnp.where(jnp.isnan(values), jnp.float32(0), values)
    with kernels.interpret():
        got = quantize_rows(x, spec, thresholds=bounds, occ=occ, transpose=transpose)
    dtype = got.values.dtype
    same(got.values, values.astype(dtype))
    same(got.scale, scales.scale[:, 0])
    assert np.isfinite(got.scale).sum() == 30


@pytest.mark.parametrize("width", [520, 640, 1032])
def test_rows_wider_than_a_chunk_that_chunks_do_not_divide(width):
    """Scaling reads 512 columns at a time; the last ones overlap. The largest value may stand anywhere."""
    x = jnp.tile(tensor((1, width), jnp.bfloat16), (16, 1)).at[0, 0].set(512.0)
    places = jnp.linspace(0, width - 1, 15).astype(jnp.int32)
    x = x.at[jnp.arange(1, 16), places].set(jnp.where(jnp.arange(15) % 2, 1000, -1000).astype(jnp.bfloat16))
    spec, occ = fp4jax.QuantSpec(fp4jax.E2M1), fp4jax.OCC(0.99)
    want = fp4jax.quantize(x, spec, axis=-1)
    bounds = thresholds(x, occ, (-1,))
    values, scales, _ = quantize_activation(x, spec, (-1,), occ, None)
    with kernels.interpret():
        got = quantize_rows(x, spec, transpose=True, config=QuantizerConfig(8, 8))
        clamped = quantize_rows(x, spec, thresholds=bounds, occ=occ, transpose=True)
    same(got.values, held(want, fp4jax.E2M1))
    same(got.scale, want.scale[:, 0])
    same(clamped.values, values.astype(jnp.float8_e4m3fn))
    same(clamped.scale, scales.scale[:, 0])


KEY = jax.random.key(3)


@pytest.mark.parametrize(
    ("spec", "transpose"),
    [
        (fp4jax.QuantSpec(fp4jax.E2M1, rounding=fp4jax.STOCHASTIC), True),
        (fp4jax.QuantSpec(fp4jax.E5M2, rounding=fp4jax.STOCHASTIC), False),
        (fp4jax.QuantSpec(fp4jax.E2M1, scale=fp4jax.PowerOfTwo("floor")), True),
        (fp4jax.QuantSpec(fp4jax.E4M3, scale=fp4jax.PowerOfTwo("even")), False),
        (fp4jax.QuantSpec(fp4jax.E2M1, scale=fp4jax.PowerOfTwo("rceil"), rounding=fp4jax.STOCHASTIC), False),
        (fp4jax.QuantSpec(fp4jax.E1M2, scale=fp4jax.PowerOfTwo("ceil"), rounding=fp4jax.TIES_UP), False),
    ],
    ids=repr,
)
def test_noise_and_powers_of_two_are_the_references(spec, transpose):
    x = tensor((40, 129), jnp.bfloat16)
    want = fp4jax.quantize(x, spec, axis=-1, key=KEY)
    values = held(want, spec.format)
    values = jnp.where(jnp.isnan(values.astype(jnp.float32)), jnp.zeros_like(values), values)
    with kernels.interpret():
        got = quantize_rows(x, spec, key=KEY, transpose=transpose, config=PACKED)
    same(got.values, values)
    same(got.scale, spec.scale.decode(want.scale, None)[:, 0])
    if transpose:
        same(got.transposed, values.T)


def test_carried_outliers_of_stochastic_values():
    x = tensor((40, 96), jnp.bfloat16, seed=3)
    x = jnp.where(jnp.isfinite(x), x, 1)
    spec, occ = fp4jax.QuantSpec(fp4jax.E2M1, rounding=fp4jax.STOCHASTIC), fp4jax.OCC(0.9)
    values, scales, _ = quantize_activation(x, spec, (-1,), occ, KEY)
    with kernels.interpret():
        got = quantize_rows(x, spec, thresholds=thresholds(x, occ, (-1,)), occ=occ, key=KEY, config=SMALL)
    same(got.values, values.astype(jnp.float8_e4m3fn))
    same(got.scale, scales.scale[:, 0])


def test_every_stream_of_a_gradient_has_a_key_of_its_own():
    x, spec = (
        tensor((7, 127), jnp.bfloat16),
        fp4jax.QuantSpec(fp4jax.E5M2, fp4jax.PerTensor(), rounding=fp4jax.STOCHASTIC),
    )
    keys = jax.random.split(KEY)
    wanted = (Wanted(None, key=keys[0]), Wanted(None, plain=False, transposed=True, key=keys[1]))
    with kernels.interpret():
        first, second = quantize_tiles(x, spec, wanted, config=PACKED)
    same(first.values, fp4jax.quantize(x, spec, axis=-1, key=keys[0]).values)
    same(second.transposed, fp4jax.quantize(x, spec, axis=-1, key=keys[1]).values.T)


def test_the_assembly_draws_what_jax_random_draws():
    index = np.arange(4096, dtype=np.uint32)
    key0, key1 = (np.uint32(word) for word in jax.random.key_data(KEY))
    with np.errstate(over="ignore"):
        found = run_assembly(noise_device.THREEFRY, {"$1": index, "$2": key0, "$3": key1})["$0"]
    want = jax.random.bits(KEY, (4096,), np.uint32) >> 8
    np.testing.assert_array_equal(found, np.asarray(want))


@pytest.mark.parametrize("packed", [1, 4])
def test_tiles_write_a_gradient_twice_and_a_weight_by_column(packed):
    shape = (20, 129)
    x = jnp.where(jnp.isfinite(tensor(shape, jnp.bfloat16)), tensor(shape, jnp.bfloat16), 1)
    rng = np.random.default_rng(2)
    rows, cols = (jnp.asarray(rng.uniform(0.1, 3, s), jnp.float32) for s in shape)
    wanted = (Wanted(None, cols, 1), Wanted(None, rows, 0, plain=False, transposed=True), Wanted(1, transposed=True))
    with kernels.interpret():
        first, second, third = quantize_tiles(x, GRADIENT, wanted, config=QuantizerConfig(16, 32, packed=packed))
    want = fp4jax.quantize(multiply(as_float32(x), cols[None]), GRADIENT, axis=-1)
    same(first.values, want.values)
    same(first.scale, want.scale.reshape(()))
    want = fp4jax.quantize(multiply(as_float32(x), rows[:, None]), GRADIENT, axis=0)
    same(second.transposed, want.values.T)
    same(second.scale, want.scale.reshape(()))
    assert first.transposed is None
    assert second.values is None
    want = fp4jax.quantize(x, fp4jax.QuantSpec(fp4jax.E5M2), axis=0)
    same(third.values, want.values)
    same(third.transposed, want.values.T)
    same(third.scale, want.scale[0])


def test_both_ways_of_a_gradient_have_scales_of_their_own():
    x, rng = jnp.where(jnp.isfinite(tensor((40, 256), jnp.bfloat16)), tensor((40, 256), jnp.bfloat16), 1), RNG
    rows, cols = jnp.asarray(rng.uniform(8, 16, 40), jnp.float32), jnp.asarray(rng.uniform(0.1, 1, 256), jnp.float32)
    with kernels.interpret():
        first, second = quantize_tiles(x, GRADIENT, (Wanted(None, cols, 1), Wanted(None, rows, 0, False, True)))
    for got, values, fold in ((first, first.values, cols[None]), (second, second.transposed.T, rows[:, None])):
        want = fp4jax.quantize(multiply(as_float32(x), fold), GRADIENT, axis=-1)
        same(values, want.values)
        same(got.scale, want.scale.reshape(()))
    assert first.scale != second.scale


def over_devices(f, specs, outs, *args):
    """``f`` on eight devices, each with its part."""
    mesh = jax.make_mesh((8,), ("d",), (jax.sharding.AxisType.Auto,))
    with kernels.interpret():
        return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=outs, check_vma=False))(*args)


@pytest.mark.parametrize("compensation", ["residual", "none", None])
def test_devices_that_split_rows_agree_on_their_scales(compensation):
    """A NaN that one of them sees makes the row NaN for all."""
    x, spec = tensor((40, 96), jnp.bfloat16), fp4jax.QuantSpec(fp4jax.E2M1)
    occ = None if compensation is None else fp4jax.OCC(0.9, compensation=compensation)
    bounds = None if occ is None else thresholds(jnp.where(jnp.isfinite(x), x, 1), occ, (-1,))

    def local(x, bounds):
        got = quantize_rows(x, spec, thresholds=bounds, occ=occ, transpose=True, names=("d",), config=SMALL)
        return got.values, got.transposed, got.scale

    values, transposed, scale = over_devices(local, (P(None, "d"), P()), (P(None, "d"), P("d"), P()), x, bounds)
    with kernels.interpret():
        want = quantize_rows(x, spec, thresholds=bounds, occ=occ, transpose=True, config=SMALL)
    same(values, want.values)
    same(transposed, want.transposed)
    same(scale, want.scale)
    assert np.isnan(scale).sum() == 2


def test_devices_agree_on_the_scales_of_a_gradient_and_of_columns():
    """So a split gradient is quantized both ways as a whole one, and a weight whose contraction is split."""
    x, rng = jnp.where(jnp.isfinite(tensor((40, 24), jnp.bfloat16)), tensor((40, 24), jnp.bfloat16), 1), RNG
    row, col = (jnp.asarray(rng.uniform(0.1, 3, n), jnp.float32) for n in x.shape)

    def local(names, x, row, col):
        wanted = (
            Wanted(None, col, 1, names=names),
            Wanted(None, row, 0, plain=False, transposed=True, names=names),
            Wanted(1, transposed=True, names=names),
        )
        first, second, third = quantize_tiles(x, GRADIENT, wanted, config=QuantizerConfig(8, 32))
        return first[::2], second[1:3], third[:3]

    parts = (P("d"), P()), (P(None, "d"), P()), (P("d"), P(None, "d"), P())
    got = over_devices(functools.partial(local, ("d",)), (P("d"), P("d"), P()), parts, x, row, col)
    with kernels.interpret():
        want = local((), x, row, col)
    jax.tree.map(same, got, want)


@pytest.mark.parametrize("numerator", [6.0, 448.0, 57344.0, 16.0])
def test_division_rounds_correctly(numerator):
    exponents = np.arange(30, 220, dtype=np.uint32)[:, None]
    mantissas = np.random.default_rng(0).integers(0, 2**23, 500, dtype=np.uint32)
    edges = np.array([0, 1, 2**22, 2**22 + 1, 2**23 - 1], np.uint32)
    x = (exponents << 23 | np.concatenate([mantissas, edges])).view(np.float32)
    same(jax.jit(lambda a: divide(numerator, a))(x), np.float32(numerator) / x)


def test_empty():
    for shape in ((0, 16), (16, 0)):
        got = quantize_rows(jnp.zeros(shape, jnp.float32), fp4jax.QuantSpec(fp4jax.E2M1), transpose=True)
        assert got.values.shape == shape
        assert got.transposed.shape == shape[::-1]
        assert got.scale.tolist() == [1.0] * shape[0]


def test_errors_say_what_is_not_supported():
    x = jnp.zeros((8, 16), jnp.float32)
    with pytest.raises(ValueError, match="the kernels do not support rounding STOCHASTIC without a key"):
        quantize_rows(x, fp4jax.QuantSpec(fp4jax.E2M1, rounding=fp4jax.STOCHASTIC))
    noisy = fp4jax.QuantSpec(fp4jax.E2M1, rounding=fp4jax.STOCHASTIC)
    with pytest.raises(
        ValueError, match="implementation rbg; the kernels draw from one key of implementation threefry"
    ):
        quantize_rows(x, noisy, key=jax.random.key(0, impl="rbg"))
    with pytest.raises(ValueError, match=r"scale rule TwoLevel\(\)"):
        quantize_rows(x, fp4jax.QuantSpec(fp4jax.E2M1, scale=fp4jax.TwoLevel()))
    with pytest.raises(ValueError, match=r"granularity PerBlock\(size=16\)"):
        quantize_rows(x, fp4jax.QuantSpec(fp4jax.E2M1, fp4jax.PerBlock(16)))
    with pytest.raises(ValueError, match="format E3M0, which has no mantissa"):
        quantize_rows(x, fp4jax.QuantSpec(fp4jax.E3M0))
    with pytest.raises(
        TypeError, match=r"x is int32\[8, 16\]; the quantizers take float32, bfloat16 or float16 matrices"
    ):
        quantize_tiles(x.astype(jnp.int32), GRADIENT, (Wanted(None),))
    with pytest.raises(ValueError, match="rows=24 must be a power of two"):
        QuantizerConfig(rows=24, cols=32)
    with pytest.raises(ValueError, match="packed=2 must be 1 or 4"):
        QuantizerConfig(rows=32, cols=32, packed=2)
    occ = fp4jax.OCC(0.9, scope="vector")
    with pytest.raises(ValueError, match="the kernels take OCC of scope 'tensor' that is not 'sparse'"):
        quantize_rows(x, fp4jax.QuantSpec(fp4jax.E2M1), thresholds=(jnp.float32(0), jnp.float32(0)), occ=occ)
