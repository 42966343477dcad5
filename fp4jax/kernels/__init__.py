"""Pallas kernels: scaled FP8 products, fused quantizers and the exact quantile, each bit-equal to the reference.

Every kernel has a host side (checks, configuration, launch) and a device side (``*_device``). ``interpret`` runs them
on a CPU.
"""

from fp4jax.kernels import gemm, quantile, quantizer
from fp4jax.kernels.device import interpret, interpreting, is_hopper, lowering_for, races_found
from fp4jax.kernels.gemm import Factor, GemmConfig, scaled_matmul
from fp4jax.kernels.quantile import order_statistics
from fp4jax.kernels.quantizer import Quantized, QuantizerConfig, Wanted, quantize_rows, quantize_tiles

__all__ = [
    "Factor",
    "GemmConfig",
    "Quantized",
    "QuantizerConfig",
    "Wanted",
    "gemm",
    "interpret",
    "interpreting",
    "is_hopper",
    "lowering_for",
    "order_statistics",
    "quantile",
    "quantize_rows",
    "quantize_tiles",
    "quantizer",
    "races_found",
    "scaled_matmul",
]
