"""The oracle itself, against ml_dtypes, exact rationals, the paper's tables and naive loops."""

import itertools
from fractions import Fraction

import ml_dtypes
import numpy as np
import oracle
import pytest
from stand_ins import AbsMax, Occ, PerBlock, PerBlock2D, PerTensor, PerVector, PowerOfTwo, Spec, TwoLevel

F32 = np.float32
DTYPES = {"E2M1": ml_dtypes.float4_e2m1fn, "E4M3": ml_dtypes.float8_e4m3fn, "E5M2": ml_dtypes.float8_e5m2}
ALL_BFLOAT16 = np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(F32)


def midpoints(fmt: oracle.Format) -> np.ndarray:
    """Every midpoint of the grid and its float32 neighbors, both signs."""
    middle = ((fmt.magnitudes[1:] + fmt.magnitudes[:-1]) / 2).astype(F32)
    near = np.concatenate([middle, np.nextafter(middle, F32(0)), np.nextafter(middle, F32(np.inf))])
    return np.concatenate([near, -near])


# --- formats and rounding ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DTYPES)
def test_grids_are_those_of_ml_dtypes(name):
    fmt, dtype = oracle.FORMATS[name], DTYPES[name]
    info = ml_dtypes.finfo(dtype)
    codes = np.arange(2 ** (info.bits - 1), dtype=np.uint8).view(dtype).astype(np.float64)
    np.testing.assert_array_equal(codes[: fmt.finite_codes], fmt.magnitudes)
    assert not np.isfinite(codes[fmt.finite_codes :]).any()
    assert fmt.max == float(info.max)


def test_grids_are_those_of_the_paper():
    tables = {
        "E1M2": [0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5],
        "E2M1": [0, 0.5, 1, 1.5, 2, 3, 4, 6],
        "E3M0": [0, 0.25, 0.5, 1, 2, 4, 8, 16],
    }
    for name, table in tables.items():
        assert oracle.FORMATS[name].magnitudes.tolist() == table
    assert [oracle.FORMATS[name].emax for name in ("E1M2", "E2M1", "E3M0", "E4M3", "E5M2")] == [1, 2, 4, 8, 15]


@pytest.mark.parametrize("name", DTYPES)
def test_nearest_even_equals_the_cast_of_ml_dtypes(name):
    fmt = oracle.FORMATS[name]
    x = np.concatenate([ALL_BFLOAT16, midpoints(fmt), np.random.default_rng(0).normal(0, 4, 50_000).astype(F32)])
    x = x[np.abs(x) <= fmt.max]
    ours = oracle.round_to_grid(x, fmt, "even")
    theirs = x.astype(DTYPES[name]).astype(np.float64)
    np.testing.assert_array_equal(ours.view(np.uint64), theirs.view(np.uint64))  # the sign of zero too


def test_ties_up_equals_the_chain_of_comparisons_of_the_paper():
    thresholds = [-5, -3.5, -2.5, -1.75, -1.25, -0.75, -0.25, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5]
    values = [-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6]
    fmt = oracle.FORMATS["E2M1"]
    x = np.concatenate([ALL_BFLOAT16[np.isfinite(ALL_BFLOAT16)], midpoints(fmt)])
    chain = np.array(values)[np.searchsorted(thresholds, x, side="right")]
    np.testing.assert_array_equal(oracle.round_to_grid(x, fmt, "up"), chain)


@pytest.mark.parametrize("name", ["E1M2", "E3M0", "E2M1"])
@pytest.mark.parametrize("ties", ["even", "up"])
def test_rounding_equals_exact_rationals(name, ties):
    fmt = oracle.FORMATS[name]
    rng = np.random.default_rng(1)
    x = np.concatenate([midpoints(fmt), rng.uniform(-1.2 * fmt.max, 1.2 * fmt.max, 500).astype(F32)])
    grid = sorted({Fraction(float(v)) for v in (*fmt.magnitudes, *-fmt.magnitudes)})
    code = {Fraction(float(v)): i for i, v in enumerate(fmt.magnitudes)}
    for value, ours in zip(x, oracle.round_to_grid(x, fmt, ties)):
        exact = Fraction(float(value))
        best = min(abs(g - exact) for g in grid)
        near = [g for g in grid if abs(g - exact) == best]
        want = max(near) if ties == "up" else next(g for g in near if len(near) == 1 or code[abs(g)] % 2 == 0)
        assert Fraction(float(ours)) == want, (value, ours, want)


def test_rounding_saturates_and_keeps_nan():
    for fmt, ties in itertools.product(oracle.FORMATS.values(), ("even", "up")):
        x = np.array([np.inf, -np.inf, 3e38, -3e38, np.nan, 1.01 * fmt.max])
        want = [fmt.max, -fmt.max, fmt.max, -fmt.max, np.nan, fmt.max]
        np.testing.assert_array_equal(oracle.round_to_grid(x, fmt, ties), want)


# --- scales -----------------------------------------------------------------------------------------------------------


def nearest_float32(value: Fraction) -> np.float32:
    """The float32 nearest a rational, by comparing neighbors of a first guess."""
    guess = F32(float(value))
    candidates = (np.nextafter(guess, F32(0)), guess, np.nextafter(guess, F32(np.inf)))
    return min(candidates, key=lambda c: abs(Fraction(float(c)) - value))


@pytest.mark.parametrize("name", oracle.FORMATS)
def test_absmax_takes_three_float32_steps(name):
    fmt = oracle.FORMATS[name]
    amax = np.exp(np.random.default_rng(2).uniform(-70, 80, 200)).astype(F32)
    r, scale = oracle.absmax(amax, fmt)
    constant = nearest_float32(Fraction(1) / Fraction(fmt.max))
    for a, r_, s in zip(amax, r, scale):
        assert r_ == nearest_float32(Fraction(fmt.max) / Fraction(float(a)))
        assert s == nearest_float32(Fraction(float(a)) * Fraction(float(constant)))


@pytest.mark.parametrize("name", oracle.FORMATS)
def test_no_scale_is_zero_infinite_or_subnormal(name):
    fmt = oracle.FORMATS[name]
    amax = np.array([1e-45, 1e-39, 1.2e-38, 1e-36, 1, 1e38, 3.4028235e38], F32)
    for values in (*oracle.absmax(amax, fmt), np.ldexp(1.0, oracle.power_of_two_exponent(amax, fmt, "rceil"))):
        assert np.isfinite(values).all()
        assert (values >= np.finfo(F32).tiny).all()
    zero_r, zero_scale = oracle.absmax(np.zeros(1, F32), fmt)
    assert (zero_r, zero_scale) == (1, 1)
    assert oracle.power_of_two_exponent(np.zeros(1, F32), fmt, "floor") == 0


def test_power_of_two_on_the_published_examples():
    e2m1, e4m3 = oracle.FORMATS["E2M1"], oracle.FORMATS["E4M3"]
    byte = lambda amax, fmt, mode: int(oracle.power_of_two_exponent(np.array([amax], F32), fmt, mode)[0]) + 127
    assert (byte(7, e2m1, "floor"), byte(7, e2m1, "rceil")) == (127, 128)
    assert (byte(150, e4m3, "rceil"), byte(150, e4m3, "ceil")) == (126, 127)
    assert [byte(a, e2m1, "even") for a in (4, 6, 6.99, 7, 7.9)] == [127, 127, 127, 128, 128]


@pytest.mark.parametrize("name", ["E2M1", "E1M2", "E3M0", "E4M3"])
def test_power_of_two_equals_exact_rationals(name):
    fmt = oracle.FORMATS[name]
    mantissas = (1, 1.25, 1.5, np.nextafter(F32(1.75), F32(0)), 1.75, 1.999, np.nextafter(F32(2), F32(0)))
    amax = np.array([np.ldexp(F32(c), k) for k in range(-20, 21) for c in mantissas], F32)
    two = Fraction(2)
    for mode in ("floor", "ceil", "even", "rceil"):
        for a, power in zip(amax, oracle.power_of_two_exponent(amax, fmt, mode)):
            exact, p = Fraction(float(a)), int(power)
            if mode == "rceil":
                assert exact / two**p <= Fraction(fmt.max) < exact / two ** (p - 1)
                continue
            if mode == "even":  # round to 1 + M significant bits, half up: the carry is all that matters
                step = two ** (int(np.floor(np.log2(float(a)))) - fmt.mantissa_bits)
                exact = ((exact / step + Fraction(1, 2)) // 1) * step
            edge = two ** (p + fmt.emax)
            assert edge / 2 < exact <= edge if mode == "ceil" else edge <= exact < 2 * edge


def test_two_level_keeps_small_and_large_blocks():
    for fill in (1e-3, 3e3, 1e5, 1e-30, 1e30):
        q = oracle.quantize(np.full((4, 32), fill, F32), Spec(granularity=PerBlock(16), scale=TwoLevel()), -1)
        assert np.abs(q.dequantized / F32(fill) - 1).max() < 0.01
    x = np.ones((1, 32), F32)
    x[0, 16:] = 1e-7  # its ideal block scale is below E4M3's smallest
    q = oracle.quantize(x, Spec(granularity=PerBlock(16), scale=TwoLevel()), -1)
    assert q.block_scale.tolist() == [[448, 2.0**-9]]
    assert (q.scale > 0).all()


# --- blocks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("granularity", "axis", "shape", "counts"),
    [
        (PerTensor(), -1, (3, 5), (1, 1)),
        (PerVector(), -1, (3, 5), (3, 1)),
        (PerVector(), 0, (3, 5), (1, 5)),
        (PerVector(), (0, 2), (3, 5, 2), (1, 5, 1)),
        (PerBlock(2), -1, (3, 5), (3, 3)),
        (PerBlock(2), 0, (3, 5), (2, 5)),
        (PerBlock2D(2, 4), 0, (3, 5), (2, 2)),
        (PerBlock2D(2, 4), -1, (2, 3, 5), (2, 1, 3)),
        (PerTensor(), -1, (0, 5), (1, 1)),
        (PerVector(), -1, (0, 5), (0, 1)),
        (PerVector(), -1, (5, 0), (5, 1)),
    ],
)
def test_blocks_are_those_of_a_naive_loop(granularity, axis, shape, counts):
    labels, blocks = oracle.block_labels(shape, granularity, axis)
    assert blocks == counts
    extent = [-(-n // c) if c else 1 for n, c in zip(shape, counts)]
    if isinstance(granularity, PerBlock):
        extent = [granularity.size if d == axis % len(shape) else 1 for d in range(len(shape))]
    if isinstance(granularity, PerBlock2D):
        other = max(d for d in range(len(shape)) if d != axis % len(shape))
        size = {axis % len(shape): granularity.rows, other: granularity.cols}
        extent = [size.get(d, 1) for d in range(len(shape))]
    for index in np.ndindex(shape):
        assert np.unravel_index(labels[index], blocks) == tuple(i // e for i, e in zip(index, extent))


def test_several_contraction_axes_are_one_long_axis_in_the_order_given():
    shape = (4, 3, 5)
    labels, blocks = oracle.block_labels(shape, PerBlock(6), (2, 0))
    assert blocks == (4, 3, 1)  # 5·4 = 20 values along k, counted on axis 0
    for i, j, h in np.ndindex(shape):
        assert np.unravel_index(labels[i, j, h], blocks) == ((h * 4 + i) // 6, j, 0)


def test_non_finite_blocks_become_nan_and_leave_others_alone():
    x = np.ones((3, 4), F32)
    x[0, 1], x[2, 3] = np.nan, -np.inf
    for scale in (AbsMax(), PowerOfTwo("floor"), TwoLevel()):
        dequantized = oracle.quantize(x, Spec(scale=scale), -1).dequantized
        assert np.isnan(dequantized[[0, 2]]).all()
        np.testing.assert_allclose(dequantized[1], 1, rtol=1e-2)
    x = np.arange(400, dtype=F32).reshape(4, 100)
    x[1, 7] = np.inf  # the clamp would make it finite
    q = oracle.quantize_activation(x, Spec(), Occ(alpha=0.9), -1)
    assert np.isnan(q.dequantized).any(axis=1).tolist() == [False, True, False, False]


# --- outliers and estimators ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [1.0, 0.999, 0.99, 0.97, 0.5])
@pytest.mark.parametrize("n", [1, 2, 7, 100, 1000])
def test_clamping_is_sorting(alpha, n):
    x = np.random.default_rng(n).standard_t(3, n).astype(F32)
    clamped, residual = oracle.clamp_outliers(x, Occ(alpha=alpha), 0)
    s = sorted(x.tolist())
    low, high = s[int((1 - alpha) * n)], s[min(int(alpha * n), n - 1)]
    assert clamped.tolist() == [min(max(v, low), high) for v in x.tolist()]
    np.testing.assert_array_equal(residual, x - clamped)
    if alpha == 1.0:
        assert not residual.any()
    if n == 1000:
        assert abs((residual != 0).mean() - 2 * (1 - alpha)) <= 2 / n


def test_vector_scope_treats_rows_alone():
    x = np.random.default_rng(0).normal(size=(3, 4, 50)).astype(F32)
    clamped, _ = oracle.clamp_outliers(x, Occ(alpha=0.9, scope="vector"), (0, 2))
    for j in range(4):
        alone, _ = oracle.clamp_outliers(x[:, j], Occ(alpha=0.9), -1)
        np.testing.assert_array_equal(clamped[:, j], alone)


def test_an_outlier_is_carried_within_e4m3_and_never_saturates():
    x = np.random.default_rng(0).normal(size=(8, 200)).astype(F32)
    x[3, 5] = 5e4
    q = oracle.quantize_activation(x, Spec(), Occ(), -1)
    _, residual = oracle.clamp_outliers(x, Occ(), -1)
    far = residual != 0
    assert np.abs(q.values[~far]).max() <= 6
    assert np.abs(q.values).max() <= 448
    # A carried value is off by half an E4M3 step of the sum, 2^-4 relative, and by the grid step of what lies below it.
    error = np.abs(q.dequantized - x)[far]
    assert (error <= np.abs(x[far]) * 2.0**-4 + q.scale[far] * 2).all()
    assert abs(q.dequantized[3, 5] / 5e4 - 1) < 2.0**-4


def test_dge_reproduces_the_released_unit_vector():
    u = np.linspace(-6, 6, 20).astype(ml_dtypes.bfloat16).astype(np.float64)
    half = [0.2002, 0.4375, 0.6055, 0.2168, 1.8359, 0.2695, 0.3027, 0.2695, 0.2402, 0.5781]
    got = oracle.dge_factor(u, oracle.FORMATS["E2M1"], 5.0, 3.0)
    np.testing.assert_allclose(got, half + half[::-1], rtol=2.0**-7)


@pytest.mark.parametrize("name", ["E2M1", "E1M2", "E3M0", "E4M3"])
def test_dge_on_grid_at_midpoints_and_past_the_ends(name):
    fmt = oracle.FORMATS[name]
    middle = (fmt.magnitudes[1:] + fmt.magnitudes[:-1]) / 2
    for k, clip in ((5.0, 3.0), (3.0, 2.0)):
        for sign in (1, -1):
            assert (oracle.dge_factor(sign * middle, fmt, k, clip) == clip).all()
            np.testing.assert_allclose(oracle.dge_factor(sign * fmt.magnitudes, fmt, k, clip), 1 / k)
            assert oracle.dge_factor(np.array(sign * fmt.max * 1.01), fmt, k, clip) == pytest.approx(1 / k)
