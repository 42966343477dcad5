"""``quantize`` against the oracle: every 16-bit input, every granularity, scale rule, rounding and transformation.

Values and scales are compared bit for bit. Formats, and deterministic roundings added to the package's registries
are tested here unasked (a rounding needs a line in ``oracle.round_to_grid`` first).
"""

import functools
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
import tolerances
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import fp4jax
from fp4jax import rounding
from fp4jax.formats import FORMATS

F32 = np.float32
PAPER_FORMATS = (fp4jax.E2M1, fp4jax.E1M2, fp4jax.E3M0)
EIGHT_BIT = (fp4jax.E4M3, fp4jax.E5M2)
SIGNED = tuple(f for f in FORMATS.values() if f.signed)  # E8M0 holds scales
ROUNDINGS = tuple(r for r in rounding.ROUNDINGS.values() if not r.needs_key)
GRANULARITIES = (fp4jax.PerTensor(), fp4jax.PerVector(), fp4jax.PerBlock(4), fp4jax.PerBlock2D(3, 2))
RULES = (fp4jax.AbsMax(), *(fp4jax.PowerOfTwo(mode) for mode in ("floor", "ceil", "even", "rceil")), fp4jax.TwoLevel())
ALL_BITS = np.arange(65536, dtype=np.uint16)
SIXTEEN_BIT = {"bfloat16": ALL_BITS.view(ml_dtypes.bfloat16), "float16": ALL_BITS.view(np.float16)}


def assert_same_bits(actual, expected, what: str = ""):
    actual, expected = np.asarray(actual).astype(F32), np.asarray(expected).astype(F32)
    assert actual.shape == expected.shape, (what, actual.shape, expected.shape)
    np.testing.assert_array_equal(actual.view(np.uint32), expected.view(np.uint32), err_msg=what)


def assert_equals_oracle(q: fp4jax.QTensor, expected: oracle.Quantized):
    """Scales bit for bit, values bit for bit in finite blocks, NaN throughout the others."""
    scale, values = np.asarray(q.scale).astype(F32), np.asarray(q.values).astype(F32)
    assert scale.shape == expected.block_scale.shape
    assert q.values.dtype == (q.spec.format.dtype or jnp.float8_e4m3fn)  # no dtype of its own: E4M3 holds the grid
    finite = np.isfinite(expected.block_scale)
    assert np.isnan(scale[~finite]).all(), "a block with NaN or inf must store a NaN scale"
    assert_same_bits(scale[finite], expected.block_scale[finite], "scale")
    if expected.outer_scale is not None:
        assert_same_bits(np.asarray(q.outer_scale).reshape(()), expected.outer_scale, "outer scale")
    good = np.isfinite(expected.scale)
    assert_same_bits(values[good], expected.values[good], "values")
    dequantized = np.asarray(q.dequantize(jnp.float32))
    assert np.isnan(dequantized[~good]).all(), "a block with NaN or inf must dequantize to NaN"
    # XLA on CPU flushes subnormal results; the product itself is one float32 rounding of values and scales seen above.
    normal = np.abs(expected.dequantized) >= np.finfo(F32).tiny
    assert_same_bits(dequantized[good & normal], expected.dequantized[good & normal], "dequantized")
    assert (np.abs(dequantized[good & ~normal]) <= np.finfo(F32).tiny).all()


# --- every 16-bit value -----------------------------------------------------------------------------------------------


def arrangements(every: np.ndarray, fmt) -> dict[str, np.ndarray]:
    """Each value alone, beside the format's maximum (scale 1), and in random blocks with and without NaN and inf."""
    rng = np.random.default_rng(0)
    finite = every[np.isfinite(every.astype(F32))]
    finite = finite[: finite.size // 32 * 32]
    return {
        "alone": every.reshape(-1, 1),
        "beside the maximum": np.stack([every, np.full_like(every, fmt.max)], axis=1),
        "random blocks": rng.permutation(every).reshape(-1, 32),
        "random finite blocks": rng.permutation(finite).reshape(-1, 32),
    }


@pytest.mark.parametrize("ties", ROUNDINGS, ids=repr)
@pytest.mark.parametrize("fmt", PAPER_FORMATS, ids=repr)
@pytest.mark.parametrize("source", SIXTEEN_BIT)
def test_every_16_bit_value(source, fmt, ties):
    spec = fp4jax.QuantSpec(fmt, rounding=ties)
    quantize = functools.partial(fp4jax.quantize, spec=spec, axis=-1)
    for name, x in arrangements(SIXTEEN_BIT[source], fmt).items():
        expected = oracle.quantize(x, spec, -1)
        for dtype, run in itertools.product((x.dtype, np.dtype(F32)), (quantize, jax.jit(quantize))):
            with np.errstate(invalid="ignore"):
                given = x.astype(dtype)
            try:
                assert_equals_oracle(run(jnp.asarray(given)), expected)
            except AssertionError as error:
                error.add_note(f"{name}, input {dtype}, {'eager' if run is quantize else 'jit'}")
                raise


@pytest.mark.parametrize("fmt", EIGHT_BIT, ids=repr)
def test_eight_bit_formats_equal_ml_dtypes_in_range_and_saturate_beyond(fmt):
    every = SIXTEEN_BIT["bfloat16"].astype(F32)
    middle = ((fmt.grid[1:].astype(np.float64) + fmt.grid[:-1]) / 2).astype(F32)
    near = [middle, np.nextafter(middle, F32(-np.inf)), np.nextafter(middle, F32(np.inf))]
    x = np.concatenate([every[np.isfinite(every)], *near])
    inside = np.abs(x) <= fmt.max
    for round_ in (fp4jax.NEAREST_EVEN, jax.jit(fp4jax.NEAREST_EVEN, static_argnums=1)):
        landed = np.asarray(round_(jnp.asarray(x), fmt))
        assert_same_bits(landed[inside], x[inside].astype(fmt.dtype))
        assert_same_bits(landed[~inside], np.copysign(F32(fmt.max), x[~inside]))
    # The same through quantize: amax = max makes r exactly 1.
    pairs = np.stack([x[inside], np.full(inside.sum(), fmt.max, F32)], axis=1)
    q = fp4jax.quantize(jnp.asarray(pairs), fp4jax.QuantSpec(fmt), axis=-1)
    assert q.values.dtype == fmt.dtype
    normal = np.abs(pairs) >= np.finfo(F32).tiny
    assert_same_bits(np.asarray(q.values)[normal], pairs.astype(fmt.dtype)[normal])


@pytest.mark.parametrize("ties", ROUNDINGS, ids=repr)
@pytest.mark.parametrize("fmt", SIGNED, ids=repr)
def test_rounding_equals_a_table_around_every_midpoint(fmt, ties):
    middle = ((fmt.grid[1:].astype(np.float64) + fmt.grid[:-1]) / 2).astype(F32)
    u = np.concatenate([middle, np.nextafter(middle, F32(-9)), np.nextafter(middle, F32(9)), fmt.grid, fmt.grid * 2])
    expected = oracle.round_to_grid(u, oracle.format_of(fmt), oracle.ties_of(ties))
    for round_ in (ties, jax.jit(ties, static_argnums=1)):
        assert_same_bits(round_(jnp.asarray(u), fmt), expected)


# --- granularities, scale rules, shapes -------------------------------------------------------------------------------

SHAPES = ((1,), (7,), (1, 1), (5, 9), (4, 8), (3, 1, 6), (2, 5, 4), (0, 6), (6, 0), (2, 0, 3))


@st.composite
def calls(draw):
    """(x, spec, axis): any format, granularity, rule and rounding over a shape, values over the whole float32 range."""
    shape = draw(st.sampled_from(SHAPES))
    granularity = draw(st.sampled_from(GRANULARITIES))
    blocks = type(granularity).__name__
    hypothesis.assume(blocks != "PerBlock2D" or len(shape) >= 2)
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    if blocks in ("PerTensor", "PerVector") and len(shape) > 1 and draw(st.booleans()):
        axis = tuple(sorted(draw(st.sets(st.integers(0, len(shape) - 1), min_size=2, max_size=2))))
    rule = draw(st.sampled_from(RULES))
    fmt = draw(st.sampled_from(SIGNED))
    spec = fp4jax.QuantSpec(fmt, granularity, rule, draw(st.sampled_from(ROUNDINGS)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    magnitude = 10.0 ** draw(st.sampled_from((-30, -3, 0, 3, 30)))
    x = rng.standard_t(2, shape) * magnitude
    if draw(st.booleans()):
        x = np.where(rng.random(shape) < 0.5, 0, x)  # zeros, and with luck blocks of zeros
    if draw(st.booleans()) and x.size:
        x[tuple(rng.integers(0, n) for n in shape)] = rng.choice([np.nan, np.inf, -np.inf])
    dtype = draw(st.sampled_from((F32, ml_dtypes.bfloat16)))
    return x.astype(F32).astype(dtype), spec, axis


@hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
@hypothesis.given(calls())
def test_any_call_equals_the_oracle(call):
    x, spec, axis = call
    q = jax.jit(functools.partial(fp4jax.quantize, spec=spec, axis=axis))(jnp.asarray(x))
    assert q.shape == x.shape
    assert_equals_oracle(q, oracle.quantize(x, spec, axis))


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=repr)
def test_the_other_axis_is_the_transpose(granularity):
    x = np.random.default_rng(0).normal(size=(13, 10)).astype(F32)
    spec = fp4jax.QuantSpec(fp4jax.E2M1, granularity)
    a, b = fp4jax.quantize(jnp.asarray(x), spec, axis=0), fp4jax.quantize(jnp.asarray(x.T), spec, axis=1)
    assert_same_bits(a.values, np.asarray(b.values).T)
    assert_same_bits(a.scale, np.asarray(b.scale).T)


# --- outliers and estimators ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["tensor", "vector"])
@pytest.mark.parametrize("dtype", [F32, ml_dtypes.bfloat16, np.float16], ids=lambda d: np.dtype(d).name)
def test_clamping_equals_sorting(dtype, scope):
    """Heavy tails, ties, signed zeros and one-sided rows; any axis, and two at once."""
    rng = np.random.default_rng(0)
    x = rng.standard_t(2, (6, 5, 40))
    x[1] = np.round(x[1])
    x[2], x[3], x[4] = np.abs(x[2]), -1.5, np.where(rng.random((5, 40)) < 0.5, -0.0, 0.0)
    x = x.astype(F32).astype(dtype)
    for alpha, axis in ((0.99, -1), (0.6, (0, 2))) if scope == "vector" else ((0.97, -1),):
        occ = fp4jax.OCC(alpha=alpha, scope=scope)
        clamped, residual = jax.jit(functools.partial(fp4jax.clamp_outliers, occ=occ, axis=axis))(jnp.asarray(x))
        expected = oracle.clamp_outliers(x, occ, axis)
        assert clamped.dtype == residual.dtype == dtype
        np.testing.assert_array_equal(np.asarray(clamped, F32), expected[0])
        np.testing.assert_array_equal(np.asarray(residual, F32), expected[1].astype(dtype).astype(F32))


@pytest.mark.parametrize("fmt", PAPER_FORMATS, ids=repr)
@pytest.mark.parametrize(
    "estimator", [fp4jax.STE(), fp4jax.ClippedSTE(), fp4jax.DGE(), fp4jax.DGE(k=3.0, clip=2.0)], ids=repr
)
def test_the_gradient_of_fake_quant_is_the_factor_of_the_estimator(estimator, fmt):
    """A power-of-two floor leaves values past the maximum, where the estimators differ most."""
    x = np.random.default_rng(0).normal(size=(9, 40)).astype(F32)
    dy = np.random.default_rng(1).normal(size=x.shape).astype(F32)
    for rule in (fp4jax.AbsMax(), fp4jax.PowerOfTwo("floor")):
        spec = fp4jax.QuantSpec(fmt, scale=rule)
        fake = functools.partial(fp4jax.fake_quant, spec=spec, axis=-1, estimator=estimator)
        y, vjp = jax.vjp(jax.jit(fake), jnp.asarray(x))
        q = oracle.quantize(x, spec, -1)
        assert_same_bits(y, q.dequantized)
        factor = oracle.estimator_factor(estimator, q, oracle.format_of(fmt))
        np.testing.assert_allclose(vjp(jnp.asarray(dy))[0], dy * factor, rtol=tolerances.DGE_FACTOR)


def test_dge_reproduces_the_vector_of_the_released_unit_test():
    """linspace(−6, 6, 20) in bfloat16, k = 5, cap 3 (Azure/MS-AMP 9746ea8), to bfloat16 precision."""
    u = np.linspace(-6, 6, 20).astype(ml_dtypes.bfloat16)
    half = [0.2002, 0.4375, 0.6055, 0.2168, 1.8359, 0.2695, 0.3027, 0.2695, 0.2402, 0.5781]
    got = np.asarray(fp4jax.DGE().factor(jnp.asarray(u), fp4jax.E2M1), F32)
    np.testing.assert_allclose(got, half + half[::-1], rtol=2 * tolerances.UNIT_ROUNDOFF["bfloat16"])


# --- transformations --------------------------------------------------------------------------------------------------

SPECS = [
    fp4jax.QuantSpec(fp4jax.E2M1, granularity, rule)
    for granularity, rule in (
        (fp4jax.PerTensor(), fp4jax.AbsMax()),
        (fp4jax.PerVector(), fp4jax.AbsMax()),
        (fp4jax.PerVector(), fp4jax.TwoLevel()),
        (fp4jax.PerBlock(16), fp4jax.PowerOfTwo("rceil")),
        (fp4jax.PerBlock(16), fp4jax.TwoLevel()),
        (fp4jax.PerBlock2D(8, 16), fp4jax.AbsMax()),
    )
]


def parts(q: fp4jax.QTensor) -> tuple[jax.Array, ...]:
    """Everything a QTensor holds, as float32 arrays."""
    return tuple(p.astype(jnp.float32) for p in (q.values, q.scale, q.outer_scale) if p is not None)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_jit_vmap_scan_and_remat_give_the_eager_bits(spec):
    x = jnp.asarray(np.random.default_rng(1).standard_t(3, (3, 16, 48)), jnp.bfloat16)

    def f(row):
        return parts(fp4jax.quantize(row, spec, axis=-1))

    def loop(f):
        return lambda x: [jnp.stack(leaves) for leaves in zip(*(f(row) for row in x))]

    expected = loop(f)(x)
    runs = {
        "jit": loop(jax.jit(f)),
        "vmap": jax.jit(jax.vmap(f)),
        "scan of remat": jax.jit(lambda x: jax.lax.map(jax.checkpoint(f), x)),
    }
    for name, run in runs.items():
        for actual, want in zip(run(x), expected, strict=True):
            assert_same_bits(actual, want, name)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_sharded_array_gets_the_scales_of_one_device(spec):
    x = jnp.asarray(np.random.default_rng(2).standard_t(3, (64, 128)), jnp.bfloat16)
    expected = parts(jax.jit(lambda x: fp4jax.quantize(x, spec, axis=-1))(x))
    for kind in (jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto):
        mesh = jax.make_mesh((8,), ("d",), axis_types=(kind,))
        for layout in (P("d", None), P(None, "d")):
            sharded = jax.device_put(x, NamedSharding(mesh, layout))
            with jax.set_mesh(mesh):
                actual = parts(jax.jit(lambda x: fp4jax.quantize(x, spec, axis=-1))(sharded))
            for a, b in zip(actual, expected, strict=True):
                assert_same_bits(a, b, f"{kind} {layout}")
