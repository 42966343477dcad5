"""Device side of the quantizers (Pallas on Triton): the arithmetic of ``fp4jax.scaling`` and ``fp4jax.rounding`` in
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
from jax.experimental import pallas as pl

from fp4jax.formats import E4M3, FloatFormat
from fp4jax.kernels.noise_device import noise_tile
from fp4jax.rounding import NOISE_BITS

_INFINITY = np.int32(0x7F800000)
_MAGNITUDE = np.int32(0x7FFFFFFF)
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
        finite = amax_bits < _INFINITY
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
        exponent = bits_of(jnp.maximum(magnitude, lowest)) & _INFINITY
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
        return float_of((bits_of(landed) & _MAGNITUDE) | (bits_of(u) & _SIGN))

    def quantize(self, value, reciprocal, finite, bounds=None, noise=None):
        """Values of a float32 tile, as float32; +0 where not ``finite``.

        An outlier is the value of the threshold that it passed plus (x - threshold) · r. Subtracting the latter, with
        the sign turned, leaves all other entries as they are, zeros of both signs too.
        """
        if bounds is None:
            landed = self.round(value * reciprocal, noise)
        else:
            clipped = _clip(value, *bounds)
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


def _clip(x, lo, hi):
    """As ``fp4jax.outliers.clip``, for bounds of which a zero is -0 below and +0 above."""
    return jnp.minimum(jnp.maximum(x, lo), hi)


def bounds_of(thresholds):
    """Bounds for ``_clip``: -0 < +0, for the maxima of PTX too."""
    lo, hi = thresholds[0], thresholds[1]
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
        return Extremes(jnp.max(bits_of(self.whole) & _MAGNITUDE, axis=1), *others)

    def of_all(self):
        """Bits of the largest magnitude."""
        return jnp.max(bits_of(self.whole) & _MAGNITUDE)

    def amax(self, bounds, rule: Rule):
        """Bits of amax of rows; with outliers that of clamped ones, but so large that no carried entry saturates."""
        if bounds is None:
            return self.whole
        amax = jnp.maximum(jnp.abs(_clip(self.top, *bounds)), jnp.abs(_clip(-self.bottom, *bounds)))
        if rule.outliers == "carried":
            amax = jnp.maximum(amax, float_of(self.whole) * jnp.float32(rule.format.max / E4M3.max))
        return jnp.where(self.whole < _INFINITY, bits_of(amax), _INFINITY)


@dataclasses.dataclass(frozen=True)
class Rows:
    """Static side of ``rows_kernel``: a program takes ``rows`` rows, ``cols`` columns at a time, ``chunks`` times.

    ``width`` counts the columns before padding, by which noise is numbered.
    """

    rows: int
    cols: int
    chunks: int
    width: int
    rule: Rule
    folded: bool


def rows_kernel(*refs, problem: Rows):
    """One scale a row: maxima in a first sweep over a strip of rows, values in a second.

    Refs: x [m, k]; fold [m], thresholds [2] and key [2] if any; values [m, k], scale [m].
    """
    p, refs = problem, list(refs)
    x_ref = refs.pop(0)
    fold_ref = refs.pop(0) if p.folded else None
    bounds_ref = refs.pop(0) if p.rule.outliers != "none" else None
    key_ref = refs.pop(0) if p.rule.rounding == "stochastic" else None
    values_ref, scale_ref = refs
    row = pl.program_id(0) * p.rows
    rows = pl.ds(row, p.rows)
    fold = fold_ref[rows][:, None] if fold_ref is not None else None
    bounds = bounds_of(bounds_ref) if bounds_ref is not None else None

    def load(chunk):
        value = as_float32(x_ref[rows, pl.ds(chunk * p.cols, p.cols)])
        return value if fold is None else value * fold

    first = load(0)
    found = Extremes.of(first, p.rule)
    if p.chunks > 1:
        found = lax.fori_loop(1, p.chunks, lambda c, best: best.including(load(c), p.rule), found)
    scale, reciprocal, finite = p.rule.scales(found.of_rows().amax(bounds, p.rule))
    scale_ref[rows] = scale

    def write(chunk, value):
        noise = noise_tile(key_ref, row, chunk * p.cols, value.shape, p.width)
        values = p.rule.quantize(value, reciprocal[:, None], finite[:, None], bounds, noise)
        values_ref[rows, pl.ds(chunk * p.cols, p.cols)] = values.astype(values_ref.dtype)

    def second(chunk, _):
        write(chunk, load(chunk))
        return _

    if p.chunks == 1:
        write(0, first)
    else:
        lax.fori_loop(0, p.chunks, second, None)


def strided_rows(row, first: int, rows: int, stride: int):
    """Rows ``first``, ``first + stride``, ... of the ``rows`` rows that begin at ``row``."""
    return pl.ds(row + first, rows // stride, stride=stride)


def transposed_of(parts: list):
    """[cols, rows] of a tile given by its rows i, i + 1, ... modulo the number of ``parts``, which is 1 or 4.

    Four bytes that lie side by side in the transposed tile cross shared memory as one word; by themselves, each would
    take a store of its own.
    """
    if len(parts) == 1:
        return parts[0].T
    dtype = parts[0].dtype
    word, *higher = (lax.bitcast_convert_type(part, jnp.int8).astype(jnp.int32) & 255 for part in parts)
    for j, byte in enumerate(higher):
        word = word | byte << (8 * (j + 1))
    word = word.T
    first, second, third, fourth = (
        lax.bitcast_convert_type((word >> (8 * j)).astype(jnp.int8), dtype)[..., None] for j in range(4)
    )
    even, odd = (jnp.concatenate(pair, axis=-1)[..., None] for pair in ((first, third), (second, fourth)))
    return jnp.concatenate([even, odd], axis=-1).reshape(word.shape[0], -1)


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
    """Static side of ``tiles_kernel`` and ``amax_kernel``: ``grid`` tiles of ``rows`` × ``cols``.

    ``width`` counts the columns before padding, by which noise is numbered; ``packed`` values are transposed as one;
    maxima are those of ``span`` tiles.
    """

    rows: int
    cols: int
    grid: tuple[int, int]
    width: int
    rule: Rule
    streams: tuple[Stream, ...]
    packed: int
    span: int = 1

    @property
    def spans(self) -> int:
        """Programs for a row of tiles that look for maxima."""
        return -(-self.grid[1] // self.span)


def _vector(ref, axis, rows, cols):
    """A vector along ``axis`` laid out against a tile."""
    return ref[rows][:, None] if axis == 0 else ref[cols][None, :]


def _bounds(refs: list, rule: Rule):
    """The thresholds, taken off ``refs``; None where nothing is clamped."""
    if rule.outliers == "none":
        return None
    return bounds_of(refs.pop(0))


def tiles_kernel(*refs, problem: Tiles):
    """Quantizes a tile under given reciprocals, once for each stream.

    Tiles are taken from the last to the first: ``amax_kernel`` has left the last in L2.

    Refs: x [m, n] and thresholds [2] if any; then for each stream fold (if any), r and key (if any); then for each its
    outputs. A NaN reciprocal marks a block that is not finite.
    """
    p, refs = problem, list(refs)
    row = (p.grid[0] - 1 - pl.program_id(0)) * p.rows
    col = (p.grid[1] - 1 - pl.program_id(1)) * p.cols
    cols, x_ref = pl.ds(col, p.cols), refs.pop(0)
    bounds = _bounds(refs, p.rule)
    draws = p.rule.rounding == "stochastic"
    operands = [
        (refs.pop(0) if s.fold is not None else None, refs.pop(0), refs.pop(0) if draws else None) for s in p.streams
    ]
    dtype = refs[-1].dtype
    outputs = [(refs.pop(0) if s.plain else None, refs.pop(0) if s.transposed else None, []) for s in p.streams]

    def quantize():
        for j in range(p.packed):
            rows = strided_rows(row, j, p.rows, p.packed)
            x = as_float32(x_ref[rows, cols])
            for stream, operand, output in zip(p.streams, operands, outputs, strict=True):
                (fold_ref, r_ref, key_ref), (plain_ref, transposed_ref, parts) = operand, output
                value = x if fold_ref is None else x * _vector(fold_ref, stream.fold, rows, cols)
                r = r_ref[0] if stream.scale is None else _vector(r_ref, stream.scale, rows, cols)
                finite = (bits_of(r) & _MAGNITUDE) < _INFINITY
                noise = noise_tile(key_ref, row + j, col, x.shape, p.width, p.packed)
                values = p.rule.quantize(value, r, finite, bounds, noise).astype(dtype)
                if plain_ref is not None:
                    plain_ref[rows, cols] = values
                if transposed_ref is not None:
                    parts.append(values)
        for _, transposed_ref, parts in outputs:
            if transposed_ref is not None:
                transposed_ref[cols, pl.ds(row, p.rows)] = transposed_of(parts)

    # Always so. Outside a branch Triton would compute values twice, once for each layout in which they are stored.
    pl.when(pl.program_id(0) < p.grid[0])(quantize)


def amax_kernel(*refs, problem: Tiles):
    """Bits of amax of ``span`` tiles side by side for each stream; with outliers, which only rows have, of the clamped.

    Refs: x [m, n] and thresholds [2] if any; the folds that there are. Outputs, of the ``spans`` of a row of tiles:
    [row tiles, spans] for a scale a tensor, [m, spans] for one a row, [row tiles, n] for one a column.
    """
    p, refs = problem, list(refs)
    i, j = pl.program_id(0), pl.program_id(1)
    rows, x_ref = pl.ds(i * p.rows, p.rows), refs.pop(0)
    bounds = _bounds(refs, p.rule)
    folds = [refs.pop(0) if s.fold is not None else None for s in p.streams]

    def of_tile(tile, largest):
        cols = pl.ds(tile * p.cols, p.cols)
        x = as_float32(x_ref[rows, cols])
        found = []
        for stream, fold_ref, out_ref, best in zip(p.streams, folds, refs, largest, strict=True):
            value = x if fold_ref is None else x * _vector(fold_ref, stream.fold, rows, cols)
            if stream.scale == 1:
                out_ref[i, cols] = jnp.max(bits_of(value) & _MAGNITUDE, axis=0)
                found.append(None)
            else:
                found.append(Extremes.of(value, p.rule) if best is None else best.including(value, p.rule))
        return tuple(found)

    first, last = j * p.span, jnp.minimum((j + 1) * p.span, p.grid[1])
    largest = of_tile(first, (None,) * len(p.streams))
    if p.span > 1:
        largest = lax.fori_loop(first + 1, last, of_tile, largest)
    for stream, out_ref, best in zip(p.streams, refs, largest, strict=True):
        if best is None:
            continue
        if stream.scale is None:
            out_ref[i, j] = best.of_all()
        else:
            out_ref[rows, j] = best.of_rows().amax(bounds, p.rule)
