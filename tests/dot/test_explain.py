"""What explain finds, and where."""

import contextlib
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from test_docs import examples_of, run

import fp4jax
from fp4jax import kernels
from fp4jax.dot import program
from fp4jax.dot.explain import Product

MATMUL = (((1,), (0,)), ((), ()))
DOT = fp4jax.DotGeneral(fp4jax.recipes.fp4())
X, W = jnp.ones((4, 16)), jnp.ones((3, 16, 16))


def layer(x, w):
    return jax.nn.relu(DOT(x, w, MATMUL))


def stack(x, ws, wrap=lambda f: f):
    return jax.lax.scan(lambda x, w: (wrap(layer)(x, w), None), x, ws)[0].sum()


def kinds(result):
    return [(p.kind, p.count) for p in result.products]


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint, jax.jit], ids=["plain", "remat", "jit"])
def test_products_are_found_through_scan_grad_and_remat_and_counted_once(wrap):
    result = fp4jax.explain(jax.jit(jax.grad(lambda x, ws: stack(x, ws, wrap), (0, 1))), X, W)
    assert kinds(result) == [("fprop", 3), ("dgrad", 3), ("wgrad", 3)]
    fprop, dgrad, wgrad = result.products
    assert (fprop.recipe, fprop.backend, fprop.lhs, fprop.rhs) == ("fp4", "xla", "E2M1", "E2M1")
    assert (dgrad.lhs, dgrad.rhs) == ("E5M2", "E2M1")
    assert (wgrad.lhs, wgrad.rhs) == ("E2M1", "E5M2")
    assert fprop.flops == 2 * 4 * 16 * 16 * 3


def test_products_are_found_inside_shard_map_and_vmap():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"in_specs": (jax.P("data"), jax.P()), "out_specs": jax.P("data")}
    f = jax.shard_map(jax.vmap(layer, (0, None)), mesh=mesh, **specs)
    result = fp4jax.explain(f, jnp.ones((8, 4, 16)), W[0])
    assert kinds(result) == [("fprop", 1)]


def test_plain_products_show_their_dtypes():
    mixed = lambda x, w: layer(x, w) @ w.astype(jnp.bfloat16).astype(jnp.float32)
    result = fp4jax.explain(mixed, X, W[0])
    assert [(p.kind, p.recipe, p.lhs) for p in result.products] == [("fprop", "fp4", "E2M1"), ("plain", "-", "float32")]
    assert len(result.quantized) == 1
    assert "2 products" in str(result)
    assert "50.0% of it under a recipe" in str(result)


def test_sizes_of_a_batched_product():
    dims = (((2,), (1,)), ((0,), (0,)))
    result = fp4jax.explain(lambda x, w: DOT(x, w, dims), jnp.ones((5, 4, 8)), jnp.ones((5, 8, 3)))
    (product,) = result.products
    assert (product.b, product.m, product.n, product.k) == (5, 4, 3, 8)


def test_shapes_are_enough():
    result = fp4jax.explain(
        layer, jax.ShapeDtypeStruct((4, 8), jnp.bfloat16), jax.ShapeDtypeStruct((8, 2), jnp.float32)
    )
    assert kinds(result) == [("fprop", 1)]


def test_a_function_without_products_prints_an_empty_table():
    assert "0 products" in str(fp4jax.explain(jnp.sin, X))


def test_sparse_compensation_is_a_product_of_its_own():
    dot = fp4jax.DotGeneral(fp4jax.recipes.fp4(compensation="sparse"))
    result = fp4jax.explain(lambda x, w: dot(x, w, MATMUL), X.astype(jnp.bfloat16), W[0])
    assert [(p.kind, p.lhs) for p in result.products] == [("fprop", "E2M1"), ("occ", "bfloat16")]


# --- other backends, whose products hold no dot_general ---------------------------------------------------------------


HOPPER = fp4jax.DotGeneral(fp4jax.recipes.fp4(), "hopper")
TABLE = [
    ("fprop", "hopper", "E2M1", "E2M1", 1, 4, 8, 16, 1),
    ("dgrad", "hopper", "E5M2", "E2M1", 1, 4, 16, 8, 1),
    ("wgrad", "hopper", "E2M1", "E5M2", 1, 16, 8, 4, 1),
]


def table(result):
    return [(p.kind, p.backend, p.lhs, p.rhs, p.b, p.m, p.n, p.k, p.count) for p in result.products]


def gradients(f):
    return jax.grad(lambda *args: jnp.sum(jnp.square(f(*args))), (0, 1))


def hopper(x, w):
    return HOPPER(x, w, MATMUL)


# transformation: the function, batch size and trip count
TRANSFORMED = {
    "grad": (gradients(hopper), 1, 1),
    "jit": (jax.jit(gradients(jax.jit(hopper))), 1, 1),
    "remat": (gradients(jax.checkpoint(hopper)), 1, 1),
    "scan": (gradients(lambda x, w: jax.lax.scan(lambda c, s: (c, hopper(x * s, w)), 0, jnp.ones(3))[1]), 1, 3),
    "vmap": (gradients(jax.vmap(hopper, (0, None))), 5, 1),
    "vmap of both": (gradients(jax.vmap(hopper, (1, 2))), 5, 1),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_products_of_kernels_are_listed_with_sizes_and_formats(name):
    f, batch, count = TRANSFORMED[name]
    x = {"vmap": (5, 4, 16), "vmap of both": (4, 5, 16)}.get(name, (4, 16))
    w = {"vmap of both": (16, 8, 5)}.get(name, (16, 8))
    with kernels.lowering_for():
        result = fp4jax.explain(f, jnp.ones(x), jnp.ones(w))
    assert table(result) == [(*row[:4], batch, *row[5:8], count) for row in TABLE]


def test_a_layer_under_nnx_jit_is_found_on_either_backend():
    with jax.numpy_dtype_promotion("standard"):
        layer = nnx.Linear(16, 8, use_bias=False, dot_general=fp4jax.DotGeneral(HOPPER.recipe), rngs=nnx.Rngs(0))
        step = nnx.jit(nnx.grad(lambda layer, x: jnp.sum(jnp.square(layer(x)))))
        for backend, context in (("xla", contextlib.nullcontext()), ("hopper", kernels.lowering_for())):
            with context:
                found = fp4jax.explain(step, layer, X)
            assert [p.kind for p in found.check(backend=backend).products] == ["fprop", "dgrad", "wgrad"]


def test_static_arguments_of_a_jitted_function():
    f = jax.jit(lambda x, w, times: sum(layer(x, w) for _ in range(times)), static_argnums=2)
    assert kinds(fp4jax.explain(f, X, W[0], 2)) == [("fprop", 1)] * 2


# --- check: what was asked for ----------------------------------------------------------------------------------------


def mixed(x, w):
    return layer(x, w) @ w.T


def test_check_returns_the_explanation():
    result = fp4jax.explain(layer, X, W[0])
    assert result.check(recipe="fp4", backend="xla", share=1.0) is result
    assert result.check_program() is result


def test_check_names_each_product_that_is_not_as_asked():
    with pytest.raises(ValueError, match="products are not as asked") as e:
        fp4jax.explain(mixed, X, W[0]).check(recipe="fp8", backend="hopper", share=0.9)
    lines = str(e.value).splitlines()
    place = r"b × m × n × k = 1 × 4 × 16 × 16, from test_explain.py:\d+ \(\w+\)"
    assert len(lines) == 5
    assert re.fullmatch(rf"fprop of recipe 'fp4' on 'xla', {place}: recipe was asked for 'fp8'", lines[1])
    assert re.fullmatch(rf"fprop of recipe 'fp4' on 'xla', {place}: backend was asked for 'hopper'", lines[2])
    assert lines[3] == "50.0% of the FLOPs are under a recipe, 90.0% was asked for; plain are:"
    assert re.fullmatch(r"  float32 · float32, b × m × n × k = 1 × 4 × 16 × 16, 1 times, from test_explain.*", lines[4])


def test_check_of_a_program_that_quantizes_nothing():
    with pytest.raises(ValueError, match="no product is quantized: the program has 1 products, all plain"):
        fp4jax.explain(lambda x, w: x @ w, X, W[0]).check()


# --- check_program: the text ------------------------------------------------------------------------------------------


def lowered(x, w):
    with kernels.lowering_for():
        return fp4jax.explain(gradients(hopper), x, w)


SHAPES = jax.ShapeDtypeStruct((256, 128), jnp.bfloat16), jax.ShapeDtypeStruct((128, 384), jnp.float32)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
def test_kernels_are_found_in_the_program_lowered_for_a_gpu():
    result = lowered(*SHAPES)
    assert [p.held for p in result.products] == [
        ("float8_e4m3fn", "float8_e4m3fn"),
        ("float8_e5m2", "float8_e4m3fn"),
        ("float8_e4m3fn", "float8_e5m2"),
    ]
    result.check(backend="hopper", share=1.0).check_program(platform="cuda")


def test_the_xla_backend_multiplies_grid_values_in_bfloat16():
    result = fp4jax.explain(gradients(lambda x, w: DOT(x, w, MATMUL)), X, W[0])
    assert {p.held for p in result.check_program().products} == {("bfloat16", "bfloat16")}


def test_interpreted_kernels_are_none():
    with kernels.interpret():
        result = fp4jax.explain(hopper, X.astype(jnp.bfloat16), W[0])
        with pytest.raises(ValueError, match=r"fprop of recipe 'fp4' on 'hopper'.*the program has no kernel for it"):
            result.check_program()


MARK = "fp4jax_fprop_fp4_hopper_0123abcd"
PRODUCT = Product(
    "fprop", "fp4", "hopper", "E2M1", "E2M1", 1, 4, 8, 16, 1, ("float8_e4m3fn",) * 2, "bfloat16", "model.py:1", MARK
)  # fmt: skip
META = f'metadata={{op_name="jit(f)/jvp(jit({MARK}))/x"}}'
KERNEL = f'%k = bf16[1,4,8]{{2,1,0}} custom-call(%a, %b), custom_call_target="mosaic_gpu_v2", {META}'
# what a compiler might have made of it: the complaint
COMPILED = {
    KERNEL: None,
    f"{KERNEL}\n  %d = f32[4,8]{{1,0}} convert(%k), {META}": r"convert makes a float32 \[4x8\] on the way to a result",
    f"%k = f32[4,8]{{1,0}} dot(%c, %c), {META}": "it is a dot of bf16 · bf16",
    f'%k = bf16[4,8]{{1,0}} custom-call(%c, %c), custom_call_target="__cublas$gemm", {META}': r"it is a __cublas\$gemm",
    KERNEL.replace("%b)", "%c)"): "it multiplies f8e4m3fn · bf16, not f8e4m3fn · f8e4m3fn",
    KERNEL.replace("bf16[1,", "f32[1,"): "its kernel writes f32, not bf16",
    f"%k = bf16[4,8]{{1,0}} add(%c, %c), {META}": "the program has no kernel for it",
}


@pytest.mark.parametrize("text", COMPILED)
def test_what_a_compiled_program_does_otherwise_is_named(text):
    operands = "\n".join(
        f"  %{n} = {t}[4,16]{{1,0}} parameter(0)" for n, t in zip("abc", ("f8e4m3fn",) * 2 + ("bf16",))
    )
    found = program.by_mark(program.compiled(f"ENTRY %main {{\n{operands}\n  {text}\n}}\n"))
    fault = program.fault(PRODUCT, found.get(MARK, []))
    assert fault is None if COMPILED[text] is None else re.search(COMPILED[text], fault)


def test_the_examples_of_the_page_run_and_print_what_they_say():
    examples = examples_of("docs/explain.md")
    assert len(examples) == 4
    names = {}
    for line, source in examples:
        run("docs/explain.md", line, source, names)
