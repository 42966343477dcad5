"""Granularity and scale rules: shapes, errors, and behavior inside shard_map."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp4jax
from fp4jax.exact import as_float32, divide, magnitude, multiply
from fp4jax.scaling import normalize_axis

MESH = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def scale_shape(shape, granularity, axis):
    return fp4jax.quantize(jnp.ones(shape), fp4jax.QuantSpec(fp4jax.E2M1, granularity), axis=axis).scale.shape


@pytest.mark.parametrize(
    ("granularity", "axis", "expected"),
    [
        (fp4jax.PerTensor(), 1, (1, 1, 1)),
        (fp4jax.PerVector(), -1, (4, 40, 1)),
        (fp4jax.PerVector(), (0, -1), (1, 40, 1)),
        (fp4jax.PerBlock(16), 1, (4, 3, 6)),
        (fp4jax.PerBlock(16), (0, 1), (1, 10, 6)),
        (fp4jax.PerBlock(16), (1, 0), (10, 1, 6)),
        (fp4jax.PerBlock2D(16, 4), 1, (4, 3, 2)),
        (fp4jax.PerBlock2D(4, 16), -1, (4, 3, 2)),
    ],
)
def test_scale_shapes(granularity, axis, expected):
    assert scale_shape((4, 40, 6), granularity, axis) == expected


def test_blocks_over_two_axes_are_those_of_the_flattened_axis():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4, 5)), jnp.float32)
    spec = fp4jax.QuantSpec(fp4jax.E2M1, fp4jax.PerBlock(7))
    for axis in ((1, 2), (2, 1)):
        both = fp4jax.quantize(x, spec, axis=axis).dequantize()
        order = (0, *axis)
        flat = fp4jax.quantize(x.transpose(order).reshape(3, 20), spec, axis=1).dequantize()
        moved = flat.reshape([x.shape[a] for a in order]).transpose(np.argsort(order))
        np.testing.assert_array_equal(both, moved)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fp4jax.PerBlock(0), "PerBlock needs a positive integer size, got size=0"),
        (lambda: fp4jax.PerBlock2D(16, -1), "PerBlock2D needs a positive integer cols, got cols=-1"),
        (lambda: fp4jax.PowerOfTwo("up"), "mode='up' is none of 'floor', 'ceil', 'even', 'rceil'"),
        (lambda: scale_shape((4,), fp4jax.PerBlock2D(2, 2), 0), "needs one contraction axis and another matrix axis"),
        (lambda: normalize_axis(3, 2), "axis=3 is out of range for an array of 2 dimensions"),
        (lambda: normalize_axis((0, -2), 2), r"axis=\(0, -2\) must name at least one axis, and none twice"),
        (lambda: normalize_axis((), 2), "must name at least one axis"),
    ],
)
def test_errors_say_what_would_work(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_other_dtypes_are_refused():
    with pytest.raises(TypeError, match="x has dtype int32; quantization takes float32, bfloat16 or float16"):
        as_float32(jnp.ones(3, jnp.int32))


def test_a_maximum_of_magnitudes_keeps_nan_and_subnormals():
    x = np.ones((64, 64), np.float32)
    x[::2, -1] = np.nan
    assert np.isinf(jnp.max(magnitude(jnp.asarray(x)), axis=-1)).sum() == 32
    tiny = jnp.asarray([[0.0, 1e-45], [0.0, -0.0]], jnp.float32)
    assert (jnp.max(magnitude(tiny), axis=-1) > 0).tolist() == [True, False]


@pytest.mark.parametrize("jit", [False, True])
def test_products_of_subnormals_are_those_of_ieee(jit):
    rng = np.random.default_rng(0)
    fields = rng.integers(0, 2**24, 4096).astype(np.uint32) | (rng.integers(0, 2, 4096).astype(np.uint32) << 31)
    x = fields.view(np.float32)
    r = np.ldexp(rng.uniform(1, 2, 4096), rng.integers(24, 125, 4096)).astype(np.float32)
    f = jax.jit(multiply) if jit else multiply
    expected = x * r
    normal = np.abs(expected) >= np.finfo(np.float32).tiny
    np.testing.assert_array_equal(np.asarray(f(x, r))[normal], expected[normal])
    assert normal.sum() > 3000


@pytest.mark.parametrize("rule", [fp4jax.AbsMax(), fp4jax.PowerOfTwo("rceil"), fp4jax.TwoLevel()], ids=str)
def test_inside_shard_map_a_tensor_is_the_whole_tensor(rule):
    x = jnp.arange(1.0, 9.0)[:, None] * jnp.ones((8, 16))
    granularity = fp4jax.PerBlock(4) if isinstance(rule, fp4jax.TwoLevel) else fp4jax.PerTensor()
    spec = fp4jax.QuantSpec(fp4jax.E2M1, granularity, rule)
    f = lambda x: fp4jax.quantize(x, spec, axis=-1).dequantize()
    inside = jax.jit(jax.shard_map(f, mesh=MESH, in_specs=jax.P("data"), out_specs=jax.P("data")))
    np.testing.assert_array_equal(inside(x), f(x))


def test_inside_an_unchecked_shard_map_the_axis_must_be_named():
    x = jnp.arange(1.0, 9.0)

    def run(granularity):
        f = lambda x: fp4jax.quantize(x, fp4jax.QuantSpec(fp4jax.E2M1, granularity), axis=-1).dequantize()
        return jax.shard_map(f, mesh=MESH, in_specs=jax.P("data"), out_specs=jax.P("data"), check_vma=False)(x)

    with pytest.raises(ValueError, match=r"shard_map\(check_vma=False\) over \('data',\) .* needs axis_name="):
        run(fp4jax.PerTensor())
    whole = fp4jax.quantize(x, fp4jax.QuantSpec(fp4jax.E2M1, fp4jax.PerTensor()), axis=-1).dequantize()
    np.testing.assert_array_equal(run(fp4jax.PerTensor(axis_name="data")), whole)
    np.testing.assert_allclose(run(fp4jax.PerTensor(axis_name=())), x, rtol=1e-6)  # a device, a tensor: all on ±max


def test_a_split_contraction_axis_is_named_on_the_vector():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 64)), jnp.float32)
    spec = lambda name: fp4jax.QuantSpec(fp4jax.E2M1, fp4jax.PerVector(axis_name=name))
    f = lambda x: fp4jax.quantize(x, spec("data"), axis=-1).dequantize()
    split = jax.P(None, "data")
    inside = jax.shard_map(f, mesh=MESH, in_specs=split, out_specs=split)(x)
    np.testing.assert_array_equal(inside, fp4jax.quantize(x, spec(None), axis=-1).dequantize())


def test_division_is_that_of_ieee():
    rng = np.random.default_rng(0)
    a = np.asarray([0.5, 3.5, 6, 16, 448, 2688, 57344], np.float32)[rng.integers(0, 7, 100_000)]
    b = np.ldexp(rng.uniform(1, 2, 100_000), rng.integers(-100, 100, 100_000)).astype(np.float32)
    b[:64] = np.nextafter(np.float32(1), np.float32(rng.uniform(0, 2, 64)))
    for f in (divide, jax.jit(divide)):
        np.testing.assert_array_equal(f(jnp.asarray(a), jnp.asarray(b)), a / b)
