"""On a GPU: the kernels as compiled, against exact sums, sorting and the NumPy oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import tolerances

import fp4jax
from fp4jax import kernels
from fp4jax.dot import hopper, registry
from fp4jax.kernels import Factor, GemmConfig, Wanted, order_statistics, quantize_rows, quantize_tiles, scaled_matmul
from fp4jax.kernels.quantizer import storage

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
GRID = fp4jax.E2M1.grid


def same(got, want) -> None:
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    unsigned = f"u{got.dtype.itemsize}"
    np.testing.assert_array_equal(got.view(unsigned), want.view(unsigned))


@pytest.mark.parametrize(
    ("sizes", "grid", "dtypes", "out", "config"),
    [
        ((1, 7, 40), GRID, (E4M3, E4M3), jnp.float32, None),
        ((129, 127, 1300), GRID, (E5M2, E4M3), jnp.bfloat16, GemmConfig(tile_n=192)),
        ((4096, 512, 2048), GRID, (E4M3, E5M2), jnp.float32, GemmConfig(tile_n=128, epilogue_n=32)),
        ((200, 400, 640), GRID, (E4M3, E4M3), jnp.float32, GemmConfig(tile_n=80, epilogue_n=16)),
        ((200, 400, 11008), GRID[GRID > 0], (E4M3, E4M3), jnp.float32, None),
    ],
    ids=["tiny", "mixed", "many tiles", "narrow tiles", "one sign"],
)
def test_products_are_exact(sizes, grid, dtypes, out, config):
    m, n, k = sizes
    rng = np.random.default_rng(0)
    lhs, rhs = rng.choice(grid, (m, k)).astype(dtypes[0]), rng.choice(grid, (n, k)).astype(dtypes[1])
    lhs_scale, rhs_scale = (rng.uniform(0.5, 2, s).astype(np.float32) for s in (m, n))
    exact = (lhs.astype(np.float64) @ rhs.astype(np.float64).T).astype(np.float32)
    want = (exact * lhs_scale[:, None] * rhs_scale).astype(out)
    got = jax.jit(lambda *a: scaled_matmul(*a, out_dtype=out, config=config))(lhs, rhs, lhs_scale, rhs_scale)
    np.testing.assert_array_equal(np.asarray(got), want)


def test_without_promotion_a_sum_of_one_sign_drifts():
    ones = np.full((128, 11008), 6.0, E4M3)
    exact = 36.0 * 11008
    off, on = (
        np.asarray(scaled_matmul(ones, ones, jnp.float32(1), jnp.float32(1), out_dtype=jnp.float32, promote=p))
        for p in (None, 256)
    )
    assert np.all(on == exact)
    assert np.all(off < 0.95 * exact)


def rows() -> np.ndarray:
    """Heavy tails, every bfloat16 value, subnormals, zeros, NaN and infinity."""
    rng = np.random.default_rng(0)
    x = rng.standard_t(2, (64, 4096)) * np.exp(4 * rng.standard_normal((64, 1)))
    x[3], x[5, 2], x[6, 1] = 0, np.nan, -np.inf
    x = x.astype(jnp.bfloat16)
    x[16:32] = np.arange(2**16, dtype=np.uint16).view(jnp.bfloat16).reshape(16, 4096)
    x[32] = (np.arange(4096, dtype=np.uint16) % 128).view(jnp.bfloat16)
    return x


@pytest.mark.parametrize("format", [fp4jax.E2M1, fp4jax.E4M3, fp4jax.E5M2], ids=repr)
@pytest.mark.parametrize("rounding", [fp4jax.NEAREST_EVEN, fp4jax.TIES_UP], ids=repr)
def test_rows_equal_numpy(format, rounding):
    x, spec = rows(), fp4jax.QuantSpec(format, rounding=rounding)
    want = oracle.quantize(x, spec, -1)
    values = np.nan_to_num(want.values, nan=0.0).astype(storage(format))
    for transpose in (False, True):
        got = quantize_rows(x, spec, transpose=transpose)
        same(got.values, values)
        np.testing.assert_array_equal(np.asarray(got.scale), want.block_scale[:, 0])
        if transpose:
            same(got.transposed, values.T)


@pytest.mark.parametrize("compensation", ["none", "residual"])
def test_outliers_equal_numpy(compensation):
    x = np.random.default_rng(1).standard_t(2, (256, 4096)).astype(jnp.bfloat16)
    spec, occ = fp4jax.QuantSpec(fp4jax.E2M1), fp4jax.OCC(0.99, compensation=compensation)
    want = oracle.quantize_activation(x, spec, occ, -1)
    ordered = np.sort(x.astype(np.float32).ravel())
    lo, hi = (jnp.float32(ordered[int(a * x.size)]) for a in (1 - 0.99, 0.99))
    got = quantize_rows(x, spec, thresholds=(lo, hi), occ=occ, transpose=True)
    same(got.values, want.values.astype(E4M3))
    same(got.transposed, want.values.T.astype(E4M3))
    same(got.scale, want.block_scale[:, 0])


def test_tiles_equal_numpy():
    x = np.random.default_rng(2).standard_t(2, (512, 768)).astype(np.float32)
    spec = fp4jax.QuantSpec(fp4jax.E2M1)
    want = oracle.quantize(x, spec, 0)
    [got] = quantize_tiles(x, spec, (Wanted(1, transposed=True),))
    same(got.values, want.values.astype(E4M3))
    same(got.transposed, want.values.T.astype(E4M3))
    same(got.scale, want.block_scale[0])


@pytest.mark.parametrize("cluster", ["m", "n"])
def test_products_of_clusters_are_exact(cluster):
    rng = np.random.default_rng(5)
    lhs, rhs = (rng.choice(GRID, (s, 1300)).astype(d) for s, d in ((1000, E4M3), (700, E5M2)))
    config, one = GemmConfig(tile_n=192, epilogue_n=32, cluster=cluster), jnp.float32(1)
    got = jax.jit(lambda a, b: scaled_matmul(a, b, one, one, out_dtype=jnp.float32, config=config))(lhs, rhs)
    np.testing.assert_array_equal(np.asarray(got), (lhs.astype(np.float64) @ rhs.astype(np.float64).T))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    ("sizes", "config"),
    [
        ((1, 7, 40), None),
        ((129, 127, 4000), None),
        ((2048, 1088, 8192), None),
        ((1000, 700, 1300), GemmConfig(tile_n=192, epilogue_n=32, cluster="m")),
        ((1000, 700, 1300), GemmConfig(tile_n=192, epilogue_n=32, cluster="n")),
    ],
    ids=str,
)
def test_products_times_the_factor_of_a_weight(sizes, config, dtype):
    """Against exact sums and the factor in float64; exact at midpoints and on the grid; subnormal weights count."""
    m, n, k = sizes
    rng = np.random.default_rng(8)
    lhs, rhs = rng.choice(GRID, (m, k)).astype(E4M3), rng.choice(GRID, (n, k)).astype(E5M2)
    weight = 2 * rng.standard_normal((m, n))
    weight[:, ::5] = rng.choice([-6, -2.5, -0.0, 0.25, 0.5, 3, 5, 7], weight[:, ::5].shape)
    reciprocal = rng.choice([0.5, 0.75, 1, 1, 2], n).astype(np.float32)
    tiny = dict.fromkeys((jnp.float32, jnp.bfloat16), 2.0**-126) | {jnp.float16: 2.0**-14}
    weight[:, -1], reciprocal[-1] = weight[:, -1] * tiny[dtype] / 4, 2 / tiny[dtype]
    weight, one = weight.astype(dtype), jnp.float32(1)

    def f(lhs, rhs, weight, reciprocal):
        factor = Factor(weight, reciprocal, fp4jax.DGE(), fp4jax.E2M1)
        return scaled_matmul(lhs, rhs, one, one, out_dtype=jnp.float32, config=config, factor=factor)

    got = np.asarray(jax.jit(f)(lhs, rhs, weight, reciprocal))
    product, u = lhs.astype(np.float64) @ rhs.astype(np.float64).T, weight.astype(np.float32) * reciprocal
    want = product * oracle.dge_factor(u, oracle.FORMATS["E2M1"], 5.0, 3.0)
    rtol = tolerances.DGE_KERNEL_FACTOR + tolerances.UNIT_ROUNDOFF["float32"]
    np.testing.assert_allclose(got, want, rtol=rtol)
    for points, factor in ((GRID, np.float32(1 / 5)), ((GRID[1:] + GRID[:-1]) / 2, np.float32(3))):
        where = np.isin(u, points)
        assert where.any() or m == 1
        np.testing.assert_array_equal(got[where], product[where].astype(np.float32) * factor)


@pytest.mark.parametrize("shape", [(512, 4096), (129, 127)], ids=str)
@pytest.mark.parametrize("scale", [fp4jax.AbsMax(), fp4jax.PowerOfTwo("floor")], ids=repr)
def test_noise_and_powers_of_two_are_the_references(shape, scale):
    x = np.random.default_rng(6).standard_t(2, shape).astype(jnp.bfloat16)
    spec, key = fp4jax.QuantSpec(fp4jax.E2M1, scale=scale, rounding=fp4jax.STOCHASTIC), jax.random.key(7)
    want = fp4jax.quantize(x, spec, axis=-1, key=key)
    got = jax.jit(lambda x: quantize_rows(x, spec, transpose=True, key=key))(x)
    same(got.values, np.asarray(want.values.astype(jnp.float32)).astype(E4M3))
    same(got.transposed, np.asarray(got.values).T)
    same(got.scale, scale.decode(want.scale, None)[:, 0])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("shape", [(4096, 1000), (1, 1), (129, 127)], ids=str)
@pytest.mark.parametrize("name", ["normal", "heavy", "zeros"])
def test_quantile_equals_sorting(name, shape, dtype):
    rng = np.random.default_rng(3)
    x = {"normal": rng.standard_normal, "heavy": lambda s: rng.standard_t(3, s), "zeros": np.zeros}[name](shape)
    x = x.astype(dtype)
    ranks = int(0.01 * x.size), int(0.99 * x.size)
    ordered = np.sort(x.astype(np.float32).ravel())
    assert [float(v) for v in order_statistics(x, ranks)] == [ordered[r] for r in ranks]


def test_backend_equals_the_reference(monkeypatch):
    if not kernels.is_hopper():
        pytest.skip("needs an H100 or H200")
    monkeypatch.setitem(registry.BACKENDS, "hopper", hopper)
    rng = np.random.default_rng(4)
    x = jnp.asarray(rng.standard_t(3, (256, 640)), jnp.bfloat16)
    w = jnp.asarray(rng.standard_normal((640, 384)), jnp.float32)
    recipe = fp4jax.recipes.fp4_vector()
    dims = (((1,), (0,)), ((), ()))
    outs = [
        jax.jit(lambda x, w, b=b: fp4jax.dot_general(x, w, dims, recipe=recipe, backend=b))(x, w)
        for b in ("xla", "hopper")
    ]
    same(outs[1], outs[0])
