"""What a quantizer did to one operand: pure functions of the array and its ``QuantSpec``, float32 scalars out."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from fp4jax.dot.xla_operands import quantize_activation
from fp4jax.estimators import Estimator, gradient_factor
from fp4jax.exact import as_float32, magnitude, multiply
from fp4jax.outliers import OCC
from fp4jax.quantize import QuantSpec
from fp4jax.rounding import NEAREST_EVEN
from fp4jax.scaling import normalize_axis
from fp4jax.typing import Array, Axis, Key

STATISTICS = (
    "snr_db", "cosine", "mse", "underflow", "clipped", "nonfinite", "residual_share", "residual_energy",
    "residual_saturated", "scale_min", "scale_max", "scale_spread", "amax", "crest",
)  # fmt: skip
"""Names of what ``operand_statistics`` returns, in order."""

FACTOR_EDGES = tuple(i / 4 for i in range(13))
"""Edges of the bins of ``factor_histogram``: 0, .25, … 3; the last bin holds everything from 2.75 on."""

SQRT3_DB = 10 * math.log10(3)
"""The SNR, 4.77 dB, at which ‖x‖ = √3 ‖x - x̂‖: below it gradients no longer outweigh their quantization noise
(Chmiel et al., FP4 All the Way, arXiv:2505.19115)."""


def operand_statistics(
    x: Array, spec: QuantSpec, *, axis: Axis, outliers: OCC | None = None, key: Key | None = None,
    clamp_axis: Axis | None = None,
) -> dict[str, Array]:  # fmt: skip
    """How well ``x`` survives its quantizer. With x̂ the values that the product multiplies:

        snr_db              10 log10(Σ x² / Σ (x - x̂)²); inf where nothing was lost, as with x = 0
        cosine              Σ x x̂ / √(Σ x² Σ x̂²)
        mse                 Σ (x - x̂)² / n
        underflow           share of the nonzero entries that became 0
        clipped             share of the entries at ±max of the format, or clamped by ``outliers``
        nonfinite           share of the entries that are NaN or infinite
        residual_share      share of the entries with ΔX ≠ 0
        residual_energy     Σ ΔX² / Σ x²
        residual_saturated  share of those carried entries that stand at ±max of ``outliers.residual_format``
        scale_min/_max      smallest and largest scale of a block that is not all zero (1 where all are)
        scale_spread        log2(scale_max / scale_min)
        amax, crest         max |x|, and that over √(Σ x² / n)

    All but ``nonfinite`` are NaN where that is not 0. Sums are taken in units of a power of two near amax, so that
    neither 1e-30 nor 1e30 squared leaves float32; ``mse`` alone can.

    Args:
        x: float32, bfloat16 or float16, any shape; an empty array lost nothing.
        spec: what it is quantized to.
        axis: the contraction axis or axes.
        outliers: OCC of an activation. x̂ then includes what compensation adds.
        key: PRNG key of stochastic rounding.
        clamp_axis: fprop's contraction, where ``axis`` is that of another product.

    Returns:
        A float32 scalar for each of ``STATISTICS``.

    Raises:
        TypeError, ValueError: as ``fp4jax.quantize`` does.

    Example:
        >>> import fp4jax, jax.numpy as jnp
        >>> stats = operand_statistics(jnp.array([0.1, 1.0, -6.0]), fp4jax.QuantSpec(fp4jax.E2M1), axis=-1)
        >>> {name: round(float(stats[name]), 2) for name in ("snr_db", "underflow", "clipped", "amax")}
        {'snr_db': 35.68, 'underflow': 0.33, 'clipped': 0.33, 'amax': 6.0}
    """
    x = lax.stop_gradient(jnp.asarray(x))
    axes = normalize_axis(axis, x.ndim)
    if spec.needs_key and key is None:
        raise ValueError(f"rounding={spec.rounding!r} draws noise and key=None; pass key=jax.random.key(...)")
    clamp_axes = None if clamp_axis is None else normalize_axis(clamp_axis, x.ndim)
    values, scales, delta = quantize_activation(x, spec, axes, outliers, key, clamp_axes)
    value = as_float32(x)
    size = np.float32(max(1, math.prod(x.shape)))

    bad = _share(~jnp.isfinite(value), size)
    largest = jnp.max(magnitude(value), initial=0)
    block_amax = spec.granularity.reduce_max(magnitude(value), axes)
    decoded = spec.scale.decode(scales.scale, scales.outer_scale)
    low, high = _range(decoded, block_amax)

    power, inverse = _unit(largest)
    dequantized = values * spec.granularity.expand(decoded, x.shape, axes)
    lost = values == 0
    if delta is not None and outliers is not None and outliers.compensation == "sparse":
        dequantized = dequantized + as_float32(delta.astype(x.dtype))
        lost = lost & (delta == 0)
    u, v = multiply(value, inverse), multiply(dequantized, inverse)
    signal, noise, kept = jnp.sum(u * u), jnp.sum(jnp.square(u - v)), jnp.sum(v * v)

    nonzero = magnitude(value) > 0
    at_end = jnp.abs(values) >= np.float32(spec.format.max)
    stats = {
        "snr_db": jnp.where(noise == 0, np.float32(np.inf), _decibel(signal, noise)),
        "cosine": jnp.where(signal == 0, np.float32(1), _ratio(jnp.sum(u * v), jnp.sqrt(signal) * jnp.sqrt(kept))),
        "mse": noise / size * power * power,
        "underflow": _ratio(_count(nonzero & lost), _count(nonzero)),
        "clipped": _share(at_end if delta is None else at_end | (delta != 0), size),
        "residual_share": jnp.float32(0),
        "residual_energy": jnp.float32(0),
        "residual_saturated": jnp.float32(0),
        "scale_min": low,
        "scale_max": high,
        "scale_spread": jnp.where(high == low, jnp.float32(0), jnp.log2(high) - jnp.log2(low)),
        "amax": largest,
        "crest": _ratio(multiply(largest, inverse), jnp.sqrt(signal / size)),
    }
    if delta is not None and outliers is not None:
        moved = delta != 0
        stats["residual_share"] = _share(moved, size)
        stats["residual_energy"] = _ratio(jnp.sum(jnp.square(multiply(delta, inverse))), signal)
        carrier = outliers.residual_format
        if outliers.compensation == "residual" and carrier is not None:
            full = moved & (jnp.abs(values) >= np.float32(carrier.max))
            stats["residual_saturated"] = _ratio(_count(full), _count(moved))
    stats = {name: jnp.where(bad > 0, np.float32(np.nan), stat) for name, stat in stats.items()}
    return {name: {**stats, "nonfinite": bad}[name] for name in STATISTICS}


def factor_histogram(w: Array, spec: QuantSpec, *, axis: Axis, estimator: Estimator) -> Array:
    """Shares of the weights by the factor f'(w · r) that the estimator gives their gradients.

    Under ``DGE(k=5, clip=3)`` all factors lie in [.2, 3]: a hump at .2-.5, and the clipped 3.4 % in the last bin.

    Args:
        w: float32, bfloat16 or float16 weights.
        spec: what they are quantized to.
        axis: the contraction axis or axes.
        estimator: whose factor.

    Returns:
        float32 [12], shares between ``FACTOR_EDGES``; they sum to 1, or to less by the share whose factor is NaN.

    Example:
        >>> import fp4jax, jax.numpy as jnp
        >>> spec = fp4jax.QuantSpec(fp4jax.E2M1)
        >>> factor_histogram(jnp.array([6.0, 5.0, 0.25, 0.0]), spec, axis=-1, estimator=fp4jax.DGE()).tolist()
        [0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.5]
    """
    w = lax.stop_gradient(jnp.asarray(w))
    factor = gradient_factor(w, spec, normalize_axis(axis, w.ndim), estimator)
    size = np.float32(max(1, math.prod(w.shape)))
    above = [_share(factor >= np.float32(edge), size) for edge in FACTOR_EDGES[:-1]]
    above = jnp.stack([*above, jnp.zeros_like(above[0])])
    return above[:-1] - above[1:]


def find_operand_scale(x: Array, spec: QuantSpec, axis: tuple[int, ...], outliers: OCC | None) -> Array:
    """The float32 scales that a product applies to ``x``, without quantizing it."""
    _, scales, _ = quantize_activation(x, dataclasses.replace(spec, rounding=NEAREST_EVEN), axis, outliers, None)
    return spec.scale.decode(scales.scale, scales.outer_scale)


def _count(mask: Array) -> Array:
    return jnp.sum(mask, dtype=jnp.int32).astype(jnp.float32)


def _share(mask: Array, size: np.float32) -> Array:
    return _count(mask) / size


def _ratio(a: Array, b: Array) -> Array:
    """a / b; 0 where b is 0."""
    return jnp.where(b == 0, jnp.float32(0), a / jnp.where(b == 0, jnp.float32(1), b))


def _decibel(signal: Array, noise: Array) -> Array:
    safe = jnp.where(noise == 0, jnp.float32(1), noise)
    return (jnp.log10(jnp.maximum(signal, np.float32(2.0**-126))) - jnp.log10(safe)) * np.float32(10)


def _range(scales: Array, amax: Array) -> tuple[Array, Array]:
    """Smallest and largest of the scales whose block is not all zero."""
    used = amax > 0
    low = jnp.min(jnp.where(used, scales, np.float32(np.inf)), initial=np.float32(np.inf))
    high = jnp.max(jnp.where(used, scales, np.float32(0)), initial=np.float32(0))
    return jnp.where(high == 0, np.float32(1), low), jnp.where(high == 0, np.float32(1), high)


def _unit(largest: Array) -> tuple[Array, Array]:
    """A power of two with largest / 2 < power ≤ largest (up to 2¹²⁶), and its reciprocal; 1 for 0 and for infinity."""
    field = jnp.minimum(lax.bitcast_convert_type(largest, jnp.int32) >> 23, 253)
    field = jnp.where((largest == 0) | ~jnp.isfinite(largest), 127, field)
    power, inverse = (lax.bitcast_convert_type(f << 23, jnp.float32) for f in (field, 254 - field))
    return power, inverse
