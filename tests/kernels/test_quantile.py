"""The exact quantile, interpreted on the CPU, against sorting."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4jax import E2M1, QuantSpec, kernels
from fp4jax.kernels import order_statistics, quantile, quantize_rows
from fp4jax.kernels import quantile_device as device
from fp4jax.kernels.quantile_device import BINS, COUNTERS, THRESHOLDS, _counts

FIND = jax.jit(quantile.order_statistics_and_extremes, static_argnums=1)


def check(x, alpha) -> quantile.RowExtremes | None:
    """The quantiles against sorting; returns extremes of rows, where they were found."""
    n = x.size
    ranks = int((1 - alpha) * n), min(int(alpha * n), n - 1)
    with kernels.interpret():
        got, extremes = FIND(x, ranks)
    ordered = np.sort(np.asarray(x).astype(np.float32).ravel())
    assert [v.dtype for v in got] == [x.dtype] * 2
    np.testing.assert_array_equal(np.asarray(got, np.float32), ordered[np.asarray(ranks)])
    return extremes


def test_one_value():
    check(jnp.full((1, 1), -2.5, jnp.float16), 0.99)


def test_a_sample_that_misleads_costs_time_but_no_correctness(monkeypatch):
    monkeypatch.setattr(quantile, "SAMPLES", 512)
    x = np.sort(np.random.default_rng(1).standard_normal(20011))
    stride = -(-x.size // 512) | 1
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


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=str)
@pytest.mark.parametrize("values", ["normal", "heavy", "clipped", "positive", "equal", "NaN", "infinite", "subnormal"])
def test_equals_sorting_and_finds_extremes_of_rows(values, dtype):
    rng = np.random.default_rng(3)
    x = rng.standard_normal((128, 256))
    match values:
        case "heavy":
            x = rng.standard_t(1, x.shape)
        case "clipped":
            x = np.maximum(x, -0.0)
        case "positive":
            x = np.abs(x)
        case "equal":
            x[:] = -2.5
        case "NaN":
            x[:40], x[50, 7] = -np.nan, np.nan
        case "infinite":
            x[:40], x[50, 7], x[51] = np.inf, np.nan, -np.inf
        case "subnormal":
            x = x * float(jnp.finfo(dtype).smallest_subnormal) * 4
    x = jnp.asarray(x, jnp.float32).astype(dtype)
    extremes = check(x, 0.9)
    assert extremes is not None
    wide = np.asarray(x).astype(np.float32)
    np.testing.assert_array_equal(extremes.top, wide.max(axis=1))
    np.testing.assert_array_equal(extremes.bottom, -wide.min(axis=1))


def test_extremes_of_another_matrix_are_refused():
    extremes = quantile.RowExtremes(jnp.zeros(32), jnp.zeros(32))
    with pytest.raises(
        ValueError, match=r"extremes have shapes \[\(32,\), \(32,\)\]; x \(16, 128\) needs those of 16 rows"
    ):
        quantize_rows(jnp.zeros((16, 128)), QuantSpec(E2M1), transpose=True, extremes=extremes)


@pytest.mark.parametrize("shape", [(333, 77), (8200,), (3, 5, 1024), (24, 384), (32, 384)])
def test_any_shape(shape):
    x = jnp.asarray(np.random.default_rng(4).standard_normal(shape), jnp.bfloat16)
    assert (check(x, 0.95) is None) == (shape != (32, 384))


def test_a_zero_is_never_negative():
    x = jnp.full((64, 256), -0.0, jnp.bfloat16)
    for part in (x, x[:1, :8]):
        with kernels.interpret():
            assert not np.signbit(np.asarray(FIND(part, (0, 7))[0], np.float32)).any()


@pytest.mark.parametrize("shape", [(2**23 - 16, 128), (2**22 - 16, 256), (2**20 - 4, 2048), (2**31 - 1,)], ids=str)
def test_programs_are_never_too_many_for_float32_sums_of_bytes(shape):
    survey = quantile.survey_of(shape, (1, 1))
    if survey is None:
        shape = jax.eval_shape(quantile._flattened, jax.ShapeDtypeStruct(shape, jnp.bfloat16)).shape
        survey = quantile.survey_of(shape, (1, 1), extremes=False)
    assert survey is not None
    assert 255 * shape[0] // (survey.rows * survey.groups) <= 2**24
    assert quantile.survey_of((2**23 - 16, 128), ()) is not None  # extremes alone are no sums


@pytest.mark.parametrize("width", [128, 2048, 4096, 5504, 8192, 11008, 16256])
def test_a_program_reads_no_more_than_its_counters_hold(width):
    survey = quantile.survey_of((64, width), (1, 1))
    assert survey is not None
    assert survey.groups * survey.chunks <= 256  # adding ones in bfloat16 is exact so far
    assert survey.groups * survey.rows * width < 2**16  # two totals share a word
    assert quantile.survey_of((64, 16384), (1, 1)) is None


@pytest.mark.parametrize("filled", [None, *range(THRESHOLDS + 1)])
def test_a_program_counts_all_of_its_values(filled):
    """Also where all of them fall in one part, which takes every counter to its limit."""
    shape = (4, 128 * 127)
    survey = quantile.survey_of(shape, (1, 1), extremes=False)
    assert survey is not None
    assert survey.groups * survey.chunks * survey.rows * survey.cols == math.prod(shape)  # one program
    low, step = np.int32([-300, 1000]), np.int32([32, 1])
    high = low + step * (THRESHOLDS - 1) - 1
    thresholds = low[:, None] + step[:, None] * np.arange(THRESHOLDS)
    keys = np.random.default_rng(2).integers(-600, 1400, (2, *shape))
    if filled is not None:
        keys = np.stack([np.full(shape, o + (filled - 1) * s) for o, s in zip(low, step, strict=True)])
    for i in range(2):
        bits = np.where(keys[i] < 0, keys[i] ^ 0x7FFF, keys[i]).astype(np.int16)
        x = jax.lax.bitcast_convert_type(jnp.asarray(bits), jnp.float16)
        brackets = jnp.asarray(np.stack([low, high], 1).reshape(-1))
        with kernels.interpret():
            _, work = quantile._survey(x, survey, brackets, jnp.zeros(BINS + COUNTERS, jnp.float32))
        counts = [_counts(work, 0, bracket) for bracket in range(2)]
        np.testing.assert_array_equal(counts, (keys[i][None, None] >= thresholds[..., None, None]).sum((2, 3)))


@pytest.mark.parametrize(
    ("alpha", "dtype", "readings"),
    [(0.99, jnp.bfloat16, 3), (0.999, jnp.bfloat16, 4), (0.99, jnp.float16, 4), (0.999, jnp.float16, 5)],
    ids=str,
)
def test_readings_decide_a_tail_that_falls_like_one_over_x(alpha, dtype, readings):
    n, bits = 16384 * 4096, jnp.finfo(dtype).nmant
    ranks = int((1 - alpha) * n), int(alpha * n)
    assert quantile._readings(ranks, n, bits) == readings
    sampled = n / quantile._stride(n) * (1 - alpha)  # values of the tail, the ends of whose bracket are 5 σ away
    low, high = (2**bits * math.log2(1 / (1 + side * 5 / math.sqrt(sampled))) for side in (1, -1))
    width, taken = math.ceil(high - low) + 1, 0
    while width > 1:
        width, taken = next(2**s for s in range(14) if device.INNER << s >= width), taken + 1
    assert taken == readings
    assert quantile._readings((0, 9), 10, jnp.finfo(dtype).nmant) == 2


def test_more_readings_where_the_sample_is_a_third():
    n = quantile.SAMPLES + 1  # every third value
    assert quantile._readings((int(0.01 * n), int(0.99 * n)), n, 7) == 3
