"""`Linear`, injection into stock Flax layers, and the noise streams of stochastic recipes."""

import dataclasses

import flax.errors
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import fp4jax
from fp4jax.nn import KeepKernelDtype, KeyedDotGeneral, Linear, set_noise_step

NUMBERS = (((1,), (0,)), ((), ()))
X = jax.random.normal(jax.random.key(0), (6, 16))
FP4, VECTOR = fp4jax.recipes.fp4(), fp4jax.recipes.fp4_vector()


def stochastic():
    """Vector-wise E2M1 with stochastic activations."""
    spec = fp4jax.QuantSpec(fp4jax.E2M1, rounding=fp4jax.STOCHASTIC)
    fprop = dataclasses.replace(VECTOR.fprop, lhs=spec)
    return dataclasses.replace(VECTOR, name="stochastic", fprop=fprop)


STOCHASTIC = stochastic()


def kernel_of(layer):
    return layer.kernel[...]


# --- without a recipe ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_bias", [False, True])
@pytest.mark.parametrize("x_dtype", [jnp.float32, jnp.bfloat16, jnp.int32])
@pytest.mark.parametrize(
    "options",
    [{}, {"dtype": jnp.bfloat16}, {"dtype": jnp.float16, "preferred_element_type": jnp.float32}],
    ids=["inferred", "bfloat16", "preferred"],
)
def test_without_a_recipe_it_is_flax_bit_for_bit(use_bias, x_dtype, options):
    x = (4 * X).astype(x_dtype)
    layers = [cls(16, 12, use_bias=use_bias, rngs=nnx.Rngs(3), **options) for cls in (Linear, nnx.Linear)]
    ours, flax = (
        jax.value_and_grad(lambda params, g=nnx.split(layer): (nnx.merge(g[0], params)(x) ** 2).sum())(
            nnx.split(layer)[1]
        )
        for layer in layers
    )
    assert ours[0].dtype == flax[0].dtype
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(ours[1]), nnx.to_pure_dict(flax[1]))
    np.testing.assert_array_equal(layers[0](x), layers[1](x))


def test_it_is_a_flax_linear_with_the_same_parameters():
    layer = Linear(4, 3, recipe=FP4, use_bias=True, rngs=nnx.Rngs(0))
    assert isinstance(layer, nnx.Linear)
    assert layer.recipe == FP4
    expected = nnx.state(nnx.Linear(4, 3, rngs=nnx.Rngs(0)))
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(layer)), nnx.to_pure_dict(expected))


# --- with a recipe -------------------------------------------------------------------------------------------------


def test_the_kernel_reaches_the_product_in_its_own_dtype():
    layer = Linear(16, 12, recipe=VECTOR, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    kernel = layer.kernel[...]
    x = X.astype(jnp.bfloat16)
    out = layer(X)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out, fp4jax.dot_general(x, kernel, NUMBERS, recipe=VECTOR))
    # The trap: the same layer, stock, rounds the kernel to bfloat16 first and lands on other grid values.
    rounded = fp4jax.dot_general(x, kernel.astype(jnp.bfloat16), NUMBERS, recipe=VECTOR)
    assert bool(jnp.any(out != rounded))


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("x_dtype", [jnp.float32, jnp.bfloat16])
def test_dtypes_of_result_and_gradients(dtype, x_dtype):
    layer = Linear(16, 12, recipe=FP4, use_bias=True, dtype=dtype, rngs=nnx.Rngs(0))
    x = X.astype(x_dtype)
    assert layer(x).dtype == (x_dtype if dtype is None else dtype)  # the float32 kernel and bias never widen it
    graphdef, params = nnx.split(layer)
    grads, x_grad = jax.grad(lambda p, x: nnx.merge(graphdef, p)(x).astype(jnp.float32).sum(), argnums=(0, 1))(
        params, x
    )
    assert x_grad.dtype == x_dtype
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype("float32")}


def test_output_dtype_of_recipe_and_layer():
    recipe = dataclasses.replace(FP4, output_dtype=jnp.float32)
    layer = Linear(16, 12, recipe=recipe, use_bias=True, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    layer.bias[...] = jnp.full(12, 1 + 2.0**-20)
    assert layer(X).dtype == jnp.float32
    low = Linear(16, 12, recipe=recipe, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))(X)
    np.testing.assert_array_equal(layer(X), low + layer.bias[...])  # the bias is not rounded to bfloat16 on the way
    preferred = Linear(16, 12, recipe=FP4, dtype=jnp.bfloat16, preferred_element_type=jnp.float32, rngs=nnx.Rngs(0))
    assert preferred(X).dtype == jnp.float32


def test_leading_axes_are_batch():
    layer = Linear(16, 12, recipe=VECTOR, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(layer(X.reshape(2, 3, 16)), layer(X).reshape(2, 3, 12))


def test_the_kernel_carries_its_metadata():
    layer = Linear(4, 3, rngs=nnx.Rngs(0), kernel_metadata={"out_sharding": ("embed", "mlp"), "eager_sharding": False})
    assert layer.kernel.get_metadata("out_sharding") == ("embed", "mlp")


@pytest.mark.parametrize("layer", [Linear, lambda *args, **kw: fp4jax.nn.Einsum("ab,bc->ac", args, **kw)])
def test_bad_recipes_and_backends_are_refused(layer):
    with pytest.raises(TypeError, match="recipe='fp4' must be a Recipe, such as"):
        layer(4, 3, recipe="fp4", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"backend='xla' needs a recipe: without one the product is jax\.lax\."):
        layer(4, 3, backend="xla", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="backend='tpu' is unknown"):
        layer(4, 3, recipe=FP4, backend="tpu", rngs=nnx.Rngs(0))


# --- injection into stock layers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [FP4, fp4jax.recipes.fp8(), fp4jax.recipes.bf16()], ids=lambda recipe: recipe.name)
def test_stock_nnx_linear(recipe):
    options = {"dtype": jnp.bfloat16, "use_bias": True, "rngs": nnx.Rngs(0)}
    stock = nnx.Linear(
        16,
        12,
        dot_general=fp4jax.DotGeneral(recipe),
        promote_dtype=KeepKernelDtype(recipe.output_dtype),
        **options,
    )
    options["rngs"] = nnx.Rngs(0)
    ours = Linear(16, 12, recipe=recipe, **options)
    np.testing.assert_array_equal(stock(X), ours(X))
    assert stock(X).dtype == ours(X).dtype


def test_stock_linear_general_contracts_two_axes():
    dot = fp4jax.DotGeneral(FP4)
    layer = nnx.LinearGeneral((4, 4), 12, axis=(-2, -1), use_bias=False, dot_general=dot, rngs=nnx.Rngs(0))
    flat = fp4jax.dot_general(X, layer.kernel[...].reshape(16, 12), NUMBERS, recipe=FP4)
    np.testing.assert_array_equal(layer(X.reshape(6, 4, 4)), flat)


def test_stock_linen_dense():
    dense = linen.Dense(12, use_bias=False, dot_general=fp4jax.DotGeneral(FP4))
    params = dense.init(jax.random.key(0), X)
    kernel = params["params"]["kernel"]
    np.testing.assert_array_equal(dense.apply(params, X), fp4jax.dot_general(X, kernel, NUMBERS, recipe=FP4))
    grads = jax.grad(lambda p: dense.apply(p, X).sum())(params)
    assert bool(jnp.any(grads["params"]["kernel"] != 0))


# --- noise ---------------------------------------------------------------------------------------------------------


def noisy(seed=1, **options):
    return Linear(16, 12, recipe=STOCHASTIC, rngs=nnx.Rngs(params=0, noise=seed), **options)


def test_only_a_stochastic_recipe_has_a_stream():
    assert isinstance(noisy().dot_general, KeyedDotGeneral)
    assert not jax.tree.leaves(nnx.state(Linear(4, 3, recipe=FP4, rngs=nnx.Rngs(0)), nnx.RngState))
    np.testing.assert_array_equal(kernel_of(noisy(1)), kernel_of(noisy(2)))


def test_calls_and_seeds_draw_anew_and_reproduce():
    first, again, other = noisy(1), noisy(1), noisy(2)
    a, b = first(X), first(X)
    assert bool(jnp.any(a != b))
    np.testing.assert_array_equal(a, again(X))
    np.testing.assert_array_equal(b, again(X))
    assert bool(jnp.any(a != other(X)))


def test_compiled_steps_draw_anew():
    layer, expected = noisy(), noisy()
    step = nnx.jit(lambda layer, x: layer(x))
    for _ in range(3):
        np.testing.assert_allclose(step(layer, X), expected(X), atol=1e-6)
    assert int(layer.dot_general.stream.count[...]) == 3


def test_evaluation_does_not_advance_the_stream():
    layer = noisy()
    layer.eval()
    np.testing.assert_array_equal(layer(X), layer(X))
    layer.train()
    np.testing.assert_array_equal(layer(X), noisy()(X))


def test_a_raw_jit_that_closes_over_the_layer_says_so():
    layer = noisy()
    with pytest.raises(flax.errors.TraceContextError, match="Cannot mutate RngCount from a different trace level"):
        jax.jit(lambda x: layer(x))(X)


def test_the_noise_of_a_step_does_not_depend_on_the_steps_before():
    straight, resumed = noisy(), noisy()
    for _ in range(5):
        straight(X)
    set_noise_step(resumed, 5)
    np.testing.assert_array_equal(straight(X), resumed(X))


def test_remat_redraws_the_same_noise():
    graphdef, params, rest = nnx.split(noisy(), nnx.Param, ...)

    def loss(params, x):
        return (nnx.merge(graphdef, params, rest, copy=True)(x) ** 2).sum()

    plain = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(params, X)
    remat = jax.jit(jax.value_and_grad(jax.checkpoint(loss), argnums=(0, 1)))(params, X)
    jax.tree.map(np.testing.assert_array_equal, plain, remat)


def test_a_stock_layer_without_a_key_is_refused():
    layer = nnx.Linear(16, 12, use_bias=False, dot_general=fp4jax.DotGeneral(STOCHASTIC), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="rounds stochastically and key=None"):
        layer(X)
