import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from reference import QUICK, assert_statistics, statistics

import fp4jax
from fp4jax import (
    DGE,
    E1M2,
    E2M1,
    E4M3,
    E5M2,
    OCC,
    ClippedSTE,
    PerBlock,
    PerBlock2D,
    PerTensor,
    PerVector,
    PowerOfTwo,
    QuantSpec,
    TwoLevel,
)
from fp4jax.telemetry import FACTOR_EDGES, STATISTICS, factor_histogram, operand_statistics


@pytest.fixture(autouse=True)
def _strict():
    with jax.numpy_dtype_promotion("strict"):
        yield


def heavy(shape, seed=0, dtype=np.float32):
    """Values with outliers in fixed channels, zeros among them, and a row of zeros."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-3, 4, shape[-1]))
    x[..., 3] *= 30
    x[rng.random(shape) < 0.05] = 0
    x[0] = 0
    return np.array(jnp.asarray(x, dtype))


measure = jax.jit(
    operand_statistics, static_argnames=("spec", "axis", "outliers", "clamp_axis"), compiler_options=QUICK
)

CASES = {
    "vector": (QuantSpec(E2M1), None),
    "tensor": (QuantSpec(E5M2, PerTensor()), None),
    "uniform, up": (QuantSpec(E1M2, rounding=fp4jax.TIES_UP), None),
    "nvfp4": (QuantSpec(E2M1, PerBlock(16), TwoLevel()), None),
    "mxfp4": (QuantSpec(E2M1, PerBlock(32), PowerOfTwo("floor")), None),
    "patches": (QuantSpec(E2M1, PerBlock2D(8, 8), PowerOfTwo("rceil")), None),
    "occ": (QuantSpec(E2M1), OCC(0.97)),
    "occ by vector": (QuantSpec(E2M1), OCC(0.97, scope="vector")),
    "occ dropped": (QuantSpec(E2M1), OCC(0.97, compensation="none")),
    "occ sparse": (QuantSpec(E2M1), OCC(0.97, compensation="sparse")),
    "occ in float32": (QuantSpec(E4M3), OCC(0.97, residual_format=None)),
    "occ, blocks": (QuantSpec(E2M1, PerBlock(16), PowerOfTwo("rceil")), OCC(0.97)),
}


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((case, "float32") for case in CASES),
        *(("nvfp4", "bfloat16"), ("occ sparse", "bfloat16"), ("occ sparse", "float16")),
    ],
)
def test_statistics_equal_a_recomputation_in_numpy(case, dtype):
    spec, occ = CASES[case]
    x = heavy((24, 40), dtype=dtype)
    expected = statistics(x, spec, -1, occ, dtype=x.dtype)
    assert_statistics(measure(x, spec, axis=-1, outliers=occ), expected)
    assert expected["snr_db"] < 50  # or the comparison would show little
    assert spec.format.bits > 4 or expected["underflow"] > 0


@pytest.mark.parametrize("axis", [0, (0, 2)])
def test_axes_are_those_of_the_contraction(axis):
    x = heavy((6, 10, 8))
    assert_statistics(measure(x, QuantSpec(E2M1), axis=axis), statistics(x, QuantSpec(E2M1), axis))


def test_the_clamp_of_another_product_is_that_of_fprop():
    x, occ = heavy((24, 40)), OCC(0.97, scope="vector")
    actual = measure(x, QuantSpec(E2M1), axis=0, outliers=occ, clamp_axis=-1)
    assert_statistics(actual, statistics(x, QuantSpec(E2M1), 0, occ, clamp_axis=-1))


def test_carried_outliers_that_fill_their_format_are_counted():
    # One value 10,000 times the rest: amax is raised so that it lands on 448, the end of E4M3, and nothing passes it.
    x = np.ones((1, 200), np.float32)
    x[0, 7] = 1e4
    stats = measure(x, QuantSpec(E2M1), axis=-1, outliers=OCC(0.99))
    assert_statistics(stats, statistics(x, QuantSpec(E2M1), -1, OCC(0.99)))
    assert float(stats["residual_saturated"]) == 1.0


@pytest.mark.parametrize("shape", [(3, 8), (0, 8)])
@pytest.mark.parametrize("occ", [None, OCC(scope="vector", compensation="sparse")])
def test_zeros_and_nothing_lose_nothing(shape, occ):
    stats = measure(jnp.zeros(shape), QuantSpec(E2M1), axis=-1, outliers=occ)
    expected = dict.fromkeys(STATISTICS, 0.0) | {"snr_db": np.inf, "cosine": 1.0, "scale_min": 1.0, "scale_max": 1.0}
    assert {name: float(value) for name, value in stats.items()} == expected


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("case", ["vector", "nvfp4", "occ", "occ sparse"])
def test_what_is_not_finite_makes_no_finite_statistic(case, bad):
    spec, occ = CASES[case]
    x = heavy((24, 40))
    x[5, 3] = bad
    stats = measure(x, spec, axis=-1, outliers=occ)
    assert float(stats["nonfinite"]) == pytest.approx(1 / x.size)
    assert all(np.isnan(stats[name]) for name in STATISTICS if name != "nonfinite")


@pytest.mark.parametrize("power", [-120, -100, 100, 120])
def test_the_snr_does_not_depend_on_the_size_of_the_values(power):
    x = heavy((24, 40))
    x[np.abs(x) < 1e-3] = 0
    near, far = (measure(v, QuantSpec(E2M1), axis=-1, outliers=OCC(0.97)) for v in (x, np.ldexp(x, power)))
    for name in ("snr_db", "cosine", "underflow", "residual_energy", "crest", "scale_spread"):
        assert float(near[name]) == pytest.approx(float(far[name]), rel=1e-5, abs=1e-5), name


def test_subnormal_float16_values_count():
    x = np.full((2, 16), 6e-8, np.float16)
    stats = measure(x, QuantSpec(E2M1), axis=-1)
    assert float(stats["underflow"]) == 0
    assert float(stats["snr_db"]) > 100
    assert float(stats["amax"]) == float(np.float16(6e-8))


def test_stochastic_rounding_is_measured_as_it_is_drawn():
    spec, x, key = QuantSpec(E2M1, rounding=fp4jax.STOCHASTIC), heavy((24, 40)), jax.random.key(3)
    draw = jax.jit(lambda x: fp4jax.quantize(x, spec, axis=-1, key=key).dequantize(), compiler_options=QUICK)
    drawn = np.asarray(draw(x), np.float64)
    exact = x.astype(np.float64)
    expected = 10 * np.log10(np.sum(exact**2) / np.sum((exact - drawn) ** 2))
    assert float(measure(x, spec, axis=-1, key=key)["snr_db"]) == pytest.approx(expected, abs=1e-4)
    with pytest.raises(ValueError, match=r"rounding=STOCHASTIC draws noise and key=None; pass key=jax.random.key"):
        operand_statistics(x, spec, axis=-1)


def test_vmap_measures_each_example():
    x = np.stack([heavy((8, 16), seed) for seed in range(3)])
    spec = QuantSpec(E2M1, PerTensor())
    together = jax.jit(jax.vmap(functools.partial(operand_statistics, spec=spec, axis=-1)), compiler_options=QUICK)(x)
    for i, one in enumerate(x):
        assert_statistics({name: values[i] for name, values in together.items()}, statistics(one, spec, -1))


def test_eight_devices_measure_what_one_does():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    x = heavy((24, 40))
    sharded = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
    for spec, occ in (CASES["occ"], CASES["nvfp4"]):
        assert_statistics(measure(sharded, spec, axis=-1, outliers=occ), statistics(x, spec, -1, occ))


@pytest.mark.parametrize("estimator", [DGE(), DGE(k=3.0, clip=2.1), ClippedSTE()])
def test_the_histogram_of_factors_equals_a_recomputation_in_numpy(estimator):
    w = heavy((40, 24), seed=2)
    spec = QuantSpec(E2M1, scale=PowerOfTwo("floor"))
    factor = oracle.estimator_factor(estimator, oracle.quantize(w, spec, 0), oracle.format_of(E2M1))
    edges = np.array([*FACTOR_EDGES[:-1], np.inf])
    # A factor within float32 rounding of an edge may count on either side of it.
    sure = np.min(np.abs(factor[..., None] - edges[:-1]) - 1e-5 * factor[..., None], axis=-1) > 0
    expected = np.histogram(np.broadcast_to(factor, w.shape), edges)[0] / w.size
    histogram = jax.jit(
        functools.partial(factor_histogram, spec=spec, axis=0, estimator=estimator), compiler_options=QUICK
    )
    actual = np.asarray(histogram(w))
    unsure = np.count_nonzero(~np.broadcast_to(sure, w.shape)) if isinstance(estimator, DGE) else 0
    assert np.abs(actual - expected).sum() * w.size <= 2 * unsure + 1e-3
    assert unsure < w.size / 20
    assert actual.sum() == pytest.approx(1)


def test_a_weight_that_is_not_finite_has_no_factor():
    w = jnp.array([[1.0, jnp.nan], [0.5, 2.0]])
    histogram = functools.partial(factor_histogram, spec=QuantSpec(E2M1), axis=0, estimator=DGE())
    actual = jax.jit(histogram, compiler_options=QUICK)(w)
    assert float(actual.sum()) == 0.5


def test_per_vector_scales_hold_no_scale_of_an_empty_row():
    stats = measure(heavy((24, 40)), QuantSpec(E2M1, PerVector()), axis=-1)
    assert float(stats["scale_max"]) > 1.1  # the row of zeros has scale 1, which is neither end
    x = np.array([[0.0, 0.0], [6e-3, 3e-3]], np.float32)
    assert float(measure(x, QuantSpec(E2M1), axis=-1)["scale_max"]) == pytest.approx(1e-3)
