"""Gradients through a quantizer."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import tolerances

import fp4jax
from fp4jax.estimators import ESTIMATORS
from fp4jax.formats import FORMATS

SIGNED = [f for f in FORMATS.values() if f.signed]
SPEC = fp4jax.QuantSpec(fp4jax.E2M1)
dtypes = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
formats = pytest.mark.parametrize("fmt", SIGNED, ids=str)


def test_dge_reproduces_the_released_unit_vector():
    """MS-AMP 9746ea8, the test of its DGE operator: linspace(-6, 6, 20) in bfloat16."""
    half = [0.2002, 0.4375, 0.6055, 0.2168, 1.8359, 0.2695, 0.3027, 0.2695, 0.2402, 0.5781]
    factor = fp4jax.DGE().factor(jnp.linspace(-6, 6, 20).astype(jnp.bfloat16), fp4jax.E2M1)
    expected = jnp.asarray(half + half[::-1], jnp.bfloat16)
    np.testing.assert_array_equal(factor.astype(jnp.float32), expected.astype(jnp.float32))


@dtypes
def test_dge_is_its_clip_at_midpoints_and_one_kth_on_the_grid(dtype):
    grid = fp4jax.E2M1.grid
    middle = (grid[1:] + grid[:-1]) / 2
    for k in (3.0, 5.0, 10.0):
        factor = lambda u, k=k: fp4jax.DGE(k).factor(jnp.asarray(u, dtype), fp4jax.E2M1).astype(jnp.float32)
        np.testing.assert_array_equal(factor(middle), np.full(14, 3, np.float32))
        one_kth = np.asarray(1 / k, np.float32).astype(dtype).astype(np.float32)
        np.testing.assert_array_equal(factor(grid), np.full(15, one_kth))
        np.testing.assert_array_equal(factor([6.5, -7.0]), [one_kth, one_kth])


@pytest.mark.parametrize(("k", "mean"), [(3.0, 0.778), (5.0, 0.593), (10.0, 0.383)])
def test_mean_factor_over_an_interval(k, mean):
    u = (jnp.arange(1_000_000, dtype=jnp.float32) + 0.5) / 1_000_000 + 2
    assert fp4jax.DGE(k).factor(u, fp4jax.E2M1).mean().item() == pytest.approx(mean, abs=6e-4)


@formats
def test_dge_is_the_slope_of_the_function_of_the_paper(fmt):
    l, r = float(fmt.grid[-3]), float(fmt.grid[-2])
    u = np.linspace(l, r, 41)[1:-1]
    u = u[np.abs(u - (l + r) / 2) > 0.05 * (r - l)]
    f = lambda u: l + (r - l) / 2 * (1 + np.sign(2 * (u - l) / (r - l) - 1) * np.abs(2 * (u - l) / (r - l) - 1) ** 0.2)
    step = 1e-6 * (r - l)
    slope = (f(u + step) - f(u - step)) / (2 * step)
    factor = fp4jax.DGE(5, 100).factor(jnp.asarray(u, jnp.float32), fmt)
    np.testing.assert_allclose(factor, slope, rtol=2e-3)


@formats
@pytest.mark.parametrize("estimator", [fp4jax.DGE(), fp4jax.DGE(k=3.0, clip=2.0), fp4jax.ClippedSTE()], ids=repr)
def test_the_form_for_kernels_is_the_factor(fmt, estimator):
    """Exactly at midpoints, on the grid and past the ends, elsewhere within the tolerance; NaN stays NaN."""
    rng, grid = np.random.default_rng(0), np.asarray(fmt.grid, np.float32)
    middle = (grid[1:] + grid[:-1]) / 2
    points = np.concatenate([grid, middle, [2 * fmt.max, -np.inf, np.inf, np.nan, -0.0]]).astype(np.float32)
    got, want = (
        np.asarray(jax.jit(f, static_argnums=1)(points, fmt)) for f in (estimator.kernel_factor, estimator.factor)
    )
    np.testing.assert_array_equal(got, want)
    u = np.concatenate([fmt.max * rng.uniform(-1.1, 1.1, 20_000), np.exp2(rng.uniform(-40, np.log2(fmt.max), 20_000))])
    u = np.concatenate([u, np.nextafter(points[:-4], np.float32(9e9)), np.nextafter(points[:-4], np.float32(-9e9))])
    u = u.astype(np.float32)
    exact = (np.abs(u) <= fmt.max * (1 + 2.0**-22)).astype(np.float64)
    if isinstance(estimator, fp4jax.DGE):
        exact = oracle.dge_factor(u, oracle.FORMATS[repr(fmt)], estimator.k, estimator.clip)
    got = jax.jit(estimator.kernel_factor, static_argnums=1)(u, fmt)
    np.testing.assert_allclose(got, exact, rtol=tolerances.DGE_KERNEL_FACTOR)


def test_an_estimator_may_have_no_form_for_kernels():
    assert not fp4jax.STE().has_kernel_form
    with pytest.raises(NotImplementedError, match=r"STE\(\) has no form for kernels; use factor"):
        fp4jax.STE().kernel_factor(jnp.ones(3), fp4jax.E2M1)


def test_clipped_ste_is_zero_past_the_range():
    factor = fp4jax.ClippedSTE().factor(jnp.asarray([-6.1, -6.0, 0.0, 6.0, 6.1]), fp4jax.E2M1)
    assert factor.tolist() == [0, 1, 1, 1, 0]
    above = np.nextafter(np.float32(6), np.float32(9))  # where x · r of the largest value may land
    assert fp4jax.ClippedSTE().factor(jnp.asarray([above, -above]), fp4jax.E2M1).tolist() == [1, 1]


@pytest.mark.parametrize("estimator", [make() for make in ESTIMATORS.values()], ids=str)
@dtypes
def test_fake_quant_is_hard_forward_and_the_estimator_backward(estimator, dtype):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 24)), dtype)
    g = jnp.asarray(np.random.default_rng(1).normal(size=(5, 24)), dtype)
    f = lambda x: fp4jax.fake_quant(x, SPEC, axis=-1, estimator=estimator)
    y, vjp = jax.vjp(f, x)
    (dx,) = vjp(g)
    q = fp4jax.quantize(x, SPEC, axis=-1)
    np.testing.assert_array_equal(y.astype(jnp.float32), q.dequantize(dtype).astype(jnp.float32))
    value = np.asarray(x.astype(jnp.float32))
    u = value * (np.float32(6) / np.abs(value).max(-1, keepdims=True))
    factor = np.asarray(estimator.factor(jnp.asarray(u), fp4jax.E2M1))
    expected = (np.asarray(g.astype(jnp.float32)) * factor).astype(dtype)
    assert dx.dtype == dtype
    np.testing.assert_array_equal(dx.astype(jnp.float32), expected.astype(np.float32))
    jitted = jax.jit(jax.grad(lambda x: jnp.sum(f(x).astype(jnp.float32) * g.astype(jnp.float32))))(x)
    np.testing.assert_array_equal(jitted.astype(jnp.float32), dx.astype(jnp.float32))


def test_fake_quant_passes_through_transformations():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3, 16)), jnp.float32)
    grad = jax.grad(lambda x: jnp.sum(jnp.square(fp4jax.fake_quant(x, SPEC, axis=-1, estimator=fp4jax.DGE()))))
    one_by_one = jnp.stack([grad(row) for row in x])
    np.testing.assert_array_equal(jax.vmap(grad)(x), one_by_one)
    np.testing.assert_array_equal(jax.lax.map(jax.checkpoint(grad), x), one_by_one)


def test_an_estimator_is_an_object():
    with pytest.raises(TypeError, match=r"estimator='dge' must be an Estimator such as STE\(\) or DGE\(\)"):
        fp4jax.fake_quant(jnp.ones(3), SPEC, axis=0, estimator="dge")


def test_a_traced_key_reaches_the_noise():
    spec = fp4jax.QuantSpec(fp4jax.E2M1, rounding=fp4jax.STOCHASTIC)
    x = jnp.full((2, 64), 0.3).at[:, 0].set(6.0)
    draw = jax.jit(jax.grad(lambda x, key: jnp.square(fp4jax.fake_quant(x, spec, axis=-1, key=key)).sum()))
    first, second = draw(x, jax.random.key(0)), draw(x, jax.random.key(1))
    assert (first != second).any()
    assert set(np.unique(first)) <= {0.0, 1.0, 12.0}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fp4jax.DGE(k=1), r"k=1 must be above 1 \(k = 1 is STE\(\)\)"),
        (lambda: fp4jax.DGE(clip=0), "clip=0 must be positive"),
        (
            lambda: fp4jax.fake_quant(jnp.ones(3), fp4jax.QuantSpec(fp4jax.E2M1, rounding=fp4jax.STOCHASTIC), axis=0),
            "rounding=STOCHASTIC draws noise and key=None",
        ),
    ],
)
def test_errors_say_what_would_work(make, message):
    with pytest.raises(ValueError, match=message):
        make()
