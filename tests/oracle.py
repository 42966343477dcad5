"""An independent model of fp4jax's numbers: plain NumPy, written from the design and never from the implementation.

Three rules keep it independent and simple:

* a format is a table of magnitudes in the order of their codes, built from (exponent bits, mantissa bits, bias);
* rounding is a search in that table, in float64, where every midpoint and every float32 is exact;
* a granularity is an integer label for each element (``block_labels``), so amax is one ``np.maximum.at``.

Where the design pins float32 steps (amax, r = max/amax, u = x·r, scale = amax·float32(1/max)) the same float32 steps
are taken here; everything else is float64. Products are summed in float64 and compared within ``tolerances``.

Specs, recipes and OCC settings are read by class name and attribute only, so this module imports nothing of fp4jax.
"""

import dataclasses
import functools
from typing import Any

import numpy as np

F32 = np.float32
_QUIET = {"over": "ignore", "invalid": "ignore", "divide": "ignore", "under": "ignore"}


# --- formats and rounding ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Format:
    """A sign-magnitude float: code (e, m) is (1 + m/2^M)·2^(e − bias); e = 0 is subnormal, m/2^M·2^(1 − bias)."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    finite_codes: int  # magnitudes 0 .. finite_codes − 1 are finite; the codes above are NaN or inf

    @functools.cached_property
    def magnitudes(self) -> np.ndarray:
        """Non-negative finite values, ascending; the index is the code without its sign."""
        code = np.arange(self.finite_codes)
        exponent, mantissa = code >> self.mantissa_bits, code & ((1 << self.mantissa_bits) - 1)
        fraction = mantissa / 2.0**self.mantissa_bits
        return np.where(
            exponent == 0, fraction * 2.0 ** (1 - self.bias), (1 + fraction) * 2.0 ** (exponent - float(self.bias))
        )

    @property
    def max(self) -> float:
        return float(self.magnitudes[-1])

    @property
    def emax(self) -> int:
        """Exponent of the largest value: 2 for E2M1, 8 for E4M3."""
        return int(np.floor(np.log2(self.max)))


# E4M3 is "fn": exponent 15 is finite but for mantissa 7. E5M2 keeps exponent 31 for inf and NaN, as IEEE does.
FORMATS = {
    f.name: f
    for f in (
        Format("E2M1", 2, 1, 1, 8),
        Format("E1M2", 1, 2, 0, 8),
        Format("E3M0", 3, 0, 3, 8),
        Format("E4M3", 4, 3, 7, 127),
        Format("E5M2", 5, 2, 15, 124),
    )
}


def format_of(fmt: Any) -> Format:
    """The oracle's own table for a format object or name; one it does not know is built from the object's fields."""
    name = (fmt if isinstance(fmt, str) else fmt.name).upper()
    if name in FORMATS or isinstance(fmt, str):
        return FORMATS[name]
    every = Format(name, fmt.exponent_bits, fmt.mantissa_bits, 1 - fmt.min_exponent, 2 ** (fmt.bits - 1))
    return dataclasses.replace(every, finite_codes=int(np.sum(every.magnitudes <= fmt.max)))


def round_to_grid(u: np.ndarray, fmt: Format, ties: str) -> np.ndarray:
    """Nearest grid value of ``u``, saturating at ±max; NaN stays NaN.

    ``ties="even"`` takes the even code, which is the even mantissa wherever there is one. E3M0 has no mantissa bits, so
    there "even" means the even exponent code: 3 lies between 2 (code 4) and 4 (code 5) and goes to 2.
    ``ties="up"`` goes toward +∞.
    """
    u = np.asarray(u, np.float64)
    table = fmt.magnitudes
    magnitude = np.minimum(np.abs(u), fmt.max)
    above = np.minimum(np.searchsorted(table, np.nan_to_num(magnitude), side="left"), table.size - 1)
    below = np.maximum(above - 1, 0)
    middle = (table[below] + table[above]) / 2
    tie = np.where(below % 2 == 0, below, above) if ties == "even" else np.where(u > 0, above, below)
    code = np.where(magnitude > middle, above, np.where(magnitude < middle, below, tie))
    return np.where(np.isnan(u), np.nan, np.copysign(table[code], u))


def ties_of(rounding: Any) -> str:
    """``even`` or ``up`` for a rounding object or name."""
    name = (rounding if isinstance(rounding, str) else rounding.name).lower()
    return {"nearest_even": "even", "ties_up": "up"}[name]


# --- who shares a scale -----------------------------------------------------------------------------------------------


def contraction_axes(axis: int | tuple[int, ...], ndim: int) -> tuple[int, ...]:
    """Non-negative contraction axes, in the order given."""
    return tuple(a % ndim for a in ((axis,) if isinstance(axis, int) else axis))


def block_labels(
    shape: tuple[int, ...], granularity: Any, axis: int | tuple[int, ...]
) -> tuple[np.ndarray, tuple[int, ...]]:
    """For each element the flat number of its block, and the shape of the array of blocks.

    Several contraction axes are one long axis in the order given; blocks along it are counted on the last of them. An
    empty contraction still has one (empty) vector, and an empty tensor one scale.
    """
    contracted = contraction_axes(axis, len(shape))
    position = {d: np.arange(n).reshape([-1 if i == d else 1 for i in range(len(shape))]) for d, n in enumerate(shape)}
    count = list(shape)
    along = contracted[-1] if contracted else None  # nothing contracted: dY beside an operand that is all contraction
    long, k = 0, 1
    for d in contracted:
        long, k = long * shape[d] + position[d], k * shape[d]
        position[d], count[d] = 0, 1
    match type(granularity).__name__:
        case "PerTensor":
            position, count = dict.fromkeys(position, 0), [1] * len(shape)
        case "PerVector":
            pass
        case "PerBlock":
            position[along], count[along] = long // granularity.size, -(-k // granularity.size)
        case "PerBlock2D":
            if len(contracted) != 1:
                raise ValueError("rows and cols need one contraction axis")
            other = max(d for d in range(len(shape)) if d != along)
            position[along], count[along] = long // granularity.rows, -(-k // granularity.rows)
            position[other], count[other] = position[other] // granularity.cols, -(-shape[other] // granularity.cols)
        case name:
            raise TypeError(f"the oracle knows no granularity {name}")
    labels = np.zeros(shape, np.int64)
    for d in range(len(shape)):
        labels = labels * count[d] + position[d]
    return labels, tuple(count)


def block_max(x: np.ndarray, labels: np.ndarray, blocks: int) -> np.ndarray:
    """Largest magnitude of each block, float32; NaN where the block holds NaN or inf; 0 where it holds nothing."""
    amax = np.zeros(blocks, F32)
    with np.errstate(**_QUIET):
        np.maximum.at(amax, labels.ravel(), np.abs(x.astype(F32)).ravel())
    return np.where(np.isfinite(amax), amax, F32(np.nan))


# --- how the scale is stored ------------------------------------------------------------------------------------------


def absmax(amax: np.ndarray, fmt: Format) -> tuple[np.ndarray, np.ndarray]:
    """(reciprocal r, scale) of ``AbsMax``: three float32 steps, each rounded once."""
    with np.errstate(**_QUIET):
        low, high = F32(fmt.max * 2.0**-125), F32(fmt.max * 2.0**126)  # high is inf but for E1M2
        clamped = np.clip(amax, low, high)
        r = F32(fmt.max) / clamped
        scale = clamped * F32(1 / fmt.max)
    return np.where(amax == 0, F32(1), r), np.where(amax == 0, F32(1), scale)


def power_of_two_exponent(amax: np.ndarray, fmt: Format, mode: str) -> np.ndarray:
    """Exponent of the E8M0 scale by exact comparisons, in [−126, 126]: scale and reciprocal are normal float32.

    amax is first clamped to [max·2⁻¹²⁵, max·2¹²⁶], as for every scale rule.
    """
    value = np.where(np.isnan(amax) | (amax == 0), 1.0, amax.astype(np.float64))
    value = np.clip(value, fmt.max * 2.0**-125, fmt.max * 2.0**126)
    half, exponent = np.frexp(value)  # value = half·2^exponent, half in [1/2, 1)
    floor = exponent - 1
    match mode:
        case "floor":
            power = floor - fmt.emax
        case "ceil":
            power = floor + (half > 0.5) - fmt.emax
        case "even":  # the mantissa rounded to the format's bits carries into the exponent from 2 − 2^−(M+1) on
            power = floor + (2 * half >= 2 - 2.0 ** -(fmt.mantissa_bits + 1)) - fmt.emax
        case "rceil":
            power = floor - fmt.emax
            power = power + (value > np.ldexp(fmt.max, power))
        case _:
            raise ValueError(f"the oracle knows no power-of-two mode {mode!r}")
    return np.where(amax == 0, 0, np.clip(power, -126, 126))


# --- quantize ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Quantized:
    """Grid values beside the scale of each element; ``block_scale`` is the stored scale in the shape of the blocks."""

    values: np.ndarray
    reciprocal: np.ndarray  # r, one an element
    scale: np.ndarray  # what the values are multiplied with, one an element
    block_scale: np.ndarray
    outer_scale: np.ndarray | None = None
    scaled: np.ndarray | None = None  # u, what was rounded
    residual: np.ndarray | None = None  # ΔX, where outliers were clamped

    @property
    def dequantized(self) -> np.ndarray:
        """Values · scale, one float32 product."""
        return self.values * self.scale

    @property
    def exact(self) -> np.ndarray:
        """Values · scale in float64, where the product is exact."""
        return self.values.astype(np.float64) * self.scale


def quantize(x: np.ndarray, spec: Any, axis: int | tuple[int, ...], floor: np.ndarray | None = None) -> Quantized:
    """The design's quantize. ``floor`` raises a block's amax (OCC): one value a block, in the shape of the blocks."""
    fmt, rule = format_of(spec.format), type(spec.scale).__name__
    x = np.asarray(x).astype(F32)
    labels, shape = block_labels(x.shape, spec.granularity, axis)
    amax = block_max(x, labels, int(np.prod(shape)))
    if floor is not None:
        with np.errstate(**_QUIET):
            amax = np.maximum(amax, floor.ravel())  # NaN stays NaN
    outer = None
    with np.errstate(**_QUIET):
        if rule == "AbsMax":
            r, scale = absmax(amax, fmt)
            stored = scale
        elif rule == "PowerOfTwo":
            power = power_of_two_exponent(amax, fmt, spec.scale.mode)
            nan = np.where(np.isnan(amax), F32(np.nan), F32(0))
            scale = np.ldexp(F32(1), power).astype(F32) + nan
            r = np.ldexp(F32(1), -power).astype(F32) + nan
            stored = scale
        elif rule == "TwoLevel":
            r, scale, stored, outer = two_level(amax, fmt)
        else:
            raise TypeError(f"the oracle knows no scale rule {spec.scale!r}")
        element_r, element_scale = r[labels], scale[labels]
        u = (x * element_r).astype(F32)
        values = round_to_grid(u, fmt, ties_of(spec.rounding)).astype(F32)
        return Quantized(values, element_r, element_scale, stored.reshape(shape), outer, u)


def two_level(amax: np.ndarray, fmt: Format) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(r, scale, stored block scale, outer scale) of ``TwoLevel`` (NVFP4), each step one float32 operation.

    Over the finite blocks of the tensor outer = amax_t·float32(1/(448·max)) and inverse = 448·max/amax_t, with amax_t
    at least 448·max·2⁻¹¹⁶; the block stores E4M3((amax·float32(1/max))·inverse), nearest even, at least 2⁻⁹ so that it
    is never zero; r = inverse/stored. These orders of operations are those of ``fp4jax.TwoLevel``'s docstring.
    """
    e4m3 = FORMATS["E4M3"]
    top = e4m3.max * fmt.max
    tensor = np.max(np.where(np.isnan(amax), F32(0), amax), initial=F32(0)).astype(F32)
    clamped = np.maximum(tensor, F32(top * 2.0**-116))
    inverse, outer = (F32(1), F32(1)) if tensor == 0 else (F32(top) / clamped, clamped * F32(1 / top))
    block = round_to_grid((amax * F32(1 / fmt.max)) * inverse, e4m3, "even")
    block = np.maximum(block, e4m3.magnitudes[1]).astype(F32)
    block = np.where(amax == 0, F32(1), block)  # NaN passes through both
    return inverse / block, block * outer, block, outer


# --- outliers ---------------------------------------------------------------------------------------------------------


def clamp_outliers(x: np.ndarray, occ: Any, axis: int | tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """(clamped, residual) in float32, by sorting: lo = s[int((1−α)n)], hi = s[min(int(αn), n−1)]."""
    x = np.asarray(x).astype(F32)
    if x.size == 0:
        return x, x
    if occ.scope == "tensor":
        rows, back = x.reshape(1, -1), lambda bound: bound.reshape((1,) * x.ndim)
    else:
        axes = contraction_axes(axis, x.ndim)
        kept = [d for d in range(x.ndim) if d not in axes]
        rows = x.transpose(*kept, *axes).reshape(int(np.prod([x.shape[d] for d in kept])), -1)
        back = lambda bound: bound.reshape([1 if d in axes else x.shape[d] for d in range(x.ndim)])
    n = rows.shape[1]
    ordered = np.sort(rows, axis=1)
    low, high = ordered[:, int((1 - occ.alpha) * n)], ordered[:, min(int(occ.alpha * n), n - 1)]
    with np.errstate(**_QUIET):
        clamped = np.clip(x, back(low), back(high))
        return clamped, x - clamped


def quantize_activation(
    x: np.ndarray, spec: Any, occ: Any | None, axis: int | tuple[int, ...], clamp_axis: Any = None
) -> Quantized:
    """Clamp, quantize, and carry the residual on top of the grid values (``compensation="residual"``).

    An outlier holds E4M3(float32(q + float32(ΔX·r))), where amax of a block is at least amax(X)·float32(max/448) so
    that nothing saturates; every other entry holds q. ``residual_format=None`` carries float32: no rounding, no floor.
    NaN and inf are looked for in X: the clamp would hide an inf. ``clamp_axis`` is fprop's contraction where that is
    not ``axis``: X is clamped alike in all three products.
    """
    x = np.asarray(x).astype(F32)
    if occ is None:
        return quantize(x, spec, axis)
    labels, shape = block_labels(x.shape, spec.granularity, axis)
    whole = block_max(x, labels, int(np.prod(shape)))  # NaN marks a non-finite block
    clamped, residual = clamp_outliers(x, occ, axis if clamp_axis is None else clamp_axis)
    carrier = None
    if occ.compensation == "residual" and occ.residual_format is not None:
        carrier = format_of(occ.residual_format)
    share = F32(0) if carrier is None else F32(format_of(spec.format).max / carrier.max)
    q = quantize(clamped, spec, axis, floor=whole * share)
    if occ.compensation == "residual":
        with np.errstate(**_QUIET):
            carried = q.values + residual * q.reciprocal
        if carrier is not None:
            carried = round_to_grid(carried, carrier, "even").astype(F32)
        q = dataclasses.replace(q, values=np.where(residual != 0, carried, q.values))
    return dataclasses.replace(q, residual=residual)


# --- estimators -------------------------------------------------------------------------------------------------------


def dge_factor(u: np.ndarray, fmt: Format, k: float, clip: float) -> np.ndarray:
    """f'(u) = min(|p|^(1/k − 1)/k, clip), p = 2(u − l)/(r − l) − 1 in the grid interval [l, r); past ±max as at it."""
    grid = np.concatenate([-fmt.magnitudes[:0:-1], fmt.magnitudes])
    inside = np.clip(np.asarray(u, np.float64), -fmt.max, fmt.max)
    left = np.clip(np.searchsorted(grid, np.nan_to_num(inside), side="right") - 1, 0, grid.size - 2)
    p = 2 * (inside - grid[left]) / (grid[left + 1] - grid[left]) - 1
    with np.errstate(**_QUIET):
        return np.minimum(np.abs(p) ** (1 / k - 1) / k, clip)


def estimator_factor(estimator: Any, q: Quantized, fmt: Format) -> np.ndarray:
    """What the gradient is multiplied with, one factor an element; 1 for an entry that the clamp moved."""
    match type(estimator).__name__:
        case "STE":
            factor = np.ones_like(q.values, np.float64)
        case "ClippedSTE":
            # x · r of the largest value may land an ulp above max; that is not out of range.
            factor = (np.abs(q.scaled) <= fmt.max * (1 + 2.0**-22)).astype(np.float64)
        case "DGE":
            factor = dge_factor(q.scaled, fmt, estimator.k, estimator.clip)
        case _:
            raise TypeError(f"the oracle knows no estimator {estimator!r}")
    return factor if q.residual is None else np.where(q.residual != 0, 1.0, factor)
