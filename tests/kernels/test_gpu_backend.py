"""On an H100 or H200: a layer of the "hopper" backend against the xla backend, and the program that is compiled."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tolerances

import fp4jax
from fp4jax import kernels
from fp4jax.dot import hopper, hopper_operands, xla
from fp4jax.exact import as_float32, multiply

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]

MATMUL = (((1,), (0,)), ((), ()))
RECIPES = {
    "fp4": fp4jax.recipes.fp4(),
    "fp4, sampled": fp4jax.recipes.fp4(quantile="sampled"),
    "fp4 in full": fp4jax.recipes.fp4(alpha=None, k=None),
    "fp4_vector": fp4jax.recipes.fp4_vector(),
    "fp4_direct": fp4jax.recipes.fp4_direct(),
    "fp8": fp4jax.recipes.fp8(),
    "w4a8": fp4jax.recipes.w4a8(),
    "w8a4": fp4jax.recipes.w8a4(),
}
EXACT = ("fp4 in full", "fp4_vector", "fp4_direct")  # FP4 × FP4, whose sums are exact
SIZES = [(1, 7, 40), (257, 129, 1000), (1024, 768, 512)]


@pytest.fixture(autouse=True)
def _on_hopper():
    if not kernels.is_hopper():
        pytest.skip("needs an H100 or H200")


def arrays(m, n, k):
    """x, w and the gradient of y; bfloat16, float32, bfloat16."""
    rng = np.random.default_rng(m + n + k)
    x = jnp.asarray(rng.standard_t(3, (m, k)), jnp.bfloat16)
    return x, jnp.asarray(0.02 * rng.standard_normal((k, n)), jnp.float32), jnp.asarray(
        1e-3 * rng.standard_t(3, (m, n)), jnp.bfloat16
    )  # fmt: skip


def value_and_gradients(x, w, g, recipe, backend):
    y, vjp = jax.vjp(lambda x, w: fp4jax.dot_general(x, w, MATMUL, recipe=recipe, backend=backend), x, w)
    return y, *vjp(g)


def same(got, want):
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", RECIPES)
def test_operands_are_those_of_the_reference(name):
    recipe, (x, w, g) = RECIPES[name], arrays(257, 129, 1000)

    def quantized(x, w, backend):
        return backend.quantize_lhs(x, recipe, (-1,), None), backend.quantize_rhs(w, recipe, (-2,), None)

    (lhs, rhs), (x_ref, w_ref) = (jax.jit(quantized, static_argnums=2)(x, w, b) for b in (hopper, xla))
    for got, want in ((lhs, x_ref), (rhs, w_ref)):
        values = np.asarray(want.operand.values.astype(jnp.float32))
        same(np.asarray(got.values, np.float32), values)
        same(np.asarray(got.transposed, np.float32), values.T)
        same(np.asarray(got.scale).ravel(), np.asarray(want.operand.scale).ravel())
    spec = recipe.dgrad.lhs
    row = lhs.scale[:, None] if lhs.scale.ndim else lhs.scale
    gradients = jax.jit(hopper_operands.gradient, static_argnums=(3, 4))(
        g, lhs.scale, rhs.scale, spec, (), [None, None]
    )
    for got, fold in zip(gradients, (rhs.scale, row), strict=True):
        want = fp4jax.quantize(multiply(as_float32(g), fold), spec, axis=-1)
        values = got.values if got.values is not None else got.transposed.T
        same(np.asarray(values, np.float32), np.asarray(want.values, np.float32))
        same(got.scale, want.scale.reshape(()))


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_a_layer_equals_the_reference(name, size):
    recipe, (x, w, g) = RECIPES[name], arrays(*size)
    m, n, k = size
    got, want = (
        jax.jit(value_and_gradients, static_argnums=(3, 4))(x, w, g, recipe, backend) for backend in ("hopper", "xla")
    )
    ax, aw, ag = (np.abs(np.asarray(v, np.float64)) for v in (x, w, g))
    # Rounding moves a magnitude by a quarter at most, but for the smallest.
    masses = [1.25**2 * mass for mass in (ax @ aw, ag @ aw.T, ax.T @ ag)]
    if not recipe.weight_estimator.is_identity:
        masses[2] = masses[2] * recipe.weight_estimator.clip
    for what, a, b, mass, terms in zip(("y", "dx", "dw"), got, want, masses, (k, n, m), strict=True):
        assert a.dtype == b.dtype
        if what == "y" and name in EXACT:
            same(a, b)
            continue
        a, b = (np.asarray(v, np.float64) for v in (a, b))
        bound = 2 * tolerances.product_bound(b, mass, terms, "bfloat16" if what != "dw" else "float32")
        error = np.abs(a - b)
        print(f"{name} {size} {what}: error / mass {np.max(error / np.maximum(mass, 1e-30)):.2e}")
        assert np.all(error <= bound + tolerances.TENSOR_CORE_FP8 * mass), what


def linears(backend, prepare, x, ws):
    """Three linears of one activation, forward and backward."""
    dot = fp4jax.DotGeneral(RECIPES["fp4"], backend)

    def loss(x, ws):
        shared = dot.prepare_lhs(x) if prepare else x
        return sum(jnp.sum(jnp.square(dot(shared, w, MATMUL).astype(jnp.float32))) for w in ws)

    return jax.value_and_grad(loss, (0, 1))(x, ws)


def inputs():
    x, w, _ = arrays(1024, 768, 512)
    return x, [w, 2 * w[:, :256], -w[:, :256]]


@pytest.mark.parametrize("backend", ["xla", "hopper"])
def test_shared_operands_give_the_numbers_of_separate_ones(backend):
    results = [jax.jit(functools.partial(linears, backend, prepare))(*inputs()) for prepare in (True, False)]
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        same(a, b)


@pytest.mark.parametrize("backend", ["xla", "hopper"])
def test_the_compiled_program_holds_what_was_asked_for(backend):
    explanation = fp4jax.explain(functools.partial(linears, backend, True), *inputs())
    assert len(explanation.products) == 9
    explanation.check(backend=backend, share=1.0).check_program()


def test_nothing_is_quantized_twice():
    """In the compiled program: x once, each weight once, each gradient once for both of its products."""
    text = jax.jit(functools.partial(linears, "hopper", True)).lower(*inputs()).compile().as_text()
    calls = [line for line in text.splitlines() if "custom-call(" in line and "fp4jax_quantize" in line]
    assert len(calls) == 1 + 3 + 3
