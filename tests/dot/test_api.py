"""The call itself: what it refuses, how it composes, and injection into stock layers."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fp4jax
from fp4jax import kernels
from fp4jax.dot.geometry import Geometry

MATMUL = (((1,), (0,)), ((), ()))
X = jnp.asarray(np.random.default_rng(0).normal(size=(8, 16)), jnp.float32)
W = jnp.asarray(np.random.default_rng(1).normal(size=(16, 4)), jnp.float32)
FP4 = fp4jax.recipes.fp4()
NOISY = fp4jax.Recipe(
    "noisy", fprop=fp4jax.Gemm(fp4jax.QuantSpec(fp4jax.E2M1, rounding=fp4jax.STOCHASTIC), fp4jax.QuantSpec(fp4jax.E2M1))
)


@pytest.mark.parametrize(
    ("error", "call", "message"),
    [
        (TypeError, lambda: fp4jax.dot_general(X.astype(jnp.int32), W, MATMUL, recipe=FP4), "lhs has dtype int32"),
        (
            TypeError,
            lambda: fp4jax.dot_general(X, W > 0, MATMUL, recipe=FP4),
            "rhs has dtype bool; dot_general takes float32",
        ),
        (ValueError, lambda: fp4jax.dot_general(X, W, MATMUL, recipe=NOISY), "rounds stochastically and key=None"),
        (ValueError, lambda: Geometry.make(2, 2, (((), ()), ((), ()))), "contracts nothing"),
        (ValueError, lambda: Geometry.make(2, 2, (((2,), (0,)), ((), ()))), "names axis 2 of lhs, which has 2 axes"),
        (TypeError, lambda: fp4jax.DotGeneral("fp4"), "recipe='fp4' must be a Recipe"),
        (TypeError, lambda: fp4jax.dot_general(X, W.T, MATMUL, recipe=FP4), "contracting dimensions"),
        (ValueError, lambda: Geometry.make(2, 2, ((1,), (0,))), r"dimension_numbers=\(\(1,\), \(0,\)\) must be"),
        (ValueError, lambda: Geometry.make(2, 2, (((1, -1), (0, 1)), ((), ()))), "names an axis of lhs twice"),
        (ValueError, lambda: Geometry.make(2, 2, (((1,), (0,)), ((0,), (0,)))), "names an axis of rhs twice"),
        (ValueError, lambda: Geometry.make(2, 3, (((1,), (0, 1)), ((), ()))), "as many contracted and as many batch"),
        (TypeError, lambda: fp4jax.dot_general(X, W, MATMUL, recipe="fp4"), "recipe='fp4' must be a Recipe"),
        (TypeError, lambda: fp4jax.dot.prepare_lhs(X, recipe=None), "recipe=None must be a Recipe"),
    ],
)
def test_bad_calls_say_what_would_work(error, call, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("backend", fp4jax.dot.BACKENDS)
@pytest.mark.parametrize(
    ("lhs", "rhs", "dims", "sizes"),
    [
        (
            (5, 2, 6),
            (3, 4, 7),
            (((1, 2), (0, 1)), ((), ())),
            r"contracting dimensions have sizes \(2, 6\) and \(3, 4\)",
        ),
        ((2, 3, 5, 4), (3, 2, 4, 7), (((3,), (2,)), ((0, 1), (0, 1))), r"batch dimensions have sizes \(2, 3\) and"),
    ],
)
def test_no_backend_takes_sizes_that_only_multiply_to_the_same(backend, lhs, rhs, dims, sizes):
    lhs, rhs = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (lhs, rhs))
    call = functools.partial(fp4jax.dot_general, dimension_numbers=dims, recipe=FP4, backend=backend)
    with kernels.interpret(), pytest.raises(TypeError, match=sizes):
        jax.eval_shape(call, lhs, rhs)


def test_a_recipe_without_quantizers_is_lax_dot_general_bit_for_bit():
    plain = fp4jax.Recipe("plain")
    f = lambda x, w: jnp.sum(jnp.square(fp4jax.dot_general(x, w, MATMUL, recipe=plain)).astype(jnp.float32))
    g = lambda x, w: jnp.sum(jnp.square(jax.lax.dot_general(x, w.astype(x.dtype), MATMUL)).astype(jnp.float32))
    for x in (X, X.astype(jnp.bfloat16)):
        for a, b in zip(jax.grad(f, (0, 1))(x, W), jax.grad(g, (0, 1))(x, W), strict=True):
            np.testing.assert_array_equal(a.astype(jnp.float32), b.astype(jnp.float32))


def test_output_dtype_is_the_callers_then_the_recipes_then_the_activations():
    bf16 = X.astype(jnp.bfloat16)
    wide = fp4jax.Recipe("wide", fprop=FP4.fprop, output_dtype=jnp.float32)
    assert fp4jax.dot_general(bf16, W, MATMUL, recipe=FP4).dtype == jnp.bfloat16
    assert fp4jax.dot_general(bf16, W, MATMUL, recipe=wide).dtype == jnp.float32
    assert fp4jax.dot_general(bf16, W, MATMUL, None, jnp.float16, recipe=wide).dtype == jnp.float16


def test_a_callable_is_a_value():
    assert fp4jax.DotGeneral(FP4) == fp4jax.DotGeneral(fp4jax.recipes.fp4())
    assert hash(fp4jax.DotGeneral(FP4)) == hash(fp4jax.DotGeneral(fp4jax.recipes.fp4()))


def test_every_quantizer_draws_noise_of_its_own():
    both = fp4jax.Recipe("both", fprop=fp4jax.Gemm(NOISY.fprop.lhs, NOISY.fprop.lhs))
    draw = lambda recipe, key: fp4jax.dot_general(X, W, MATMUL, recipe=recipe, key=jax.random.key(key))
    assert (draw(both, 0) != draw(NOISY, 0)).any()
    assert (draw(NOISY, 0) != draw(NOISY, 1)).any()
    np.testing.assert_array_equal(draw(both, 0), draw(both, 0))


def test_sparse_compensation_brings_the_outliers_back():
    heavy = X.at[:, 3].mul(30)
    exact = heavy @ W
    error = lambda recipe: jnp.linalg.norm(fp4jax.dot_general(heavy, W, MATMUL, recipe=recipe) - exact)
    untouched = error(fp4jax.recipes.w8a4(alpha=None))
    assert error(fp4jax.recipes.w8a4(alpha=0.9, compensation="sparse")) < 0.5 * untouched
    assert error(fp4jax.recipes.w8a4(alpha=0.9, compensation="residual")) < 0.5 * untouched
    assert error(fp4jax.recipes.w8a4(alpha=0.9, compensation="none")) > untouched


@pytest.mark.parametrize("name", fp4jax.recipes.RECIPES)
def test_on_an_explicit_mesh_operands_and_gradients_keep_their_sharding(name):
    mesh = jax.make_mesh((4, 2), ("data", "tensor"))
    recipe = fp4jax.recipes.RECIPES[name]()
    out = jax.NamedSharding(mesh, jax.P("data", "tensor"))

    def loss(x, w, out_sharding=None):
        y = fp4jax.dot_general(x, w, MATMUL, out_sharding=out_sharding, recipe=recipe)
        return jnp.sum(jnp.square(y))

    x = jax.device_put(X, jax.NamedSharding(mesh, jax.P("data")))
    w = jax.device_put(W, jax.NamedSharding(mesh, jax.P(None, "tensor")))
    dx, dw = jax.jit(jax.grad(lambda x, w: loss(x, w, out), (0, 1)))(x, w)
    assert dx.sharding.spec[0] == "data"
    assert dw.sharding.spec[1] == "tensor"
    for sharded, one in zip((dx, dw), jax.jit(jax.grad(loss, (0, 1)))(X, W), strict=True):
        np.testing.assert_allclose(sharded, one, rtol=0, atol=2e-6 * float(jnp.abs(one).max()))


def test_inside_shard_map_the_gradient_of_a_shared_weight_is_summed():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    recipe = fp4jax.recipes.fp4_vector(gradient=None)
    specs = {"in_specs": (jax.P("data"), jax.P()), "out_specs": jax.P("data")}
    inside = jax.shard_map(lambda x, w: fp4jax.dot_general(x, w, MATMUL, recipe=recipe), mesh=mesh, **specs)
    outside = lambda x, w: fp4jax.dot_general(x, w, MATMUL, recipe=recipe)
    grad = lambda f: jax.grad(lambda x, w: jnp.sum(jnp.square(f(x, w))), (0, 1))(X, W)
    for a, b in zip(grad(inside), grad(outside), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_stock_nnx_and_linen_layers_take_it():
    dot = fp4jax.DotGeneral(FP4)
    with jax.numpy_dtype_promotion("standard"):
        layer = nnx.Linear(16, 4, use_bias=False, dot_general=dot, rngs=nnx.Rngs(0))
        expected = fp4jax.dot_general(X, layer.kernel[...], MATMUL, recipe=FP4)
        np.testing.assert_array_equal(layer(X), expected)
        dense = nn.Dense(4, use_bias=False, dot_general=dot)
        variables = dense.init(jax.random.key(0), X)
        expected = fp4jax.dot_general(X, variables["params"]["kernel"], MATMUL, recipe=FP4)
        np.testing.assert_array_equal(dense.apply(variables, X), expected)


def test_a_float16_gradient_in_high_precision_does_not_underflow():
    recipe = fp4jax.recipes.fp4_vector(gradient=None)
    x, w = jnp.full((1, 1), 1e-2, jnp.float16), jnp.full((1, 1), 1e-2)
    _, vjp = jax.vjp(lambda w: fp4jax.dot_general(x, w, MATMUL, recipe=recipe), w)
    dy = jnp.full((1, 1), 1e-5, jnp.float16)
    expected = float(dy[0, 0]) * float(x[0, 0])
    assert vjp(dy)[0].item() == pytest.approx(expected, rel=1e-3)


def test_several_free_axes_on_either_side():
    """XLA's CPU code refuses several on the right; a LinearGeneral's weight has them."""
    weight = W.reshape(16, 2, 2)

    def loss(x, w):
        return jnp.sum(jnp.square(fp4jax.dot_general(x, w, MATMUL, recipe=fp4jax.recipes.fp4_vector())))

    for a, b in zip(jax.grad(loss, (0, 1))(X, weight), jax.grad(loss, (0, 1))(X, W), strict=True):
        np.testing.assert_array_equal(a.reshape(b.shape), b)
    with jax.numpy_dtype_promotion("standard"):
        layer = nnx.LinearGeneral(16, (4, 2), dot_general=fp4jax.DotGeneral(FP4), rngs=nnx.Rngs(0))
        assert nnx.grad(lambda layer: jnp.sum(jnp.square(layer(X))))(layer).kernel[...].shape == (16, 4, 2)
