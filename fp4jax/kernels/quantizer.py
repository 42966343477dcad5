"""Fused quantizers for GPUs: values in FP8, transposed values and scales, written in one pass; bit-equal to
``fp4jax.quantize``.

The kernels are in ``quantizer_device``, the arithmetic in ``value_device``. They take matrices whose scales leave the
product: one a row, one a column or one a tensor, stored by ``AbsMax`` or ``PowerOfTwo``.
"""

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from fp4jax.formats import E4M3, E5M2, FloatFormat
from fp4jax.kernels.device import triton_call
from fp4jax.kernels.maxima import amax_of_rows, known_scales, maxima_of
from fp4jax.kernels.quantile import RowExtremes, row_extremes
from fp4jax.kernels.quantizer_device import Rows, Stream, Tiles, rows_kernel, tiles_kernel
from fp4jax.kernels.value_device import Rule
from fp4jax.outliers import OCC
from fp4jax.quantize import QuantSpec
from fp4jax.rounding import NEAREST_EVEN, STOCHASTIC, TIES_UP
from fp4jax.scaling import AbsMax, PowerOfTwo
from fp4jax.typing import Array, Key

_ROUNDINGS = (NEAREST_EVEN, TIES_UP, STOCHASTIC)
_DTYPES = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16))


class Quantized(NamedTuple):
    """A quantized matrix.

    Attributes:
        values: [m, n] in E4M3 or E5M2, or None.
        transposed: [n, m], or None.
        scale: float32 [m], [n] or [], by the axis whose entries have one each; NaN for a block that is not finite.
        reciprocal: r, by which values were multiplied, like ``scale``; of ``quantize_tiles`` alone.
    """

    values: Array | None
    transposed: Array | None
    scale: Array
    reciprocal: Array | None = None


@dataclasses.dataclass(frozen=True)
class QuantizerConfig:
    """How a matrix is cut up; no choice changes a bit of the result.

    Args:
        rows, cols: of a tile.
        warps: of 32 threads, for each program.
        packed: values that are transposed as one word, 1 or 4; 1 where a tile has no four rows.

    Raises:
        ValueError: if one is no power of two, or ``packed`` another number.
    """

    rows: int
    cols: int
    warps: int = 4
    packed: int = 1

    def __post_init__(self):
        if self.packed not in (1, 4):
            raise ValueError(f"packed={self.packed} must be 1 or 4")
        for name in ("rows", "cols", "warps"):
            size = getattr(self, name)
            if size < 1 or size & (size - 1):
                raise ValueError(f"{name}={size} must be a power of two")


def storage(format: FloatFormat) -> np.dtype:
    """The FP8 dtype that holds the grid of ``format`` exactly.

    Raises:
        ValueError: if neither E4M3 nor E5M2 does.
    """
    for held in (E4M3, E5M2):
        if np.isin(format.grid, held.grid).all():
            return np.dtype(held.dtype)
    raise ValueError(f"format={format!r} fits neither E4M3 nor E5M2")


def unsupported(spec: QuantSpec, *, keyed: bool = False) -> list[str]:
    """Why the kernels cannot quantize by ``spec``, a reason each; empty if they can.

    Args:
        spec: what to quantize to.
        keyed: whether a key is passed, which stochastic rounding needs.
    """
    reasons = []
    if spec.rounding not in _ROUNDINGS or (spec.rounding.needs_key and not keyed):
        reasons.append(f"rounding {spec.rounding!r}" + (" without a key" if spec.rounding.needs_key else ""))
    if not isinstance(spec.scale, AbsMax | PowerOfTwo):
        reasons.append(f"scale rule {spec.scale!r}")
    if not spec.granularity.leaves_the_sum:
        reasons.append(f"granularity {spec.granularity!r}")
    if not spec.format.mantissa_bits:
        reasons.append(f"format {spec.format!r}, which has no mantissa")
    return reasons


def _check(x: Array, spec: QuantSpec, keys: list[Key | None]) -> None:
    if x.ndim != 2 or x.dtype not in _DTYPES:
        raise TypeError(f"x is {x.dtype}{list(x.shape)}; the quantizers take float32, bfloat16 or float16 matrices")
    if why := unsupported(spec, keyed=all(key is not None for key in keys)):
        raise ValueError(f"the kernels do not support {', '.join(why)}")


def _rule(spec: QuantSpec, occ: OCC | None = None) -> Rule:
    outliers = "none" if occ is None else _outliers(occ)
    scale = spec.scale.mode if isinstance(spec.scale, PowerOfTwo) else "absmax"
    held = np.dtype(spec.format.dtype or np.float32) == storage(spec.format)
    cast = held and spec.rounding == NEAREST_EVEN and outliers != "carried"
    return Rule(spec.format, spec.rounding.name, scale, outliers, cast)


def _outliers(occ: OCC) -> Literal["dropped", "carried"]:
    if occ.scope != "tensor" or occ.compensation == "sparse":
        raise ValueError(f"the kernels take OCC of scope 'tensor' that is not 'sparse', got {occ}")
    if occ.compensation == "none":
        return "dropped"
    if occ.residual_format != E4M3:
        raise ValueError(f"the kernels carry residuals in E4M3, got residual_format={occ.residual_format}")
    return "carried"


def _key_data(optional: Key | None, spec: QuantSpec) -> list[Array]:
    """The two words of a Threefry key, or nothing where none is drawn."""
    if not spec.rounding.needs_key or optional is None:
        return []
    key: Any = optional
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)
    if key.shape or str(jax.random.key_impl(key)) != "threefry2x32":
        raise ValueError(
            f"key has shape {key.shape} and implementation {jax.random.key_impl(key)}; the kernels draw from one key "
            "of implementation threefry2x32"
        )
    return [jax.random.key_data(key)]


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _fit(size: int, wanted: int) -> int:
    """The largest power of two up to ``wanted`` that divides ``size``, unless that is small: padding is then better."""
    divisor = size & -size
    return min(wanted, divisor) if divisor >= min(16, wanted) else min(wanted, 1 << (size - 1).bit_length())


def _padded(x: Array, rows: int, cols: int) -> Array:
    widths = [(0, _up(x.shape[0], rows) - x.shape[0]), (0, _up(x.shape[1], cols) - x.shape[1])]
    return jnp.pad(x, widths) if any(w for _, w in widths) else x


def _cut(x: Array, *shape: int) -> Array:
    return x if x.shape == shape else x[tuple(slice(s) for s in shape)]


def quantize_rows(
    x: Array,
    spec: QuantSpec,
    *,
    fold: Array | None = None,
    thresholds: tuple[Array, Array] | None = None,
    occ: OCC | None = None,
    transpose: bool = False,
    key: Key | None = None,
    names: tuple[str, ...] = (),
    extremes: RowExtremes | None = None,
    config: QuantizerConfig | None = None,
) -> Quantized:
    """Quantizes each row of ``x`` under a scale of its own, reading it from memory once.

    With ``transpose``, or inside a ``shard_map`` in which mesh axes ``names`` split the rows' entries, it reads twice:
    for the maxima, on which devices then agree (four bytes a row), and for the values. ``extremes`` spare the first of
    two, unless a ``fold`` changes them.

    Args:
        x: float32, bfloat16 or float16 [m, n].
        spec: its granularity plays no part: the vectors are the rows.
        fold: float32 [m]; rows are multiplied by it first, and rounded to float32.
        thresholds: scalars lo and hi of ``occ``, float32, from ``fp4jax.outliers.thresholds``.
        occ: clamps at the thresholds; with "residual" compensation outlier entries carry ΔX, as the xla backend has it.
        transpose: also write the values transposed.
        key: for stochastic rounding, of Threefry; elements draw what ``fp4jax.quantize`` draws for them.
        names: mesh axes over which the entries of a row are split.
        extremes: of the rows of ``x``, float32 [m] each, if known (``quantile.order_statistics_and_extremes``).
        config: tile sizes.

    Returns:
        Values in the FP8 type that holds the format (of ``occ``: that holds the carried entries too).

    Raises:
        TypeError: for another dtype or rank of ``x``.
        ValueError: for a ``spec`` that the kernels do not support, an ``occ`` or ``key`` they do not, or ``extremes``
            of another number of rows.
    """
    x = jnp.asarray(x)
    _check(x, spec, [key])
    m, n = x.shape
    if extremes is not None and not extremes.top.shape == extremes.bottom.shape == (m,):
        raise ValueError(f"extremes have shapes {[e.shape for e in extremes]}; x {x.shape} needs those of {m} rows")
    rule, dtype = _rule(spec, None if thresholds is None else occ), storage(spec.format)
    if m * n == 0:
        empty = jnp.zeros((m, n), dtype)
        return Quantized(empty, empty.T if transpose else None, jnp.ones((m,), jnp.float32))
    bounds = None if thresholds is None or occ is None else jnp.stack([t.reshape(()) for t in thresholds])
    if names or transpose:
        wanted = Wanted(0, fold, None if fold is None else 0, transposed=transpose, key=key, names=names)
        if config is None and spec.rounding == STOCHASTIC:  # drawing noise takes the arithmetic of more threads
            config = QuantizerConfig(128, 128, 8, packed=4)
        return _tiles(x, spec, (wanted,), rule, bounds, config, extremes)[0]
    config = QuantizerConfig(1, 4096, 2) if config is None else config
    rows, cols = _fit(m, config.rows), _fit(n, config.cols)
    padded = _padded(x, rows, cols)
    height, width = padded.shape
    operands = [padded]
    if fold is not None:
        operands.append(jnp.pad(fold, (0, height - m)))
    if bounds is not None:
        operands.append(bounds)
    operands += _key_data(key, spec)
    values = jax.ShapeDtypeStruct((height, width), dtype)
    vector = jax.ShapeDtypeStruct((height,), jnp.float32)
    problem = Rows(rows, cols, width // cols, n, rule, fold is not None)
    values, scale = triton_call(
        functools.partial(rows_kernel, problem=problem), [values, vector], *operands,
        name="fp4jax_quantize_rows", grid=(height // rows,), warps=config.warps,
    )  # fmt: skip
    return Quantized(_cut(values, m, n), None, _cut(scale, m))


def _packed(config: QuantizerConfig, rows: int) -> int:
    return config.packed if rows % config.packed == 0 else 1


# --- scales known beforehand: columns, tensors, and gradients with a scale folded in -----------------------------


class Wanted(NamedTuple):
    """A quantization of a matrix under a scale a row (``axis=0``), one a column (``axis=1``) or one in all (None).

    Attributes:
        axis: 0, 1 or None: which axis has a scale for each entry.
        fold: float32 vector that is multiplied in first, or None.
        fold_axis: the axis it lies along.
        plain, transposed: what to write.
        key: for stochastic rounding.
        names: inside a ``shard_map``, the mesh axes over which the entries of a scale are split: devices agree on their
            maxima, four bytes a scale, between the two readings.
    """

    axis: int | None
    fold: Array | None = None
    fold_axis: int | None = None
    plain: bool = True
    transposed: bool = False
    key: Key | None = None
    names: tuple[str, ...] = ()


def quantize_tiles(
    x: Array,
    spec: QuantSpec,
    wanted: tuple[Wanted, ...],
    *,
    config: QuantizerConfig | None = None,
) -> list[Quantized]:
    """Quantizes ``x`` in one or several ways, reading it twice: for all maxima, then for all values.

    So a weight [k, n] with a scale a column comes back with its transpose, and a gradient dY [m, n], one scale a
    tensor, both as Q(dY · sw) [m, n] for dgrad and as Q(dY · sx) transposed [n, m] for wgrad.

    Args:
        x: float32, bfloat16 or float16 [m, n].
        spec: format and rounding; the granularity is given by ``wanted``.
        wanted: the quantizations.
        config: tile sizes.

    Raises:
        TypeError: for another dtype or rank of ``x``.
        ValueError: for a ``spec`` that the kernels do not support.
    """
    x = jnp.asarray(x)
    _check(x, spec, [w.key for w in wanted])
    return _tiles(x, spec, wanted, _rule(spec), None, config)


def _tiles(
    x: Array,
    spec: QuantSpec,
    wanted: tuple[Wanted, ...],
    rule: Rule,
    bounds: Array | None,
    config: QuantizerConfig | None,
    extremes: RowExtremes | None = None,
) -> list[Quantized]:
    """``quantize_tiles`` by a ``rule`` that clamps at ``bounds`` (lo and hi) where it has outliers.

    ``extremes`` of the rows, if known, spare the reading for maxima where there is one scale a row and no fold.
    """
    m, n = x.shape
    dtype = storage(spec.format)
    if config is None:
        config = QuantizerConfig(64, 128, 4, packed=4 if len(wanted) == 1 else 1)
    rows, cols = _fit(max(m, 1), config.rows), _fit(max(n, 1), config.cols)
    padded = _padded(x, rows, cols)
    height, width = padded.shape
    grid = (height // rows, width // cols)
    # Scales of the tensor are found together, as one vector: each kernel between the two readings costs microseconds.
    together = len(wanted) > 1 and all(w.axis is None and w.names == wanted[0].names for w in wanted)
    streams = tuple(
        Stream(w.fold_axis, w.axis, w.plain, w.transposed, i if together else 0) for i, w in enumerate(wanted)
    )
    problem = Tiles(rows, cols, grid, n, rule, streams, _packed(config, rows))
    sizes = {None: (), 0: (m,), 1: (n,)}
    if m * n == 0:
        empty = jnp.zeros((m, n), dtype)
        ones = {axis: jnp.ones(size, jnp.float32) for axis, size in sizes.items()}
        return [
            Quantized(empty if w.plain else None, empty.T if w.transposed else None, ones[w.axis], ones[w.axis])
            for w in wanted
        ]
    folds = [_fold(w, padded.shape) for w in wanted]
    read = [padded] if bounds is None else [padded, bounds]
    if len(wanted) == 1 and wanted[0].axis == 0 and wanted[0].fold is None:
        extremes = row_extremes(x) if extremes is None else extremes
    else:
        extremes = None
    if extremes is not None:
        maxima = [jnp.pad(amax_of_rows(extremes, bounds, rule), (0, height - m))]
    else:
        maxima = maxima_of(read, streams, folds, rule, together)
    scales = [known_scales(bits, spec, w.names) for bits, w in zip(maxima, wanted, strict=not together)]
    if together:
        [whole] = scales
        scales = [whole._replace(scale=whole.scale[i]) for i in range(len(wanted))]
    operands, outs = list(read), []
    for w, fold, found in zip(wanted, folds, scales, strict=True):
        operands += [*fold, found.reciprocal.reshape(-1), *_key_data(w.key, spec)]
        outs += [jax.ShapeDtypeStruct((height, width), dtype)] if w.plain else []
        outs += [jax.ShapeDtypeStruct((width, height), dtype)] if w.transposed else []
    kernel = functools.partial(tiles_kernel, problem=problem)
    written = iter(triton_call(kernel, outs, *operands, name="fp4jax_quantize_tiles", grid=grid, warps=config.warps))
    return [
        Quantized(
            _cut(next(written), m, n) if w.plain else None,
            _cut(next(written), n, m) if w.transposed else None,
            _cut(found.scale, *sizes[w.axis]),
            found.reciprocal[stream.place] if together else _cut(found.reciprocal, *sizes[w.axis]),
        )
        for w, stream, found in zip(wanted, streams, scales, strict=True)
    ]


def _fold(wanted: Wanted, shape: tuple[int, ...]) -> list[Array]:
    """The vector that is folded in, padded, or nothing."""
    if wanted.fold is None or wanted.fold_axis is None:
        return []
    return [jnp.pad(wanted.fold, (0, shape[wanted.fold_axis] - wanted.fold.size))]
