"""What explain finds, and where."""

import jax
import jax.numpy as jnp
import pytest

import fp4jax

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
