"""``dot_general`` and both gradients against the NumPy model, for every recipe in the registry.

The registry is the list: a recipe that is added is tested here unasked. Products are compared within ``tolerances``,
relative to Σ|a||b|, which is tight enough that one wrong code, scale or factor fails: with float32 inputs and k ≤ 40 a
neighboring E2M1 value moves a sum by a thousand times the bound. What the design calls bit-equal is compared so.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle_dot
import pytest
import tolerances
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import fp4jax
from fp4jax.recipes import RECIPES

F32, BF16, F16 = np.float32, ml_dtypes.bfloat16, np.float16
MATMUL = (((1,), (0,)), ((), ()))
BATCH = (((2,), (1,)), ((0,), (0,)))

# name: (lhs shape, rhs shape, dimension numbers)
PRODUCTS = {
    "odd": ((7, 40), (40, 13), MATMUL),
    "1x1x1": ((1, 1), (1, 1), MATMUL),
    "empty m": ((0, 64), (64, 8), MATMUL),
    "empty n": ((5, 8), (8, 0), MATMUL),
    "batch": ((2, 5, 19), (2, 19, 3), BATCH),
    "batch of tokens": ((2, 3, 17), (17, 6), (((2,), (0,)), ((), ()))),
    "rhs transposed": ((6, 11), (4, 11), (((1,), (1,)), ((), ()))),
    "two contracted": ((3, 4, 5), (5, 6, 4), (((2, 1), (0, 2)), ((), ()))),
    "everything permuted": ((3, 2, 7, 4), (4, 3, 5, 2), (((3,), (0,)), ((1, 0), (3, 1)))),
    "vector by matrix": ((9,), (9, 4), (((0,), (0,)), ((), ()))),
}


def arrays(lhs_shape, rhs_shape, dims, dtypes, seed=0):
    """Heavy-tailed activations, small weights, small gradients, all finite in float16 too."""
    rng = np.random.default_rng(seed)
    lhs = rng.standard_t(3, lhs_shape).astype(F32).astype(dtypes[0])
    rhs = (0.1 * rng.normal(size=rhs_shape)).astype(F32).astype(dtypes[1])
    out = jax.eval_shape(
        lambda a, b: jax.lax.dot_general(a, b, dims), *(np.zeros(s, F32) for s in (lhs_shape, rhs_shape))
    )
    return lhs, rhs, 0.01 * rng.normal(size=out.shape)


def value_and_gradients(recipe, dims, lhs, rhs, dy):
    """(y, dlhs, drhs) with ``dy`` cast to y's dtype."""
    y, vjp = jax.vjp(functools.partial(fp4jax.dot_general, dimension_numbers=dims, recipe=recipe), lhs, rhs)
    return (y, *vjp(dy.astype(y.dtype)))


def assert_within(actual, expected: oracle_dot.Sum, k: int, dtype, operand="float32", what=""):
    assert actual.dtype == dtype, what
    assert actual.shape == expected.value.shape, what
    error = np.abs(np.asarray(actual).astype(np.float64) - expected.value)
    bound = tolerances.dge_product_bound(expected.value, expected.mass, k, np.dtype(dtype).name, operand)
    assert (error <= bound).all(), (
        f"{what}: error {error.max()} where {bound.flat[np.argmax(error - bound)]} is allowed"
    )


def assert_equals_model(recipe, name, dtypes):
    lhs_shape, rhs_shape, dims = PRODUCTS[name]
    lhs, rhs, dy = arrays(lhs_shape, rhs_shape, dims, dtypes)
    out_dtype = np.dtype(recipe.output_dtype or dtypes[0])
    dy = dy.astype(F32).astype(out_dtype)
    got = jax.jit(functools.partial(value_and_gradients, recipe, dims))(*map(jnp.asarray, (lhs, rhs, dy)))
    model = oracle_dot.dot_general(lhs, rhs, dims, recipe, dy)
    terms = max(*lhs_shape, *rhs_shape, *(np.prod([lhs_shape[d] for d in group], dtype=int) for group in dims[0]), 1)
    # An operand left in high precision takes part in the dtype of the activation.
    narrow = np.dtype(dtypes[0]).name if None in recipe.specs.values() else "float32"
    for what, actual, expected, dtype in zip(
        ("y", "dlhs", "drhs"), got, (model.y, model.dlhs, model.drhs), (out_dtype, *map(np.dtype, dtypes)), strict=True
    ):
        assert_within(actual, expected, terms, dtype, narrow, what)
    return got, model


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_equals_the_numpy_model(name, product):
    assert_equals_model(RECIPES[name](), product, (F32, F32))


@pytest.mark.parametrize("dtypes", [(BF16, F32), (BF16, BF16), (F16, F32), (F16, F16)], ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_mixed_dtypes_equal_the_model_and_gradients_keep_their_dtype(name, dtypes):
    assert_equals_model(RECIPES[name](), "odd", dtypes)


# --- what is bit-equal ------------------------------------------------------------------------------------------------


def is_exact(recipe) -> bool:
    """FP4×FP4 in fprop: the sum is exact in float32, whatever its order."""
    specs = (recipe.fprop.lhs, recipe.fprop.rhs)
    return recipe.outliers is None and all(s is not None and s.format.bits == 4 for s in specs)


EXACT = [name for name in RECIPES if is_exact(RECIPES[name]())]


def assert_same_bits(actual, expected, what=""):
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype, what
    np.testing.assert_array_equal(actual.astype(F32).view(np.uint32), expected.astype(F32).view(np.uint32), what)


def test_some_recipe_has_exact_products():
    assert {"fp4_direct", "fp4_vector"} <= set(EXACT)


@pytest.mark.parametrize("name", RECIPES)
def test_jit_vmap_scan_and_remat_give_the_same_bits(name):
    """Per example, the order of every sum is the same: y, dlhs and drhs agree bit for bit."""
    recipe = RECIPES[name]()
    rng = np.random.default_rng(5)
    lhs = jnp.asarray(rng.standard_t(3, (3, 16, 48)), jnp.bfloat16)
    rhs = jnp.asarray(rng.normal(size=(48, 24)), jnp.float32)
    dy = jnp.asarray(rng.normal(size=(3, 16, 24)), jnp.bfloat16)
    f = functools.partial(value_and_gradients, recipe, MATMUL)
    compiled = jax.jit(f)
    want = [jnp.stack(leaves) for leaves in zip(*(compiled(a, rhs, g) for a, g in zip(lhs, dy)))]
    remat = jax.jit(functools.partial(value_and_gradients_of, jax.checkpoint(plain(recipe))))
    runs = {
        "eager": lambda: [jnp.stack(leaves) for leaves in zip(*(f(a, rhs, g) for a, g in zip(lhs, dy)))],
        "scan": lambda: jax.lax.scan(lambda c, ag: (c, f(ag[0], rhs, ag[1])), None, (lhs, dy))[1],
        "remat": lambda: [jnp.stack(leaves) for leaves in zip(*(remat(a, rhs, g) for a, g in zip(lhs, dy)))],
        "vmap": lambda: jax.jit(jax.vmap(f, (0, None, 0)))(lhs, rhs, dy),
    }
    for run, result in runs.items():
        for what, actual, expected in zip(("y", "dlhs", "drhs"), result(), want, strict=True):
            if run == "vmap" and (what != "y" or name not in EXACT):
                np.testing.assert_allclose(*(np.asarray(t, F32) for t in (actual, expected)), rtol=2e-2, atol=1e-3)
            else:
                assert_same_bits(actual, expected, f"{run} {what}")


def plain(recipe):
    return lambda a, b: fp4jax.dot_general(a, b, MATMUL, recipe=recipe)


def value_and_gradients_of(f, lhs, rhs, dy):
    y, vjp = jax.vjp(f, lhs, rhs)
    return (y, *vjp(dy))


@pytest.mark.parametrize("layout", ["m", "k", "n"])
@pytest.mark.parametrize("name", RECIPES)
def test_eight_devices_agree_with_one(name, layout):
    """Codes and scales are those of one device, so only the order of sums may differ, and FP4×FP4 not even that."""
    recipe = RECIPES[name]()
    rng = np.random.default_rng(6)
    lhs, rhs, dy = (rng.normal(size=s).astype(F32) for s in ((16, 64), (64, 24), (16, 24)))
    one = jax.jit(functools.partial(value_and_gradients, recipe, MATMUL))(lhs, rhs, dy)
    model = oracle_dot.dot_general(lhs, rhs, MATMUL, recipe, dy)
    mesh = jax.make_mesh((8,), ("d",))
    specs = {
        "m": (P("d", None), P(None, None), P("d", None)),
        "k": (P(None, "d"), P("d", None), P(None, None)),
        "n": (P(None, None), P(None, "d"), P(None, "d")),
    }[layout]
    with jax.set_mesh(mesh):
        arrays = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip((lhs, rhs, dy), specs)]

        def f(lhs, rhs):
            return fp4jax.dot_general(lhs, rhs, MATMUL, out_sharding=specs[2], recipe=recipe)

        many = jax.jit(functools.partial(value_and_gradients_of, f))(*arrays)
    for what, actual, spec in zip(("y", "dlhs", "drhs"), many, (specs[2], specs[0], specs[1])):
        assert actual.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2), f"{what}: {actual.sharding}"
    if name in EXACT:
        assert_same_bits(many[0], one[0], "y")
    for what, actual, expected in zip(("y", "dlhs", "drhs"), many, (model.y, model.dlhs, model.drhs)):
        assert_within(actual, expected, 64, F32, "float32", what)
