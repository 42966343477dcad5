"""What broke others (shared list of traps): noise, transformations, shapes and dtypes. See ``test_traps``."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import PartitionSpec as P
from traps import (
    DTYPES,
    E2M1_VECTOR,
    F32,
    MATMUL,
    RECIPES,
    RULES,
    STOCHASTIC_VECTOR,
    dot,
    dtypes,
    every_recipe,
    formats,
    mesh_of_eight,
    normal,
    on_devices,
    product,
    quantized,
    quantizer,
    same,
    there_and_back,
    uniform_recipe,
    with_gradients,
)

import fp4jax

# --- stochastic rounding ----------------------------------------------------------------------------------------------


@formats
def test_stochastic_rounding_draws_both_neighbors_and_is_unbiased(fmt):
    """Traps 22 and 23: never zeros, never deterministic; the mean is the value."""
    spec = fp4jax.QuantSpec(fmt, rounding=fp4jax.STOCHASTIC)
    f = jax.jit(lambda x, key: fp4jax.quantize(x, spec, axis=-1, key=key).values.astype(jnp.float32))
    left, right = oracle.format_of(fmt).magnitudes[[2, 3]]
    for sign, share in itertools.product((1, -1), (0.3, 0.6)):
        target = sign * (left + share * (right - left))
        x = jnp.full((1, 4097), target, jnp.float32).at[0, 0].set(fmt.max)
        drawn = np.asarray(f(x, jax.random.key(7)))[0, 1:]
        assert set(np.abs(drawn).tolist()) == {left, right}
        assert abs(drawn.mean() - target) < 0.04 * (right - left)


def test_stochastic_rounding_of_0_3():
    """Trap 22, to the letter: x = .3 under scale 1, 4096 draws from {0, .5} with mean .3 ± .02; eager as jit."""
    x = jnp.full((4097,), 0.3, jnp.float32).at[0].set(6)
    f = functools.partial(there_and_back, spec=STOCHASTIC_VECTOR, key=jax.random.key(0))
    drawn = np.asarray(same(f(x), jax.jit(f)(x)))[1:]
    assert set(drawn.tolist()) == {0, 0.5}
    assert abs(drawn.mean() - 0.3) < 0.02


def test_stochastic_rounding_without_a_key_is_an_error():
    """Trap 23: asking for noise never gives nearest."""
    x, w = jnp.ones((2, 4), jnp.float32), jnp.ones((4, 2), jnp.float32)
    for call in (
        lambda: fp4jax.quantize(x, STOCHASTIC_VECTOR, axis=-1),
        lambda: fp4jax.fake_quant(x, STOCHASTIC_VECTOR, axis=-1),
        lambda: dot(uniform_recipe(STOCHASTIC_VECTOR))(x, w),
        lambda: fp4jax.DotGeneral(uniform_recipe(STOCHASTIC_VECTOR))(x, w, MATMUL),
    ):
        with pytest.raises(ValueError, match="key"):
            call()


def test_layers_and_rows_draw_differently():
    """Traps 25 and 28: split keys in a scan, and one key under vmap, give distinct noise."""
    x = jnp.full((3, 256), 0.3, jnp.float32).at[:, 0].set(6)
    keys = jax.random.split(jax.random.key(0), 3)
    f = functools.partial(there_and_back, spec=STOCHASTIC_VECTOR)
    scanned = jax.jit(lambda x, keys: jax.lax.scan(lambda c, xk: (c, f(xk[0], key=xk[1])), None, (x, keys))[1])(x, keys)
    own_keys = jax.jit(jax.vmap(lambda row, key: f(row, key=key)))(x, keys)
    one_key = jax.vmap(lambda row: f(row, key=keys[0]))
    for result in (scanned, own_keys, same(one_key(x), jax.jit(one_key)(x))):
        assert len({np.asarray(row).tobytes() for row in result}) == 3
    np.testing.assert_array_equal(scanned, own_keys)


def test_noise_is_the_same_on_any_mesh():
    """Trap 25: noise depends on the key and the position, never on the device."""
    x = jnp.full((16, 64), 0.3, jnp.float32).at[:, 0].set(6)
    f = jax.jit(lambda x, key: there_and_back(x, STOCHASTIC_VECTOR, key=key))
    want = np.asarray(f(x, jax.random.key(3)))
    mesh = mesh_of_eight()
    with jax.set_mesh(mesh):
        for spec in (("d", None), (None, "d")):
            np.testing.assert_array_equal(np.asarray(f(on_devices(x, mesh, *spec), jax.random.key(3))), want)


# --- transformations --------------------------------------------------------------------------------------------------


def test_a_traced_key_passes_through_every_transformation():
    """Trap 29: nothing leaks a tracer, and remat draws the same noise again."""
    recipe = fp4jax.Recipe("noisy", fprop=fp4jax.Gemm(STOCHASTIC_VECTOR, STOCHASTIC_VECTOR))
    x, w, keys = normal(0, 4, 8), normal(1, 8, 6), jax.random.split(jax.random.key(0), 2)

    def loss(x, w, key):
        y = fp4jax.dot_general(x, w, MATMUL, recipe=recipe, key=key)
        z = fp4jax.fake_quant(w, STOCHASTIC_VECTOR, axis=0, estimator=fp4jax.DGE(), key=key)
        return (y**2).sum() + (z**2).sum()

    grad = jax.jit(jax.grad(loss, (0, 1)))
    want = [np.stack(pair) for pair in zip(grad(x, w, keys[0]), grad(x, w, keys[1]))]
    runs = {
        "grad(jit)": [jnp.stack(p) for p in zip(*(jax.grad(jax.jit(loss), (0, 1))(x, w, k) for k in keys))],
        "remat": jax.jit(lambda ks: jax.lax.map(lambda k: jax.grad(jax.checkpoint(loss), (0, 1))(x, w, k), ks))(keys),
        "scan": jax.jit(lambda ks: jax.lax.scan(lambda c, k: (c, jax.grad(loss, (0, 1))(x, w, k)), None, ks)[1])(keys),
        "vmap": jax.jit(jax.vmap(jax.grad(loss, (0, 1)), (None, None, 0)))(x, w, keys),
    }
    for name, got in runs.items():
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5, err_msg=name)


def test_a_traced_outlier_clamp_passes_through_every_transformation():
    """Trap 29: the gradient of clamp plus residual is the identity through all of them."""
    occ = fp4jax.OCC(alpha=0.9)
    x = normal(0, 8, 32)

    def loss(x):
        clamped, residual = fp4jax.clamp_outliers(x, occ, axis=-1)
        return (3 * clamped + 3 * residual).sum()

    runs = (
        jax.grad(jax.jit(loss)),
        jax.jit(jax.grad(loss)),
        jax.jit(jax.grad(jax.checkpoint(loss))),
        jax.jit(jax.vmap(jax.grad(loss))),
        lambda x: jax.lax.map(jax.grad(loss), x),
    )
    for grad in runs:
        np.testing.assert_array_equal(np.asarray(grad(x)), 3)


@pytest.mark.parametrize("name", ["bf16", "fp4_vector", "fp4_direct"])
def test_weight_gradients_under_shard_map_are_summed(name):
    """Trap 31: X = arange(32) over 8 devices, W = 1: dW[0] = 0 + 4 + … + 28 = 112, up to quantization of X."""
    mesh = mesh_of_eight()
    x, w = jnp.arange(32, dtype=jnp.float32).reshape(8, 4), jnp.ones((4, 4), jnp.float32)
    mapped = jax.shard_map(dot(RECIPES[name]()), mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"))
    dw = jax.jit(jax.grad(lambda w, x: mapped(x, w).sum()))(on_devices(w, mesh), on_devices(x, mesh, "d", None))
    want = jax.jit(jax.grad(lambda w, x: dot(RECIPES[name]())(x, w).sum()))(w, x)
    if name == "bf16":
        assert np.asarray(dw)[0].tolist() == [112] * 4
    np.testing.assert_allclose(dw, want, rtol=1e-5)
    assert dw.sharding.is_fully_replicated


@dtypes
def test_fake_quant_gradients_have_the_dtype_of_their_input(dtype):
    """Trap 32."""
    f = jax.grad(lambda x: fp4jax.fake_quant(x, E2M1_VECTOR, axis=-1).astype(jnp.float32).sum())
    x = normal(0, 8, 64, dtype=dtype)
    assert same(f(x), jax.jit(f)(x)).dtype == dtype


@dtypes
def test_dge_is_exactly_its_cap_at_midpoints_and_a_fifth_on_the_grid(dtype):
    """Trap 34: p^(1/k − 1) is inf at p = 0 before the cap; no NaN, no rounding of the 3."""
    grid = fp4jax.E2M1.grid
    u = jnp.asarray(np.concatenate([(grid[1:] + grid[:-1]) / 2, grid]), dtype)
    factor = functools.partial(fp4jax.DGE().factor, format=fp4jax.E2M1)
    f = same(factor(u), jax.jit(factor)(u))
    assert f.dtype == dtype
    assert np.asarray(f).tolist() == np.array([3] * 14 + [0.2] * 15).astype(dtype).tolist()
    x = jnp.asarray([0.25, 0.75, 5, 0, 6], dtype)
    fake = functools.partial(fp4jax.fake_quant, spec=E2M1_VECTOR, axis=-1, estimator=fp4jax.DGE())
    slope = jax.jit(jax.grad(lambda x: fake(x).astype(jnp.float32).sum()))(x)
    assert np.asarray(slope).tolist() == np.array([3, 3, 3, 0.2, 0.2]).astype(dtype).tolist()


@dtypes
def test_vmap_is_a_stack_of_calls(dtype):
    """Trap 35: a per-tensor scale becomes one an example, as a loop would have it."""
    x = normal(0, 5, 8, 64, dtype=dtype) * jnp.asarray(10.0 ** np.arange(-2, 3)[:, None, None], dtype)
    for granularity in (fp4jax.PerTensor(), fp4jax.PerVector()):
        spec = fp4jax.QuantSpec(fp4jax.E2M1, granularity)
        many = jax.jit(jax.vmap(functools.partial(there_and_back, spec=spec)))(x)
        np.testing.assert_array_equal(np.asarray(many), np.stack([quantized(row, spec)[2] for row in x]))


def test_debug_nans_finds_nothing_in_a_donated_step():
    """Trap 36: zero rows, donated buffers and debug_nans together; no NaN arises on the way to a finite result."""
    recipe = RECIPES["fp4"]()
    x, w = normal(0, 16, 32).at[0].set(0), normal(1, 32, 8).at[:, 0].set(0)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(w, x):
        return w - 0.1 * jax.grad(lambda w: (dot(recipe)(x, w) ** 2).sum())(w)

    with jax.debug_nans(True):
        for _ in range(2):
            w = step(w, x)
    assert np.isfinite(np.asarray(w)).all()


def test_vmap_over_a_sharded_product_equals_a_loop():
    """Trap 37: vmap(shard_map(pmax)) of a per-tensor scale."""
    mesh = mesh_of_eight()
    x, w = normal(0, 3, 16, 32), normal(1, 32, 8)
    direct = dot(RECIPES["fp4_direct"]())
    mapped = jax.shard_map(direct, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"))
    many = jax.jit(jax.vmap(mapped, (0, None)))(on_devices(x, mesh, None, "d", None), on_devices(w, mesh))
    one, whole = jax.jit(mapped), jax.jit(direct)
    loop = [one(on_devices(row, mesh, "d", None), on_devices(w, mesh)) for row in x]
    np.testing.assert_array_equal(np.asarray(many), np.stack(loop))
    np.testing.assert_array_equal(np.asarray(many), np.stack([whole(row, w) for row in x]))


# --- shapes -----------------------------------------------------------------------------------------------------------


@every_recipe
def test_empty_operands_have_empty_products_and_zero_gradients(name):
    """Trap 38."""
    w = normal(0, 64, 8)
    y, dx, dw = product(name)(jnp.zeros((0, 64), jnp.float32), w, jnp.zeros((0, 8), jnp.float32))
    assert (y.shape, dx.shape, dw.shape) == ((0, 8), (0, 64), (64, 8))
    assert not np.asarray(dw).any()
    y, dx, dw = product(name)(jnp.zeros((3, 0), jnp.float32), w[:0], jnp.ones((3, 8), jnp.float32))
    assert (y.shape, dx.shape, dw.shape) == ((3, 8), (3, 0), (0, 8))
    assert not np.asarray(y).any()


def test_empty_arrays_quantize():
    """Trap 38: a maximum over nothing is no error."""
    granularities = (fp4jax.PerTensor(), fp4jax.PerVector(), fp4jax.PerBlock(3))
    for granularity, rule, shape in itertools.product(granularities, RULES, ((0,), (0, 4), (4, 0))):
        spec = fp4jax.QuantSpec(fp4jax.E2M1, granularity, rule)
        q = jax.jit(lambda x: fp4jax.quantize(x, spec, axis=-1))(jnp.zeros(shape, jnp.float32))  # noqa: B023
        assert q.shape == q.dequantize(jnp.float32).shape == shape
    for shape in ((0,), (4, 0)):
        clamped, residual = fp4jax.clamp_outliers(jnp.zeros(shape, jnp.float32), fp4jax.OCC(), axis=-1)
        assert clamped.shape == residual.shape == shape


@pytest.mark.parametrize("name", ["fp4_vector", "fp4_release", "fp4_research"])
def test_no_stride_is_hidden_by_equal_sizes(name):
    """Trap 42: m ≠ n ≠ k, batch 2: each slice of the batch equals its own product."""
    recipe = RECIPES[name]()
    assert recipe.outliers is None or recipe.outliers.scope == "vector"
    x, w = normal(0, 2, 5, 7, scale=0.1).at[1].multiply(30), normal(1, 2, 7, 3)
    batched = jax.jit(dot(recipe, (((2,), (1,)), ((0,), (0,)))))(x, w)
    one = jax.jit(dot(recipe))
    for i in range(2):
        np.testing.assert_allclose(batched[i], one(x[i], w[i]), rtol=1e-6, atol=1e-6)


# --- dtypes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lhs", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("rhs", DTYPES, ids=lambda d: np.dtype(d).name)
def test_every_public_function_takes_every_dtype(lhs, rhs):
    """Trap 47: float4 storage never meets a product it cannot enter."""
    x, w = normal(0, 8, 64, dtype=lhs), normal(1, 64, 6, dtype=rhs)
    q = quantizer(E2M1_VECTOR)[1](x)
    assert q.values.dtype == jnp.float4_e2m1fn
    assert q.dequantize(rhs).dtype == rhs
    assert fp4jax.fake_quant(x, E2M1_VECTOR, axis=-1).dtype == lhs
    assert {t.dtype for t in fp4jax.clamp_outliers(x, fp4jax.OCC(), axis=-1)} == {np.dtype(lhs)}
    for name in ("bf16", "fp4"):
        y = jax.eval_shape(dot(RECIPES[name]()), x, w)
        assert y.dtype == (RECIPES[name]().output_dtype or lhs)


def test_other_dtypes_are_refused_by_name():
    """Trap 47: an integer or float8 array is an error, not a silent cast."""
    for x in (jnp.arange(4), jnp.ones(4, jnp.float8_e4m3fn)):
        with pytest.raises(TypeError, match=str(x.dtype)):
            fp4jax.quantize(x, E2M1_VECTOR, axis=-1)


def test_x64_changes_no_bit():
    """Trap 54: tables, noise and scales are pinned to float32."""
    x, w, dy = (np.asarray(normal(i, *shape)) for i, shape in enumerate(((8, 32), (32, 6), (8, 6))))

    def everything(x, w, dy):
        key = jax.random.key(0)
        out = list(with_gradients(dot(RECIPES["fp4"]()), x, w, dy))
        for spec in (STOCHASTIC_VECTOR, *(fp4jax.QuantSpec(fp4jax.E2M1, fp4jax.PerBlock(8), rule) for rule in RULES)):
            q = fp4jax.quantize(x, spec, axis=-1, key=key)
            out += [q.values, q.scale, q.dequantize(jnp.float32)]
        out += [fp4jax.fake_quant(x, E2M1_VECTOR, axis=-1), fp4jax.DGE().factor(x, fp4jax.E2M1)]
        out += fp4jax.clamp_outliers(x, fp4jax.OCC(alpha=0.9), axis=-1)
        return out

    narrow = jax.jit(everything)(x, w, dy)
    with jax.enable_x64(True):
        same(jax.jit(everything)(x, w, dy), narrow)


def test_a_small_gradient_does_not_underflow_on_its_way_to_the_master_weight():
    """Trap 60: 2e-4 and far less arrive in float32."""
    x, w = normal(0, 32, 16, dtype=jnp.bfloat16), normal(1, 16, 4)
    for scale in (2e-4, 1e-12):
        dy = jnp.full((32, 4), scale, jnp.bfloat16)
        _, _, dw = product("fp4_vector")(x, w, dy)
        want = np.asarray(x, F32).T @ np.asarray(dy, F32)
        assert dw.dtype == jnp.float32
        assert np.linalg.norm(np.asarray(dw) - want) < 0.2 * np.linalg.norm(want)
