"""What becomes of a value in the quantizers' kernels: the arithmetic of ``fp4jax.scaling`` and ``fp4jax.rounding`` in
few operations.

A quantizer moves bytes: at 4.3 TB/s an H200 has time for about 20 operations a BF16 value. So maxima are taken on the
bits as integers, and rounding is an addition: with e the exponent of |u|, adding and subtracting 2^(e + 23 -
mantissa_bits) leaves |u| rounded to the grid, ties to even, since that is where the last bit of a float32 sum stands.
The largest value of a block may land an ulp past M; that rounds to M as well.
"""

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from fp4jax.formats import E4M3, FloatFormat
from fp4jax.rounding import NOISE_BITS

INFINITY = np.int32(0x7F800000)
MAGNITUDE = np.int32(0x7FFFFFFF)
_SIGN = np.int32(-(2**31))


def bits_of(x):
    """int32 bits of float32."""
    return lax.bitcast_convert_type(x, jnp.int32)


def float_of(bits):
    """float32 of int32 bits."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def as_float32(x):
    """Exact float32 of float32, bfloat16 or float16."""
    if x.dtype == jnp.bfloat16:
        return float_of(lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.int32) << 16)
    return x.astype(jnp.float32)


def divide(numerator: float, x):
    """float32(numerator / x) rounded once, for normal x > 0 and a normal quotient: Triton's division is not.

    The quotient of the 24-bit mantissas is estimated in float32, then corrected by its remainder, which is exact
    modulo 2³².
    """
    bits = bits_of(x)
    exponent, mantissa = (bits >> 23) - 127, (bits & 0x007FFFFF) | 0x00800000
    top, top_exponent = np.frexp(np.float64(numerator))  # numerator = top · 2^top_exponent, 1/2 <= top < 1
    top, top_exponent = int(top * 2**24), int(top_exponent) - 1
    assert top == np.float64(numerator) / 2.0**top_exponent * 2**23
    # Shifted so that the quotient lies in [2²³, 2²⁴).
    smaller = (mantissa > top).astype(jnp.int32)
    shift = 23 + smaller
    quotient = (jnp.float32(top) / mantissa.astype(jnp.float32) * float_of((shift + 127) << 23)).astype(jnp.int32)
    low_bits = jnp.where(smaller == 1, jnp.int32(_wrap(top << 24)), jnp.int32(_wrap(top << 23)))
    remainder = low_bits - quotient * mantissa
    for _ in range(4):
        over, under = (remainder >= mantissa).astype(jnp.int32), (remainder < 0).astype(jnp.int32)
        quotient = quotient + over - under
        remainder = remainder - (over - under) * mantissa
    quotient = quotient + (2 * remainder > mantissa).astype(jnp.int32)
    carry = quotient >> 24  # rounded up to 2²⁴
    field = top_exponent - exponent - smaller + carry + 127
    return float_of((field << 23) | jnp.where(carry == 1, 0, quotient & 0x007FFFFF))


def _wrap(value: int) -> int:
    """``value`` modulo 2³² as a signed 32-bit integer."""
    return (value + 2**31) % 2**32 - 2**31


@dataclasses.dataclass(frozen=True)
class Rule:
    """What becomes of a value: static side of all quantizers.

    Attributes:
        format: of the values, with a mantissa; its grid fits E4M3 or E5M2.
        rounding: name of the rounding.
        scale: ``"absmax"``, or the mode of ``PowerOfTwo``.
        outliers: whether values are clamped at thresholds, and ΔX dropped or carried in E4M3.
        cast: whether the cast to the held type rounds as the format asks.
    """

    format: FloatFormat
    rounding: str
    scale: str
    outliers: Literal["none", "dropped", "carried"]
    cast: bool

    def scales(self, amax_bits):
        """(scale, r, finite) from the bits of amax, those of NaN or infinity where a block is not finite."""
        finite = amax_bits < INFINITY
        amax = float_of(jnp.where(finite, amax_bits, 0))
        highest = min(self.format.max * 2.0**126, float(np.finfo(np.float32).max))
        amax = jnp.minimum(jnp.maximum(amax, jnp.float32(self.format.max * 2.0**-125)), jnp.float32(highest))
        if self.scale == "absmax":
            scale, reciprocal = amax * jnp.float32(1.0 / self.format.max), divide(self.format.max, amax)
        else:
            scale, reciprocal = _powers_of_two(amax, self.format, self.scale)
        empty = amax_bits == 0
        scale, reciprocal = (jnp.where(empty, jnp.float32(1), v) for v in (scale, reciprocal))
        return jnp.where(finite, scale, jnp.float32(np.nan)), reciprocal, finite

    @property
    def saturates(self) -> bool:
        """Whether values may land past M by more than rounding."""
        return self.scale in ("floor", "even")

    def round(self, u, noise):
        """float32 u, in units of the grid, to the grid, or to what the cast takes there; ``noise()`` where it draws."""
        if self.cast:
            limit = jnp.float32(self.format.max)
            return jnp.minimum(jnp.maximum(u, -limit), limit) if self.saturates else u
        lowest, shift = jnp.float32(2.0**self.format.min_exponent), self.format.mantissa_bits << 23
        magnitude = jnp.abs(u)
        if self.saturates or self.rounding != "nearest_even":
            magnitude = jnp.minimum(magnitude, jnp.float32(self.format.max))
        exponent = bits_of(jnp.maximum(magnitude, lowest)) & INFINITY
        if self.rounding == "nearest_even":
            anchor = float_of(exponent + np.int32((23 << 23) - shift))
            landed = (magnitude + anchor) - anchor
        else:
            step = exponent - np.int32(shift)
            scaled = magnitude * float_of(np.int32(254 << 23) - step)
            if self.rounding == "ties_up":
                scaled = jnp.where(u < 0, -scaled, scaled)
                floor = jnp.floor(scaled)
                up = scaled - floor >= jnp.float32(0.5)
            else:
                floor = jnp.floor(scaled)
                up = noise() < (scaled - floor) * jnp.float32(2**NOISE_BITS)
            landed = (floor + up.astype(jnp.float32)) * float_of(step)
        return float_of((bits_of(landed) & MAGNITUDE) | (bits_of(u) & _SIGN))

    def quantize(self, value, reciprocal, finite, bounds=None, noise=None):
        """Values of a float32 tile, as float32; +0 where not ``finite``.

        An outlier is the value of the threshold that it passed plus (x - threshold) · r. Subtracting the latter, with
        the sign turned, leaves all other entries as they are, zeros of both signs too.
        """
        if bounds is None:
            landed = self.round(value * reciprocal, noise)
        else:
            clipped = clip(value, *bounds)
            landed = self.round(clipped * reciprocal, noise)
            if self.outliers == "carried":
                # The bound changes no result. It keeps product and difference from being fused into one rounding.
                landed = landed - jnp.maximum((clipped - value) * reciprocal, jnp.float32(-2 * E4M3.max))
        return jnp.where(finite, landed, jnp.float32(0))


def _powers_of_two(amax, format: FloatFormat, mode: str):
    """(2^e, 2^-e) as ``fp4jax.PowerOfTwo`` has e."""
    bits = bits_of(amax)
    exponent, mantissa = (bits >> 23) - 127, bits & 0x007FFFFF
    largest = int(np.float32(format.max).view(np.int32)) & 0x007FFFFF
    up = {
        "floor": lambda: jnp.zeros_like(bits),
        "ceil": lambda: (mantissa > 0).astype(jnp.int32),
        "even": lambda: (mantissa + (1 << (22 - format.mantissa_bits)) >= 1 << 23).astype(jnp.int32),
        "rceil": lambda: (mantissa > largest).astype(jnp.int32),
    }[mode]()
    e = jnp.minimum(jnp.maximum(exponent - (math.frexp(format.max)[1] - 1) + up, -126), 126)
    return float_of((e + 127) << 23), float_of((127 - e) << 23)


def clip(x, lo, hi):
    """As ``fp4jax.outliers.clip``, for bounds of which a zero is -0 below and +0 above."""
    return jnp.minimum(jnp.maximum(x, lo), hi)


def bounds_of(thresholds):
    """Bounds for ``clip``: -0 < +0, for the maxima of PTX too; NaN, which clamps nothing, as infinity."""
    lo, hi = thresholds[0], thresholds[1]
    lo, hi = jnp.where(lo != lo, jnp.float32(-np.inf), lo), jnp.where(hi != hi, jnp.float32(np.inf), hi)
    return jnp.where(lo == 0, jnp.float32(-0.0), lo), jnp.where(hi == 0, jnp.float32(0.0), hi)


class Extremes(NamedTuple):
    """The largest magnitudes; with outliers also the largest values, and the negated smallest.

    Of each place of a tile, as float32, until ``of_rows`` or ``of_all`` has compared places, after which magnitudes are
    bits: threads compare what they hold as it comes, and exchange it once. Comparing places keeps NaN, exchanging may
    lose it, but for integers.
    """

    whole: Any
    top: Any = None
    bottom: Any = None

    @classmethod
    def of(cls, tile, rule: Rule) -> "Extremes":
        """Those of one tile."""
        magnitude = jnp.abs(tile)
        return cls(magnitude) if rule.outliers == "none" else cls(magnitude, tile, -tile)

    def including(self, tile, rule: Rule) -> "Extremes":
        """With those of another tile."""
        both = zip(self, Extremes.of(tile, rule), strict=True)
        return Extremes(*(one if one is None else jnp.maximum(one, two) for one, two in both))

    def of_rows(self) -> "Extremes":
        """Those of each row."""
        others = (one if one is None else jnp.max(one, axis=1) for one in self[1:])
        return Extremes(jnp.max(bits_of(self.whole) & MAGNITUDE, axis=1), *others)

    def of_all(self):
        """Bits of the largest magnitude."""
        return jnp.max(bits_of(self.whole) & MAGNITUDE)

    def amax(self, bounds, rule: Rule):
        """Bits of amax of rows; with outliers that of clamped ones, but so large that no carried entry saturates."""
        if bounds is None:
            return self.whole
        amax = jnp.maximum(jnp.abs(clip(self.top, *bounds)), jnp.abs(clip(-self.bottom, *bounds)))
        if rule.outliers == "carried":
            amax = jnp.maximum(amax, float_of(self.whole) * jnp.float32(rule.format.max / E4M3.max))
        return jnp.where(self.whole < INFINITY, bits_of(amax), INFINITY)
