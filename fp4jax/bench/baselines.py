"""What else there is: products of XLA, Flax's FP8 layer, and Qwix where it is installed."""

import functools
import importlib.util
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from jax import lax

from fp4jax.bench.measure import K_MAJOR, normal
from fp4jax.formats import E2M1
from fp4jax.kernels import quantize_rows
from fp4jax.quantize import QuantSpec
from fp4jax.typing import Array

QWIX = {
    "Qwix FP8": {"weight_qtype": "float8_e4m3fn", "act_qtype": "float8_e4m3fn", "bwd_qtype": "float8_e5m2"},
    "Qwix NVFP4, emulated": {
        "weight_qtype": "nvfp4", "act_qtype": "nvfp4", "bwd_qtype": "float8_e5m2", "tile_size": 16
    },
}  # fmt: skip
"""Rules of Qwix's quantized training. Its NVFP4 has no tensor core on Hopper, and is computed in higher precision."""


def compiled(function: Callable, *, quick: bool) -> Any:
    """``function`` under jit; ``quick`` on a GPU lets XLA choose among the products of cuBLASLt only."""
    options = {"xla_gpu_enable_triton_gemm": False} if quick and jax.default_backend() == "gpu" else None
    return jax.jit(function, compiler_options=options)


def fp8_operand(shape: tuple[int, int], seed: int = 0) -> Array:
    """E2M1 values of a normal matrix, held in E4M3."""
    values = quantize_rows(normal(shape, seed=seed), QuantSpec(E2M1)).values
    assert values is not None
    return values


def xla_bfloat16(dtype, *, quick: bool = True) -> Any:
    """BF16 operands [m, k] and [n, k]."""
    return compiled(
        lambda lhs, rhs: lax.dot_general(lhs, rhs, K_MAJOR, preferred_element_type=jnp.dtype(dtype)), quick=quick
    )


def _scaled(lhs: Array, rhs: Array, scale: Array, dtype) -> Array:
    lhs, rhs = (x.astype(jnp.bfloat16) * scale for x in (lhs, rhs))
    return lax.dot_general(lhs, rhs, K_MAJOR, preferred_element_type=dtype)


def xla_fp8(dtype, *, quick: bool = True) -> Any:
    """FP8 operands under one scale a tensor, a pattern that XLA hands to cuBLASLt."""
    return compiled(functools.partial(_scaled, dtype=jnp.dtype(dtype)), quick=quick)


def xla_fp8_vectors(dtype, *, quick: bool = True) -> Any:
    """The same in float32, multiplied by a scale a row and one a column afterwards."""

    def product(lhs, rhs, scale, rows, cols):
        return (_scaled(lhs, rhs, scale, jnp.float32) * rows[:, None] * cols).astype(dtype)

    return compiled(product, quick=quick)


def flax_fp8_layer(features: int) -> tuple[Callable, Callable]:
    """(apply, init) of a Linen Dense whose products are Flax's ``Fp8DotGeneral``."""
    layer = linen.Dense(features, use_bias=False, dtype=jnp.bfloat16, dot_general_cls=linen.Fp8DotGeneral, name="dense")
    return layer.apply, lambda x: layer.init(jax.random.key(0), x)


def qwix() -> ModuleType | None:
    """Qwix, or None where it is not installed."""
    return importlib.import_module("qwix") if importlib.util.find_spec("qwix") else None


def qwix_model(module: ModuleType, model: Any, rule: Mapping[str, Any], keep: str, *inputs: Array) -> Any:
    """``model`` with its linear layers under a rule of ``QWIX``, but for the paths that match ``keep``."""
    provider = module.QtProvider([module.QtRule(module_path=f"^(?!.*({keep})).*$", **rule)])
    return module.quantize_model(model, provider, *inputs)
