"""The two-operand einsum: equal to `jnp.einsum`, activation always first, and clear about what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import fp4jax
from fp4jax.nn import DotEinsum, Einsum, einsum

SIZES = dict(zip("abcdefghijk", (2, 3, 4, 5, 6, 7, 8, 3, 2, 5, 4), strict=True))
DOTS = (2, 3)

EQUATIONS = [
    "ab,bc->ac",
    "ab,cb->ac",
    "ba,bc->ca",
    "ab,bc->ca",
    "ab,ab->ab",
    "ab,ab->ba",
    "ab,ba->a",
    "ab,ab->",
    "a,b->ab",
    "a,b->ba",
    "a,->a",
    ",a->a",
    "abc,cd->abd",
    "abc,dc->dab",
    "abcd,cde->abe",
    "abcd,dce->eab",
    "abc,cde->abde",
    "abc,cde->adbe",
    "abcd,bde->abce",
    "abcd,bed->ebca",
    "gab,gbc->gac",
    "abg,gbc->acg",
    "abgh,hgcd->dabcgh",
    "...a,ab->...b",
    "...ab,bca->...c",
    "a...,ab->b...",
    "...ab,...bc->...ac",
    "...a,ab->b...",
    "ab,...bc->...ac",
    " ab , bc -> ac ",
]


def operands(equation, dtype=jnp.float32):
    lhs, rhs = equation.replace(" ", "").split("->")[0].split(",")
    shapes = []
    for indices in (lhs, rhs):
        before, dots, after = indices.partition("...")
        shapes.append((*map(SIZES.get, before), *(DOTS if dots else ()), *map(SIZES.get, after)))
    keys = jax.random.split(jax.random.key(0))
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


@pytest.mark.parametrize("equation", EQUATIONS)
def test_equals_jnp_einsum_with_lhs_first_in_one_dot(equation):
    lhs, rhs = operands(equation)
    seen = []

    def dot_general(a, b, *args, **options):
        seen.append((a is lhs, b is rhs))
        return lax.dot_general(a, b, *args, **options)

    out = einsum(equation, lhs, rhs, dot_general=dot_general)
    expected = jnp.einsum(equation, lhs, rhs)
    assert out.shape == expected.shape
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    assert seen == [(True, True)]


def test_gradients_equal_those_of_jnp_einsum():
    lhs, rhs = operands("abcd,dce->eab")
    expected = jax.grad(lambda *args: jnp.sum(jnp.sin(jnp.einsum("abcd,dce->eab", *args))), argnums=(0, 1))(lhs, rhs)
    actual = jax.grad(lambda *args: jnp.sum(jnp.sin(einsum("abcd,dce->eab", *args))), argnums=(0, 1))(lhs, rhs)
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-5), actual, expected)


@pytest.mark.parametrize(
    ("equation", "shapes", "message"),
    [
        ("aab,bc->ac", ((2, 2, 3), (3, 4)), "index 'a' appears twice in the first operand; take the diagonal first"),
        ("ab,bcc->ac", ((2, 3), (3, 4, 4)), "index 'c' appears twice in the second operand"),
        ("ab,bc->aca", ((2, 3), (3, 4)), "index 'a' appears twice in the result"),
        ("ab,bc->c", ((2, 3), (3, 4)), "index 'a' is summed but appears only in the first operand; sum that operand"),
        ("ab,bc->a", ((2, 3), (3, 4)), "index 'c' is summed but appears only in the second operand"),
        ("ab,bc->acd", ((2, 3), (3, 4)), "index 'd' of the result appears in neither operand"),
        ("ab,bc->ac", ((2, 3), (5, 4)), r"index 'b' has size 3 in the first operand, of shape \(2, 3\), and 5 in the"),
        ("ab,bc->ac", ((2, 3, 1), (3, 4)), "the first operand has 3 axes, its indices 'ab' name 2"),
        ("...abc,bc->...a", ((2, 3), (3, 4)), "the first operand has 2 axes, its indices '...abc' name 3"),
        (
            "...a,...ab->...b",
            ((2, 3), (2, 2, 3, 4)),
            "'...' stands for 1 axes of the first operand and 2 of the second",
        ),
        ("...a,ab->b", ((2, 3), (3, 4)), "the result must contain '...' too"),
        ("ab,bc", ((2, 3), (3, 4)), "write two operands and the result, as in 'btd,df->btf'"),
        ("ab,bc,cd->ad", ((2, 3), (3, 4)), "write two operands and the result"),
        ("a1,1b->ab", ((2, 3), (3, 4)), "indices are letters and one '...', not 'a1'"),
    ],
)
def test_equations_it_cannot_lower_are_refused(equation, shapes, message):
    with pytest.raises(ValueError, match=message):
        einsum(equation, *map(jnp.ones, shapes))


def test_the_recipe_quantizes_lhs_as_the_activation():
    recipe = fp4jax.recipes.w4a8()  # activations E4M3, weights E2M1: swapping the operands would show
    x, w = operands("abc,dc->dab")
    out = einsum("abc,dc->dab", x, w, dot_general=fp4jax.DotGeneral(recipe))
    expected = fp4jax.dot_general(x, w, (((2,), (1,)), ((), ())), recipe=recipe)
    np.testing.assert_array_equal(out, jnp.transpose(expected, (2, 0, 1)))
    swapped = fp4jax.dot_general(w, x, (((1,), (2,)), ((), ())), recipe=recipe)
    assert bool(jnp.any(out != swapped))


def test_out_sharding_is_given_in_the_order_of_the_equation():
    mesh = jax.make_mesh((2, 4), ("x", "y"))
    with jax.set_mesh(mesh):
        lhs = jax.device_put(jnp.ones((4, 6)), jax.P("x", None))
        rhs = jax.device_put(jnp.ones((6, 8)), jax.P(None, "y"))
        for sharding in (jax.P("y", "x"), jax.NamedSharding(mesh, jax.P("y", "x"))):
            out = jax.jit(lambda a, b, s=sharding: einsum("ab,bc->ca", a, b, out_sharding=s))(lhs, rhs)
            assert jax.typeof(out).sharding.spec == jax.P("y", "x")
        partial = jax.jit(lambda a, b: einsum("ab,bc->ca", a, b, out_sharding=jax.P("y")))(lhs, rhs)
        assert jax.typeof(partial).sharding.spec == jax.P("y", None)


def test_without_a_recipe_the_layer_is_flax_bit_for_bit():
    x = jax.random.normal(jax.random.key(1), (3, 7, 8))
    for options in ({}, {"dtype": jnp.bfloat16}, {"dtype": jnp.bfloat16, "preferred_element_type": jnp.float32}):
        ours = Einsum("btd,dhk->bthk", (8, 2, 4), (2, 4), rngs=nnx.Rngs(0), **options)
        flax = nnx.Einsum("btd,dhk->bthk", (8, 2, 4), (2, 4), rngs=nnx.Rngs(0), **options)
        np.testing.assert_array_equal(ours(x), flax(x))
        assert ours(x).dtype == flax(x).dtype


def test_the_layer_hands_its_kernel_over_unrounded():
    recipe = fp4jax.recipes.fp4_vector()
    layer = Einsum("btd,dhk->bthk", (8, 2, 4), (2, 4), recipe=recipe, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    layer.bias[...] = jnp.arange(8.0).reshape(2, 4)
    x = jax.random.normal(jax.random.key(1), (3, 7, 8))
    out = layer(x)
    expected = fp4jax.dot_general(
        x.astype(jnp.bfloat16), layer.kernel[...], (((2,), (0,)), ((), ())), recipe=recipe
    ) + layer.bias[...].astype(jnp.bfloat16)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out, expected)


def test_stock_flax_einsum_takes_it_injected():
    recipe = fp4jax.recipes.fp4()
    x = jax.random.normal(jax.random.key(1), (3, 7, 8))
    stock = nnx.Einsum("btd,dhk->bthk", (8, 2, 4), einsum_op=DotEinsum(fp4jax.DotGeneral(recipe)), rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(stock(x), Einsum("btd,dhk->bthk", (8, 2, 4), recipe=recipe, rngs=nnx.Rngs(0))(x))
