"""Order statistics by counting, the split into clamped and residual, and the rotation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp4jax
from fp4jax import outliers
from fp4jax.outliers import clip, hadamard_rotate, order_statistics

AUTO = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
EXPLICIT = jax.make_mesh((4, 2), ("data", "tensor"))
dtypes = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])


def sample(dtype, shape=(40, 24), seed=0):
    x = np.random.default_rng(seed).standard_t(2, shape).astype(np.float32)
    x[::7] = 0.25  # ties
    return jnp.asarray(x, dtype)


@dtypes
@pytest.mark.parametrize("method", ["histogram", "bisection"])
def test_both_ways_of_counting_equal_sorting(dtype, method, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu" if method == "histogram" else "gpu")
    x = sample(dtype)
    ordered = np.sort(np.asarray(x).astype(np.float32).ravel())
    ranks = (0, 1, 9, 480, 950, 959)
    found = order_statistics(x, ranks, (-2, -1))
    assert [v.item() for v in found] == ordered[list(ranks)].tolist()


@dtypes
def test_vectors_are_sorted_one_by_one(dtype):
    x = sample(dtype)
    ordered = np.sort(np.asarray(x).astype(np.float32), axis=0)
    lo, hi = order_statistics(x, (2, 37), (-2,))
    np.testing.assert_array_equal(lo[0], ordered[2])
    np.testing.assert_array_equal(hi[0], ordered[37])


@pytest.mark.parametrize("mesh", [AUTO, EXPLICIT], ids=["auto", "explicit"])
@dtypes
def test_a_sharded_quantile_is_global_and_gathers_nothing(mesh, dtype):
    x = sample(dtype, (64, 32))
    occ = fp4jax.OCC(0.95)
    f = jax.jit(lambda x: fp4jax.clamp_outliers(x, occ, axis=-1))
    sharded = jax.device_put(x, jax.NamedSharding(mesh, jax.P("data", "tensor")))
    for a, b in zip(f(sharded), f(x), strict=True):
        np.testing.assert_array_equal(np.asarray(a).astype(np.float32), np.asarray(b).astype(np.float32))
    program = f.lower(sharded).compile().as_text()
    assert "all-gather" not in program
    assert "all-to-all" not in program


def test_inside_shard_map_the_quantile_is_global():
    x = sample(jnp.float32, (64, 32))
    f = lambda x: fp4jax.clamp_outliers(x, fp4jax.OCC(0.9), axis=-1)[0]
    inside = jax.shard_map(f, mesh=AUTO, in_specs=jax.P("data"), out_specs=jax.P("data"))
    np.testing.assert_array_equal(inside(x), f(x))


@dtypes
def test_parts_keep_the_dtype_and_add_up(dtype):
    x = sample(dtype)
    clamped, residual = fp4jax.clamp_outliers(x, fp4jax.OCC(0.97), axis=-1)
    assert clamped.dtype == residual.dtype == dtype
    share = np.mean(np.asarray(residual).astype(np.float32) != 0)
    assert 0.03 < share <= 0.06 + 2 / x.size
    if dtype == jnp.float32:
        np.testing.assert_allclose(clamped + residual, x, rtol=1e-6)


def test_the_gradient_through_both_parts_is_the_identity():
    x = sample(jnp.float32)

    def through(x):
        clamped, residual = fp4jax.clamp_outliers(x, fp4jax.OCC(0.9), axis=-1)
        return jnp.sum((clamped + residual) * jnp.arange(24.0))

    np.testing.assert_array_equal(jax.grad(through)(x), jnp.broadcast_to(jnp.arange(24.0), x.shape))


def test_a_sampled_quantile_looks_at_every_channel():
    x = jnp.asarray(
        np.random.default_rng(0).normal(size=(512, 256)) * np.where(np.arange(256) == 7, 50, 1), jnp.float32
    )
    sampled = outliers.thresholds(x, fp4jax.OCC(0.99, quantile="sampled"), (-1,))
    exact = outliers.thresholds(x, fp4jax.OCC(0.99), (-1,))
    for a, b in zip(sampled, exact, strict=True):
        assert a.item() == pytest.approx(b.item(), rel=0.15)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"alpha": 0.5}, r"alpha=0.5 must be in \(0.5, 1\]"),
        ({"alpha": 1.01}, r"alpha=1.01 must be in"),
        ({"quantile": "exactly"}, "quantile='exactly' is none of 'exact', 'sampled'"),
        ({"scope": "row"}, "scope='row' is none of 'tensor', 'vector'"),
        ({"compensation": "full"}, "compensation='full' is none of 'none', 'residual', 'sparse'"),
        ({"compensation": "sparse", "quantile": "sampled"}, 'compensation="sparse" needs quantile="exact"'),
    ],
)
def test_bad_parameters_say_what_would_work(arguments, message):
    with pytest.raises(ValueError, match=message):
        fp4jax.OCC(**arguments)


def test_sampling_refuses_an_explicit_mesh():
    x = jax.device_put(jnp.ones((64, 32)), jax.NamedSharding(EXPLICIT, jax.P("data")))
    with pytest.raises(ValueError, match=r"quantile='sampled' would gather .* use quantile='exact'"):
        fp4jax.clamp_outliers(x, fp4jax.OCC(quantile="sampled"), axis=-1)


@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (2, 0, 8)], ids=str)
@pytest.mark.parametrize("quantile", ["exact", "sampled"])
@pytest.mark.parametrize("scope", ["tensor", "vector"])
def test_empty_tensors_pass(scope, quantile, shape):
    clamped, residual = fp4jax.clamp_outliers(jnp.zeros(shape), fp4jax.OCC(scope=scope, quantile=quantile), axis=-1)
    assert clamped.shape == residual.shape == shape


@pytest.mark.parametrize("axis", [0, -1])
def test_rotating_twice_is_the_identity_and_spreads_an_outlier(axis):
    x = jnp.zeros((32, 32)).at[3, 5].set(16.0)
    rotated = hadamard_rotate(x, axis=axis, size=16)
    assert jnp.abs(rotated).max() == pytest.approx(4.0)
    np.testing.assert_allclose(hadamard_rotate(rotated, axis=axis, size=16), x, atol=1e-6)


def test_rotation_refuses_other_sizes():
    with pytest.raises(ValueError, match=r"size=12 must be a power of two that divides x.shape\[-1\]=24"):
        hadamard_rotate(jnp.ones((2, 24)), axis=-1, size=12)


@pytest.mark.parametrize("zero", [0.0, -0.0])
@pytest.mark.parametrize("low", [True, False])
def test_what_is_clamped_to_zero_has_the_sign_of_its_side(zero, low):
    x, zero = jnp.float32([-1, -0.0, 0, 1]), jnp.float32(zero)
    clipped = clip(x, zero, jnp.float32(2)) if low else clip(x, jnp.float32(-2), zero)
    assert clipped.tolist() == ([0, 0, 0, 1] if low else [-1, 0, 0, 0])
    assert np.signbit(clipped).tolist() == [True, True, False, False]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=str)
def test_nan_of_either_sign_sorts_last(dtype):
    x = jnp.array([3, -np.nan, 1, np.nan, -2], dtype)
    assert np.signbit(np.asarray(x, np.float32)).tolist() == [False, True, False, False, True]
    assert [v.item() for v in order_statistics(x, (0, 2), (-1,))] == [-2, 3]
    assert np.isnan(order_statistics(x, (3, 4), (-1,))).all()
