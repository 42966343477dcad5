"""Operands quantized once: the numbers of separate products, and less work."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp4jax

MATMUL = (((1,), (0,)), ((), ()))
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.standard_t(3, (16, 32)), jnp.bfloat16)
WS = [jnp.asarray(RNG.normal(size=(32, n)), jnp.float32) for n in (24, 8)]
STOCHASTIC = fp4jax.QuantSpec(fp4jax.E2M1, rounding=fp4jax.STOCHASTIC)
E5M2 = fp4jax.QuantSpec(fp4jax.E5M2, fp4jax.PerTensor())

RECIPES = {
    "fp4": fp4jax.recipes.fp4(alpha=0.9),
    "sparse": fp4jax.recipes.fp4(alpha=0.9, compensation="sparse"),
    "blocks": fp4jax.recipes.fp4_vector(activation=fp4jax.PerBlock(16), weight=fp4jax.PerBlock(16)),
    "noise": fp4jax.Recipe(
        "noise",
        fp4jax.Gemm(STOCHASTIC, STOCHASTIC),
        fp4jax.Gemm(E5M2, fp4jax.REUSE),
        fp4jax.Gemm(fp4jax.REUSE, E5M2),
        activation_estimator=fp4jax.ClippedSTE(),
    ),
}


def total(ys):
    return sum(jnp.sum(jnp.square(y.astype(jnp.float32))) for y in ys)


def assert_same(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("name", ["sparse", "blocks", "noise"])  # the others are compared below, and in test_hopper
def test_shared_operands_give_the_numbers_of_separate_ones(name):
    dot, key = fp4jax.DotGeneral(RECIPES[name]), jax.random.key(1) if name == "noise" else None

    def separate(x, ws):
        return total(dot(x, w, MATMUL, key=key) for w in ws)

    def shared(x, ws):
        x, ws = dot.prepare_lhs(x, key=key), [dot.prepare_rhs(w, key=key) for w in ws]
        return total(dot(x, w, MATMUL, key=key) for w in ws)

    assert_same(*(jax.jit(jax.value_and_grad(f, (0, 1)))(X, WS) for f in (shared, separate)))


def scatters(f, *args):
    """How often the compiled program counts values for a quantile (on CPU: a histogram)."""
    return jax.jit(f).lower(*args).compile().as_text().count(" scatter(")


def test_a_shared_activation_is_quantized_once_in_the_compiled_program():
    dot = fp4jax.DotGeneral(RECIPES["fp4"])

    def layers(x, ws):
        shared = dot.prepare_lhs(x)
        return total(dot(shared, w, MATMUL) for w in ws)

    one = scatters(jax.grad(lambda x, w: layers(x, [w]), (0, 1)), X, WS[0])
    assert one > 0
    assert scatters(jax.grad(layers, (0, 1)), X, WS) == one


def accumulated(dot, prepare, w, batches):
    """Σ of the gradients of w over microbatches, as a train step has it."""
    prepared = dot.prepare_rhs(w) if prepare else None

    def loss(w, x):
        return total([dot(x, w if prepared is None else prepared.with_array(w), MATMUL)])

    def add(sums, x):
        return sums + jax.grad(loss)(w, x), None

    return jax.lax.scan(add, jnp.zeros_like(w), batches)[0]


def inner_scan(f, *args):
    (scan,) = [e for e in jax.make_jaxpr(f)(*args).jaxpr.eqns if e.primitive.name == "scan"]
    return str(scan.params["jaxpr"])


def test_a_weight_is_quantized_once_for_all_microbatches():
    """DGE's factor is applied in each of them, so the sum is that of the plain step."""
    batches = jnp.stack([X, X[::-1], -X])
    dot = fp4jax.DotGeneral(RECIPES["fp4"])
    runs = [functools.partial(accumulated, dot, prepare) for prepare in (True, False)]
    assert_same(*(jax.jit(run)(WS[0], batches) for run in runs))
    dot = fp4jax.DotGeneral(fp4jax.recipes.fp4_vector())
    once, again = (
        inner_scan(functools.partial(accumulated, dot, p), WS[0], batches).count("reduce_max") for p in (1, 0)
    )
    assert once == again - 1


def test_a_stack_of_weights_is_prepared_by_vmap_and_scanned_under_remat():
    dot = fp4jax.DotGeneral(fp4jax.recipes.fp4(alpha=None))
    stack = jnp.stack([WS[0][:, :16]] * 3) * jnp.arange(1.0, 4.0)[:, None, None]
    x = X[:, :16].astype(jnp.float32)

    def loss(stack, prepare):
        def layer(x, w):
            prepared, w = w
            return dot(x, w if prepared is None else prepared.with_array(w), MATMUL)[:, :16], None

        stack = stack[:, :16]
        prepared = jax.vmap(dot.prepare_rhs)(jax.lax.stop_gradient(stack)) if prepare else None
        return jnp.sum(jnp.square(jax.lax.scan(jax.checkpoint(layer), x, (prepared, stack))[0]))

    assert_same(*(jax.jit(jax.grad(loss), static_argnums=1)(stack, prepare) for prepare in (True, False)))


def test_a_recipe_that_quantizes_nothing_prepares_nothing():
    assert fp4jax.DotGeneral(fp4jax.recipes.bf16()).prepare_lhs(X) is X


def test_products_share_by_recipe_and_backend():
    fp8, named = fp4jax.DotGeneral(fp4jax.recipes.fp8()), fp4jax.DotGeneral(FP4.recipe, "xla")
    noisy = fp4jax.DotGeneral(RECIPES["noise"])
    products = [FP4, fp8, FP4, named, jax.lax.dot_general, noisy, noisy]

    def check(x):
        a, b, c, *rest = fp4jax.dot.share_lhs(x, products)
        assert a is c
        assert a.recipe == FP4.recipe
        assert all(operand is x for operand in (b, *rest))

    jax.eval_shape(check, X)


def test_residuals_of_a_shared_activation_are_kept_once():
    """What a scan over layers stacks for its backward pass: one copy of the activation, a byte a value."""

    def loss(ws, x):
        def layer(x, w):
            operands = fp4jax.dot.share_lhs(x, [FP4] * 3)
            return jnp.tanh(sum(FP4(operand, v, MATMUL) for operand, v in zip(operands, w, strict=True))), None

        return jnp.sum(jax.lax.scan(layer, x, ws)[0].astype(jnp.float32))

    jaxpr = jax.make_jaxpr(jax.grad(loss))(jnp.ones((4, 3, 32, 32)), X)
    forward = next(e for e in jaxpr.jaxpr.eqns if e.primitive.name == "scan")
    stacked = [(v.aval.shape, str(v.aval.dtype)) for v in forward.outvars]
    assert stacked.count(((4, 16, 32), "uint8")) == 1
    assert stacked.count(((4, 32, 32), "uint8")) == 3


def test_shape_and_dtype_are_those_of_the_array():
    prepared = jax.eval_shape(fp4jax.DotGeneral(RECIPES["fp4"]).prepare_rhs, WS[0])
    assert (prepared.shape, prepared.ndim, prepared.dtype) == ((32, 24), 2, jnp.float32)


FP4 = fp4jax.DotGeneral(RECIPES["fp4"])
MISUSES = {
    r"rhs was prepared as 'lhs', and the product takes it as 'rhs'": lambda: FP4(X, FP4.prepare_lhs(WS[0], 0), MATMUL),
    r"lhs was prepared for axis \(-2,\), and the product takes it for axis \(-1,\)": lambda: FP4(
        FP4.prepare_lhs(X, 0), WS[0], MATMUL
    ),
    "lhs was prepared for recipe 'fp4', and the product takes it for recipe 'fp8'": lambda: fp4jax.dot_general(
        FP4.prepare_lhs(X), WS[0], MATMUL, recipe=fp4jax.recipes.fp8()
    ),
    "lhs was prepared for another recipe of the name 'fp4' than the product's": lambda: fp4jax.dot_general(
        FP4.prepare_lhs(X), WS[0], MATMUL, recipe=fp4jax.recipes.fp4()
    ),
    "lhs was prepared, but recipe 'bf16' quantizes nothing": lambda: fp4jax.dot_general(
        FP4.prepare_lhs(X), WS[0], MATMUL, recipe=fp4jax.recipes.bf16()
    ),
    "lhs was prepared for backend 'xla', and the product asks for 'hopper'": lambda: fp4jax.dot_general(
        FP4.prepare_lhs(X), WS[0], MATMUL, recipe=FP4.recipe, backend="hopper"
    ),
    r"array is float32\[32, 8\]; this rhs was prepared from float32\[32, 24\]": lambda: FP4.prepare_rhs(
        WS[0]
    ).with_array(WS[1]),
    "recipe 'noise' rounds stochastically and key=None": lambda: fp4jax.DotGeneral(RECIPES["noise"]).prepare_lhs(X),
}


@pytest.mark.parametrize("message", MISUSES)
def test_misuse_says_what_was_prepared(message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(MISUSES[message])


def test_other_dtypes_are_refused():
    with pytest.raises(TypeError, match="lhs has dtype int32; dot_general takes float32"):
        FP4.prepare_lhs(jnp.ones((2, 2), jnp.int32))
