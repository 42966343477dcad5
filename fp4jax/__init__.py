"""fp4jax: train language models with 4-bit floating-point matrix products, in JAX and Flax.

The public names stand in the order in which an array meets them:
array → outliers → scale → round → QTensor → dot_general → layer → model → train step → optimizer.
"""

import importlib

from fp4jax import recipes
from fp4jax.dot import DotGeneral, dot_general, explain
from fp4jax.estimators import DGE, STE, ClippedSTE, fake_quant
from fp4jax.formats import E1M2, E2M1, E3M0, E4M3, E5M2, E8M0, FloatFormat
from fp4jax.outliers import OCC, clamp_outliers
from fp4jax.quantize import QTensor, QuantSpec, dequantize, quantize
from fp4jax.recipe import REUSE, Gemm, Recipe
from fp4jax.rounding import NEAREST_EVEN, STOCHASTIC, TIES_UP
from fp4jax.scaling import AbsMax, PerBlock, PerBlock2D, PerTensor, PerVector, PowerOfTwo, TwoLevel

__version__ = "0.1.0"

__all__ = [
    "DGE",
    "E1M2",
    "E2M1",
    "E3M0",
    "E4M3",
    "E5M2",
    "E8M0",
    "NEAREST_EVEN",
    "OCC",
    "REUSE",
    "STE",
    "STOCHASTIC",
    "TIES_UP",
    "AbsMax",
    "ClippedSTE",
    "DotGeneral",
    "FloatFormat",
    "Gemm",
    "PerBlock",
    "PerBlock2D",
    "PerTensor",
    "PerVector",
    "PowerOfTwo",
    "QTensor",
    "QuantSpec",
    "Recipe",
    "TwoLevel",
    "clamp_outliers",
    "dequantize",
    "dot_general",
    "explain",
    "fake_quant",
    "quantize",
    "recipes",
]

_LAZY = ("interop", "kernels", "linen", "models", "nn", "optim", "parallel", "telemetry", "train")


def __getattr__(name: str):
    """Imports the packages beyond the numerics when they are first named: they bring Flax, Optax and Orbax along."""
    if name in _LAZY:
        return importlib.import_module(f"fp4jax.{name}")
    raise AttributeError(f"module 'fp4jax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
