"""The one table of tolerances. Keyed by format or dtype, derived rather than tuned, and never loosened quietly.

Values, scales and thresholds have no entry here: they are compared bit for bit. What remains is

* a sum of k products in float32, whatever its order: |error| ≤ (k + 4)·2⁻²⁴·Σ|a||b|, then one rounding to the output's
  dtype. ``product_bound`` is that inequality; the 4 covers the scales multiplied in afterwards;
* the DGE factor, whose p^(1/k − 1) amplifies a rounding of the scaled input by 0.8/|p| ≤ 24 before it is clipped;
* a value that was quantized: half a step of its format, relative to itself.
"""

import numpy as np

# Half the distance between 1 and the next value: what one rounding to the dtype or format costs, relative.
UNIT_ROUNDOFF = {
    "float32": 2.0**-24,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
    "E4M3": 2.0**-4,
    "E5M2": 2.0**-3,
    "E1M2": 2.0**-3,
    "E2M1": 2.0**-2,
    "E3M0": 2.0**-1,
}

# Smallest normal: below it a dtype's rounding is absolute.
SMALLEST_NORMAL = {"float32": 2.0**-126, "float16": 2.0**-14, "bfloat16": 2.0**-126}

# Relative error of the DGE factor computed from a float32 scaled input, off the clipped plateau.
DGE_FACTOR = 64 * UNIT_ROUNDOFF["float32"]

# That of a factor computed in a kernel from the same scaled input. With log2 and exp2 good to 2⁻²² (PTX ISA), and log2
# of p^(1/k − 1) at most 3.9 below the paper's clip, (3.9 ln 2 + 1)·2⁻²² and four roundings.
DGE_KERNEL_FACTOR = 2.0**-19

# A sum of FP8 products on Hopper's tensor cores, promoted to float32 every 256 of k, relative to Σ|a||b|: eight
# instructions add 32 products each, and each keeps about 14 bits of its largest addend. Where four-bit products fit
# into those bits the sum is exact.
TENSOR_CORE_FP8 = 8 * 2.0**-13


def product_bound(value: np.ndarray, mass: np.ndarray, k: int, dtype: str, operand: str = "float32") -> np.ndarray:
    """Largest error of a sum of ``k`` products that was summed in float32 and stored in ``dtype``.

    ``mass`` is Σ|a||b|. ``operand`` names the dtype both operands were rounded to first, where a recipe leaves them
    in high precision but the product runs in a narrower dtype (a float32 weight beside a bfloat16 activation).
    """
    relative = (k + 4) * UNIT_ROUNDOFF["float32"]
    if operand != "float32":
        relative += 2 * UNIT_ROUNDOFF[operand]
    unit = UNIT_ROUNDOFF[dtype]
    return mass * relative + np.abs(value) * unit * (1 + relative) + SMALLEST_NORMAL[dtype] * unit * 2


def dge_product_bound(value: np.ndarray, mass: np.ndarray, k: int, dtype: str, operand: str = "float32") -> np.ndarray:
    """``product_bound`` of a sum that was then multiplied with a DGE factor (already inside value and mass)."""
    return product_bound(value, mass, k, dtype, operand) + np.abs(value) * DGE_FACTOR
