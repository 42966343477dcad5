"""``dot_general`` and both gradients against the NumPy model, for every recipe in the registry.

The registry is the list: a recipe that is added is tested here unasked. Products are compared within ``tolerances``,
relative to Σ|a||b|, which is tight enough that one wrong code, scale or factor fails: with float32 inputs and k ≤ 40 a
neighboring E2M1 value moves a sum by a thousand times the bound. What the design calls bit-equal is compared so.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import oracle_dot
import pytest
import tolerances
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import fp4jax
from fp4jax import kernels
from fp4jax.dot import BACKENDS
from fp4jax.dot.call import Call
from fp4jax.dot.geometry import Geometry
from fp4jax.recipes import RECIPES

F32, BF16, F16 = np.float32, ml_dtypes.bfloat16, np.float16
MATMUL = (((1,), (0,)), ((), ()))
BATCH = (((2,), (1,)), ((0,), (0,)))

# The recipe that also runs the rarer products, and eagerly, which compiles every primitive by itself.
THOROUGH = ("fp4",)

# name: (lhs shape, rhs shape, dimension numbers)
PRODUCTS = {
    "odd": ((7, 40), (40, 13), MATMUL),
    "1x1x1": ((1, 1), (1, 1), MATMUL),
    "empty m": ((0, 64), (64, 8), MATMUL),
    "empty n": ((5, 8), (8, 0), MATMUL),
    "empty k": ((5, 0), (0, 8), MATMUL),
    "batch": ((2, 5, 19), (2, 19, 3), BATCH),
    "batch of tokens": ((2, 3, 17), (17, 6), (((2,), (0,)), ((), ()))),
    "two contracted": ((3, 4, 5), (5, 6, 4), (((2, 1), (0, 2)), ((), ()))),
    "everything permuted": ((3, 2, 7, 4), (4, 3, 5, 2), (((3,), (0,)), ((1, 0), (3, 1)))),
    "vector by matrix": ((9,), (9, 4), (((0,), (0,)), ((), ()))),
}


def arrays(lhs_shape, rhs_shape, dims, dtypes, seed=0):
    """Heavy-tailed activations, small weights, small gradients; a zero row and a zero column in the matrices."""
    rng = np.random.default_rng(seed)
    lhs, rhs = rng.standard_t(3, lhs_shape), 0.1 * rng.normal(size=rhs_shape)
    if dims == MATMUL and min(*lhs_shape, *rhs_shape) > 2:
        lhs[1], rhs[:, 2] = 0, 0
    out = jax.eval_shape(lambda a, b: jax.lax.dot_general(a, b, dims), lhs.astype(F32), rhs.astype(F32))
    return lhs.astype(F32).astype(dtypes[0]), rhs.astype(F32).astype(dtypes[1]), 0.01 * rng.normal(size=out.shape)


def value_and_gradients(recipe, dims, lhs, rhs, dy, backend=None):
    """(y, dlhs, drhs) with ``dy`` cast to y's dtype."""
    product = functools.partial(fp4jax.dot_general, dimension_numbers=dims, recipe=recipe, backend=backend)
    y, vjp = jax.vjp(product, lhs, rhs)
    return (y, *vjp(dy.astype(y.dtype)))


def assert_within(actual, expected: oracle_dot.Sum, k: int, dtype, operand="float32", what=""):
    assert actual.dtype == dtype, what
    assert actual.shape == expected.value.shape, what
    error = np.abs(np.asarray(actual).astype(np.float64) - expected.value)
    bound = tolerances.dge_product_bound(expected.value, expected.mass, k, np.dtype(dtype).name, operand)
    assert (error <= bound).all(), (
        f"{what}: error {error.max()} where {bound.flat[np.argmax(error - bound)]} is allowed"
    )


def assert_equals_model(recipe, name, dtypes, backend=None):
    lhs_shape, rhs_shape, dims = PRODUCTS[name]
    lhs, rhs, dy = arrays(lhs_shape, rhs_shape, dims, dtypes)
    out_dtype = np.dtype(recipe.output_dtype or dtypes[0])
    dy = dy.astype(F32).astype(out_dtype)
    run = functools.partial(value_and_gradients, recipe, dims, backend=backend)
    got = jax.jit(run)(*map(jnp.asarray, (lhs, rhs, dy)))
    model = oracle_dot.dot_general(lhs, rhs, dims, recipe, dy)
    terms = max(*lhs_shape, *rhs_shape, *(np.prod([lhs_shape[d] for d in group], dtype=int) for group in dims[0]), 1)
    # An operand left in high precision takes part in the dtype of the activation.
    sparse = recipe.outliers is not None and recipe.outliers.compensation == "sparse"
    narrow = np.dtype(dtypes[0]).name if sparse or None in recipe.specs.values() else "float32"
    for what, actual, expected, dtype in zip(
        ("y", "dlhs", "drhs"), got, (model.y, model.dlhs, model.drhs), (out_dtype, *map(np.dtype, dtypes)), strict=True
    ):
        assert_within(actual, expected, terms, dtype, narrow, what)
    if is_exact(recipe):
        assert_same_bits(got[0], model.pinned_y.astype(out_dtype), "y of an exact sum")


# Axes are handled by one code for all recipes, so the rarer products need only one of them.
EVERYWHERE = ("odd", "1x1x1", "empty m", "batch", "everything permuted")
CASES = [(name, product) for name in RECIPES for product in PRODUCTS if product in EVERYWHERE or name in THOROUGH]


@pytest.mark.parametrize(("name", "product"), CASES)
def test_every_recipe_equals_the_numpy_model(name, product):
    assert_equals_model(RECIPES[name](), product, (F32, F32))


@pytest.mark.parametrize("dtypes", [(BF16, F32), (F16, F16)], ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_narrow_dtypes_equal_the_model_and_gradients_keep_their_dtype(name, dtypes):
    assert_equals_model(RECIPES[name](), "odd", dtypes)


@pytest.mark.parametrize("dtypes", [(BF16, BF16), (F16, F32), (F32, BF16), (F16, BF16)], ids=str)
def test_any_pair_of_dtypes_equals_the_model(dtypes):
    assert_equals_model(RECIPES["fp4"](), "odd", dtypes)


# --- the other backends, interpreted where their device is not -------------------------------------------------------


def refusals(backend, recipe) -> list[str]:
    """Why a backend does not run the "odd" product of a recipe."""
    lhs_shape, rhs_shape, dims = PRODUCTS["odd"]
    float32 = np.dtype(F32)
    call = Call(recipe, Geometry.make(len(lhs_shape), len(rhs_shape), dims), float32, float32, float32, backend)
    with kernels.interpret():
        return BACKENDS[backend].unsupported(call)


OTHERS = [
    (backend, name)
    for backend in BACKENDS
    for name in RECIPES
    if backend != "xla" and RECIPES[name]().quantizes and not refusals(backend, RECIPES[name]())
]


def test_what_each_backend_runs_is_known():
    """A recipe that a backend no longer takes would else leave the suite in silence."""
    assert [("hopper", name) for name in ("fp8", "fp4_direct", "fp4_vector", "fp4", "w4a8", "w8a4")] == OTHERS


@pytest.mark.parametrize(("backend", "name"), OTHERS)
def test_every_backend_equals_the_numpy_model(backend, name):
    recipe = RECIPES[name]()
    if recipe.outliers is not None:  # exact quantiles take long to interpret; those of the kernels are tested there
        recipe = dataclasses.replace(recipe, outliers=dataclasses.replace(recipe.outliers, quantile="sampled"))
    with kernels.interpret():
        assert_equals_model(recipe, "odd", (BF16, F32), backend)


EMPTY = [product for product in PRODUCTS if product.startswith("empty")]


@pytest.mark.parametrize("product", EMPTY)
@pytest.mark.parametrize(("backend", "name"), OTHERS)
def test_every_backend_takes_empty_operands(backend, name, product):
    with kernels.interpret():
        assert_equals_model(RECIPES[name](), product, (BF16, F32), backend)


FINE = fp4jax.QuantSpec(fp4jax.E2M1)
MXFP4 = fp4jax.QuantSpec(fp4jax.E2M1, fp4jax.PerBlock(32), fp4jax.PowerOfTwo("floor"))
NVFP4 = fp4jax.QuantSpec(fp4jax.E2M1, fp4jax.PerBlock(16), fp4jax.TwoLevel())
PATCHES = fp4jax.QuantSpec(fp4jax.E2M1, fp4jax.PerBlock2D(16, 8))
TOKENWISE_E4M3 = fp4jax.QuantSpec(fp4jax.E4M3)


def recipe_of(fprop, dgrad=(None, fp4jax.REUSE), wgrad=(fp4jax.REUSE, None), **options):
    return fp4jax.Recipe("test", fp4jax.Gemm(*fprop), fp4jax.Gemm(*dgrad), fp4jax.Gemm(*wgrad), **options)


# What no recipe of the registry does: every part of a Recipe in another combination.
COMBINATIONS = {
    "mxfp4 everywhere": recipe_of((MXFP4, MXFP4), (MXFP4, MXFP4), (MXFP4, MXFP4)),
    "nvfp4 everywhere": recipe_of((NVFP4, NVFP4), (NVFP4, NVFP4), (NVFP4, NVFP4), weight_estimator=fp4jax.DGE()),
    "patches of weights": recipe_of((FINE, PATCHES), (TOKENWISE_E4M3, PATCHES), (None, None)),
    "weights alone": recipe_of((None, FINE), wgrad=(None, None), weight_estimator=fp4jax.ClippedSTE()),
    "activations alone": recipe_of((FINE, None), dgrad=(None, None), activation_estimator=fp4jax.DGE(k=3.0)),
    "outliers beside a plain wgrad": recipe_of(
        (FINE, FINE), wgrad=(None, None), outliers=fp4jax.OCC(0.9, compensation="sparse")
    ),
    "gradients in high precision": recipe_of((FINE, FINE), outliers=fp4jax.OCC()),
    "gradients by vector": recipe_of(
        (FINE, FINE), (TOKENWISE_E4M3, fp4jax.REUSE), (fp4jax.REUSE, fp4jax.QuantSpec(fp4jax.E2M1))
    ),
    "two-level vectors, reused": recipe_of(
        (fp4jax.QuantSpec(fp4jax.E4M3, scale=fp4jax.TwoLevel()), fp4jax.QuantSpec(fp4jax.E2M1, scale=fp4jax.TwoLevel()))
    ),
    "residual in float32": recipe_of((FINE, FINE), outliers=fp4jax.OCC(alpha=0.9, residual_format=None)),
    "residual in E5M2": recipe_of((FINE, FINE), outliers=fp4jax.OCC(alpha=0.9, residual_format=fp4jax.E5M2)),
    "sparse residual": recipe_of((FINE, FINE), outliers=fp4jax.OCC(alpha=0.9, compensation="sparse")),
    "an estimator behind a clamp": recipe_of(
        (fp4jax.QuantSpec(fp4jax.E2M1, scale=fp4jax.PowerOfTwo("floor")), FINE),
        outliers=fp4jax.OCC(alpha=0.9, scope="vector", compensation="none"),
        activation_estimator=fp4jax.ClippedSTE(),
    ),
    "an activation quantized again": recipe_of((FINE, FINE), wgrad=(NVFP4, None), outliers=fp4jax.OCC(alpha=0.9)),
    "float32 out": recipe_of((FINE, FINE), output_dtype=jnp.float32),
}


@pytest.mark.parametrize("name", COMBINATIONS)
def test_any_combination_of_parts_equals_the_model(name):
    recipe = COMBINATIONS[name]
    assert_equals_model(recipe, "odd", (F32, F32))
    if None in recipe.specs.values():  # what stays in high precision takes the dtype of the activation
        assert_equals_model(recipe, "odd", (BF16, F32))


# --- what is bit-equal ------------------------------------------------------------------------------------------------


def assert_same_values(actual, expected, what):
    """To the bit, but for the sign of zero: a sum of −0 and 0 is 0."""
    assert_same_bits(np.asarray(actual) + F32(0), expected + F32(0), what)


QUANTIZED = [name for name in RECIPES if RECIPES[name]().quantizes]


@pytest.mark.parametrize("name", QUANTIZED)
def test_operands_are_those_of_the_oracle_bit_for_bit(name):
    """A product with the identity shows an operand, and one with a diagonal a folded gradient, each value · scale."""
    recipe = dataclasses.replace(RECIPES[name](), weight_estimator=fp4jax.STE(), activation_estimator=fp4jax.STE())
    high = fp4jax.Gemm()
    rng = np.random.default_rng(7)
    heavy = rng.standard_t(3, (24, 16)).astype(F32)
    heavy[3, 5] = 1e4  # beyond 448/6 of its row, so the floor under amax shows
    ties = np.tile([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -6, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5], (24, 1))
    samples = (heavy, ties.astype(F32), ties.astype(F32) * F32(3.5 / 6))
    if recipe.fprop.lhs is not None:
        alone = dataclasses.replace(recipe, fprop=fp4jax.Gemm(recipe.fprop.lhs), dgrad=high, wgrad=high)
        show = jax.jit(plain(alone))
        for x in samples:
            q = oracle.quantize_activation(x, recipe.fprop.lhs, recipe.outliers, -1)
            assert_same_values(show(x, np.eye(16, dtype=F32)), q.dequantized, "X")
    if recipe.fprop.rhs is not None:
        fprop = fp4jax.Gemm(None, recipe.fprop.rhs)
        show = jax.jit(plain(dataclasses.replace(recipe, fprop=fprop, dgrad=high, wgrad=high, outliers=None)))
        for x in samples:
            q = oracle.quantize(x.T, recipe.fprop.rhs, 0)
            assert_same_values(show(np.eye(16, dtype=F32), x.T), q.dequantized, "W")
    if recipe.dgrad != fp4jax.Gemm(recipe.dgrad.lhs, fp4jax.REUSE) or recipe.wgrad.lhs is not fp4jax.REUSE:
        return  # only a reused operand is folded
    square, dy = rng.normal(size=(16, 16)).astype(F32), rng.normal(size=(16, 16)).astype(F32)
    diagonal = np.diag(np.diag(square))
    gradients = jax.jit(functools.partial(value_and_gradients, recipe, MATMUL))
    _, dlhs, _ = gradients(square, diagonal, dy)
    _, _, drhs = gradients(diagonal, square, dy)
    wq = oracle.quantize(diagonal, recipe.fprop.rhs, 0)
    g = oracle.quantize(dy * wq.scale[0], recipe.dgrad.lhs, 1)
    assert_same_values(dlhs, g.values * np.diag(wq.values) * g.scale, "dY · sw")
    xq = oracle.quantize_activation(diagonal, recipe.fprop.lhs, recipe.outliers, 1)
    g = oracle.quantize(dy * xq.scale[:, :1], recipe.wgrad.rhs, 0)
    assert_same_values(drhs, np.diag(xq.values)[:, None] * g.values * g.scale, "dY · sx")


def is_exact(recipe) -> bool:
    """FP4×FP4 in fprop with scales outside the sum: it is exact in float32, whatever its order."""
    specs = (recipe.fprop.lhs, recipe.fprop.rhs)
    return recipe.outliers is None and all(
        s is not None and s.format.bits == 4 and isinstance(s.granularity, fp4jax.PerTensor | fp4jax.PerVector)
        for s in specs
    )


EXACT = [name for name in RECIPES if is_exact(RECIPES[name]())]


def assert_same_bits(actual, expected, what=""):
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype, what
    np.testing.assert_array_equal(actual.astype(F32).view(np.uint32), expected.astype(F32).view(np.uint32), what)


def test_some_recipe_has_exact_products():
    assert {"fp4_direct", "fp4_vector"} <= set(EXACT)


def plain(recipe, **options):
    return lambda a, b: fp4jax.dot_general(a, b, MATMUL, recipe=recipe, **options)


def value_and_gradients_of(f, lhs, rhs, dy):
    y, vjp = jax.vjp(f, lhs, rhs)
    return (y, *vjp(dy))


@pytest.mark.parametrize("name", RECIPES)
def test_jit_vmap_scan_and_remat_give_the_same_bits(name):
    """Per example, the order of every sum is the same: y, dlhs and drhs agree bit for bit."""
    recipe = RECIPES[name]()
    rng = np.random.default_rng(5)
    lhs = jnp.asarray(rng.standard_t(3, (2, 16, 48)), jnp.bfloat16)
    rhs = jnp.asarray(rng.normal(size=(48, 24)), jnp.float32)
    dy = jnp.asarray(rng.normal(size=(2, 16, 24)), jnp.bfloat16)
    f = functools.partial(value_and_gradients_of, plain(recipe))
    remat = functools.partial(value_and_gradients_of, jax.checkpoint(plain(recipe)))  # what the scan repeats

    def loop(f):
        return [jnp.stack(leaves) for leaves in zip(*(f(a, rhs, g) for a, g in zip(lhs, dy)))]

    def scan(lhs, rhs, dy):
        return jax.lax.scan(lambda c, x: (c, remat(x[0], rhs, x[1])), None, (lhs, dy))[1]

    want = loop(jax.jit(f))
    runs = {
        "scan of remat": lambda: jax.jit(scan)(lhs, rhs, dy),
        "vmap": lambda: jax.jit(jax.vmap(f, (0, None, 0)))(lhs, rhs, dy),
    }
    if name in THOROUGH:
        runs["eager"] = lambda: loop(f)
    for run, result in runs.items():
        for what, actual, expected in zip(("y", "dlhs", "drhs"), result(), want, strict=True):
            if run == "vmap" and (what != "y" or name not in EXACT):  # a batched product may sum in another order
                error = np.asarray(actual, np.float64) - np.asarray(expected, np.float64)
                unit = tolerances.UNIT_ROUNDOFF[np.dtype(actual.dtype).name]
                bound = 4 * unit * np.abs(np.asarray(expected, np.float64)) + 1e-4
                assert (np.abs(error) <= bound).all(), f"{run} {what}"
            else:
                assert_same_bits(actual, expected, f"{run} {what}")


# layout: (lhs, rhs, y) on a mesh of 4 × 2
LAYOUTS = {
    "m and n": (P("a", None), P(None, "b"), P("a", "b")),
    "k": (P(None, ("a", "b")), P(("a", "b"), None), P(None, None)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", RECIPES)
def test_eight_devices_agree_with_one(name, layout):
    """Codes and scales are those of one device, so only the order of sums may differ, and FP4×FP4 not even that."""
    recipe = RECIPES[name]()
    rng = np.random.default_rng(6)
    lhs, rhs, dy = (rng.normal(size=s).astype(F32) for s in ((16, 64), (64, 24), (16, 24)))
    model = oracle_dot.dot_general(lhs, rhs, MATMUL, recipe, dy)
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    lhs_spec, rhs_spec, out_spec = LAYOUTS[layout]
    with jax.set_mesh(mesh):
        operands = [
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in zip((lhs, rhs, dy), (lhs_spec, rhs_spec, out_spec))
        ]
        f = functools.partial(value_and_gradients_of, plain(recipe, out_sharding=out_spec))
        many = jax.jit(f)(*operands)
    for what, actual, spec, expected in zip(
        ("y", "dlhs", "drhs"), many, (out_spec, lhs_spec, rhs_spec), (model.y, model.dlhs, model.drhs)
    ):
        assert actual.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2), f"{what}: {actual.sharding}"
        assert_within(actual, expected, 64, F32, "float32", what)
    if name in EXACT:
        assert_same_bits(many[0], model.pinned_y, "y")
