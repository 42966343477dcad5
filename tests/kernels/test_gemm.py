"""The scaled FP8 product, interpreted on the CPU, against exact sums."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import tolerances

from fp4jax import DGE, STE, ClippedSTE, kernels
from fp4jax.formats import E2M1
from fp4jax.kernels import Factor, GemmConfig, gemm, gemm_device, scaled_matmul

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
SMALL = GemmConfig(tile_n=64, stages=2, epilogue_n=32)


def operands(m, n, k, *, batch=(), lhs=E4M3, rhs=E4M3, seed=0):
    """Random E2M1 values in FP8, and scales."""
    rng = np.random.default_rng(seed)
    return (
        rng.choice(E2M1.grid, (*batch, m, k)).astype(lhs),
        rng.choice(E2M1.grid, (*batch, n, k)).astype(rhs),
        rng.uniform(0.5, 2, (*batch, m)).astype(np.float32),
        rng.uniform(0.5, 2, (*batch, n)).astype(np.float32),
    )


def reference(lhs, rhs, lhs_scale, rhs_scale, dtype):
    """The sum is exact in float64; then the xla backend's two products and one rounding."""
    exact = np.einsum("...mk,...nk->...mn", lhs.astype(np.float64), rhs.astype(np.float64)).astype(np.float32)
    return (exact * lhs_scale[..., :, None] * rhs_scale[..., None, :]).astype(dtype)


def run(args, **kwargs):
    with kernels.interpret():
        return np.asarray(jax.jit(lambda *a: scaled_matmul(*a, **kwargs))(*args))


@pytest.mark.parametrize("sizes", [(1, 7, 40), (7, 129, 1), (40, 1, 129), (127, 40, 127), (129, 127, 40)], ids=str)
def test_any_size_is_exact(sizes):
    args = operands(*sizes, rhs=E5M2)
    np.testing.assert_array_equal(run(args, out_dtype=jnp.float32), reference(*args, np.float32))


@pytest.mark.parametrize("promote", [128, None])
def test_batch_promotion_and_bfloat16(promote):
    args = operands(130, 40, 300, batch=(2,), lhs=E5M2)
    got = run(args, out_dtype=jnp.bfloat16, promote=promote, config=SMALL)
    assert got.shape == (2, 130, 40)
    np.testing.assert_array_equal(got, reference(*args, jnp.bfloat16))


@pytest.mark.parametrize("tile_n", [48, 80])
def test_tile_widths_that_are_no_multiple_of_64(tile_n):
    args = operands(70, 100, 200)
    got = run(args, out_dtype=jnp.float32, config=GemmConfig(tile_n=tile_n, stages=2, epilogue_n=16))
    np.testing.assert_array_equal(got, reference(*args, np.float32))


def test_no_race_while_consumers_are_staggered():
    args = operands(40, 40, 500)
    with kernels.interpret(detect_races=True):
        got = jax.jit(lambda *a: scaled_matmul(*a, out_dtype=jnp.float32, config=SMALL))(*args)
    np.testing.assert_array_equal(np.asarray(got), reference(*args, np.float32))
    assert not kernels.races_found()


def test_no_race_where_stores_wait_for_slots(monkeypatch):
    """Three chunks a tile and two slots, so that a tile begins with the slot that was stored last."""
    monkeypatch.setattr(GemmConfig, "slots", lambda self, dtype: 2)
    args, config = operands(200, 100, 129), GemmConfig(tile_n=48, stages=2, epilogue_n=16)
    with kernels.interpret(detect_races=True):
        got = jax.jit(lambda *a: scaled_matmul(*a, out_dtype=jnp.float32, config=config))(*args)
    np.testing.assert_array_equal(np.asarray(got), reference(*args, np.float32))
    assert not kernels.races_found()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_slots_fill_shared_memory(dtype):
    for tile_n in (64, 128, 160, 176, 192, 256):
        config = GemmConfig(tile_n=tile_n, epilogue_n=16 if tile_n == 176 else 32)
        assert 2 <= config.slots(dtype) <= tile_n // config.epilogue_n
        assert config.shared_bytes(dtype) + gemm.BARRIER_BYTES <= gemm.SHARED_BYTES
    assert GemmConfig(tile_n=192, epilogue_n=64).slots(jnp.bfloat16) == 3
    assert GemmConfig(tile_n=192, epilogue_n=32).slots(jnp.float32) == 4


@pytest.mark.parametrize(("cluster", "sizes"), [("m", (300, 40, 500)), ("n", (40, 150, 300)), ("m", (129, 70, 129))])
def test_blocks_of_a_cluster_take_tiles_side_by_side(cluster, sizes):
    """The interpreter of jax 0.11.2 lets each block copy whole tiles, so neither halves nor races on them are seen."""
    args = operands(*sizes)
    config = GemmConfig(tile_n=64, stages=2, epilogue_n=32, cluster=cluster)
    with kernels.interpret(detect_races=True):
        got = jax.jit(lambda *a: scaled_matmul(*a, out_dtype=jnp.float32, config=config))(*args)
    np.testing.assert_array_equal(np.asarray(got), reference(*args, np.float32))
    assert not kernels.races_found()


def test_scalar_scales_and_vmap():
    lhs, rhs, *_ = operands(40, 24, 64, batch=(2,))
    with kernels.interpret():
        got = jax.vmap(lambda a, b: scaled_matmul(a, b, jnp.float32(3), jnp.float32(0.5), out_dtype=jnp.float32))(
            lhs, rhs
        )
    ones = np.ones((2, 1), np.float32)
    np.testing.assert_array_equal(got, reference(lhs, rhs, 3 * ones, 0.5 * ones, np.float32))


@pytest.mark.parametrize("axes", [(0, None, 0, None), (0, 0, 0, None), (0, 0, None, 0), (None, None, 0, 0)], ids=str)
def test_scalar_scales_of_which_a_vmap_has_several(axes):
    lhs, rhs, *_ = operands(40, 24, 64, batch=(2,))
    scales = [jnp.float32([3, 0.5]), jnp.float32([0.25, 2])]
    args = [x if axis == 0 else x[0] for x, axis in zip((lhs, rhs, *scales), axes, strict=True)]
    with kernels.interpret():
        got = jax.vmap(functools.partial(scaled_matmul, out_dtype=jnp.float32), axes)(*args)
    whole = [x if axis == 0 else np.stack([x[0]] * 2) for x, axis in zip((lhs, rhs, *scales), axes, strict=True)]
    want = reference(*whole[:2], *(np.asarray(scale)[:, None] for scale in whole[2:]), np.float32)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("axes", "lhs_shape", "rhs_shape"),
    [
        ((0, None, 0, None), (1, 80, 128), (1, 24, 128)),  # many lhs, one rhs: more rows
        ((None, 0, None, 0), (2, 40, 128), (2, 24, 128)),
        ((0, None, 0, 0), (2, 40, 128), (2, 24, 128)),
    ],
    ids=str,
)
def test_a_vmap_is_one_launch(monkeypatch, axes, lhs_shape, rhs_shape):
    launches, launch = [], gemm_device.launch

    def recorded(lhs, rhs, *args, **kwargs):
        launches.append((lhs.shape, rhs.shape))
        return launch(lhs, rhs, *args, **kwargs)

    args = operands(40, 24, 64, batch=(2,))
    mapped = [x if axis == 0 else x[0] for x, axis in zip(args, axes, strict=True)]
    monkeypatch.setattr(gemm_device, "launch", recorded)
    with kernels.interpret():
        got = jax.jit(jax.vmap(lambda *a: scaled_matmul(*a, out_dtype=jnp.float32), axes))(*mapped)
    assert launches[-1] == (lhs_shape, rhs_shape)
    whole = [x if axis == 0 else np.stack([x[0]] * 2) for x, axis in zip(args, axes, strict=True)]
    np.testing.assert_array_equal(got, reference(*whole, np.float32))


# --- with a factor ---------------------------------------------------------------------------------------------------


def weight_of(shape, *, dtype=np.float32, scalar=False, seed=1):
    """A weight with zeros, grid points and midpoints, and reciprocal scales."""
    rng = np.random.default_rng(seed)
    weight = 2 * rng.standard_normal(shape)
    weight[..., ::5] = rng.choice([-6, -2.5, -0.0, 0.25, 0.5, 3, 5, 7], weight[..., ::5].shape)
    reciprocal = rng.choice([0.5, 0.75, 1, 1, 2], () if scalar else (*shape[:-2], shape[-1]))
    return weight.astype(dtype), np.float32(reciprocal)


def times_factor(product, weight, reciprocal):
    """In float64, but for u, which is rounded once."""
    u = weight.astype(np.float32) * (reciprocal if reciprocal.ndim == 0 else reciprocal[..., None, :])
    return product * oracle.dge_factor(u, oracle.FORMATS["E2M1"], 5.0, 3.0)


def with_factor(*args, estimator=DGE(), **kwargs):
    return scaled_matmul(*args[:4], factor=Factor(*args[4:], estimator, E2M1), **kwargs)


def assert_close(got, want):
    np.testing.assert_allclose(got, want, rtol=tolerances.DGE_KERNEL_FACTOR + tolerances.UNIT_ROUNDOFF["float32"])


@pytest.mark.parametrize(
    ("sizes", "dtype", "scalar", "cluster"),
    [
        ((1, 7, 40), np.float32, False, ""),
        ((7, 129, 1), np.float16, True, ""),
        ((127, 40, 129), jnp.bfloat16, False, ""),
        ((129, 127, 40), np.float32, True, "m"),
        ((200, 150, 300), np.float32, False, "n"),
    ],
    ids=str,
)
def test_a_factor_of_any_size(sizes, dtype, scalar, cluster):
    args, (weight, reciprocal) = operands(*sizes), weight_of(sizes[:2], dtype=dtype, scalar=scalar)
    with kernels.interpret(detect_races=True):
        config = dataclasses.replace(SMALL, cluster=cluster)
        got = jax.jit(lambda *a: with_factor(*a, out_dtype=jnp.float32, config=config))(*args, weight, reciprocal)
    assert not kernels.races_found()
    assert_close(got, times_factor(reference(*args, np.float32), weight, reciprocal))


def test_a_factor_is_the_estimators_and_keeps_nan():
    args, (weight, reciprocal) = operands(40, 24, 64), weight_of((40, 24))
    weight[3, 4], reciprocal[7] = np.nan, np.nan
    with kernels.interpret():
        f = jax.jit(lambda *a: with_factor(*a, out_dtype=jnp.float32, estimator=ClippedSTE()))
        clipped = np.asarray(f(*args, weight, reciprocal))
        got = np.asarray(jax.jit(lambda *a: with_factor(*a, out_dtype=jnp.bfloat16))(*args, weight, reciprocal))
    product, u = reference(*args, np.float32), weight * reciprocal
    want = np.asarray(product * ClippedSTE().factor(jnp.asarray(u), E2M1))
    np.testing.assert_array_equal(clipped, want)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(u))
    exact = times_factor(product, np.nan_to_num(weight), np.nan_to_num(reciprocal))
    keep = ~np.isnan(u)
    np.testing.assert_allclose(
        got[keep].astype(np.float32), exact[keep], rtol=tolerances.UNIT_ROUNDOFF["bfloat16"] * 1.01
    )
    grid, middle = np.isin(u, E2M1.grid), np.isin(u, (E2M1.grid[1:] + E2M1.grid[:-1]) / 2)
    assert grid.any()
    assert middle.any()
    for where, value in ((grid, np.float32(1 / 5)), (middle, np.float32(3))):
        np.testing.assert_array_equal(got[where], (product[where] * value).astype(jnp.bfloat16))


@pytest.mark.parametrize(
    "axes", [(0, None, 0, None, None, None), (0, 0, 0, 0, 0, 0), (None, None, None, None, 0, None)]
)
def test_a_factor_joins_the_batch_of_a_vmap(monkeypatch, axes):
    launches, launch = [], gemm_device.launch

    def recorded(*args, **kwargs):
        launches.append([x.shape[0] for x in args])
        return launch(*args, **kwargs)

    monkeypatch.setattr(gemm_device, "launch", recorded)
    args = (*operands(40, 24, 64, batch=(2,)), *weight_of((2, 40, 24)))
    mapped = [x if axis == 0 else x[0] for x, axis in zip(args, axes, strict=True)]
    with kernels.interpret():
        got = jax.jit(jax.vmap(lambda *a: with_factor(*a, out_dtype=jnp.float32), axes))(*mapped)
    assert launches[-1] == [2] * 6
    whole = [x if axis == 0 else np.stack([x[0]] * 2) for x, axis in zip(args, axes, strict=True)]
    assert_close(got, times_factor(reference(*whole[:4], np.float32), *whole[4:]))


def test_errors_of_a_factor():
    args, (weight, reciprocal) = operands(8, 16, 32), weight_of((8, 16))
    with pytest.raises(ValueError, match=r"factor.estimator=STE\(\) has no form for kernels; multiply the result"):
        with_factor(*args, weight, reciprocal, estimator=STE())
    with pytest.raises(TypeError, match=r"factor.weight has dtype float64; it must be float32, bfloat16 or float16"):
        with_factor(*args, weight.astype(np.float64), reciprocal)
    with pytest.raises(
        ValueError, match=r"factor.weight has shape \(16, 8\); it must be that of the product, \(8, 16\)"
    ):
        with_factor(*args, weight.T, reciprocal)
    with pytest.raises(ValueError, match=r"factor.reciprocal has shape \(8,\); it must be a scalar or \(16,\)"):
        with_factor(*args, weight, reciprocal[:8])


@pytest.mark.parametrize("sizes", [(0, 8, 16), (8, 0, 16), (8, 8, 0)], ids=str)
def test_empty(sizes):
    args = operands(*sizes)
    got = scaled_matmul(*args)
    assert got.shape == sizes[:2]
    assert got.dtype == jnp.bfloat16
    assert not np.any(got)


def test_errors_name_the_argument_and_what_would_work():
    lhs, rhs, ls, rs = operands(8, 16, 32)
    with pytest.raises(TypeError, match="lhs has dtype float32; scaled_matmul takes float8_e4m3fn or float8_e5m2"):
        scaled_matmul(lhs.astype(np.float32), rhs, ls, rs)
    with pytest.raises(TypeError, match="out_dtype=float16 must be bfloat16 or float32"):
        scaled_matmul(lhs, rhs, ls, rs, out_dtype=jnp.float16)
    with pytest.raises(ValueError, match=r"lhs has shape \(8, 32\) and rhs \(16, 31\)"):
        scaled_matmul(lhs, rhs[:, :31], ls, rs)
    with pytest.raises(ValueError, match=r"lhs_scale has shape \(7,\); it must be a scalar or \(8,\)"):
        scaled_matmul(lhs, rhs, ls[:7], rs)
    with pytest.raises(ValueError, match="promote=100 must be a multiple of 128, or None"):
        scaled_matmul(lhs, rhs, ls, rs, promote=100)
    with pytest.raises(ValueError, match="tile_n=256 leaves no registers for promotion; use tile_n of at most 192"):
        scaled_matmul(*operands(8, 16, 512), config=GemmConfig(tile_n=256))
    with pytest.raises(ValueError, match=r"bytes of shared memory for a result in float32.*use fewer stages"):
        scaled_matmul(lhs, rhs, ls, rs, out_dtype=jnp.float32, config=GemmConfig(tile_n=192, stages=6))
    with pytest.raises(ValueError, match="tile_n=200 must be a multiple of 16"):
        GemmConfig(tile_n=200)
    with pytest.raises(ValueError, match="epilogue_n=48 must be a multiple of 16 that divides tile_n=128"):
        GemmConfig(tile_n=128, epilogue_n=48)
