"""Recipes: what they contain, how they compare and print, and what is refused."""

import jax.numpy as jnp
import pytest

import fp4jax
from fp4jax import Gemm, PerBlock, PerTensor, PerVector, QuantSpec, Recipe
from fp4jax.recipes import RECIPES

FP4, FP8 = QuantSpec(fp4jax.E2M1), QuantSpec(fp4jax.E5M2, PerTensor())


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_values(name):
    recipe = RECIPES[name]()
    assert recipe == RECIPES[name]()
    assert hash(recipe) == hash(RECIPES[name]())
    assert recipe.name == name
    assert not recipe.needs_key
    assert "Source:" in RECIPES[name].__doc__ or name == "bf16"


@pytest.mark.parametrize("name", RECIPES)
def test_describe_lists_every_quantizer(name):
    recipe = RECIPES[name]()
    text = recipe.describe()
    for place, spec in recipe.specs.items():
        line = next(line for line in text.splitlines() if line.split()[0] == place)
        assert (repr(spec) in line) == isinstance(spec, QuantSpec)
    assert repr(recipe.weight_estimator) in text


def test_the_paper_is_what_the_paper_says():
    recipe = fp4jax.recipes.fp4()
    assert recipe.fprop == Gemm(FP4, FP4)
    assert recipe.fprop.lhs.granularity == PerVector()
    assert recipe.weight_estimator == fp4jax.DGE(5.0, 3.0)
    assert recipe.activation_estimator == fp4jax.STE()
    assert recipe.outliers == fp4jax.OCC(0.99)
    assert recipe.dgrad == Gemm(FP8, fp4jax.REUSE)
    assert recipe.wgrad == Gemm(fp4jax.REUSE, FP8)


def test_knobs_change_what_they_name():
    assert fp4jax.recipes.fp4(alpha=None).outliers is None
    assert fp4jax.recipes.fp4(k=None).weight_estimator == fp4jax.STE()
    assert fp4jax.recipes.fp4(gradient=None).dgrad.lhs is None
    blocks = fp4jax.recipes.fp4_vector(weight=PerBlock(32))
    assert blocks.dgrad.rhs == blocks.fprop.rhs
    assert blocks.wgrad.lhs == fp4jax.REUSE


def test_a_stochastic_recipe_says_that_it_needs_a_key():
    noisy = QuantSpec(fp4jax.E5M2, PerTensor(), rounding=fp4jax.STOCHASTIC)
    assert Recipe("noisy", dgrad=Gemm(noisy, None)).needs_key


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fprop": Gemm(fp4jax.REUSE, FP4)}, r"fprop.lhs=REUSE has nothing to reuse; REUSE is for dgrad.rhs"),
        ({"wgrad": Gemm(None, fp4jax.REUSE)}, r"wgrad.rhs=REUSE has nothing to reuse"),
        (
            {"fprop": Gemm(None, QuantSpec(fp4jax.E2M1, PerBlock(32))), "dgrad": Gemm(None, fp4jax.REUSE)},
            r"dgrad.rhs=REUSE cannot reuse an operand with scales by PerBlock\(size=32\), .* give it a QuantSpec",
        ),
        ({"weight_estimator": fp4jax.DGE()}, r"weight_estimator=DGE\(.*\) needs a quantized weight"),
        ({"activation_estimator": fp4jax.DGE()}, "needs a quantized activation, but fprop.lhs is None"),
        ({"outliers": fp4jax.OCC()}, "outliers needs a quantized activation, but fprop.lhs is None"),
        (
            {"fprop": Gemm(QuantSpec(fp4jax.E4M3), None), "outliers": fp4jax.OCC(residual_format=fp4jax.E5M2)},
            r"outliers.residual_format=E5M2 cannot hold the values of E4M3 \(such as 416.0\); use E4M3, or None",
        ),
        (
            {"fprop": Gemm(None, QuantSpec(fp4jax.FloatFormat("e5m10", 5, 10, 65504.0)))},
            r"fprop.rhs has values of 16 bits \(E5M10\); operands have at most 8, .* use None to leave one in high",
        ),
        (
            {"fprop": Gemm(QuantSpec(fp4jax.E2M1, scale=fp4jax.PowerOfTwo("floor")), None), "outliers": fp4jax.OCC()},
            r"need a scale that no value exceeds, and PowerOfTwo\(mode='floor'\) lets the largest saturate",
        ),
    ],
)
def test_contradictions_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Recipe("broken", **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fprop": FP4}, r"fprop=.* must be a Gemm\(lhs, rhs\)"),
        ({"dgrad": Gemm("e2m1", None)}, "dgrad.lhs='e2m1' must be a QuantSpec, None or REUSE"),
        ({"weight_estimator": "dge"}, "weight_estimator='dge' must be an Estimator"),
        ({"outliers": 0.99}, "outliers=0.99 must be an OCC or None"),
    ],
)
def test_other_kinds_are_refused(arguments, message):
    with pytest.raises(TypeError, match=message):
        Recipe("broken", **arguments)


def test_output_dtype_is_canonical():
    assert Recipe("a", output_dtype=jnp.bfloat16) == Recipe("a", output_dtype="bfloat16")
