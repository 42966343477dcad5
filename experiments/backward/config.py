"""What becomes of the gradient dY in both backward products."""

import dataclasses

from experiments.experiment import ArmSpec, Claim, Experiment
from fp4jax.formats import E5M2, FloatFormat
from fp4jax.quantize import QuantSpec
from fp4jax.recipe import REUSE, Gemm, Recipe
from fp4jax.recipes import fp4
from fp4jax.scaling import PerVector


def fp4_vector_gradient(*, gradient: FloatFormat = E5M2) -> Recipe:
    """`fp4` with a scale for each vector of the gradient along the contraction, where it has one a tensor."""
    spec = QuantSpec(gradient, PerVector())
    return dataclasses.replace(fp4(), name="fp4_vector_gradient", dgrad=Gemm(spec, REUSE), wgrad=Gemm(REUSE, spec))


EXPERIMENT = Experiment(
    name="backward",
    question="In which format do gradients enter the backward products without loss, and with how many scales?",
    expected="No difference between high precision, E5M2 and E4M3, tensor or vector, at this length.",
    cost="4 runs of 3 seeds side by side on one H200, 35 to 80 s each, and 20 s to compile, beside others on "
    "the card; fp4 is that of precision",
    arms=(
        ArmSpec("bf16", "bf16"),
        ArmSpec("dY in BF16", "fp4:gradient=none"),
        ArmSpec("dY in E5M2, tensor", "fp4"),
        ArmSpec("dY in E4M3, tensor", "fp4:gradient=E4M3"),
        ArmSpec("dY in E5M2, vector", "fp4_vector_gradient"),
        ArmSpec("dY in E4M3, vector", "fp4_vector_gradient:gradient=E4M3"),
    ),
    claims=(
        Claim("BF16 gradients beat E5M2", "dY in BF16", "dY in E5M2, tensor"),
        Claim("E4M3 gradients beat E5M2", "dY in E4M3, tensor", "dY in E5M2, tensor"),
        Claim("vectors beat tensors in E5M2", "dY in E5M2, vector", "dY in E5M2, tensor"),
    ),
    paper="The paper does not say how gradients are quantized; its code takes E5M2, one scale a tensor.",
    recipes={"fp4_vector_gradient": fp4_vector_gradient},
)
