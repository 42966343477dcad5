"""Device side of the quantizers (Pallas on Triton): the arithmetic of ``fp4jax.scaling`` and ``fp4jax.rounding`` in
few operations.

A quantizer moves bytes: at 4.3 TB/s an H200 has time for about 20 operations a BF16 value. So maxima are taken on the
bits as integers, and rounding is an addition: with e the exponent of |u|, adding and subtracting 2^(e + 23 -
mantissa_bits) leaves |u| rounded to the grid, ties to even, since that is where the last bit of a float32 sum stands.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from fp4jax.formats import FloatFormat

_INFINITY = np.int32(0x7F800000)
_MAGNITUDE = np.int32(0x7FFFFFFF)
_SIGN = np.int32(-(2**31))


@dataclasses.dataclass(frozen=True)
class Carry:
    """Outlier compensation: thresholds are given, and ΔX is carried in ``format``; None drops it."""

    format: FloatFormat | None


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


def scale_of(amax_bits, format: FloatFormat):
    """(scale, r, finite) of ``AbsMax`` from the bits of amax, those of NaN or infinity where a block is not finite."""
    finite = amax_bits < _INFINITY
    amax = float_of(jnp.where(finite, amax_bits, 0))
    highest = min(format.max * 2.0**126, float(np.finfo(np.float32).max))
    amax = jnp.minimum(jnp.maximum(amax, jnp.float32(format.max * 2.0**-125)), jnp.float32(highest))
    scale, reciprocal = amax * jnp.float32(1.0 / format.max), divide(format.max, amax)
    empty = amax_bits == 0
    scale, reciprocal = (jnp.where(empty, jnp.float32(1), v) for v in (scale, reciprocal))
    return jnp.where(finite, scale, jnp.float32(np.nan)), reciprocal, finite


def _nearest(u, highest, lowest_exponent, mantissa_shift):
    """|u|, at most ``highest``, to the nearest value, ties to even; ``mantissa_shift`` = (23 - mantissa bits) << 23."""
    magnitude = jnp.minimum(jnp.abs(u), highest)
    exponent = bits_of(jnp.maximum(magnitude, lowest_exponent)) & _INFINITY
    anchor = float_of(exponent + mantissa_shift)
    return (magnitude + anchor) - anchor


def _signed(magnitude, u, finite):
    """``magnitude`` with the sign of u; +0 where not ``finite``."""
    sign, rest = jnp.where(finite, _SIGN, 0), jnp.where(finite, _MAGNITUDE, 0)
    return float_of((bits_of(magnitude) & rest) | (bits_of(u) & sign))


def round_to_grid(u, format: FloatFormat, rounding: str, finite):
    """u, in units of the grid, to the values of ``format``; +0 where not ``finite``."""
    highest, lowest = jnp.float32(format.max), jnp.float32(2.0**format.min_exponent)
    if rounding == "nearest_even":
        return _signed(_nearest(u, highest, lowest, np.int32((23 - format.mantissa_bits) << 23)), u, finite)
    magnitude = jnp.minimum(jnp.abs(u), highest)
    step = (bits_of(jnp.maximum(magnitude, lowest)) & _INFINITY) - (format.mantissa_bits << 23)
    scaled = jnp.where(u < 0, -magnitude, magnitude) * float_of(np.int32(254 << 23) - step)
    floor = jnp.floor(scaled)
    landed = (floor + (scaled - floor >= jnp.float32(0.5)).astype(jnp.float32)) * float_of(step)
    return _signed(landed, u, finite)


def _clip(x, lo, hi):
    return jnp.where(x < lo, lo, jnp.where(x > hi, hi, x))


class Outliers(NamedTuple):
    """What a tile needs to clamp and carry: thresholds, and where they land on the grid, by row."""

    lo: Any
    hi: Any
    lo_value: Any
    hi_value: Any


def quantize_tile(value, reciprocal, finite, format, rounding, outliers: Outliers | None, carry: Carry | None):
    """Grid values of a float32 tile, as float32.

    An outlier is the value of the threshold it passed plus (x - threshold) · r, rounded to the carrying format; any
    other entry is -0 + x · r, rounded to ``format``. So both take the same few operations, under constants chosen by
    the comparison.
    """
    if outliers is None or carry is None:
        return round_to_grid(value * reciprocal, format, rounding, finite)
    if carry.format is None:
        return round_to_grid(_clip(value, outliers.lo, outliers.hi) * reciprocal, format, rounding, finite)
    below, above = value < outliers.lo, value > outliers.hi
    outside = below | above
    threshold = jnp.where(below, outliers.lo, jnp.where(above, outliers.hi, jnp.float32(0)))
    landed = jnp.where(below, outliers.lo_value, jnp.where(above, outliers.hi_value, jnp.float32(-0.0)))
    # The bound changes no result. It keeps the compiler from fusing product and sum into one rounding.
    moved = jnp.minimum((value - threshold) * reciprocal, jnp.float32(2 * carry.format.max))
    u = landed + moved

    def pick(of):
        return jnp.where(outside, of(carry.format), of(format))

    if rounding != "nearest_even":
        carried = round_to_grid(u, carry.format, "nearest_even", finite)
        return jnp.where(outside, carried, round_to_grid(u, format, rounding, finite))
    highest, lowest = pick(lambda f: jnp.float32(f.max)), pick(lambda f: jnp.float32(2.0**f.min_exponent))
    return _signed(_nearest(u, highest, lowest, pick(lambda f: np.int32((23 - f.mantissa_bits) << 23))), u, finite)


@dataclasses.dataclass(frozen=True)
class Rows:
    """Static side of ``rows_kernel``: a program takes ``rows`` rows, ``cols`` columns at a time, ``chunks`` times."""

    rows: int
    cols: int
    chunks: int
    format: FloatFormat
    rounding: str
    folded: bool
    carry: Carry | None
    transposed: bool


def rows_kernel(*refs, problem: Rows):
    """One scale a row: maxima in a first sweep over a strip of rows, values in a second, which finds the strip in L2.

    Refs: x [m, k], fold [m] if any, thresholds [2] if any; values [m, k], scale [m], transposed values [k, m] if any.
    """
    p = problem
    refs = list(refs)
    x_ref = refs.pop(0)
    fold_ref = refs.pop(0) if p.folded else None
    bounds_ref = refs.pop(0) if p.carry else None
    values_ref, scale_ref, *transposed_ref = refs
    rows = pl.ds(pl.program_id(0) * p.rows, p.rows)
    fold = fold_ref[rows][:, None] if fold_ref is not None else None

    def load(start, width):
        value = as_float32(x_ref[rows, pl.ds(start, width)])
        return value if fold is None else value * fold

    def extremes(value):
        """The row's largest magnitude, as bits; with thresholds also its largest and smallest value."""
        whole = jnp.max(bits_of(value) & _MAGNITUDE, axis=1)
        return (whole,) if p.carry is None else (whole, jnp.max(value, axis=1), jnp.max(-value, axis=1))

    if p.chunks == 1:
        whole_row = load(0, p.cols)
        found = extremes(whole_row)
    else:
        whole_row = None
        lowest = (jnp.zeros((p.rows,), jnp.int32),)
        if p.carry is not None:
            lowest += (jnp.full((p.rows,), -jnp.inf, jnp.float32),) * 2
        found = lax.fori_loop(
            0,
            p.chunks,
            lambda c, best: tuple(map(jnp.maximum, best, extremes(load(c * p.cols, p.cols)))),
            lowest,
        )
    bounds = (bounds_ref[0], bounds_ref[1]) if bounds_ref is not None else None
    scale, reciprocal, finite = scale_of(_amax(found, bounds, p), p.format)
    scale_ref[rows] = scale
    outliers = None
    if bounds is not None:
        ends = [round_to_grid(bound * reciprocal, p.format, p.rounding, finite)[:, None] for bound in bounds]
        outliers = Outliers(*bounds, *ends)
    reciprocal, finite = reciprocal[:, None], finite[:, None]

    def write(chunk, value):
        cols = pl.ds(chunk * p.cols, p.cols)
        values = quantize_tile(value, reciprocal, finite, p.format, p.rounding, outliers, p.carry)
        values = values.astype(values_ref.dtype)
        values_ref[rows, cols] = values
        if transposed_ref:
            transposed_ref[0][cols, rows] = values.T

    def second(chunk, _):
        write(chunk, load(chunk * p.cols, p.cols))
        return _

    if whole_row is not None:
        write(0, whole_row)
    else:
        lax.fori_loop(0, p.chunks, second, None)


def _amax(found, bounds, p: Rows):
    """Bits of amax of a row; with thresholds that of the clamped row, but so large that no carried entry saturates."""
    whole = found[0]
    if p.carry is None or bounds is None:
        return whole
    amax = jnp.maximum(jnp.abs(_clip(found[1], *bounds)), jnp.abs(_clip(-found[2], *bounds)))
    if p.carry.format is not None:
        amax = jnp.maximum(amax, float_of(whole) * jnp.float32(p.format.max / p.carry.format.max))
    return jnp.where(whole < _INFINITY, bits_of(amax), _INFINITY)


@dataclasses.dataclass(frozen=True)
class Stream:
    """One quantization of a tensor whose scales are known: what it is multiplied by first, and what is written.

    Attributes:
        fold: axis (0 or 1) of the vector that is folded in, or None.
        scale: axis of the vector of reciprocals, or None for one of the whole tensor.
        plain, transposed: whether values and transposed values are written.
    """

    fold: int | None
    scale: int | None
    plain: bool
    transposed: bool


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Static side of ``tiles_kernel`` and ``amax_kernel``."""

    rows: int
    cols: int
    format: FloatFormat
    rounding: str
    streams: tuple[Stream, ...]


def _vector(ref, axis, rows, cols):
    """A vector along ``axis`` laid out against a tile."""
    return ref[rows][:, None] if axis == 0 else ref[cols][None, :]


def tiles_kernel(*refs, problem: Tiles):
    """Quantizes a tile under given reciprocals, once for each stream.

    Refs: x [m, n]; then for each stream fold (if any) and r; then for each its outputs. A NaN reciprocal marks a block
    that is not finite.
    """
    p, refs = problem, list(refs)
    rows = pl.ds(pl.program_id(0) * p.rows, p.rows)
    cols = pl.ds(pl.program_id(1) * p.cols, p.cols)
    x = as_float32(refs.pop(0)[rows, cols])
    operands = [(refs.pop(0) if s.fold is not None else None, refs.pop(0)) for s in p.streams]
    for stream, (fold_ref, r_ref) in zip(p.streams, operands, strict=True):
        value = x if fold_ref is None else x * _vector(fold_ref, stream.fold, rows, cols)
        r = r_ref[0] if stream.scale is None else _vector(r_ref, stream.scale, rows, cols)
        finite = (bits_of(r) & _MAGNITUDE) < _INFINITY
        values = round_to_grid(value * r, p.format, p.rounding, finite)
        if stream.plain:
            ref = refs.pop(0)
            ref[rows, cols] = values.astype(ref.dtype)
        if stream.transposed:
            ref = refs.pop(0)
            ref[cols, rows] = values.astype(ref.dtype).T


def amax_kernel(*refs, problem: Tiles):
    """Bits of amax of a tile for each stream.

    Outputs: [row tiles, col tiles] for a scale a tensor, [m, col tiles] for one a row, [row tiles, n] for one a column.
    """
    p, refs = problem, list(refs)
    i, j = pl.program_id(0), pl.program_id(1)
    rows, cols = pl.ds(i * p.rows, p.rows), pl.ds(j * p.cols, p.cols)
    x = as_float32(refs.pop(0)[rows, cols])
    folds = [refs.pop(0) if s.fold is not None else None for s in p.streams]
    for stream, fold_ref, out_ref in zip(p.streams, folds, refs, strict=True):
        value = x if fold_ref is None else x * _vector(fold_ref, stream.fold, rows, cols)
        bits = bits_of(value) & _MAGNITUDE
        match stream.scale:
            case None:
                out_ref[i, j] = jnp.max(bits)
            case 0:
                out_ref[rows, j] = jnp.max(bits, axis=1)
            case 1:
                out_ref[i, cols] = jnp.max(bits, axis=0)
